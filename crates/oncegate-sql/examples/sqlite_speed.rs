//! Measures how many ids a second one consumer claims and completes in a SQLite file, in batches.
//!
//! `cargo run --release -p oncegate-sql --example sqlite_speed -- [DIRECTORY [IDS [BATCH]]]`
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_core::marker::{Ask, Guarantee, Operation, Terms, Token, Verdict};
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
    let (ids, batch): (usize, usize) = (number(100_000), number(256));
    for (order, name) in [
        (WriteOrder::Counted, "ids in order"),
        (WriteOrder::Random, "random ids"),
    ] {
        for synchronous in [Synchronous::Full, Synchronous::Normal] {
            let directory = tempfile::tempdir_in(&directory).expect("a directory");
            let file = directory.path().join("markers.db");
            let store = Sqlite::file(&file)
                .synchronous(synchronous)
                .timeout(Duration::from_secs(60));
            let begun = Instant::now();
            let mut slowest = Duration::ZERO;
            for first in (0..ids).step_by(batch) {
                let keys: Vec<Key> = (first..ids.min(first + batch))
                    .map(|n| order.key(n))
                    .collect();
                for ask in [Ask::Claim, Ask::Complete] {
                    let asked = Instant::now();
                    apply(&store, &keys, ask).await;
                    slowest = slowest.max(asked.elapsed());
                }
            }
            let seconds = begun.elapsed().as_secs_f64();
            let size = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
            let size: i64 = rusqlite::Connection::open(&file)
                .and_then(|file| file.query_row(size, [], |row| row.get(0)))
                .expect("a number");
            println!(
                "{name:<13} {synchronous:?}: {:>7.0} ids a second, each claimed and completed; {:.1} ms an apply of {batch}, {} ms at most; {} bytes an id",
                ids as f64 / seconds,
                seconds * 1000.0 / (2.0 * ids.div_ceil(batch) as f64),
                slowest.as_millis(),
                size as usize / ids,
            );
        }
    }
}

#[derive(Clone, Copy)]
enum WriteOrder {
    Counted,
    Random,
}

impl WriteOrder {
    fn key(self, n: usize) -> Key {
        let id = match self {
            Self::Counted => format!("payment-{n:010}"),
            // Deterministic and in random order, like UUIDs.
            Self::Random => format!(
                "{:032x}",
                (n as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
            ),
        };
        Key::new(&MessageId::new(id).expect("an id"))
    }
}

async fn apply(store: &Sqlite, keys: &[Key], ask: Ask) {
    let terms = Terms {
        guarantee: Guarantee::AtMostOnce,
        lease: Duration::from_secs(30),
        window: Duration::from_secs(24 * 3600),
        fingerprint: None,
    };
    let attempt = u32::from(ask != Ask::Claim);
    let operations: Vec<_> = keys
        .iter()
        .map(|key| Operation {
            key: key.clone(),
            ask,
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
