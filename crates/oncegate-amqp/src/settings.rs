//! What the user says about the queue, checked.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lapin::Connection;
use lapin::types::ShortString;
use oncegate_core::source::{Order, SourceError};

use crate::link::Access;
use crate::node::Node;
use crate::status::{Meter, RabbitMqStatus};
use crate::tls::{Identity, Tls};

/// How long RabbitMQ waits for an acknowledgement before it closes the channel, unless it was told
/// otherwise.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// A RabbitMQ queue to consume from: hand it to the consumer as its source.
///
/// Nothing is checked before it is opened; then a wrong setting is an error that names it.
#[derive(Clone)]
pub struct RabbitMq {
    queue: String,
    urls: Vec<String>,
    tls: Tls,
    prefetch: u32,
    in_flight: usize,
    key_header: Option<String>,
    body_limit: usize,
    consumer_timeout: Duration,
    longest_open: Duration,
    topology: Topology,
    kind: QueueKind,
    consumers: Consumers,
    order: Order,
    rejects: Rejects,
    dead_letters: Option<String>,
    in_doubt: Option<String>,
    status: RabbitMqStatus,
}

/// What the source does about its queues when it connects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// Creates what is missing: the queue, its dead-letter and in-doubt queues, and its delay
    /// queues (`<queue>.delay.<milliseconds>`). If the queue exists with other arguments, that is
    /// an error: the broker does not say which, and a delivery limit without a dead-letter
    /// exchange, say, loses messages. One of the other queues is used as it is, with a warning.
    #[default]
    Declare,
    /// Creates nothing; a queue, dead-letter or in-doubt queue that is missing is an error.
    /// Released deliveries wait in memory, unacknowledged, however long their delay: keep it under
    /// the broker's consumer timeout (30 minutes). The choice for a queue that is yours: it is
    /// taken as it is, and what it loses by its own arguments is lost.
    Check,
    /// Creates and checks nothing. Released deliveries wait as with [`Topology::Check`].
    Trust,
}

/// What kind of queue [`Topology::Declare`] creates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueKind {
    /// Replicated, and its dead letters are confirmed. What the broker itself dead-letters (a
    /// delivery limit) goes to the dead-letter queue too.
    #[default]
    Quorum,
    /// Durable on one node. A delay queue of this kind may lose what it holds if its node fails.
    Classic,
}

/// How what is rejected reaches the dead letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rejects {
    /// The source publishes a copy to the dead-letter queue, with the reason, the errors and the id
    /// in its headers, and acknowledges the original once the copy is confirmed.
    #[default]
    Published,
    /// The broker is told to reject, and the queue's own dead-letter exchange does the rest. No
    /// reason goes along. Choose it only for a queue that *has* a dead-letter exchange which loses
    /// nothing: without one the broker drops the message, and it tells nobody which a queue has.
    /// In-doubt messages are published nevertheless.
    ByQueue,
}

/// Who consumes a queue that [`Topology::Declare`] creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consumers {
    Competing,
    SingleActive,
}

impl RabbitMq {
    /// Consumes from this queue.
    pub fn queue(name: impl Into<String>) -> Self {
        Self {
            queue: name.into(),
            urls: vec!["amqp://guest:guest@localhost:5672/%2f".into()],
            tls: Tls::default(),
            prefetch: 512,
            in_flight: usize::MAX,
            key_header: None,
            body_limit: usize::MAX,
            consumer_timeout: CONSUMER_TIMEOUT,
            longest_open: Duration::ZERO,
            topology: Topology::default(),
            kind: QueueKind::default(),
            consumers: Consumers::Competing,
            order: Order::Unordered,
            rejects: Rejects::default(),
            dead_letters: None,
            in_doubt: None,
            status: RabbitMqStatus::default(),
        }
    }

    /// The broker: `amqp://user:password@host:port/vhost`, or `amqps://`. The default virtual host
    /// is written `%2f`; an IPv6 address stands in brackets; what is odd in user, password and
    /// virtual host is percent-encoded.
    ///
    /// The default is `amqp://guest:guest@localhost:5672/%2f`. In its query may stand `heartbeat`
    /// (10 s unless it says otherwise), `connection_timeout` (5,000 ms, for the whole handshake),
    /// `frame_max`, `channel_max`, and `auth_mechanism`: with `external` the broker takes the user
    /// from the client's certificate. With `amqps://` the broker's certificate is always checked,
    /// against the system's authorities and that of [`ca_certificate`](Self::ca_certificate); the
    /// environment variable `SSL_CERT_FILE` names others for the system's.
    pub fn url(self, url: impl Into<String>) -> Self {
        self.urls([url])
    }

    /// The nodes of a cluster, with one virtual host. It begins with any of them; while one cannot
    /// be reached or does not serve, the next is tried at once.
    pub fn urls(mut self, urls: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.urls = urls.into_iter().map(Into::into).collect();
        self
    }

    /// Trusts the authorities in this file (PEM) beside the system's, for `amqps://`. It is read at
    /// each connection.
    pub fn ca_certificate(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls.authority = Some(path.into());
        self
    }

    /// Shows this certificate to a broker that asks for one, for `amqps://`: the files of the
    /// certificate, with what links it to its authority, and of its key (PEM, without a
    /// passphrase). They are read at each connection, so that a certificate which was renewed is
    /// used.
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.tls.identity = Some(Identity {
            certificate: certificate.into(),
            key: key.into(),
        });
        self
    }

    /// How many deliveries the broker hands over ahead of their acknowledgement: 1 to 65,535, 512
    /// by default.
    ///
    /// It bounds what is in memory and in flight; 0 would mean without limit, and is refused. With
    /// [`Topology::Declare`] the source asks for no more than twice what the consumer has in
    /// flight, because what waits behind slow handlers runs into the broker's consumer timeout (30
    /// minutes).
    pub fn prefetch(mut self, count: u32) -> Self {
        self.prefetch = count;
        self
    }

    /// Takes the key of a message from this header; from its routing key where the header is
    /// missing, as without this.
    ///
    /// `Order::ByKey` goes by it. What is published straight to the queue has the queue's name as
    /// its routing key, so all of it would have one key.
    pub fn key_header(mut self, name: impl Into<String>) -> Self {
        self.key_header = Some(name.into());
        self
    }

    /// The largest body to hand over, in bytes; a larger one is rejected to the dead letters. No
    /// limit by default.
    ///
    /// It does not keep such a message from being received: what a consumer may hold in memory is
    /// the prefetch times the largest message that the broker takes.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// The broker's consumer timeout, if it is not RabbitMQ's default of 30 minutes: how long a
    /// delivery may stay unacknowledged before the broker closes the channel.
    ///
    /// When a delivery has stood open for nine tenths of it, the source gives the channel up by
    /// itself and says so in its log; all that the channel held comes back. A release that waits in
    /// memory waits for half of it at the most.
    pub fn consumer_timeout(mut self, timeout: Duration) -> Self {
        self.consumer_timeout = timeout;
        self
    }

    /// What to do about the queues; [`Topology::Declare`] by default.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = topology;
        self
    }

    /// What kind of queue to create; [`QueueKind::Quorum`] by default.
    pub fn queue_kind(mut self, kind: QueueKind) -> Self {
        self.kind = kind;
        self
    }

    /// Creates the queue with a single active consumer: of a fleet, one consumes, and when it goes
    /// the next one does. With `Order::ByKey` the order by key then holds across the fleet; what is
    /// released waits in memory therefore, however long its delay. A queue that exists without this
    /// is an error.
    pub fn single_active_consumer(mut self) -> Self {
        self.consumers = Consumers::SingleActive;
        self
    }

    /// How what is rejected reaches the dead letters; [`Rejects::Published`] by default.
    pub fn rejects(mut self, rejects: Rejects) -> Self {
        self.rejects = rejects;
        self
    }

    /// Where to count. See [`RabbitMqStatus`].
    pub fn status(mut self, status: RabbitMqStatus) -> Self {
        self.status = status;
        self
    }

    /// Where rejected deliveries go; `<queue>.dead-letters` by default.
    pub fn dead_letters(mut self, queue: impl Into<String>) -> Self {
        self.dead_letters = Some(queue.into());
        self
    }

    /// Where deliveries go of which nobody knows whether they happened; `<queue>.in-doubt` by
    /// default.
    pub fn in_doubt(mut self, queue: impl Into<String>) -> Self {
        self.in_doubt = Some(queue.into());
        self
    }

    /// A connection to the broker for a tool that reads or repairs what the source writes, under
    /// this name. It is made as the source makes its own: the same nodes, each tried once, TLS,
    /// login and timeouts. Messages that would end the client arrive as they do at the source:
    /// tables nested more than 32 deep as bytes, and of a short string that is not UTF-8 each byte
    /// as U+001A.
    ///
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`]: a URL or a certificate that the source refuses; no node was asked. [`SourceError::Unavailable`]: no node
    /// can be reached, or one refuses the login; it holds a [`SourceError::Misconfigured`] that
    /// names the setting to look at.
    pub async fn connect(&self, name: &str) -> Result<Connection, SourceError> {
        let access = Access::read(&self.urls, self.tls.clone())?;
        access
            .connect(name)
            .await
            .map_err(|trouble| SourceError::Unavailable(trouble.into()))
    }

    pub(crate) fn in_flight(mut self, count: usize) -> Self {
        self.in_flight = count;
        self
    }

    pub(crate) fn longest_open(mut self, open: Duration) -> Self {
        self.longest_open = open;
        self
    }

    pub(crate) fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    pub(crate) fn check(self) -> Result<Settings, SourceError> {
        let dead_letters = self
            .dead_letters
            .unwrap_or_else(|| format!("{}.dead-letters", self.queue));
        let in_doubt = self
            .in_doubt
            .unwrap_or_else(|| format!("{}.in-doubt", self.queue));
        let access = Access::read(&self.urls, self.tls)?;
        let wanted = u16::try_from(self.prefetch)
            .ok()
            .filter(|count| *count > 0)
            .ok_or_else(|| {
                let problem = format!("{} is not between 1 and 65535", self.prefetch);
                SourceError::misconfigured(
                    "prefetch",
                    problem,
                    "choose how many deliveries may be in flight; 512 is the default",
                )
            })?;
        // Without delay queues, what is released waits within the prefetch: there it has to be as
        // wide as was said.
        let enough = if self.topology == Topology::Declare {
            self.in_flight.max(1).saturating_mul(2)
        } else {
            usize::MAX
        };
        let prefetch = u16::try_from(enough).unwrap_or(u16::MAX).min(wanted);
        if dead_letters == self.queue || in_doubt == self.queue {
            let setting = if dead_letters == self.queue {
                "dead_letters"
            } else {
                "in_doubt"
            };
            let problem = format!(
                "`{}` is the queue that is consumed: what is rejected would come back for ever",
                self.queue
            );
            return Err(SourceError::misconfigured(
                setting,
                problem,
                "name another queue",
            ));
        }
        if self
            .key_header
            .as_deref()
            .is_some_and(|name| name.is_empty() || name.len() > 255)
        {
            let problem = "a header's name has 1 to 255 bytes";
            return Err(SourceError::misconfigured(
                "key_header",
                problem,
                "name the header that holds the key",
            ));
        }
        if self.consumer_timeout < Duration::from_secs(1) {
            let problem = format!("{:?} is too short", self.consumer_timeout);
            return Err(SourceError::misconfigured(
                "consumer_timeout",
                problem,
                "name the broker's; 30 minutes is RabbitMQ's default",
            ));
        }
        if (self.rejects, self.kind, self.topology)
            == (Rejects::ByQueue, QueueKind::Classic, Topology::Declare)
        {
            let problem = "a classic queue is declared without a dead-letter exchange: the broker would drop what is rejected";
            return Err(SourceError::misconfigured(
                "rejects",
                problem,
                "let oncegate publish dead letters, or choose a quorum queue",
            ));
        }
        Ok(Settings {
            meter: Meter::new(self.status, &self.queue),
            name: Arc::from(self.queue.as_str()),
            queue: queue_name("queue", self.queue)?,
            dead_letters: queue_name("dead_letters", dead_letters)?,
            in_doubt: queue_name("in_doubt", in_doubt)?,
            access,
            prefetch,
            key_header: self.key_header,
            body_limit: self.body_limit,
            consumer_timeout: self.consumer_timeout,
            longest_open: self.longest_open,
            topology: self.topology,
            kind: self.kind,
            consumers: self.consumers,
            order: self.order,
            rejects: self.rejects,
        })
    }
}

impl fmt::Debug for RabbitMq {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("queue", &self.queue)
            .field(
                "urls",
                &self.urls.iter().map(|url| shown(url)).collect::<Vec<_>>(),
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

fn shown(url: &str) -> String {
    Node::read(url).map_or_else(|_| "(not a broker's URL)".to_owned(), |node| node.shown)
}

/// What the user said, once it was checked.
pub(crate) struct Settings {
    pub(crate) name: Arc<str>,
    pub(crate) queue: ShortString,
    pub(crate) dead_letters: ShortString,
    pub(crate) in_doubt: ShortString,
    pub(crate) access: Access,
    pub(crate) prefetch: u16,
    pub(crate) key_header: Option<String>,
    pub(crate) body_limit: usize,
    pub(crate) consumer_timeout: Duration,
    /// How long the consumer may leave a delivery unsettled; zero where no consumer said.
    pub(crate) longest_open: Duration,
    pub(crate) topology: Topology,
    pub(crate) kind: QueueKind,
    pub(crate) consumers: Consumers,
    pub(crate) order: Order,
    pub(crate) rejects: Rejects,
    pub(crate) meter: Meter,
}

/// The delays that have a queue. A fixed time to live per queue, because a queue expires messages
/// at its head alone.
pub(crate) const DELAYS: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
];

impl Settings {
    /// When the source gives a channel up for a delivery that stands open.
    pub(crate) fn patience(&self) -> Duration {
        self.consumer_timeout.mul_f64(0.9)
    }

    /// What to say where deliveries may stand open for longer than that.
    pub(crate) fn outlasts(&self) -> Option<String> {
        let (open, patience) = (self.longest_open, self.patience());
        (open > patience).then(|| {
            format!(
                "consumer_timeout: a delivery may stay open for {open:?} by .handler_timeout(…), .retries(…) and .lease(…), and at {patience:?} \
                 the channel is given up, since the broker closes it at {:?}: all that it holds is delivered again; shorten one of them, or \
                 raise consumer_timeout in rabbitmq.conf and say so by .consumer_timeout(…)",
                self.consumer_timeout
            )
        })
    }

    /// The queue that holds a message for one of [`DELAYS`].
    pub(crate) fn delay_queue(&self, delay: Duration) -> ShortString {
        // The longest such name was checked with the queue's.
        format!("{}.delay.{}", self.name, delay.as_millis()).into()
    }

    /// Whether a released delivery may wait outside of this process. Where an order is kept it may
    /// not: while it is away, another consumer, or this one after a restart, could be handed what
    /// comes after it.
    pub(crate) fn delays_by_queue(&self) -> bool {
        self.topology == Topology::Declare
            && self.consumers == Consumers::Competing
            && !self.keeps_order()
    }

    /// Whether an order is kept: then what is given back has to be in its place again before
    /// anybody is handed what follows.
    pub(crate) fn keeps_order(&self) -> bool {
        self.order != Order::Unordered
    }

    /// The URL of the node that is used, without its password.
    pub(crate) fn shown(&self) -> &str {
        &self.access.nodes.current().shown
    }
}

/// A name that leaves room for `.delay.600000` within AMQP's 255 bytes.
fn queue_name(setting: &str, name: String) -> Result<ShortString, SourceError> {
    if name.is_empty() {
        return Err(SourceError::misconfigured(
            setting,
            "the name is empty",
            "name a queue",
        ));
    }
    if name.len() > 240 {
        let problem = format!("the name has {} bytes", name.len());
        return Err(SourceError::misconfigured(
            setting,
            problem,
            "use a name of at most 240 bytes",
        ));
    }
    Ok(name.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(source: RabbitMq) -> String {
        match source.check() {
            Err(SourceError::Misconfigured { setting, .. }) => setting,
            Err(other) => panic!("{other}"),
            Ok(_) => "none".into(),
        }
    }

    #[test]
    fn a_wrong_setting_is_named() {
        let payments = || RabbitMq::queue("payments");
        assert_eq!(setting(payments()), "none");
        assert_eq!(setting(RabbitMq::queue("")), "queue");
        assert_eq!(setting(RabbitMq::queue("q".repeat(241))), "queue");
        assert_eq!(setting(payments().prefetch(0)), "prefetch");
        assert_eq!(setting(payments().prefetch(65_536)), "prefetch");
        assert_eq!(setting(payments().dead_letters("payments")), "dead_letters");
        assert_eq!(setting(payments().in_doubt("payments")), "in_doubt");
        for url in [
            "",
            "localhost",
            "http://localhost",
            "amqp:guest:secret",
            "amqp://guest:secret@[::1]:5672/%2f?heart=1",
        ] {
            assert_eq!(setting(payments().url(url)), "url", "{url}");
        }
        assert_eq!(setting(payments().urls(Vec::<String>::new())), "url");
        assert_eq!(
            setting(payments().ca_certificate("/nowhere.pem")),
            "url",
            "a certificate is no use in plain text"
        );
        assert_eq!(
            setting(
                payments()
                    .url("amqps://broker")
                    .ca_certificate("/nowhere.pem")
            ),
            "ca_certificate"
        );
        assert_eq!(setting(payments().key_header("")), "key_header");
        assert_eq!(setting(payments().key_header("customer")), "none");
        assert_eq!(
            setting(payments().consumer_timeout(Duration::ZERO)),
            "consumer_timeout"
        );
        assert_eq!(setting(payments().rejects(Rejects::ByQueue)), "none");
        assert_eq!(
            setting(
                payments()
                    .rejects(Rejects::ByQueue)
                    .queue_kind(QueueKind::Classic)
            ),
            "rejects"
        );
    }

    #[test]
    fn no_more_is_asked_for_than_twice_what_is_in_flight() {
        let prefetch = |in_flight| {
            RabbitMq::queue("payments")
                .in_flight(in_flight)
                .check()
                .expect("settings")
                .prefetch
        };
        assert_eq!(
            [1, 8, 300, 0, usize::MAX].map(prefetch),
            [2, 16, 512, 2, 512]
        );
        assert_eq!(
            RabbitMq::queue("payments")
                .check()
                .expect("settings")
                .prefetch,
            512
        );
        assert_eq!(
            RabbitMq::queue("payments")
                .topology(Topology::Check)
                .in_flight(1)
                .check()
                .expect("settings")
                .prefetch,
            512
        );
        assert_eq!(
            RabbitMq::queue("payments")
                .prefetch(1)
                .in_flight(64)
                .check()
                .expect("settings")
                .prefetch,
            1
        );
    }

    #[test]
    fn deliveries_that_may_stay_open_for_too_long_are_warned_of() {
        let minutes = |count: u64| Duration::from_secs(60 * count);
        let says = |open, timeout| {
            let source = RabbitMq::queue("payments")
                .consumer_timeout(timeout)
                .longest_open(open);
            source.check().expect("settings").outlasts()
        };
        assert_eq!(
            RabbitMq::queue("payments")
                .check()
                .expect("settings")
                .outlasts(),
            None
        );
        assert_eq!(says(minutes(27), minutes(30)), None);
        let said = says(minutes(28), minutes(30)).expect("a warning");
        assert!(
            said.starts_with("consumer_timeout: ") && said.contains(".handler_timeout(…)"),
            "{said}"
        );
        assert_eq!(says(minutes(28), minutes(60)), None);
    }

    #[test]
    fn no_text_shows_the_password() {
        for url in [
            "amqp://guest:canary@localhost:5672/%2f",
            "amqp:guest:canary",
            "amqp://guest:canary@host:port",
            "http://a:canary@b",
        ] {
            let source = RabbitMq::queue("payments").url(url);
            assert!(!format!("{source:?}").contains("canary"), "{source:?}");
            match source.check() {
                Ok(settings) => assert_eq!(settings.shown(), "amqp://guest@localhost:5672/%2f"),
                Err(error) => assert!(!format!("{error} {error:?}").contains("canary"), "{error}"),
            }
        }
    }
}
