//! A timer fires on three machines, and its daily job runs on one of them.
//!
//! `ONCEGATE_REDIS=redis://… cargo run -p oncegate --example cron`

use oncegate::{Failure, Gate, Redis, RunOutcome};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let redis = std::env::var("ONCEGATE_REDIS").unwrap_or_else(|_| "redis://localhost:6379".into());
    let today = format!("settle-{}", std::process::id()); // in production: the date
    let machines: Vec<_> = (1..=3)
        .map(|machine| tokio::spawn(at_midnight(machine, redis.clone(), today.clone())))
        .collect();
    for machine in machines {
        machine.await??;
    }
    Ok(())
}

/// What each machine runs when the timer fires.
async fn at_midnight(
    machine: u32,
    redis: String,
    today: String,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let gate = Gate::builder()
        .store(Redis::at(redis))
        .scope("ledger")
        .open()
        .await?;
    match gate.run(today, settle_the_day).await? {
        RunOutcome::Executed(entries) => println!("machine {machine} settled {entries} entries"),
        RunOutcome::AlreadyDone => println!("machine {machine} sees that it was settled"),
        RunOutcome::HeldElsewhere => println!("machine {machine} leaves it to another"),
    }
    Ok(())
}

/// Placeholder for your work.
async fn settle_the_day() -> Result<usize, Failure> {
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    Ok(3)
}
