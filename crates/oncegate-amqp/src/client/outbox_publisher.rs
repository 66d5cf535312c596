//! Publishes messages of an outbox with publisher confirms.
//!
//! Each message has a channel to itself until it is confirmed, so that a returned or refused message
//! is identified (see `confirm_window`) and closes no other message's channel. Channels are used
//! again.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection};
use oncegate_core::internal::{Lock, fault};
use oncegate_core::outbox::{
    CONTENT_TYPE_HEADER, CORRELATION_ID_HEADER, KEY_HEADER, NotPublished, OutboxMessage, Publisher,
};
use oncegate_core::source::SourceError;
use oncegate_core::store::BoxError;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::client::confirm_timeout::CONFIRM_TIMEOUT;
use crate::client::connector::{BrokerConnector, code, reply_code};
use crate::client::tls::TlsFiles;
use crate::protocol::message_copy::{header_frame_size, max_header_frame};

/// For this time after a failed attempt to connect, messages fail with its error.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Publishes messages of an outbox to RabbitMQ, on a connection of its own: to a queue through the
/// default exchange, or to an exchange with the destination as the routing key. Created by
/// [`RabbitMq::publisher`](crate::RabbitMq::publisher).
///
/// Messages are persistent. The id is the property `message_id`, the key is the header
/// `message-key`. A message that reaches no queue, because the queue, the exchange or a binding is
/// missing, is not lost: it is published again. The publisher declares nothing, because the
/// consumer of a queue chooses its arguments.
///
/// A message that is larger than the broker's `max_message_size` is refused.
pub struct RabbitMqPublisher {
    urls: Vec<String>,
    tls: TlsFiles,
    connector: OnceLock<BrokerConnector>,
    connection: Mutex<RelayConnection>,
    /// Channels with publisher confirms and without an unconfirmed message.
    idle: Lock<Vec<Channel>>,
}

/// The connection, or the last failure to connect.
#[derive(Default)]
struct RelayConnection {
    open: Option<Arc<Connection>>,
    failed: Option<(Instant, String)>,
}

/// Whether a channel can be used again after a message was published on it.
enum ChannelUse {
    /// The channel can be used again.
    Reusable,
    /// It is closed, or has to be.
    Ended,
}

impl RabbitMqPublisher {
    pub(crate) fn new(urls: Vec<String>, tls: TlsFiles) -> Self {
        Self {
            urls,
            tls,
            connector: OnceLock::new(),
            connection: Mutex::default(),
            idle: Lock::default(),
        }
    }

    fn connector(&self) -> Result<&BrokerConnector, SourceError> {
        if let Some(connector) = self.connector.get() {
            return Ok(connector);
        }
        let connector = BrokerConnector::new(&self.urls, self.tls.clone())?;
        Ok(self.connector.get_or_init(|| connector))
    }

    /// The open connection, or a new one.
    async fn connection(&self) -> Result<Arc<Connection>, BoxError> {
        let mut connection = self.connection.lock().await;
        if let Some(open) = &connection.open
            && open.status().connected()
        {
            return Ok(Arc::clone(open));
        }
        if let Some((at, error)) = &connection.failed
            && at.elapsed() < RECONNECT_PAUSE
        {
            return Err(error.clone().into());
        }
        connection.open = None;
        match self.connector()?.connect("oncegate relay").await {
            Ok((opened, _)) => Ok(Arc::clone(connection.open.insert(Arc::new(opened)))),
            Err(error) => {
                connection.failed = Some((Instant::now(), error.to_string()));
                Err(error.into())
            }
        }
    }

    /// A channel of this connection without an unconfirmed message.
    async fn channel(&self, connection: &Connection) -> lapin::Result<Channel> {
        while let Some(channel) = self.idle() {
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let channel = connection.create_channel().await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        Ok(channel)
    }

    fn idle(&self) -> Option<Channel> {
        self.idle.lock().pop()
    }

    async fn publish_once(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        let connection = self
            .connection()
            .await
            .map_err(NotPublished::NotConfirmed)?;
        if connection.status().blocked() {
            return Err(not_confirmed(
                "RabbitMQ blocks publishing because of a resource alarm; free memory or disk space on the broker",
            ));
        }
        let properties = properties(message)?;
        let (size, limit) = (
            header_frame_size(&properties),
            max_header_frame(connection.configuration().frame_max()),
        );
        if size > limit {
            return Err(NotPublished::Refused(
                format!("the headers have {size} bytes, more than the {limit} that fit into a frame; raise frame_max in rabbitmq.conf and in the URL").into(),
            ));
        }
        let channel = self.channel(&connection).await.map_err(failed)?;
        let (used, result) = publish_on(&channel, message, properties).await;
        match used {
            ChannelUse::Reusable => self.idle.lock().push(channel),
            ChannelUse::Ended => drop(channel.close(200, "OK".into()).await),
        }
        result
    }
}

impl Publisher for RabbitMqPublisher {
    fn described(&self) -> String {
        let connector = self.connector();
        let node = connector.map(|it| it.nodes.current().redacted_url.clone());
        format!("RabbitMQ at {}", node.unwrap_or_default())
    }

    async fn preflight(&self) -> Result<(), SourceError> {
        self.connector().map(drop)
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        let published = tokio::time::timeout(CONFIRM_TIMEOUT, self.publish_once(message)).await;
        published.unwrap_or_else(|_| {
            let text = format!("no publisher confirm within {CONFIRM_TIMEOUT:?}");
            Err(not_confirmed(&text))
        })
    }
}

impl fmt::Debug for RabbitMqPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqPublisher")
            .field("broker", &self.described())
            .finish_non_exhaustive()
    }
}

/// Publishes a message on a channel without unconfirmed ones, and waits for its confirm.
async fn publish_on(
    channel: &Channel,
    message: &OutboxMessage,
    properties: BasicProperties,
) -> (ChannelUse, Result<(), NotPublished>) {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let publishing = channel.basic_publish(
        message.exchange.as_str().into(),
        message.destination.as_str().into(),
        options,
        &message.body,
        properties,
    );
    let confirm = match publishing.await {
        Ok(confirm) => fault::when_pending("relay.publish.sent", confirm).await,
        Err(error) => Err(error),
    };
    match confirm {
        Ok(Confirmation::Ack(None)) => (ChannelUse::Reusable, Ok(())),
        Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => {
            let text = format!(
                "the message reached no queue ({}); create the queue, or bind one to the exchange",
                returned.reply_text
            );
            (ChannelUse::Reusable, Err(not_confirmed(&text)))
        }
        // The channel is closed because of a defect of RabbitMQ: see `refusing_channel`.
        Ok(Confirmation::Nack(None) | Confirmation::NotRequested) => (
            ChannelUse::Ended,
            Err(not_confirmed(
                "basic.nack; check the length limit of the queue (x-max-length, x-max-length-bytes) and that a majority of its nodes runs",
            )),
        ),
        Err(error) => (ChannelUse::Ended, Err(failed(error))),
    }
}

/// The error of a channel that was closed by the only message on it. With `PRECONDITION_FAILED`,
/// that message can never be published.
fn failed(error: lapin::Error) -> NotPublished {
    match reply_code(&error) {
        Some(code::PRECONDITION_FAILED) => NotPublished::Refused(
            format!("{error}; raise max_message_size in rabbitmq.conf").into(),
        ),
        Some(code::NOT_FOUND) => not_confirmed(&format!("{error}; create the exchange")),
        Some(code::ACCESS_REFUSED) => not_confirmed(&format!(
            "{error}; grant the user the write permission on the exchange (amq.default for queues)"
        )),
        _ => NotPublished::NotConfirmed(error.into()),
    }
}

fn not_confirmed(text: &str) -> NotPublished {
    NotPublished::NotConfirmed(text.into())
}

/// The properties of a message. The client panics if a name of AMQP has more than 255 bytes, so
/// such a message is refused.
fn properties(message: &OutboxMessage) -> Result<BasicProperties, NotPublished> {
    let names = [&message.id, &message.exchange, &message.destination];
    let mut names = names
        .into_iter()
        .chain(message.headers.iter().map(|it| &it.0));
    if names.any(|name| name.len() > usize::from(u8::MAX)) {
        let text = "the id, the exchange, the routing key or the name of a header has more than 255 bytes; send the message with shorter ones";
        return Err(NotPublished::Refused(text.into()));
    }
    let mut table = FieldTable::default();
    let mut properties = BasicProperties::default()
        .with_delivery_mode(2)
        .with_message_id(message.id.as_str().into());
    for (name, value) in &message.headers {
        let fits = value.len() <= usize::from(u8::MAX);
        match name.as_str() {
            CONTENT_TYPE_HEADER if fits => {
                properties = properties.with_content_type(value.as_str().into());
            }
            CORRELATION_ID_HEADER if fits => {
                properties = properties.with_correlation_id(value.as_str().into());
            }
            name => {
                let value = AMQPValue::LongString(value.as_str().into());
                table.insert(name.into(), value);
            }
        }
    }
    if let Some(key) = &message.key {
        table.insert(
            KEY_HEADER.into(),
            AMQPValue::LongString(key.to_vec().into()),
        );
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let properties = properties.with_timestamp(now.unwrap_or_default().as_secs());
    Ok(properties.with_headers(table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RabbitMq;

    #[test]
    fn a_message_with_a_name_that_is_too_long_is_refused() {
        assert!(properties(&OutboxMessage::new("i".repeat(255), "q", "")).is_ok());
        let mut with_header = OutboxMessage::new("t/1", "q", "");
        with_header.headers = vec![("h".repeat(256), "v".into())];
        for message in [
            OutboxMessage::new("i".repeat(256), "q", ""),
            OutboxMessage::new("t/1", "q".repeat(256), ""),
            with_header,
        ] {
            let refused = properties(&message);
            assert!(matches!(refused, Err(NotPublished::Refused(_))));
        }
    }

    #[tokio::test]
    async fn wrong_settings_are_named_at_the_start_and_no_output_has_the_password() {
        let publisher = RabbitMq::queue("q").url("amqp:guest:canary").publisher();
        let error = publisher.preflight().await.expect_err("not a URL");
        for text in [error.to_string(), format!("{publisher:?}")] {
            assert!(!text.contains("canary"), "{text}");
        }
        let right = RabbitMq::queue("q").url("amqp://guest:canary@localhost/%2f");
        let right = right.publisher();
        right.preflight().await.expect("the settings are right");
        assert!(!format!("{right:?}").contains("canary"));
    }
}
