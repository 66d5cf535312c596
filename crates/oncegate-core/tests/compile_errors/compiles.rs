//! Correct code that resembles the mistakes.

use oncegate_core::handler::IntoFailure;
use oncegate_core::{
    Consumer, Context, Error, Failure, Handler, IdSource, MemoryBroker, MemoryStore,
};

struct Print;

impl Handler for Print {
    type Payload = String;

    async fn handle(&self, payload: String, cx: &Context) -> Result<(), Failure> {
        println!("{}: {payload}", cx.id());
        Ok(())
    }
}

/// Any future ends a consumer, whatever its output.
pub async fn run(
    queue: MemoryBroker,
    stop: tokio::sync::oneshot::Receiver<u32>,
) -> Result<(), Error> {
    let consumer = || {
        Consumer::builder()
            .store(MemoryStore::new())
            .id(IdSource::message_id())
            .handler(Print)
    };
    consumer()
        .source(queue.source())
        .run_until(tokio::signal::ctrl_c())
        .await?;
    consumer().source(queue.source()).run_until(stop).await
}

pub struct Declined;

impl IntoFailure for Declined {
    fn into_failure(self) -> Failure {
        Failure::Reject("the card was declined".into())
    }
}

pub struct Silent;

impl From<Silent> for Failure {
    fn from(_: Silent) -> Self {
        Failure::InDoubt("no answer".into())
    }
}

/// Own errors that convert into a `Failure`.
pub fn charge(answer: Result<Result<(), Declined>, Silent>) -> Result<(), Failure> {
    answer??;
    Ok(())
}

fn main() {}
