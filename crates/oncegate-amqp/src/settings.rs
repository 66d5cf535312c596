//! What the user says about the queue, checked.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lapin::types::ShortString;
use lapin::uri::{AMQPScheme, AMQPUri};
use oncegate_core::source::SourceError;

/// A RabbitMQ queue to consume from: hand it to the consumer as its source.
///
/// Nothing is checked before it is opened; then a wrong setting is an error that names it.
#[derive(Clone)]
pub struct RabbitMq {
    queue: String,
    url: String,
    prefetch: u32,
    in_flight: usize,
    topology: Topology,
    kind: QueueKind,
    dead_letters: Option<String>,
    in_doubt: Option<String>,
}

/// What the source does about its queues when it connects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// Creates what is missing: the queue, its dead-letter and in-doubt queues, and its delay queues
    /// (`<queue>.delay.<milliseconds>`). If the queue exists with other arguments, that is an error: the broker does
    /// not say which, and a delivery limit without a dead-letter exchange, say, loses messages. One of the other queues
    /// is used as it is, with a warning.
    #[default]
    Declare,
    /// Creates nothing; a queue, dead-letter or in-doubt queue that is missing is an error. Released deliveries wait
    /// in memory, unacknowledged, however long their delay: keep it under the broker's consumer timeout (30 minutes).
    /// The choice for a queue that is yours: it is taken as it is, and what it loses by its own arguments is lost.
    Check,
    /// Creates and checks nothing. Released deliveries wait as with [`Topology::Check`].
    Trust,
}

/// What kind of queue [`Topology::Declare`] creates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueKind {
    /// Replicated, and its dead letters are confirmed. What the broker itself dead-letters (a delivery limit) goes to
    /// the dead-letter queue too.
    #[default]
    Quorum,
    /// Durable on one node. A delay queue of this kind may lose what it holds if its node fails.
    Classic,
}

impl RabbitMq {
    /// Consumes from this queue.
    pub fn queue(name: impl Into<String>) -> Self {
        Self {
            queue: name.into(),
            url: "amqp://guest:guest@localhost:5672/%2f".into(),
            prefetch: 512,
            in_flight: usize::MAX,
            topology: Topology::default(),
            kind: QueueKind::default(),
            dead_letters: None,
            in_doubt: None,
        }
    }

    /// The broker: `amqp://user:password@host:port/vhost`, or `amqps://`. The default virtual host is written `%2f`.
    ///
    /// The default is `amqp://guest:guest@localhost:5672/%2f`. `heartbeat` (10 s unless it says otherwise) and
    /// `connection_timeout` (5,000 ms, for the whole handshake) may stand in its query. With `amqps://` the broker's
    /// certificate is checked against the system's; the environment variable `SSL_CERT_FILE` names others.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = url.into();
        self
    }

    /// How many deliveries the broker hands over ahead of their acknowledgement: 1 to 65,535, 512 by default.
    ///
    /// It bounds what is in memory and in flight; 0 would mean without limit, and is refused. With
    /// [`Topology::Declare`] the source asks for no more than twice what the consumer has in flight, because what waits
    /// behind slow handlers runs into the broker's consumer timeout (30 minutes).
    pub fn prefetch(mut self, count: u32) -> Self {
        self.prefetch = count;
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

    /// Where rejected deliveries go; `<queue>.dead-letters` by default.
    pub fn dead_letters(mut self, queue: impl Into<String>) -> Self {
        self.dead_letters = Some(queue.into());
        self
    }

    /// Where deliveries go of which nobody knows whether they happened; `<queue>.in-doubt` by default.
    pub fn in_doubt(mut self, queue: impl Into<String>) -> Self {
        self.in_doubt = Some(queue.into());
        self
    }

    pub(crate) fn in_flight(mut self, count: usize) -> Self {
        self.in_flight = count;
        self
    }

    pub(crate) fn check(self) -> Result<Settings, SourceError> {
        let dead_letters = self.dead_letters.unwrap_or_else(|| format!("{}.dead-letters", self.queue));
        let in_doubt = self.in_doubt.unwrap_or_else(|| format!("{}.in-doubt", self.queue));
        let (uri, shown) = broker(&self.url)?;
        let wanted = u16::try_from(self.prefetch).ok().filter(|count| *count > 0).ok_or_else(|| {
            let problem = format!("{} is not between 1 and 65535", self.prefetch);
            SourceError::misconfigured("prefetch", problem, "choose how many deliveries may be in flight; 512 is the default")
        })?;
        // Without delay queues, what is released waits within the prefetch: there it has to be as wide as was said.
        let enough = if self.topology == Topology::Declare { self.in_flight.max(1).saturating_mul(2) } else { usize::MAX };
        let prefetch = u16::try_from(enough).unwrap_or(u16::MAX).min(wanted);
        if dead_letters == self.queue || in_doubt == self.queue {
            let setting = if dead_letters == self.queue { "dead_letters" } else { "in_doubt" };
            let problem = format!("`{}` is the queue that is consumed: what is rejected would come back for ever", self.queue);
            return Err(SourceError::misconfigured(setting, problem, "name another queue"));
        }
        Ok(Settings {
            name: Arc::from(self.queue.as_str()),
            queue: queue_name("queue", self.queue)?,
            dead_letters: queue_name("dead_letters", dead_letters)?,
            in_doubt: queue_name("in_doubt", in_doubt)?,
            uri,
            shown,
            prefetch,
            topology: self.topology,
            kind: self.kind,
        })
    }
}

impl fmt::Debug for RabbitMq {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("queue", &self.queue)
            .field("url", &broker(&self.url).map_or_else(|_| "(not a broker's URL)".to_owned(), |(_, shown)| shown))
            .field("prefetch", &self.prefetch)
            .field("topology", &self.topology)
            .field("kind", &self.kind)
            .field("dead_letters", &self.dead_letters)
            .field("in_doubt", &self.in_doubt)
            .finish()
    }
}

/// What the user said, once it was checked.
pub(crate) struct Settings {
    pub(crate) name: Arc<str>,
    pub(crate) queue: ShortString,
    pub(crate) dead_letters: ShortString,
    pub(crate) in_doubt: ShortString,
    pub(crate) uri: AMQPUri,
    /// The URL without its password.
    pub(crate) shown: String,
    pub(crate) prefetch: u16,
    pub(crate) topology: Topology,
    pub(crate) kind: QueueKind,
}

/// The delays that have a queue. A fixed time to live per queue, because a queue expires messages at its head alone.
pub(crate) const DELAYS: [Duration; 5] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(30), Duration::from_secs(120), Duration::from_secs(600)];

impl Settings {
    /// The queue that holds a message for one of [`DELAYS`].
    pub(crate) fn delay_queue(&self, delay: Duration) -> ShortString {
        // The longest such name was checked with the queue's.
        format!("{}.delay.{}", self.name, delay.as_millis()).into()
    }
}

/// Parses the URL, and says it again without its password. No error repeats the URL: the password may be in it.
fn broker(url: &str) -> Result<(AMQPUri, String), SourceError> {
    let refused = |problem: &str| {
        SourceError::misconfigured(
            "url",
            problem,
            "write amqp://user:password@host:port/vhost, with / as %2f and the password percent-encoded",
        )
    };
    if url.contains("://[") || url.contains("@[") {
        return Err(refused("an IPv6 address cannot stand in it; use a name"));
    }
    let mut uri: AMQPUri = url.parse().map_err(|_| refused("it is not an AMQP URL"))?;
    if uri.authority.host.is_empty() {
        return Err(refused("it names no host"));
    }
    uri.query.heartbeat.get_or_insert(10);
    uri.query.connection_timeout.get_or_insert(5_000);
    let scheme = match uri.scheme {
        AMQPScheme::AMQP => "amqp",
        AMQPScheme::AMQPS => "amqps",
    };
    let vhost = uri.vhost.replace('%', "%25").replace('/', "%2f");
    let shown = format!("{scheme}://{}@{}:{}/{vhost}", uri.authority.userinfo.username, uri.authority.host, uri.authority.port);
    Ok((uri, shown))
}

/// A name that leaves room for `.delay.600000` within AMQP's 255 bytes.
fn queue_name(setting: &str, name: String) -> Result<ShortString, SourceError> {
    if name.is_empty() {
        return Err(SourceError::misconfigured(setting, "the name is empty", "name a queue"));
    }
    if name.len() > 240 {
        let problem = format!("the name has {} bytes", name.len());
        return Err(SourceError::misconfigured(setting, problem, "use a name of at most 240 bytes"));
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
        for url in ["", "localhost", "http://localhost", "amqp:guest:secret", "amqp://guest:secret@[::1]:5672/%2f"] {
            assert_eq!(setting(payments().url(url)), "url", "{url}");
        }
    }

    #[test]
    fn no_more_is_asked_for_than_twice_what_is_in_flight() {
        let prefetch = |in_flight| RabbitMq::queue("payments").in_flight(in_flight).check().expect("settings").prefetch;
        assert_eq!([1, 8, 300, 0, usize::MAX].map(prefetch), [2, 16, 512, 2, 512]);
        assert_eq!(RabbitMq::queue("payments").check().expect("settings").prefetch, 512);
        assert_eq!(RabbitMq::queue("payments").topology(Topology::Check).in_flight(1).check().expect("settings").prefetch, 512);
        assert_eq!(RabbitMq::queue("payments").prefetch(1).in_flight(64).check().expect("settings").prefetch, 1);
    }

    #[test]
    fn no_text_shows_the_password() {
        for url in ["amqp://guest:canary@localhost:5672/%2f", "amqp:guest:canary", "amqp://guest:canary@host:port", "http://a:canary@b"] {
            let source = RabbitMq::queue("payments").url(url);
            assert!(!format!("{source:?}").contains("canary"), "{source:?}");
            match source.check() {
                Ok(settings) => assert_eq!(settings.shown, "amqp://guest@localhost:5672/%2f"),
                Err(error) => assert!(!format!("{error} {error:?}").contains("canary"), "{error}"),
            }
        }
    }
}
