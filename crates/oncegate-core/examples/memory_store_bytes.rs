//! Measures how much memory the memory store allocates for done ids, after each has been claimed and
//! completed in batches, and how many a second it takes.
//!
//! `cargo run --release -p oncegate-core --example memory_store_bytes -- [IDS [BATCH]]`
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_core::marker::{
    Fingerprint, Guarantee, Operation, OperationKind, Terms, Token, Verdict,
};
use oncegate_core::{Key, MemoryStore, MessageId, Store};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |otherwise| {
        arguments
            .next()
            .map_or(otherwise, |it| it.parse().expect("a whole number"))
    };
    let (ids, batch): (u64, usize) = (number(1_000_000), number(256) as usize);
    for (name, fingerprint) in [
        ("without fingerprints", None),
        ("with fingerprints", Some(Fingerprint::new(7))),
    ] {
        let store = MemoryStore::new();
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let begun = Instant::now();
        let mut worst = Worst::default();
        for first in (0..ids).step_by(batch) {
            let ids = first..ids.min(first + batch as u64);
            for kind in [OperationKind::Claim, OperationKind::Complete] {
                apply(&store, ids.clone(), kind, fingerprint).await;
            }
            worst.observe(ALLOCATED.current_usage() - before, ids.end);
        }
        let seconds = begun.elapsed().as_secs_f64();
        println!(
            "{ids} ids {name}: {:.1} bytes an id, {:.1} at the peak; {:.1} at most with another number of ids above 100,000; {:.0} ids a second",
            (ALLOCATED.current_usage() - before) as f64 / ids as f64,
            (ALLOCATED.peak_usage() - before) as f64 / ids as f64,
            worst.bytes_per_id,
            ids as f64 / seconds,
        );
    }
}

/// The largest number of bytes an id after any batch.
#[derive(Default)]
struct Worst {
    bytes_per_id: f64,
}

impl Worst {
    fn observe(&mut self, bytes: usize, ids: u64) {
        if ids >= 100_000 {
            self.bytes_per_id = self.bytes_per_id.max(bytes as f64 / ids as f64);
        }
    }
}

async fn apply(
    store: &MemoryStore,
    ids: std::ops::Range<u64>,
    kind: OperationKind,
    fingerprint: Option<Fingerprint>,
) {
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease: Duration::from_secs(30),
        window: Duration::from_secs(24 * 3600),
        fingerprint,
    };
    let operations: Vec<_> = ids
        .map(|number| Operation {
            // As long as a UUID.
            key: Key::new(
                &MessageId::new(format!("payment-of-the-day-{number:017}")).expect("an id"),
            ),
            kind,
            token: Token(1),
            attempt: u32::from(kind != OperationKind::Claim),
            terms,
        })
        .collect();
    for answer in store.apply(&operations).await {
        assert!(
            matches!(
                answer,
                Ok(Verdict::Granted(_) | Verdict::Done { marker_lost: false })
            ),
            "{answer:?}"
        );
    }
}
