//! A daily job that runs once, on however many machines and however often its timer fires.

use oncegate::{Failure, FailureExt, Gate, Redis, RunOutcome};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gate = Gate::builder()
        .store(Redis::at("redis://localhost:6379"))
        .scope("ledger")
        .open()
        .await?;
    match gate
        .run("settle-2026-11-20", || async { settle_the_day().await })
        .await?
    {
        RunOutcome::Executed(entries) => println!("settled {entries} entries"),
        RunOutcome::AlreadyDone => println!("was settled before"),
        RunOutcome::HeldElsewhere => println!("is being settled elsewhere"),
    }
    Ok(())
}

/// Placeholder for your work.
async fn settle_the_day() -> Result<usize, Failure> {
    let entries = std::fs::read_to_string("entries.txt").retry()?; // nothing happened: run again
    Ok(entries.lines().count())
}
