//! The memory broker.

use oncegate_core::source::rejection_headers;
use oncegate_core::{
    DeadLetter, Delivery, MemoryBroker, MemorySource, Message, Receipt, async_trait,
};
use oncegate_testkit::laws::source::{Destination, TestQueue};

pub(crate) struct Memory(pub(crate) MemoryBroker);

#[async_trait]
impl TestQueue for Memory {
    type Source = MemorySource;

    async fn source(&self) -> MemorySource {
        self.0.source()
    }

    async fn publish(&self, message: Message) {
        self.0.publish(message);
    }

    async fn rejected_messages(&self, destination: Destination) -> Vec<Message> {
        let messages = match destination {
            Destination::DeadLetters => self.0.dead_letters(),
            Destination::InDoubt => self.0.in_doubt(),
        };
        messages.into_iter().map(with_headers).collect()
    }
}

/// Adds the headers that other brokers write; the memory broker keeps reason and history in fields.
fn with_headers(dead_letter: DeadLetter) -> Message {
    let delivery = Delivery::new(dead_letter.message, Receipt::new(0, 0));
    let history = dead_letter.failure_history.as_ref();
    let headers = rejection_headers(&delivery, &dead_letter.reason, history);
    headers
        .into_iter()
        .fold(delivery.message, |message, (name, value)| {
            message.with_header(name, value)
        })
}

oncegate_testkit::source_laws!(async || Memory(MemoryBroker::new("laws")));
