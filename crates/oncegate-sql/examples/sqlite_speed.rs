//! Measures how many ids a second one consumer claims and completes in a SQLite file, in batches:
//! random ids and ascending ones by turns, each in a new file.
//!
//! `cargo run --release -p oncegate-sql --example sqlite_speed -- [DIRECTORY [IDS [BATCH [ROUNDS]]]]`
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_core::marker::{Guarantee, Operation, OperationKind, Terms, Token, Verdict};
use oncegate_core::{Key, MessageId, Store};
use oncegate_sql::{Sqlite, Synchronous};

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| ".".to_owned());
    let mut number = |otherwise| {
        arguments
            .next()
            .map_or(otherwise, |it| it.parse().expect("a whole number"))
    };
    let (ids, batch, rounds): (usize, usize, usize) = (number(100_000), number(256), number(3));
    for synchronous in [Synchronous::Full, Synchronous::Normal] {
        let mut ratios: Vec<f64> = Vec::new();
        for _ in 0..rounds {
            let [random, ascending] = [
                measure(&directory, WriteOrder::Random, synchronous, ids, batch).await,
                measure(&directory, WriteOrder::Ascending, synchronous, ids, batch).await,
            ];
            ratios.push(random / ascending);
        }
        ratios.sort_by(f64::total_cmp);
        println!(
            "{synchronous:?}: random / ascending {:.2} ({:.2} to {:.2}), {rounds} rounds",
            ratios[rounds / 2],
            ratios[0],
            ratios[rounds - 1]
        );
    }
}

/// Returns the number of ids a second.
async fn measure(
    directory: &str,
    order: WriteOrder,
    synchronous: Synchronous,
    ids: usize,
    batch: usize,
) -> f64 {
    let directory = tempfile::tempdir_in(directory).expect("a directory");
    let file = directory.path().join("markers.db");
    let store = Sqlite::file(&file)
        .synchronous(synchronous)
        .timeout(Duration::from_secs(60));
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    let mut slowest = Duration::ZERO;
    for first in (0..ids).step_by(batch) {
        let keys: Vec<Key> = (first..ids.min(first + batch))
            .map(|n| order.key(n))
            .collect();
        for kind in [OperationKind::Claim, OperationKind::Complete] {
            let asked = Instant::now();
            apply(&store, &keys, kind).await;
            slowest = slowest.max(asked.elapsed());
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let cpu = cpu_seconds()
        .zip(cpu)
        .map_or(f64::NAN, |(now, then)| now - then);
    let size = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
    let size: i64 = rusqlite::Connection::open(&file)
        .and_then(|file| file.query_row(size, [], |row| row.get(0)))
        .expect("a number");
    println!(
        "{order:<9?} {synchronous:?}: {:>7.0} ids a second, each claimed and completed; {:.2} µs of CPU an id; {:.1} ms an apply of {batch}, {} ms at most; {} bytes an id",
        ids as f64 / seconds,
        1e6 * cpu / ids as f64,
        seconds * 1000.0 / (2.0 * ids.div_ceil(batch) as f64),
        slowest.as_millis(),
        size as usize / ids,
    );
    ids as f64 / seconds
}

/// The CPU time of this process, in steps of 10 ms; `None` where it is not known.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / 100.0)
}

#[derive(Clone, Copy, Debug)]
enum WriteOrder {
    Ascending,
    Random,
}

impl WriteOrder {
    fn key(self, n: usize) -> Key {
        let id = match self {
            Self::Ascending => format!("payment-{n:010}"),
            // Deterministic and in random order, like UUIDs.
            Self::Random => format!(
                "{:032x}",
                (n as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
            ),
        };
        Key::new(&MessageId::new(id).expect("an id"))
    }
}

async fn apply(store: &Sqlite, keys: &[Key], kind: OperationKind) {
    let terms = Terms {
        guarantee: Guarantee::AtMostOnce,
        lease: Duration::from_secs(30),
        window: Duration::from_secs(24 * 3600),
        fingerprint: None,
    };
    let attempt = u32::from(kind != OperationKind::Claim);
    let operations: Vec<_> = keys
        .iter()
        .map(|key| Operation {
            key: key.clone(),
            kind,
            token: Token(1),
            attempt,
            terms,
        })
        .collect();
    for answer in store.apply(&operations).await {
        assert!(
            matches!(
                answer,
                Ok(Verdict::Granted { .. } | Verdict::Done { marker_lost: false })
            ),
            "{answer:?}"
        );
    }
}
