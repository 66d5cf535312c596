//! An HTTP service with an `Idempotency-Key` for the tests. Each charge is an effect in Redis: it
//! counts the charges of its key and, if it may be repeated, returns the receipt of the first one.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use clap::Parser;
use oncegate::{Gate, Guarantee, Redis};
use oncegate_http::IdempotencyLayer;
use redis::aio::MultiplexedConnection;

#[derive(Clone, Parser)]
struct Arguments {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    redis: String,
    /// The scope of the gate, and the beginning of the keys of the effects.
    #[arg(long)]
    scope: String,
    #[arg(long)]
    at_most_once: bool,
}

#[derive(Clone)]
struct ChargingService {
    redis: MultiplexedConnection,
    arguments: Arguments,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let arguments = Arguments::parse();
    let guarantee = match arguments.at_most_once {
        true => Guarantee::AtMostOnce,
        false => Guarantee::EffectivelyOnce,
    };
    let gate = Gate::builder()
        .store(Redis::at(&arguments.redis).allow_volatile_store())
        .scope(&arguments.scope)
        .guarantee(guarantee)
        .lease(Duration::from_secs(2))
        .open()
        .await?;
    let client = redis::Client::open(&*arguments.redis)?;
    let listen = arguments.listen;
    let till = ChargingService {
        redis: client.get_multiplexed_async_connection().await?,
        arguments,
    };
    let layer = IdempotencyLayer::new(gate).required();
    let service = Router::new()
        .route("/charges", post(charge))
        .layer(layer)
        .with_state(till);
    axum::serve(tokio::net::TcpListener::bind(listen).await?, service).await?;
    Ok(())
}

async fn charge(
    State(mut till): State<ChargingService>,
    headers: HeaderMap,
) -> (StatusCode, String) {
    let key = headers["idempotency-key"].to_str().unwrap_or_default();
    let name = |what: &str| format!("{}:{what}", till.arguments.scope);
    let own: u64 = redis::cmd("INCR")
        .arg(name("receipts"))
        .query_async(&mut till.redis)
        .await
        .unwrap_or_default();
    // A kill may hit between the effect and the end of the handler.
    let charged: Result<(u64, u64), _> = redis::pipe()
        .hincr(name("charges"), key, 1)
        .hset_nx(name("first"), key, own)
        .ignore()
        .hget(name("first"), key)
        .query_async(&mut till.redis)
        .await;
    tokio::time::sleep(Duration::from_millis(2)).await;
    match charged {
        Ok((_, first)) if !till.arguments.at_most_once => (StatusCode::CREATED, first.to_string()),
        Ok(_) => (StatusCode::CREATED, own.to_string()),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}
