//! A settlement is passed to its source once.
use oncegate_core::{Settled, Source};

async fn twice(mut source: Box<dyn Source>, settled: Settled) {
    let _ = source.settle(&mut vec![settled]).await;
    let _ = source.settle(&mut vec![settled]).await;
}

fn main() {}
