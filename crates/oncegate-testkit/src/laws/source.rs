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

/// A queue or a topic for one law only: what a test needs besides the [`Source`].
///
/// It has at most one partition, so messages are delivered in the order of publication. It, or its
/// server, cleans up after the test.
#[async_trait]
pub trait TestQueue: Send + Sync {
    /// The source that it opens.
    type Source: Source + 'static;

    /// A new consumer of the queue, in the same group. The laws open one at a time.
    async fn source(&self) -> Self::Source;

    /// Publishes a message at the end and waits for the broker's confirmation: body, headers and,
    /// if the transport has one, the message id.
    async fn publish(&self, message: Message);

    /// The messages in a destination of rejected messages, read with a client of the broker, with
    /// their headers. The laws call it again until the expected messages are there.
    async fn set_aside(&self, destination: Destination) -> Vec<Message>;

    /// The time limit for one step of a law. A consumer group may need 30 s until it reassigns the
    /// partitions of a closed consumer.
    fn patience(&self) -> Duration {
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
            messages_arrive_as_they_were_sent_and_in_order
            what_came_is_not_delivered_again_while_it_is_open
            no_more_is_handed_over_than_was_asked_for
            who_asks_for_nothing_gets_nothing
            a_dropped_receive_loses_nothing
            settling_empties_the_list
            what_is_accepted_never_comes_back
            what_is_not_settled_comes_back
            what_is_dropped_with_its_source_comes_back
            a_gap_keeps_its_place_and_nothing_else
            a_stopped_source_still_settles
            what_is_released_comes_back_after_its_delay_and_holds_up_no_other
            what_is_released_for_long_comes_back_to_the_next_source
            what_is_released_again_and_again_keeps_its_count
            releases_come_back_in_the_order_of_their_delays
            what_is_rejected_stands_in_the_dead_letters_with_its_story
            what_is_in_doubt_stands_apart
            many_rejections_at_once_all_arrive
            each_settlement_of_a_batch_is_its_own
        }
    };
}
