//! RabbitMQ by lapin.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate::source::headers;
use tokio::sync::Mutex;

use super::RejectedMessage;
use crate::Error;
use crate::ledger::{Log, RejectedTo, What};
use crate::message::{ID_HEADER, KEY_HEADER, OutgoingMessage};
use crate::run::ConsumerMode;

/// The time limit of confirmations before messages are published again on a new connection.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(200);
/// The maximum number of tries: enough for a restart of the broker.
const TRIES: u32 = 600;
/// The suffixes of the delay queues.
const DELAYS: [&str; 5] = [
    ".delay.1000",
    ".delay.5000",
    ".delay.30000",
    ".delay.120000",
    ".delay.600000",
];

/// A queue and a connection that publishes to it.
pub struct RabbitClient {
    url: String,
    queue: String,
    consumer_mode: ConsumerMode,
    open: Mutex<Option<(Connection, Channel)>>,
}

impl fmt::Debug for RabbitClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitClient")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

impl RabbitClient {
    pub(super) fn new(url: &str, queue: &str, consumer_mode: ConsumerMode) -> Self {
        Self {
            url: url.to_owned(),
            queue: queue.to_owned(),
            consumer_mode,
            open: Mutex::new(None),
        }
    }

    /// Publishes until all messages are confirmed; repeated messages may be in the queue twice.
    pub(super) async fn publish(
        &self,
        messages: Vec<OutgoingMessage>,
        log: &Arc<Log>,
    ) -> Result<(), Error> {
        let mut left = messages;
        for _ in 0..TRIES {
            log.write_all(left.iter().map(|message| What::Attempted {
                id: message.id.clone(),
            }));
            left = match tokio::time::timeout(CONFIRM_TIMEOUT, self.send(&left, log)).await {
                Ok(Ok(refused)) => refused,
                Ok(Err((unconfirmed, _))) => {
                    *self.open.lock().await = None;
                    unconfirmed
                }
                Err(_) => {
                    *self.open.lock().await = None;
                    left
                }
            };
            if left.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(format!(
            "RabbitMQ did not confirm {} messages for {}",
            left.len(),
            self.queue
        )
        .into())
    }

    /// Publishes each message once, and returns those that were refused or returned.
    ///
    /// # Errors
    /// The connection failed; returns the unconfirmed messages.
    async fn send(
        &self,
        messages: &[OutgoingMessage],
        log: &Log,
    ) -> Result<Vec<OutgoingMessage>, (Vec<OutgoingMessage>, Error)> {
        let all = |error: lapin::Error| (messages.to_vec(), error.into());
        let mut open = self.open.lock().await;
        let channel = match &mut *open {
            Some((_, channel)) => channel,
            none => &mut none.insert(connect(&self.url).await.map_err(all)?).1,
        };
        let mut asked = Vec::with_capacity(messages.len());
        for message in messages {
            let mut headers = FieldTable::default();
            headers.insert(
                ID_HEADER.into(),
                AMQPValue::LongString(message.id.as_str().into()),
            );
            let key = message.key.as_ref().unwrap_or(&message.id);
            headers.insert(
                KEY_HEADER.into(),
                AMQPValue::LongString(key.as_str().into()),
            );
            let properties = BasicProperties::default()
                .with_delivery_mode(2)
                .with_headers(headers);
            let options = BasicPublishOptions {
                mandatory: true,
                ..BasicPublishOptions::default()
            };
            let publish = channel.basic_publish(
                "".into(),
                self.queue.as_str().into(),
                options,
                message.body.as_bytes(),
                properties,
            );
            asked.push((message, publish.await.map_err(all)?));
        }
        let (mut refused, mut trouble) = (Vec::new(), None);
        for (message, confirmation) in asked {
            match confirmation.await {
                Ok(confirmation) => {
                    // An unroutable message is returned with its confirmation.
                    if confirmation.is_ack() && confirmation.take_message().is_none() {
                        log.write(What::Confirmed {
                            id: message.id.clone(),
                        });
                    } else {
                        refused.push(message.clone());
                    }
                }
                Err(error) => {
                    refused.push(message.clone());
                    trouble = Some(error);
                }
            }
        }
        match trouble {
            None => Ok(refused),
            Some(error) => Err((refused, error.into())),
        }
    }

    pub(super) async fn unsettled(&self) -> Result<u64, Error> {
        let (connection, channel) = connect(&self.url).await?;
        let mut left = 0;
        // With ordering, failed messages wait in the consumer, without delay queues.
        let delays = DELAYS
            .into_iter()
            .filter(|_| self.consumer_mode == ConsumerMode::Competing);
        for suffix in [""].into_iter().chain(delays) {
            let options = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            let name = format!("{}{suffix}", self.queue);
            left += u64::from(
                channel
                    .queue_declare(name.into(), options, FieldTable::default())
                    .await?
                    .message_count(),
            );
        }
        connection.close(200, "OK".into()).await?;
        Ok(left)
    }

    pub(super) async fn rejected_in(
        &self,
        suffix: &str,
        place: RejectedTo,
    ) -> Result<Vec<RejectedMessage>, Error> {
        let (connection, channel) = connect(&self.url).await?;
        let (name, mut rejected) = (format!("{}{suffix}", self.queue), Vec::new());
        // Unacknowledged messages return to the queue when the connection closes.
        while let Some(message) = channel
            .basic_get(name.as_str().into(), BasicGetOptions::default())
            .await?
        {
            let headers = message
                .delivery
                .properties
                .headers()
                .clone()
                .unwrap_or_default();
            let header = |name: &str| match headers.inner().get(name) {
                Some(AMQPValue::LongString(text)) => {
                    String::from_utf8_lossy(text.as_bytes()).into_owned()
                }
                other => other.map(|other| format!("{other:?}")).unwrap_or_default(),
            };
            rejected.push(RejectedMessage {
                id: header(ID_HEADER),
                place,
                reason: header(headers::REASON),
            });
        }
        connection.close(200, "OK".into()).await?;
        Ok(rejected)
    }
}

async fn connect(url: &str) -> Result<(Connection, Channel), lapin::Error> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    Ok((connection, channel))
}
