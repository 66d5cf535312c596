//! Publishes copies of messages: to the consumed queue, or in place of a message in its queue.

use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Connection};

use super::properties::{redriven_properties, replacement_properties};
use super::reply_timeout::within_limit;
use super::{QueueReader, REQUEST_TIMEOUT, message_digest, reply_code, unacked};
use crate::destination::{CopyAge, DeadLetter, PublishError};
use crate::error::CliError;
use crate::output::now_ms;

impl QueueReader {
    /// Checks that copies can be published, before any message is read, since requeueing may
    /// increase the delivery count. Publishes a message to a queue that does not exist: the broker
    /// returns it if the user has write permission, and otherwise closes the channel.
    ///
    /// # Errors
    /// The user has no write permission, or whether it has is unknown.
    pub(super) async fn check_can_publish(&mut self) -> Result<(), CliError> {
        let missing_queue = format!("oncegate-no-queue-{}", self.reader_id);
        let problem = match self
            .send(&missing_queue, b"", BasicProperties::default())
            .await
        {
            Ok(()) | Err(SendError::NotAccepted) => return Ok(()),
            Err(SendError::ChannelFailed(error)) if reply_code(&error) == Some(403) => format!(
                "the user has no permission to publish the copies that reset the count ({error}). Let the user write to the default exchange \
                 (rabbitmqctl set_permissions)"
            ),
            Err(error) => format!(
                "whether the copies that reset the count can be published is unknown ({}). Run the command again",
                CliError::from(error.of_copy_for(&missing_queue))
            ),
        };
        Err(CliError::server(format!(
            "RabbitMQ: reads may count towards a delivery-limit that a policy sets for `{}`, and {problem}; or, if `rabbitmqctl list_policies` \
             shows no delivery-limit for this queue, pass --accept-delivery-counts or set rabbitmq.delivery-counts = \"accepted\"",
            self.queue
        )))
    }

    /// Publishes a copy of a message to the end of its queue, and acknowledges the original once
    /// the copy is confirmed. A crash in between leaves both.
    ///
    /// # Errors
    /// No copy was confirmed, so the original is unacknowledged; or its acknowledgement failed.
    pub(super) async fn replace(
        &mut self,
        delivery: Delivery,
        delivery_count: Option<u64>,
    ) -> Result<(), CliError> {
        let queue = self.queue.clone();
        let properties = replacement_properties(&delivery, &queue, &self.reader_id);
        if let Err(error) = self.send(&queue, &delivery.data, properties).await {
            let count = delivery_count.unwrap_or(0);
            return Err(CliError::server(format!(
                "RabbitMQ: a message in `{queue}` has delivery count {count} and could not be replaced by a copy that counts from zero: {}",
                CliError::from(error.of_copy_for(&queue))
            )));
        }
        self.unread_replacements += 1;
        self.acknowledge(
            delivery.delivery_tag,
            "a message that was replaced by a copy",
        )
        .await
    }

    /// The channel for copies, in confirm mode.
    async fn publish_channel(&mut self) -> lapin::Result<Channel> {
        if let Some(channel) = &self.publish_channel {
            return Ok(channel.clone());
        }
        let channel = within_limit(self.publish_connection.create_channel()).await?;
        within_limit(channel.confirm_select(ConfirmSelectOptions::default())).await?;
        Ok(self.publish_channel.insert(channel).clone())
    }

    /// Publishes a copy to the consumed queue and waits for its confirmation.
    pub(crate) async fn publish(
        &mut self,
        dead_letter: &DeadLetter,
        age: CopyAge,
    ) -> Result<(), PublishError> {
        let unacked = unacked(dead_letter).map_err(PublishError::Refused)?;
        let source_queue = self.source_queue.clone();
        self.redriven_at_ms
            .entry(message_digest(dead_letter))
            .or_insert_with(now_ms);
        self.send(
            &source_queue,
            dead_letter.bytes(),
            redriven_properties(&unacked.properties, age),
        )
        .await
        .map_err(|error| error.of_copy_for(&source_queue))
    }

    /// Publishes to a queue and waits for the confirmation.
    async fn send(
        &mut self,
        queue: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> Result<(), SendError> {
        let channel = self.publish_channel().await.map_err(SendError::NoChannel)?;
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let published = channel.basic_publish("".into(), queue.into(), options, body, properties);
        let confirmed = tokio::time::timeout(REQUEST_TIMEOUT, async { published.await?.await });
        let confirmed = tokio::select! {
            confirmed = confirmed => confirmed,
            () = until_blocked(&self.publish_connection) => return Err(SendError::Blocked),
        };
        match confirmed {
            // RabbitMQ confirms a returned message, too.
            Ok(Ok(answer)) => match answer.is_ack() && answer.take_message().is_none() {
                true => Ok(()),
                false => Err(SendError::NotAccepted),
            },
            Ok(Err(error)) => Err(SendError::ChannelFailed(error)),
            Err(_) => Err(SendError::TimedOut),
        }
    }
}

/// Completes when RabbitMQ blocks the connection: when the connection has published during a
/// resource alarm. RabbitMQ then reads nothing more from it.
async fn until_blocked(connection: &Connection) {
    while !connection.status().blocked() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Why RabbitMQ did not confirm a copy.
enum SendError {
    /// No channel in confirm mode could be opened: nothing was published.
    NoChannel(lapin::Error),
    /// The copy was returned or negatively confirmed: its queue does not exist or is full.
    NotAccepted,
    /// The channel failed before the confirmation arrived.
    ChannelFailed(lapin::Error),
    /// No confirmation arrived within [`REQUEST_TIMEOUT`].
    TimedOut,
    /// RabbitMQ blocks the connection. It processes the copy when the alarm ends.
    Blocked,
}

impl SendError {
    /// The error of a copy that was to be published to this queue.
    fn of_copy_for(self, queue: &str) -> PublishError {
        match self {
            Self::NoChannel(error) => PublishError::Refused(CliError::server(format!(
                "RabbitMQ: the copy for `{queue}` was not sent, since no channel could be opened: {error}"
            ))),
            Self::NotAccepted => PublishError::Refused(CliError::server(format!(
                "RabbitMQ: the queue `{queue}` does not exist or is full: the copy was not accepted"
            ))),
            Self::ChannelFailed(error) => PublishError::Unconfirmed(CliError::server(format!(
                "RabbitMQ: the copy for `{queue}` was not confirmed: {error}"
            ))),
            Self::TimedOut => PublishError::Unconfirmed(CliError::server(format!(
                "RabbitMQ: the copy for `{queue}` was not confirmed within {REQUEST_TIMEOUT:?}"
            ))),
            Self::Blocked => PublishError::Unconfirmed(CliError::server(format!(
                "RabbitMQ: the copy for `{queue}` is not confirmed, because a resource alarm (memory or disk) blocks publishing: free the \
                 resource; `rabbitmq-diagnostics alarms` shows it"
            ))),
        }
    }
}
