//! Work that runs once a day on a machine, however often it is started: `cargo run -p oncegate --features
//! sqlite --example sqlite`, twice.

use oncegate::{Failure, Gate, Guarantee, RunOutcome, Sqlite};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gate = Gate::builder()
        .store(Sqlite::file("jobs.db"))
        .guarantee(Guarantee::AtMostOnce)
        .open()
        .await?;
    match gate
        .run("report-2026-11-20", || async { write_the_report().await })
        .await?
    {
        RunOutcome::Executed(pages) => println!("wrote {pages} pages"),
        RunOutcome::AlreadyDone => println!("was written before"),
        RunOutcome::HeldElsewhere => println!("is being written by another process"),
    }
    Ok(())
}

/// Placeholder for your work.
async fn write_the_report() -> Result<usize, Failure> {
    Ok(7)
}
