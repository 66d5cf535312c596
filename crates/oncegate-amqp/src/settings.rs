//! The public builder of a source, and the validation of its settings.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lapin::Connection;
use oncegate_core::IdSource;
use oncegate_core::source::{ConnectOptions, Order, SourceError};

use crate::client::connector::BrokerConnector;
use crate::client::context::SourceContext;
use crate::client::declare::{self, MismatchLog};
use crate::client::node::BrokerNode;
use crate::client::outbox_publisher::RabbitMqPublisher;
use crate::client::tls::{ClientIdentity, TlsFiles};
use crate::protocol::queue_settings::{ConsumerMode, QueueSettings, queue_name};
use crate::status::{RabbitMqStatus, SourceMetrics};

/// RabbitMQ's default consumer timeout.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The description of a RabbitMQ queue to consume: pass it to the consumer as its source.
///
/// Settings are validated when the source is opened. The error names an invalid setting.
#[derive(Clone)]
pub struct RabbitMq {
    queue: String,
    urls: Vec<String>,
    tls: TlsFiles,
    prefetch: u32,
    /// The consumer's maximum number of deliveries in flight.
    in_flight: usize,
    key_header: Option<String>,
    body_limit: usize,
    consumer_timeout: Duration,
    /// How long a delivery may stay unsettled: [`ConnectOptions::max_unsettled_time`]; zero if
    /// unknown.
    max_unsettled_time: Duration,
    topology: Topology,
    kind: QueueKind,
    consumers: ConsumerMode,
    order: Order,
    rejects: Rejects,
    dead_letters: Option<String>,
    in_doubt: Option<String>,
    status: RabbitMqStatus,
    /// From where the consumer reads ids, for log lines.
    id: Option<IdSource>,
}

/// Whether the source declares or checks its queues when it connects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Topology {
    /// Creates the queues that do not exist: the queue, its dead-letter and in-doubt queues, and its
    /// delay queues (`<queue>.delay.<milliseconds>`), in which failed messages wait. If the queue
    /// exists with other arguments, that is an error: AMQP does not report which, and some lose
    /// messages, such as a delivery limit without a dead-letter exchange. Any other queue with other
    /// arguments is used as it is, with a warning.
    #[default]
    Declare,
    /// Creates nothing; a missing queue, dead-letter queue or in-doubt queue is an error. Failed
    /// messages wait in the consumer, unacknowledged, at most half of the broker's consumer timeout
    /// (30 minutes by default). For queues that you declare yourself: their arguments are not
    /// checked, although some lose messages, as [`Topology::Declare`] explains.
    Check,
    /// Creates and checks nothing. Failed messages wait as with [`Topology::Check`].
    Trust,
}

/// The type of the queues that [`Topology::Declare`] creates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueKind {
    /// Replicated, with at-least-once dead-lettering. Messages that the broker dead-letters
    /// (because of a delivery limit) go to the dead-letter queue, too.
    #[default]
    Quorum,
    /// Durable on one node. A delay queue of this type may lose its messages if the node fails.
    Classic,
}

/// How rejected messages are dead-lettered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejects {
    /// The source publishes a copy to the dead-letter queue, with the reason, the errors and the id
    /// in its headers, and acknowledges the original once the copy is confirmed.
    #[default]
    Published,
    /// The source sends `basic.reject`, and the broker routes the message to the queue's own
    /// dead-letter exchange, without a reason. Choose it only for a queue that has a dead-letter
    /// exchange which loses nothing: without one the broker drops the message, and AMQP does not
    /// report whether a queue has one. In-doubt messages are published as with [`Rejects::Published`].
    ByQueue,
}

impl RabbitMq {
    /// A source that consumes this queue.
    pub fn queue(name: impl Into<String>) -> Self {
        Self {
            queue: name.into(),
            urls: vec!["amqp://guest:guest@localhost:5672/%2f".into()],
            tls: TlsFiles::default(),
            prefetch: 512,
            in_flight: usize::MAX,
            key_header: None,
            body_limit: usize::MAX,
            consumer_timeout: CONSUMER_TIMEOUT,
            max_unsettled_time: Duration::ZERO,
            topology: Topology::default(),
            kind: QueueKind::default(),
            consumers: ConsumerMode::Competing,
            order: Order::Unordered,
            rejects: Rejects::default(),
            dead_letters: None,
            in_doubt: None,
            status: RabbitMqStatus::default(),
            id: None,
        }
    }

    /// The URL of the broker: `amqp://user:password@host:port/vhost`, or `amqps://`;
    /// `amqp://guest:guest@localhost:5672/%2f` by default. Write the default virtual host as `%2f`
    /// and an IPv6 address in brackets, and percent-encode reserved characters.
    ///
    /// Query parameters: `heartbeat` (10 s by default), `connection_timeout` (5,000 ms by default,
    /// for the whole handshake), `frame_max`, `channel_max`, and `auth_mechanism` (with `external`
    /// the broker takes the user from the client certificate). With `amqps://` the broker's
    /// certificate is always verified, against the system's CA certificates, or those of the
    /// environment variable `SSL_CERT_FILE`, and [`ca_certificate`](Self::ca_certificate).
    pub fn url(self, url: impl Into<String>) -> Self {
        self.urls([url])
    }

    /// The URLs of the nodes of a cluster, with the same virtual host. The source connects to a
    /// random node first; if a node cannot be reached, to the next one at once; if it does not serve
    /// the queue, to the next one after a pause.
    pub fn urls(mut self, urls: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.urls = urls.into_iter().map(Into::into).collect();
        self
    }

    /// Trusts the CA certificates in this file (PEM) in addition to the system's, for `amqps://`.
    /// The file is read at each connection.
    pub fn ca_certificate(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls.ca_certificate = Some(path.into());
        self
    }

    /// The client certificate for `amqps://`: the files of the certificate, with intermediate ones,
    /// and of its key (PEM, without a passphrase). The files are read at each connection, so that a
    /// renewed certificate is used.
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.tls.identity = Some(ClientIdentity {
            certificate: certificate.into(),
            key: key.into(),
        });
        self
    }

    /// The prefetch count (`basic.qos`): how many deliveries may be unacknowledged, 1 to 65,535, 512
    /// by default.
    ///
    /// It bounds the deliveries in memory; 0, which means unlimited, is refused. With
    /// [`Topology::Declare`] it is capped at twice the consumer's limit of deliveries in flight,
    /// because a delivery that waits behind slow handlers may exceed the broker's consumer timeout
    /// (30 minutes by default).
    pub fn prefetch(mut self, count: u32) -> Self {
        self.prefetch = count;
        self
    }

    /// Takes the key of a message from this header instead of its routing key. A message without the
    /// header has its routing key as the key.
    ///
    /// The key matters for `Order::ByKey`. All messages published through the default exchange have
    /// the queue's name as their routing key, hence the same key.
    pub fn key_header(mut self, name: impl Into<String>) -> Self {
        self.key_header = Some(name.into());
        self
    }

    /// The largest body to handle, in bytes; a message with a larger one goes to the dead letters.
    /// Unlimited by default.
    ///
    /// Larger messages are received nevertheless: a consumer may need memory for the prefetch count
    /// times the largest message that the broker accepts.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// The broker's `consumer_timeout`, 30 minutes by default as in RabbitMQ: how long a delivery may
    /// be unacknowledged before the broker closes the channel.
    ///
    /// When a delivery has been unsettled for nine tenths of it, the source logs a warning and
    /// closes the channel itself; its unacknowledged messages are redelivered. A failed message
    /// waits in the consumer for at most half of it.
    pub fn consumer_timeout(mut self, timeout: Duration) -> Self {
        self.consumer_timeout = timeout;
        self
    }

    /// Whether to declare or check the queues; [`Topology::Declare`] by default.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = topology;
        self
    }

    /// The type of the queues to declare; [`QueueKind::Quorum`] by default.
    pub fn queue_kind(mut self, kind: QueueKind) -> Self {
        self.kind = kind;
        self
    }

    /// Declares the queue with `x-single-active-consumer`: only one of its consumers receives
    /// messages, and RabbitMQ activates another one when it ends. With `Order::ByKey` the order
    /// then holds across all consumers of the queue; failed messages therefore wait in the
    /// consumer, whatever their delay. An existing queue without the argument is an error. With a
    /// topology other than [`Topology::Declare`] nothing is declared, and the argument not checked.
    pub fn single_active_consumer(mut self) -> Self {
        self.consumers = ConsumerMode::SingleActive;
        self
    }

    /// How rejected messages are dead-lettered; [`Rejects::Published`] by default.
    pub fn rejects(mut self, rejects: Rejects) -> Self {
        self.rejects = rejects;
        self
    }

    /// The status to update. See [`RabbitMqStatus`].
    pub fn status(mut self, status: RabbitMqStatus) -> Self {
        self.status = status;
        self
    }

    /// The queue for dead letters; `<queue>.dead-letters` by default.
    pub fn dead_letters(mut self, queue: impl Into<String>) -> Self {
        self.dead_letters = Some(queue.into());
        self
    }

    /// The queue for messages whose effect is unknown; `<queue>.in-doubt` by default.
    pub fn in_doubt(mut self, queue: impl Into<String>) -> Self {
        self.in_doubt = Some(queue.into());
        self
    }

    /// Opens a connection with this name for a tool that reads or repairs the source's queues. It
    /// uses the source's nodes (each is tried once), TLS, login and timeouts. Messages that lapin
    /// cannot parse arrive as at the source: tables nested more than 32 deep as bytes, and each byte
    /// of a short string that is not UTF-8 as U+001A.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`]: an invalid URL or certificate; no connection was attempted.
    /// [`SourceError::Unavailable`]: no node can be reached, or one refuses the login; its cause
    /// names the setting to check, if one is a likely cause.
    pub async fn client(&self, name: &str) -> Result<Connection, SourceError> {
        let connector = BrokerConnector::new(&self.urls, self.tls.clone())?;
        connector
            .connect(name)
            .await
            .map(|(connection, _)| connection)
            .map_err(|error| SourceError::Unavailable(error.into()))
    }

    /// A publisher for a [`Relay`](oncegate_core::Relay), which uses the nodes, TLS files and login
    /// of this source. It publishes to any queue or exchange.
    pub fn publisher(&self) -> RabbitMqPublisher {
        RabbitMqPublisher::new(self.urls.clone(), self.tls.clone())
    }

    /// For tools: compares the consumed queue with these settings as the source does when it opens,
    /// over a connection from [`client`](Self::client). Creates no queue, and changes none.
    ///
    /// Returns the error with which the source would refuse the queue, because it exists with other
    /// arguments. `None` if the arguments match, if the queue does not exist, if [`Topology`] is
    /// not `Declare`, or if the check failed, for example because the user may not declare queues.
    ///
    /// # Errors
    /// As [`check_settings`](Self::check_settings).
    pub async fn queue_mismatch(
        &self,
        connection: &Connection,
    ) -> Result<Option<SourceError>, SourceError> {
        let context = self.clone().check()?;
        Ok(declare::consumed_mismatch(connection, &context).await)
    }

    /// Applies the settings of the consumer.
    pub(crate) fn with_options(mut self, options: ConnectOptions) -> Self {
        self.in_flight = options.max_in_flight.unwrap_or(self.in_flight);
        self.order = options.order.unwrap_or(self.order);
        self.max_unsettled_time = options
            .max_unsettled_time
            .unwrap_or(self.max_unsettled_time);
        self.id = options.id;
        self
    }

    /// Checks all settings as opening the source does, and connects to no broker. Reads the
    /// certificate files.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`] names the setting.
    pub fn check_settings(&self) -> Result<(), SourceError> {
        self.clone().check().map(drop)
    }

    pub(crate) fn check(self) -> Result<SourceContext, SourceError> {
        let or_suffix = |name: Option<String>, suffix: &str| {
            name.unwrap_or_else(|| format!("{}.{suffix}", self.queue))
        };
        let dead_letters = or_suffix(self.dead_letters, "dead-letters");
        let in_doubt = or_suffix(self.in_doubt, "in-doubt");
        let connector = BrokerConnector::new(&self.urls, self.tls)?;
        let configured = u16::try_from(self.prefetch).unwrap_or(0);
        if configured == 0 {
            return Err(SourceError::misconfigured(
                "prefetch",
                format!("{} is not between 1 and 65535", self.prefetch),
                "use at least 1 and at most 65535 unacknowledged deliveries; the default is 512",
            ));
        }
        // Not capped with other topologies: they have no delay queues, so deliveries that wait for a
        // retry count towards the prefetch.
        let cap = if self.topology == Topology::Declare {
            self.in_flight.max(1).saturating_mul(2)
        } else {
            usize::MAX
        };
        let prefetch = u16::try_from(cap).unwrap_or(u16::MAX).min(configured);
        for (setting, queue) in [("dead_letters", &dead_letters), ("in_doubt", &in_doubt)] {
            if *queue == self.queue {
                return Err(SourceError::misconfigured(
                    setting,
                    format!(
                        "`{queue}` is the consumed queue: rejected messages would be redelivered endlessly"
                    ),
                    "name another queue",
                ));
            }
        }
        if dead_letters == in_doubt {
            return Err(SourceError::misconfigured(
                "in_doubt",
                format!("`{in_doubt}` is the dead-letter queue, too"),
                "name another queue: `oncegate dead-letters redrive` and `oncegate in-doubt resolve` need separate queues",
            ));
        }
        let key_header = self.key_header.as_deref();
        if key_header.is_some_and(|name| name.is_empty() || name.len() > 255) {
            return Err(SourceError::misconfigured(
                "key_header",
                "the name of the header is empty or longer than 255 bytes",
                "use the name of the header that has the key",
            ));
        }
        if self.consumer_timeout < Duration::from_secs(1) {
            return Err(SourceError::misconfigured(
                "consumer_timeout",
                format!("{:?} is below 1 s", self.consumer_timeout),
                "use the value of consumer_timeout in rabbitmq.conf; RabbitMQ's default is 30 minutes",
            ));
        }
        if (self.rejects, self.kind, self.topology)
            == (Rejects::ByQueue, QueueKind::Classic, Topology::Declare)
        {
            return Err(SourceError::misconfigured(
                "rejects",
                "a classic queue is declared without a dead-letter exchange: the broker would drop rejected messages",
                "choose `Rejects::Published`, or a quorum queue",
            ));
        }
        Ok(SourceContext {
            metrics: SourceMetrics::new(self.status, &self.queue),
            connector,
            mismatches: MismatchLog::default(),
            settings: QueueSettings {
                name: Arc::from(self.queue.as_str()),
                queue: queue_name("queue", self.queue)?,
                dead_letters: queue_name("dead_letters", dead_letters)?,
                in_doubt: queue_name("in_doubt", in_doubt)?,
                prefetch,
                key_header: self.key_header,
                body_limit: self.body_limit,
                consumer_timeout: self.consumer_timeout,
                max_unsettled_time: self.max_unsettled_time,
                topology: self.topology,
                kind: self.kind,
                consumers: self.consumers,
                order: self.order,
                rejects: self.rejects,
                id: self.id,
            },
        })
    }
}

impl fmt::Debug for RabbitMq {
    /// Without passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("queue", &self.queue)
            .field(
                "urls",
                &self.urls.iter().map(|url| redact(url)).collect::<Vec<_>>(),
            )
            .field("tls", &self.tls)
            .field("prefetch", &self.prefetch)
            .field("key_header", &self.key_header)
            .field("body_limit", &self.body_limit)
            .field("consumer_timeout", &self.consumer_timeout)
            .field("topology", &self.topology)
            .field("kind", &self.kind)
            .field("consumers", &self.consumers)
            .field("rejects", &self.rejects)
            .field("dead_letters", &self.dead_letters)
            .field("in_doubt", &self.in_doubt)
            .finish_non_exhaustive()
    }
}

fn redact(url: &str) -> String {
    BrokerNode::parse(url).map_or_else(|_| "(not an AMQP URL)".to_owned(), |node| node.redacted_url)
}

#[cfg(test)]
mod tests {
    use oncegate_core::source::{Order, RetryDelays};

    use super::*;

    #[test]
    fn an_invalid_setting_is_named_in_the_error() {
        let payments = || RabbitMq::queue("payments");
        let with_certificate = |source: RabbitMq| source.ca_certificate("/nowhere.pem");
        for (source, named) in [
            (payments(), "none"),
            (RabbitMq::queue(""), "queue"),
            (RabbitMq::queue("q".repeat(241)), "queue"),
            (payments().prefetch(0), "prefetch"),
            (payments().prefetch(65_536), "prefetch"),
            (payments().dead_letters("payments"), "dead_letters"),
            (payments().dead_letters("bad").in_doubt("bad"), "in_doubt"),
            (payments().in_doubt("payments"), "in_doubt"),
            (payments().url(""), "url"),
            (payments().url("localhost"), "url"),
            (payments().url("http://localhost"), "url"),
            (payments().url("amqp:guest:secret"), "url"),
            (
                payments().url("amqp://guest:secret@[::1]:5672/%2f?heart=1"),
                "url",
            ),
            (payments().urls(Vec::<String>::new()), "url"),
            // A CA certificate has no effect without TLS.
            (with_certificate(payments()), "url"),
            (
                with_certificate(payments().url("amqps://broker")),
                "ca_certificate",
            ),
            (payments().key_header(""), "key_header"),
            (payments().key_header("customer"), "none"),
            (
                payments().consumer_timeout(Duration::ZERO),
                "consumer_timeout",
            ),
            (payments().rejects(Rejects::ByQueue), "none"),
            (
                payments()
                    .rejects(Rejects::ByQueue)
                    .queue_kind(QueueKind::Classic),
                "rejects",
            ),
        ] {
            let text = format!("{source:?}");
            let found = match source.check() {
                Err(SourceError::Misconfigured { setting, .. }) => setting,
                Err(other) => panic!("{other}"),
                Ok(_) => "none".into(),
            };
            assert_eq!(found, named, "{text}");
        }
    }

    #[test]
    fn the_prefetch_is_capped_at_twice_the_deliveries_in_flight() {
        let payments = || RabbitMq::queue("payments");
        for (source, in_flight, expected) in [
            (payments(), Some(1), 2),
            (payments(), Some(8), 16),
            (payments(), Some(300), 512),
            (payments(), Some(0), 2),
            (payments(), Some(usize::MAX), 512),
            (payments(), None, 512),
            (payments().topology(Topology::Check), Some(1), 512),
            (payments().prefetch(1), Some(64), 1),
        ] {
            let mut options = ConnectOptions::default();
            options.max_in_flight = in_flight;
            let settings = source.with_options(options).check().expect("settings");
            assert_eq!(settings.prefetch, expected, "{in_flight:?}");
        }
    }

    #[test]
    fn a_delivery_that_may_exceed_the_consumer_timeout_causes_a_warning() {
        let minutes = |count: u64| Duration::from_secs(60 * count);
        for (max_unsettled_time, timeout, warns) in [
            (None, minutes(30), false),
            (Some(minutes(27)), minutes(30), false),
            (Some(minutes(28)), minutes(30), true),
            (Some(minutes(28)), minutes(60), false),
        ] {
            let mut options = ConnectOptions::default();
            options.max_unsettled_time = max_unsettled_time;
            let source = RabbitMq::queue("payments").consumer_timeout(timeout);
            let settings = source.with_options(options).check().expect("settings");
            let warning = settings.consumer_timeout_warning();
            assert_eq!(
                warning.is_some(),
                warns,
                "{max_unsettled_time:?}, {timeout:?}"
            );
            for part in ["RabbitMQ's consumer_timeout", ".handler_timeout(…)"] {
                assert!(
                    warning.as_ref().is_none_or(|text| text.contains(part)),
                    "{warning:?}"
                );
            }
        }
    }

    #[test]
    fn waiting_deliveries_leave_half_of_the_prefetch_and_half_of_the_consumer_timeout() {
        let timeout = Duration::from_secs(1800);
        let delays = |change: fn(RabbitMq) -> RabbitMq, order| {
            let mut options = ConnectOptions::default();
            options.order = order;
            let source = RabbitMq::queue("q").prefetch(9).consumer_timeout(timeout);
            let settings = change(source).with_options(options).check();
            settings.expect("settings").retry_delays()
        };
        let in_source = |above| RetryDelays::InSource { above, max_kept: 4 };
        let in_consumer = RetryDelays::InConsumer {
            longest: timeout / 2,
        };
        let five_seconds = Duration::from_secs(5);
        assert_eq!(delays(|source| source, None), in_source(five_seconds));
        let short = delays(|it| it.consumer_timeout(Duration::from_secs(4)), None);
        assert_eq!(short, in_source(Duration::from_secs(2)));
        assert_eq!(delays(|it| it, Some(Order::ByKey)), in_consumer);
        assert_eq!(delays(|it| it.topology(Topology::Trust), None), in_consumer);
        assert_eq!(delays(RabbitMq::single_active_consumer, None), in_consumer);
    }

    #[test]
    fn no_debug_output_or_error_contains_the_password() {
        for url in [
            "amqp://guest:canary@localhost:5672/%2f",
            "amqp:guest:canary",
            "amqp://guest:canary@host:port",
            "http://a:canary@b",
        ] {
            let source = RabbitMq::queue("payments").url(url);
            assert!(!format!("{source:?}").contains("canary"), "{source:?}");
            match source.check() {
                Ok(settings) => {
                    assert_eq!(settings.redacted_url(), "amqp://guest@localhost:5672/%2f")
                }
                Err(error) => assert!(!format!("{error} {error:?}").contains("canary"), "{error}"),
            }
        }
    }
}
