//! An HTTP endpoint with an `Idempotency-Key`: five concurrent requests with one key place one order.
//!
//! `ONCEGATE_REDIS=redis://… cargo run -p oncegate --example idempotency_key`

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::routing::post;
use oncegate::{Failure, Gate, GateError, Redis, RunOutcome, WhenHeld};
use tower::ServiceExt;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let redis = std::env::var("ONCEGATE_REDIS").unwrap_or_else(|_| "redis://localhost:6379".into());
    // A second request with the same key waits for the first, so that its sender need not retry.
    let when_held = WhenHeld::Wait(Duration::from_secs(5));
    let gate = Gate::builder()
        .store(Redis::at(redis))
        .scope("orders")
        .when_held(when_held)
        .open()
        .await?;
    let service = Router::new().route("/orders", post(order)).with_state(gate);

    let key = format!("order-{}", std::process::id());
    let senders: Vec<_> = (0..5)
        .map(|_| {
            let request = Request::post("/orders")
                .header("idempotency-key", &key)
                .body(Body::empty());
            request.map(|request| tokio::spawn(service.clone().oneshot(request)))
        })
        .collect::<Result<_, _>>()?;
    for sender in senders {
        println!("{}", sender.await??.status());
    }
    Ok(())
}

async fn order(State(gate): State<Gate>, headers: HeaderMap) -> StatusCode {
    let Some(key) = headers.get("idempotency-key") else {
        return StatusCode::BAD_REQUEST;
    };
    match gate.run(key, place_the_order).await {
        Ok(RunOutcome::Executed(())) => StatusCode::CREATED,
        Ok(RunOutcome::AlreadyDone) => StatusCode::OK,
        Ok(RunOutcome::HeldElsewhere) | Err(GateError::HeldElsewhere) => StatusCode::CONFLICT,
        Err(GateError::Failed(_)) => StatusCode::SERVICE_UNAVAILABLE, // nothing happened: the sender may try again
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,                  // the outcome is unknown
    }
}

/// Placeholder for your work.
async fn place_the_order() -> Result<(), Failure> {
    tokio::time::sleep(Duration::from_millis(100)).await;
    Ok(())
}
