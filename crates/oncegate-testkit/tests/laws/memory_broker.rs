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

    async fn set_aside(&self, destination: Destination) -> Vec<Message> {
        let letters = match destination {
            Destination::DeadLetters => self.0.dead_letters(),
            Destination::InDoubt => self.0.in_doubt(),
        };
        letters.into_iter().map(as_a_broker_has_it).collect()
    }
}

/// In memory, the story stands beside the message and not in its headers.
fn as_a_broker_has_it(letter: DeadLetter) -> Message {
    let receipt = Receipt {
        epoch: 0,
        partition: 0,
        position: 0,
    };
    let delivery = Delivery {
        message: letter.message,
        receipt,
        failures: 0,
    };
    let written = rejection_headers(&delivery, &letter.reason, letter.story.as_ref());
    written
        .into_iter()
        .fold(delivery.message, |message, (name, value)| {
            message.with_header(name, value)
        })
}

oncegate_testkit::source_laws!(async || Memory(MemoryBroker::new("laws")));
