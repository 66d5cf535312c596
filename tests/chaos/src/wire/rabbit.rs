//! RabbitMQ with lapin alone.

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

use super::Letter;
use crate::Error;
use crate::ledger::{Log, Place, What};
use crate::message::{ID_HEADER, KEY_HEADER, Outgoing};
use crate::play::Taken;

/// How long the broker may take to confirm before it is asked on another connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(200);
/// How often a broker that is away is tried: for longer than a restart takes.
const TRIES: u32 = 600;
/// Where the source keeps what waits for another attempt.
const DELAYS: [&str; 5] = [
    ".delay.1000",
    ".delay.5000",
    ".delay.30000",
    ".delay.120000",
    ".delay.600000",
];

/// A queue, and a connection that sends into it.
pub struct Wire {
    url: String,
    queue: String,
    taken: Taken,
    open: Mutex<Option<(Connection, Channel)>>,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

impl Wire {
    pub(super) fn new(url: &str, queue: &str, taken: Taken) -> Self {
        Self {
            url: url.to_owned(),
            queue: queue.to_owned(),
            taken,
            open: Mutex::new(None),
        }
    }

    /// Sends again what was not confirmed, until all is: some of it then stands there twice.
    pub(super) async fn publish(
        &self,
        messages: Vec<Outgoing>,
        log: &Arc<Log>,
    ) -> Result<(), Error> {
        let mut left = messages;
        for _ in 0..TRIES {
            log.write_all(left.iter().map(|message| What::Attempted {
                id: message.id.clone(),
            }));
            left = match tokio::time::timeout(PATIENCE, self.send(&left, log)).await {
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
            "RabbitMQ did not take {} messages for {}",
            left.len(),
            self.queue
        )
        .into())
    }

    /// Sends each once, and returns what was refused or returned; after trouble all whose
    /// confirmation did not come.
    async fn send(
        &self,
        messages: &[Outgoing],
        log: &Log,
    ) -> Result<Vec<Outgoing>, (Vec<Outgoing>, Error)> {
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
                    // A message for which there is no queue comes back with the confirmation.
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

    pub(super) async fn left(&self) -> Result<u64, Error> {
        let (connection, channel) = connect(&self.url).await?;
        let mut left = 0;
        // What is handled in order waits in its consumer, and has no such queues.
        let delays = DELAYS.into_iter().filter(|_| self.taken == Taken::ByAll);
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

    pub(super) async fn letters(&self, suffix: &str, place: Place) -> Result<Vec<Letter>, Error> {
        let (connection, channel) = connect(&self.url).await?;
        let (name, mut letters) = (format!("{}{suffix}", self.queue), Vec::new());
        // Nothing is acknowledged: all goes back when the connection is closed.
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
            letters.push(Letter {
                id: header(ID_HEADER),
                place,
                reason: header(headers::REASON),
            });
        }
        connection.close(200, "OK".into()).await?;
        Ok(letters)
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
