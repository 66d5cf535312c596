//! A consumer that was given no source.

use oncegate_core::{
    Consumer, Context, Error, Failure, Handler, IdSource, MemoryStore, shutdown_signal,
};

struct Print;

impl Handler for Print {
    type Payload = String;

    async fn handle(&self, payload: String, cx: &Context) -> Result<(), Failure> {
        println!("{}: {payload}", cx.id());
        Ok(())
    }
}

pub async fn run() -> Result<(), Error> {
    let consumer = Consumer::builder()
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .handler(Print);
    consumer.run_until(shutdown_signal()).await
}

fn main() {}
