//! The laws of a [`Source`]: each is a function that panics if the source violates the law.
//!
//! Each law has a queue or a topic of its own. [`source_laws!`](crate::source_laws) makes a test of
//! each.

mod client;
mod deliveries;
mod endings;
mod rejections;
mod releases;

pub use client::accepted;
pub use deliveries::*;
pub use endings::*;
pub use rejections::*;
pub use releases::*;

use std::time::Duration;

use oncegate_core::{Message, Source, async_trait};

/// A queue or topic that only one law uses, and the client that publishes to it.
///
/// A topic has one partition, so messages are delivered in the order of publication. The test
/// removes the queue or its server afterwards.
#[async_trait]
pub trait TestQueue: Send + Sync {
    /// The source under test.
    type Source: Source + 'static;

    /// Opens a new source for the queue, on Kafka in the same group each time. The laws open one at
    /// a time.
    async fn source(&self) -> Self::Source;

    /// Publishes the body and the headers of a message at the end, and waits for the broker's
    /// confirmation.
    async fn publish(&self, message: Message);

    /// The messages in a destination of rejected messages, read with a client of the broker, with
    /// their headers. The laws call it again until the expected messages are there.
    async fn rejected_messages(&self, destination: Destination) -> Vec<Message>;

    /// The time limit for one step of a law. A consumer group may need 30 s until it reassigns the
    /// partitions of a closed consumer.
    fn step_timeout(&self) -> Duration {
        Duration::from_secs(60)
    }
}

/// The destination of rejected messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// The dead letters: messages that can never succeed.
    DeadLetters,
    /// The in-doubt queue: messages whose outcome is unknown.
    InDoubt,
}

/// Calls a macro with the given arguments and the name of each law.
#[doc(hidden)]
#[macro_export]
macro_rules! __each_source_law {
    ($callback:ident, $($with:tt)*) => {
        $crate::$callback! {
            $($with)*;
            messages_are_delivered_unchanged_and_in_order
            an_unsettled_delivery_is_not_delivered_again
            receive_respects_its_limit
            receive_with_an_empty_limit_delivers_nothing
            a_dropped_receive_loses_nothing
            settling_empties_the_list
            an_accepted_delivery_is_not_redelivered
            unsettled_deliveries_are_redelivered_after_a_close
            unsettled_deliveries_are_redelivered_after_a_crash
            accepting_a_later_delivery_does_not_accept_an_earlier_one
            a_stopped_source_still_settles
            a_release_is_redelivered_after_its_delay_and_blocks_no_other
            a_release_with_a_long_delay_survives_a_close
            repeated_releases_keep_the_failure_count
            releases_are_redelivered_in_the_order_of_their_delays
            a_rejected_message_is_a_dead_letter_with_its_failure_history
            in_doubt_messages_have_a_destination_of_their_own
            many_rejections_at_once_all_arrive
            settlements_in_one_batch_are_independent
        }
    };
}
