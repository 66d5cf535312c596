//! Closures and functions as handlers, for several types of messages in one queue.

use std::sync::Arc;

use oncegate::{
    Consumer, Context, Error, Failure, FailureExt, IdSource, MemoryBroker, MemoryStore, Message,
    Reconciled, Router, handler_fn,
};

#[derive(serde::Deserialize)]
struct Payment {
    card: String,
    cents: u64,
}

#[derive(serde::Deserialize)]
struct Refund {
    cents: u64,
}

/// Placeholder for your bank.
struct Bank;

impl Bank {
    async fn charge(&self, payment: &Payment, id: &str) -> Result<(), std::io::Error> {
        println!("{id}: charged {} to {}", payment.cents, payment.card);
        Ok(())
    }

    async fn was_charged(&self, id: &str) -> Result<bool, std::io::Error> {
        println!("{id}: looked up");
        Ok(true)
    }
}

async fn refund(refund: Refund, cx: Context) -> Result<(), Failure> {
    println!("{}: refunded {}", cx.id(), refund.cents);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let bank = Arc::new(Bank);
    let lookup = bank.clone();
    let charge = handler_fn(move |payment: Payment, cx| {
        let bank = bank.clone(); // for this message
        async move { bank.charge(&payment, cx.id()).await.in_doubt() }
    })
    .reconcile(move |_: Payment, cx| {
        let bank = lookup.clone();
        async move {
            Ok(match bank.was_charged(cx.id()).await.retry()? {
                true => Reconciled::Happened,
                false => Reconciled::Unknown,
            })
        }
    });
    let router = Router::by_header("type")
        .route("payment.created", charge)
        .route("payment.refunded", handler_fn(refund));
    let id = IdSource::all_of([IdSource::header("tenant"), IdSource::message_id()]);

    let queue = MemoryBroker::new("payments");
    for (id, kind, body) in [
        ("1", "payment.created", r#"{"card": "alice", "cents": 5}"#),
        ("2", "payment.refunded", r#"{"cents": 3}"#),
        ("3", "payment.declined", r#"{}"#), // no route: dead letters
    ] {
        let message = Message::new(body).with_header("type", kind);
        queue.publish(message.with_message_id(id).with_header("tenant", "shop-7"));
    }
    let empty = queue.clone();
    Consumer::builder()
        .source(queue.source())
        .store(MemoryStore::new())
        .id(id)
        .handler(router)
        .run_until(async move { empty.all_settled().await })
        .await?;
    for rejected in queue.dead_letters() {
        println!("dead letter: {}", rejected.reason.as_str());
    }
    Ok(())
}
