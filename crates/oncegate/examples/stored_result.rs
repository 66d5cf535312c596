//! A caller that asks twice gets the answer of the first run: three equal requests, one charge.
//!
//! `ONCEGATE_REDIS=redis://… cargo run -p oncegate --example stored_result`

use std::sync::atomic::{AtomicU64, Ordering};

use oncegate::gate::Stored;
use oncegate::{Failure, Gate, GateError, Redis};
use serde::{Deserialize, Serialize};

#[derive(Debug)]
struct ChargeRequest {
    account: String,
    cents: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct ChargeReceipt {
    number: u64,
    cents: u64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let redis = std::env::var("ONCEGATE_REDIS").unwrap_or_else(|_| "redis://localhost:6379".into());
    let gate = Gate::builder()
        .store(Redis::at(redis))
        .scope("charges")
        .open()
        .await?;
    let key = format!("charge-{}", std::process::id());
    let mut request = ChargeRequest {
        account: "tea".into(),
        cents: 4200,
    };
    for _ in 0..3 {
        println!("{}", answer(&gate, &key, &request).await?);
    }
    request.cents = 9900;
    if let Err(error) = answer(&gate, &key, &request).await {
        println!("{error}");
    }
    Ok(())
}

async fn answer(gate: &Gate, key: &str, request: &ChargeRequest) -> Result<String, GateError> {
    let body = format!("{request:?}");
    let run = || async { charge(request).await };
    Ok(match gate.request(key).body(body).run_stored(run).await? {
        Stored::Executed(receipt) => format!("charged now: {receipt:?}"),
        Stored::Replayed(receipt) => format!("charged before: {receipt:?}"),
        Stored::Missing(_) => "charged before, without a receipt".into(),
        Stored::HeldElsewhere => "is being charged by another process".into(),
    })
}

/// Placeholder for your work.
async fn charge(request: &ChargeRequest) -> Result<ChargeReceipt, Failure> {
    static CHARGES: AtomicU64 = AtomicU64::new(1);
    Ok(ChargeReceipt {
        number: CHARGES.fetch_add(1, Ordering::Relaxed),
        cents: request.cents,
    })
}
