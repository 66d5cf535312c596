//! `payments provider`: the bank behind HTTP.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use oncegate::shutdown_signal;
use tokio::net::TcpListener;

use super::Error;
use super::rundir::RunDir;
use super::traces::Traces;
use crate::bank::{Bank, Pace};
use crate::cli::Promise;
use crate::faults::Faults;
use crate::ledger::Ledger;

/// How often it is said what was charged, while that changes.
const SAYING: Duration = Duration::from_secs(2);

/// The provider's settings.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: String,
    /// Where the ledger is kept, as ledger.jsonl.
    #[arg(long, default_value = "payments-run")]
    run_dir: PathBuf,
    /// Decides what goes wrong.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// A payment that it charges without ever saying so, not even when asked: only a person finds
    /// out, in the ledger. May be given several times.
    #[arg(long, value_name = "ID")]
    unsure_of: Vec<String>,
    #[command(flatten)]
    promise: Promise,
}

/// Answers until SIGTERM. The first line on stdout is its URL.
pub(super) async fn run(arguments: &Arguments) -> Result<(), Error> {
    // Before the ledger is touched: who cannot answer has no business there.
    let listener = TcpListener::bind(&arguments.listen)
        .await
        .map_err(|error| format!("--listen {}: {error}", arguments.listen))?;
    let _traces = Traces::begin("payments-provider")?;
    let ledger = Ledger::in_file(&RunDir::at(&arguments.run_dir)?.ledger())?;
    let pace = Pace {
        answer: Duration::from_millis(20),
        timeout: Duration::from_millis(300),
        late: Duration::from_secs(1),
    };
    let (faults, unsure_of) = (
        Faults::seeded(arguments.seed),
        arguments.unsure_of.iter().cloned(),
    );
    let bank = Bank::new(ledger, faults, arguments.promise.repeats(), pace, unsure_of);
    println!("http://{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    let serving = axum::serve(listener, crate::http::router(Arc::clone(&bank)))
        .with_graceful_shutdown(shutdown_signal());
    tokio::select! {
        served = serving => Ok(served?),
        () = say(&bank) => Ok(()),
    }
}

/// Says what was charged, as long as the provider runs.
async fn say(bank: &Bank) {
    let mut said = (0, 0);
    loop {
        tokio::time::sleep(SAYING).await;
        let now = {
            let ledger = bank.ledger();
            (ledger.charged(), ledger.charged_twice())
        };
        if now != said {
            eprintln!("payments: charged {}, charged twice {}", now.0, now.1);
            said = now;
        }
    }
}
