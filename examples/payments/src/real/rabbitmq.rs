//! RabbitMQ, as the demo itself uses it.

use std::time::{Duration, Instant};

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::uri::AMQPUri;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ErrorKind};

use super::Error;
use super::check::RABBITMQ;
use super::traces::{Sending, TRACEPARENT};
use crate::payment::ID_HEADER;
use crate::traffic::{self, Outgoing};

/// How long the workers may take to declare the queue.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a message is sent that RabbitMQ refuses.
const TRIES: u32 = 20;
/// How long nobody is told what is waited for.
const SILENCE: Duration = Duration::from_secs(5);
/// Where the source of oncegate keeps what waits for another attempt.
const DELAYS: [&str; 5] = [
    ".delay.1000",
    ".delay.5000",
    ".delay.30000",
    ".delay.120000",
    ".delay.600000",
];
const ASIDE: [&str; 2] = [".dead-letters", ".in-doubt"];

/// AMQP's reply codes to a user, and to a virtual host, that are not right.
const ACCESS_REFUSED: u16 = 403;
const NOT_ALLOWED: u16 = 530;

/// Why there is no connection.
enum Refused {
    /// It may come.
    Absent(Error),
    /// A person has to change it.
    Wrong(Error),
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Absent(error) | Refused::Wrong(error) => error,
        }
    }
}

/// Whether RabbitMQ lets us in.
///
/// # Errors
/// The option, what is wrong, and what to do.
pub(super) async fn check(url: &str) -> Result<(), Error> {
    let connection = connect(url).await?;
    let _ = connection.close(200, "OK".into()).await; // it has answered
    Ok(())
}

async fn connect(url: &str) -> Result<Connection, Refused> {
    // No error repeats the URL: the password may be in it.
    let uri: AMQPUri = url.parse().map_err(|_| {
        let remedy = "write amqp://user:password@host:port/vhost, with / as %2f and the password percent-encoded";
        Refused::Wrong(RABBITMQ.wrong(format!("it is not an AMQP URL; {remedy}")))
    })?;
    let place = format!("RabbitMQ at {}:{}", uri.authority.host, uri.authority.port);
    let vhost = uri.vhost.clone();
    Connection::connect_uri(uri, ConnectionProperties::default()).await.map_err(|error| match error.kind() {
        ErrorKind::ProtocolError(refusal) if refusal.get_id() == ACCESS_REFUSED => Refused::Wrong(RABBITMQ.wrong(format!(
            "{place} refuses the user or the password; correct them in amqp://user:password@host:port/vhost, and mind that `guest` may \
             only connect from the broker's own host"
        ))),
        ErrorKind::ProtocolError(refusal) if refusal.get_id() == NOT_ALLOWED => Refused::Wrong(RABBITMQ.wrong(format!(
            "{place} does not let this user into the virtual host {vhost:?} ({error}); correct it at the end of the URL, where / is %2f"
        ))),
        _ => {
            Refused::Absent(RABBITMQ.wrong(format!(
                "{place} cannot be reached ({error}); is it running, are host and port right, and does that port speak AMQP?"
            )))
        }
    })
}

/// A connection that sends, and looks.
pub(crate) struct Wire {
    connection: Connection,
    channel: Channel,
    queue: String,
}

impl Wire {
    /// Waits until a worker has declared the queue, and says so if that takes long.
    pub(crate) async fn open(url: &str, queue: &str) -> Result<Self, Error> {
        let (begun, mut said) = (Instant::now(), String::new());
        loop {
            let trouble = match connect(url).await {
                Ok(connection) => match Self::over(connection, queue).await {
                    Ok(wire) => return Ok(wire),
                    Err(error) => format!("the queue {queue} is not there ({error}); a worker declares it: is one running?").into(),
                },
                Err(Refused::Absent(trouble)) => trouble,
                Err(Refused::Wrong(error)) => return Err(error),
            };
            if begun.elapsed() > PATIENCE {
                return Err(trouble);
            }
            if begun.elapsed() > SILENCE && said != trouble.to_string() {
                said = trouble.to_string();
                eprintln!("payments: {said}; trying again for {PATIENCE:?}");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// If the queue is there.
    async fn over(connection: Connection, queue: &str) -> Result<Self, Error> {
        let channel = connection.create_channel().await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        let wire = Self {
            connection,
            channel,
            queue: queue.to_owned(),
        };
        wire.ready("").await?;
        Ok(wire)
    }

    /// Sends, and sends again what was refused: RabbitMQ has not taken that, as happens while a
    /// quorum queue that was just declared has no leader yet.
    pub(crate) async fn send(&self, messages: &[Outgoing]) -> Result<(), Error> {
        let mut left: Vec<&Outgoing> = messages.iter().collect();
        for _ in 0..TRIES {
            left = self.publish(left).await?;
            if left.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Err(format!(
            "RabbitMQ refused {} messages for the queue {}, {TRIES} times",
            left.len(),
            self.queue
        )
        .into())
    }

    /// Sends each once, and returns those that were refused.
    async fn publish<'a>(&self, messages: Vec<&'a Outgoing>) -> Result<Vec<&'a Outgoing>, Error> {
        let mut confirmations = Vec::with_capacity(messages.len());
        for message in messages {
            let sending =
                Sending::begin(("rabbitmq", "publish"), &self.queue, message.id.as_deref());
            let mut headers = FieldTable::default();
            for (name, value) in [
                (ID_HEADER, message.id.clone()),
                (TRACEPARENT, sending.header()),
            ] {
                if let Some(value) = value {
                    headers.insert(name.into(), AMQPValue::LongString(value.into()));
                }
            }
            let properties = BasicProperties::default()
                .with_delivery_mode(2)
                .with_headers(headers);
            let options = BasicPublishOptions {
                mandatory: true,
                ..BasicPublishOptions::default()
            };
            let publish = self.channel.basic_publish(
                "".into(),
                self.queue.as_str().into(),
                options,
                message.body.as_bytes(),
                properties,
            );
            confirmations.push((sending, message, publish.await?));
        }
        let mut refused = Vec::new();
        for (_sending, message, confirmation) in confirmations {
            let confirmation = confirmation.await?;
            let is_ack = confirmation.is_ack();
            if let Some(returned) = confirmation.take_message() {
                return Err(format!(
                    "RabbitMQ returned a message for the queue {}: {}",
                    self.queue, returned.reply_text
                )
                .into());
            }
            if !is_ack {
                refused.push(message);
            }
        }
        Ok(refused)
    }

    /// What is ready, or waits for another attempt.
    pub(crate) async fn backlog(&self) -> Result<u64, Error> {
        let mut waiting = 0;
        for suffix in [""].into_iter().chain(DELAYS) {
            waiting += self.ready(suffix).await?;
        }
        Ok(waiting)
    }

    /// The names of all messages beside the queue.
    pub(crate) async fn names(&self, suffix: &str) -> Result<Vec<String>, Error> {
        let name = format!("{}{suffix}", self.queue);
        // What is got and not acknowledged goes back when the channel closes.
        let channel = self.connection.create_channel().await?;
        let mut names = Vec::new();
        while let Some(message) = channel
            .basic_get(name.as_str().into(), BasicGetOptions::default())
            .await?
        {
            let headers = message.delivery.properties.headers().as_ref();
            let id = headers
                .and_then(|headers| headers.inner().get(ID_HEADER))
                .and_then(|id| match id {
                    AMQPValue::LongString(id) => {
                        Some(String::from_utf8_lossy(id.as_bytes()).into_owned())
                    }
                    _ => None,
                });
            names.push(traffic::name(id, &message.delivery.data));
        }
        channel.close(200, "OK".into()).await?;
        Ok(names)
    }

    pub(crate) async fn remove(&self) -> Result<(), Error> {
        for suffix in [""].into_iter().chain(ASIDE).chain(DELAYS) {
            let name = format!("{}{suffix}", self.queue);
            self.channel
                .queue_delete(name.into(), QueueDeleteOptions::default())
                .await?;
        }
        Ok(())
    }

    async fn ready(&self, suffix: &str) -> Result<u64, Error> {
        let name = format!("{}{suffix}", self.queue);
        let options = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        Ok(self
            .channel
            .queue_declare(name.into(), options, FieldTable::default())
            .await?
            .message_count()
            .into())
    }
}
