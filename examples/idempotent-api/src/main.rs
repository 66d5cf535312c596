//! A payment API that charges once, however often a client repeats a request.
//!
//! ```text
//! cargo run -p idempotent-api
//!
//! alias charge="curl -i localhost:3000/charges -H 'Idempotency-Key: 8e03978e' -H 'X-Account: ada'"
//! charge --json '{"cents": 0}'       # 422 of the handler; the key is still free
//! charge --json '{"cents": 4200}'    # 201; the server prints a line
//! charge --json '{"cents": 4200}'    # the same 201, with Idempotency-Replayed: true
//! charge --json '{"cents": 9900}'    # 422: the key was used for another request
//! ```

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router, routing::post};
use oncegate::{Gate, MemoryStore};
use oncegate_http::{IdempotencyLayer, ResponseOutcome};

#[derive(serde::Deserialize)]
struct Charge {
    cents: u64,
}

async fn charge(Json(charge): Json<Charge>) -> Response {
    if charge.cents == 0 {
        let refusal = (StatusCode::UNPROCESSABLE_ENTITY, "no amount");
        return (Extension(ResponseOutcome::NothingHappened), refusal).into_response();
    }
    println!("charging {} cents", charge.cents);
    StatusCode::CREATED.into_response()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let store = MemoryStore::new(); // forgets all keys when the process ends
    let gate = Gate::builder().store(store).scope("api").open().await?;
    let layer =
        IdempotencyLayer::new(gate).scope_by(|request| request.headers.get("x-account").cloned());
    let api = Router::new().route("/charges", post(charge)).layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, api).await?;
    Ok(())
}
