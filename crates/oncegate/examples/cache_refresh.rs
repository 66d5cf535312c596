//! Twenty readers find a stale cache: one of them refreshes it, the others serve the stale content.
//!
//! `ONCEGATE_REDIS=redis://… cargo run -p oncegate --example cache_refresh`

use std::time::Duration;

use oncegate::{Failure, Gate, Redis, RunOutcome, WhenHeld};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let redis = std::env::var("ONCEGATE_REDIS").unwrap_or_else(|_| "redis://localhost:6379".into());
    // The cache is fresh for the dedup window; after that, the next reader refreshes it.
    let gate = Gate::builder()
        .store(Redis::at(redis))
        .scope("cache")
        .dedup_window(Duration::from_secs(60))
        .lease(Duration::from_secs(10));
    let gate = gate.when_held(WhenHeld::Skip).open().await?;
    let cache = format!("prices-{}", std::process::id());

    let readers: Vec<_> = (0..20)
        .map(|_| tokio::spawn(read(gate.clone(), cache.clone())))
        .collect();
    for reader in readers {
        println!("{}", reader.await??);
    }
    Ok(())
}

async fn read(gate: Gate, cache: String) -> Result<&'static str, oncegate::GateError> {
    Ok(match gate.run(cache, fetch_the_prices).await? {
        RunOutcome::Executed(()) => "refreshed",
        RunOutcome::AlreadyDone => "fresh",
        RunOutcome::HeldElsewhere => "stale, while another refreshes",
    })
}

/// Placeholder for your work.
async fn fetch_the_prices() -> Result<(), Failure> {
    tokio::time::sleep(Duration::from_millis(100)).await;
    Ok(())
}
