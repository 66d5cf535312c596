//! Drains at a signal, as a container is stopped: `cargo run -p oncegate --features sqlite --example
//! stop`, and `kill -TERM` or Ctrl-C while it charges.

use std::time::Duration;

use oncegate::{
    Consumer, Context, Error, Failure, Guarantee, Handler, IdSource, MemoryBroker, Message, Sqlite,
    shutdown_signal,
};

struct Charge;

impl Handler for Charge {
    type Payload = u64;

    async fn handle(&self, cents: u64, cx: &Context) -> Result<(), Failure> {
        println!("{}: charging {cents} cents", cx.id());
        tokio::time::sleep(Duration::from_secs(1)).await; // in place of a payment provider
        println!("{}: charged", cx.id());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let queue = MemoryBroker::new("payments");
    for number in 0..20_000 {
        queue.publish(Message::new("1995").with_message_id(format!("payment-{number}")));
    }
    Consumer::builder()
        .source(queue.source())
        .store(Sqlite::file("payments.db"))
        .scope("ledger")
        .guarantee(Guarantee::AtMostOnce)
        .id(IdSource::message_id())
        .handler(Charge)
        .drain_timeout(Duration::from_secs(20)) // longer than a charge takes, shorter than the container's grace period
        .run_until(shutdown_signal())
        .await
}
