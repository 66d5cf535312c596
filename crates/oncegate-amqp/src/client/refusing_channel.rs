//! Closes a channel on which a quorum queue refuses messages.
//!
//! # Workaround
//! - *Symptom:* a quorum queue that refused a publish because it was full refuses all later ones on the
//!   same channel, also after its limit was removed or raised. *Version:* RabbitMQ 3.10.8.
//! - *Upstream:* rabbitmq/rabbitmq-server#12206, fixed by #12310 for 3.13 and 4.0.
//! - *Test:* `limits::refused_dead_letters_are_published_once_the_queue_has_room` in `tests/amqp`.
//! - *May be removed* when the oldest supported release has the fix; the queue must still be declared
//!   again if it is missing.

use std::sync::Arc;

use lapin::{Channel, Connection};

use crate::client::confirm_timeout::CONFIRM_TIMEOUT;
use crate::client::context::SourceContext;
use crate::client::declare;
use crate::protocol::message_copy::MessageCopy;

/// Declares the queue of the first of these copies again, because one was returned or nacked, and
/// closes the channel. If declaring fails, or both take longer than [`CONFIRM_TIMEOUT`], appends
/// the error to `problem`. The time is limited because nothing is published meanwhile.
pub(crate) async fn redeclare_and_close(
    source: &SourceContext,
    connection: &Connection,
    channel: &Channel,
    problem: &mut String,
    copies: &[Arc<MessageCopy>],
) {
    let redeclared = tokio::time::timeout(CONFIRM_TIMEOUT, async {
        let declared = match copies.first() {
            Some(copy) => declare::redeclare(connection, source, &copy.destination).await,
            None => Ok(()),
        };
        let _ = channel.close(200, "OK".into()).await;
        declared
    });
    match redeclared.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => problem.push_str(&format!("; declaring the queue failed: {error}")),
        Err(_) => problem.push_str(
            "; declaring the queue and closing the channel took longer than the confirm timeout",
        ),
    }
}
