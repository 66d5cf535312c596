//! A gate that was given no store.

use oncegate_core::{Error, Gate};

pub async fn open() -> Result<Gate, Error> {
    Gate::builder().scope("ledger").open().await
}

fn main() {}
