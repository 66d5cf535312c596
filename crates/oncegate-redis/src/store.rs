//! The store that users name.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::marker::{Ask, Guarantee, Marker, Operation, Verdict};
use oncegate_core::{Key, Persistence, Store, StoreError};
use redis::{Cmd, Pipeline, Value};

use crate::durability::Durability;
use crate::failure::{Failure, Problem};
use crate::link::{Patience, Place};
use crate::preflight::Asked;
use crate::route::{Lanes, Route, Target};
use crate::sentinel::Sentinels;
use crate::server::Server;
use crate::tls::Tls;
use crate::watch::Watch;
use crate::{batch, memory, preflight, record};

/// How long a reply may take by default.
const TIMEOUT: Duration = Duration::from_millis(500);

/// How long connecting may take.
const CONNECTING: Duration = Duration::from_secs(2);

/// The same for renewals, unless a reply may take longer: they wait for a part of a lease alone,
/// and another server may answer within it.
const CONNECTING_TO_RENEW: Duration = Duration::from_millis(500);

/// The prefix of keys by default.
const PREFIX: &str = "processed:";

/// Remembers ids in Redis, 7.0 or newer ([`Guarantee::Bare`](oncegate_core::Guarantee::Bare) needs
/// nothing that older ones lack): a single server, a primary that Sentinels watch, or a Cluster.
///
/// Each operation is atomic on its key and judged by the server's clock. It connects when it is
/// first used, and again when the connection breaks; what was under way then is
/// [`StoreError::Unknown`]. Clones share the connection.
///
/// ```
/// # use std::time::Duration;
/// use oncegate_redis::{Durability, Redis};
///
/// let store = Redis::at("redis://localhost:6379").prefix("payments:").timeout(Duration::from_secs(1));
/// let sentinels = ["redis://:secret@10.0.0.1:26379", "redis://:secret@10.0.0.2:26379", "redis://:secret@10.0.0.3:26379"];
/// let outlives_failovers = Redis::sentinel(sentinels, "mymaster")
///     .durability(Durability::Replicas { count: 1, timeout: Duration::from_millis(200) });
/// let cluster = Redis::cluster(["rediss://10.0.0.1:6379", "rediss://10.0.0.2:6379"]);
/// ```
#[derive(Clone)]
pub struct Redis {
    target: Result<Target, Problem>,
    tls: Tls,
    timeout: Duration,
    durability: Durability,
    route: Arc<Route>,
    watch: Arc<Watch>,
    prefix: Arc<[u8]>,
    forgetting: Forgetting,
}

/// What the user says to a server that may forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forgetting {
    Told,
    Accepted,
}

/// Whether claims wait for a look at the servers.
enum Waits {
    ForIt,
    NotAtAll,
}

impl Redis {
    /// The server at `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or
    /// `redis+unix:///path/of.sock`.
    ///
    /// Connects to nothing yet. A URL that cannot be read is [`StoreError::Misconfigured`] at the
    /// first use. A server is trusted over TLS if an authority of the system, or that of
    /// [`ca_certificate`](Self::ca_certificate), signed for its host; nothing switches that off.
    pub fn at(url: impl AsRef<str>) -> Self {
        Self::of(
            Server::at(url.as_ref(), "Redis::at").map(|server| Target::One(Place::Fixed(server))),
        )
    }

    /// The primary that these Sentinels know by this name.
    ///
    /// They are asked for it each time a connection is made: at first, when one breaks, when a
    /// server says that it may not write, and after three timeouts in a row. User, password and
    /// database in the URLs are those of the Redis servers; a Sentinel that asks for a login is
    /// given the same one.
    pub fn sentinel(urls: impl IntoIterator<Item: AsRef<str>>, name: impl AsRef<str>) -> Self {
        let sentinels = several(urls, "Redis::sentinel");
        Self::of(
            sentinels.map(|sentinels| {
                Target::One(Place::Primary(Sentinels::new(sentinels, name.as_ref())))
            }),
        )
    }

    /// The Cluster that these nodes belong to. One that answers is enough, and it names the others.
    ///
    /// Each key's commands go to the node that serves it; nodes are asked side by side. User and
    /// password in the URLs are the same on all nodes.
    pub fn cluster(urls: impl IntoIterator<Item: AsRef<str>>) -> Self {
        Self::of(several(urls, "Redis::cluster").map(Target::Cluster))
    }

    fn of(target: Result<Target, Problem>) -> Self {
        let (timeout, durability) = (TIMEOUT, Durability::default());
        let route = Arc::new(Route::to(
            &target,
            Patience {
                connect: CONNECTING,
                reply: timeout,
            },
            durability,
        ));
        let watch = Arc::default();
        Self {
            target,
            tls: Tls::default(),
            timeout,
            durability,
            route,
            watch,
            prefix: PREFIX.as_bytes().into(),
            forgetting: Forgetting::Told,
        }
    }

    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    pub(crate) fn prefix_bytes(&self) -> &[u8] {
        &self.prefix
    }

    /// With connections of its own, for what was set.
    fn anew(self) -> Self {
        self.connecting_within(CONNECTING)
    }

    fn connecting_within(self, connect: Duration) -> Self {
        let patience = Patience {
            connect,
            reply: self.timeout,
        };
        Self {
            route: Arc::new(Route::to(&self.target, patience, self.durability)),
            watch: Arc::default(),
            ..self
        }
    }

    /// Trusts, over TLS, what the authority whose certificate (PEM) is in this file signed, and
    /// nothing else.
    ///
    /// A file that cannot be read, or a URL that is not `rediss://`, is
    /// [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn ca_certificate(self, path: impl AsRef<Path>) -> Self {
        self.with_tls(|tls| tls.trusting(path.as_ref()))
    }

    /// Shows servers that ask for it, over TLS, this certificate, with those that signed it if need
    /// be, and proves it with its key (both PEM). Sentinels and the nodes of a Cluster are shown
    /// the same.
    ///
    /// A file that cannot be read, or a URL that is not `rediss://`, is
    /// [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn client_certificate(self, certificate: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        self.with_tls(|tls| tls.showing(certificate.as_ref(), key.as_ref()))
    }

    fn with_tls(mut self, set: impl FnOnce(Tls) -> Result<Tls, Problem>) -> Self {
        self.target = self.target.and_then(|target| {
            self.tls = set(std::mem::take(&mut self.tls))?;
            target.with_servers(|server| server.over(&self.tls))
        });
        self.anew()
    }

    /// How many servers have to know of a claim before it is granted: the primary alone by default.
    ///
    /// No replicas, or no time for them, is [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        let wrong = match durability {
            Durability::Replicas { count: 0, .. } => {
                Some("count is 0; name at least 1 replica, or choose Durability::Primary")
            }
            Durability::Replicas {
                timeout: Duration::ZERO,
                ..
            } => Some(
                "timeout is 0, and no replica answers at once; give them what a round trip takes, such as 200 ms",
            ),
            _ => None,
        };
        self.durability = durability;
        self.refused_if(
            wrong.map(|wrong| format!("Redis::durability: Durability::Replicas {wrong}")),
        )
    }

    /// What stands before each key: `processed:` by default. Two services on one server without a
    /// prefix or a scope of their own skip each other's messages.
    #[must_use]
    pub fn prefix(mut self, prefix: impl AsRef<str>) -> Self {
        self.prefix = prefix.as_ref().as_bytes().into();
        self.anew()
    }

    /// How long a reply may take before its outcome is unknown: 500 ms by default. Connecting has 2
    /// s of its own; for renewals, as long as a reply and at least 500 ms.
    ///
    /// 0 is [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        let wrong = timeout
            .is_zero()
            .then_some("Redis::timeout: it is 0, and no reply comes at once; give it what a round trip takes, such as 500 ms");
        self.refused_if(wrong.map(String::from))
    }

    /// With connections of its own, unless something is wrong with what was set.
    fn refused_if(mut self, wrong: Option<String>) -> Self {
        if let Some(wrong) = wrong {
            self.target = self.target.and(Err(Problem::new(wrong)));
        }
        self.anew()
    }

    /// Checks URLs, certificate files and settings without connecting.
    ///
    /// # Errors
    /// [`StoreError::Misconfigured`], as at the first use.
    pub fn check(&self) -> Result<(), StoreError> {
        match &self.target {
            Ok(_) => Ok(()),
            Err(problem) => Err(StoreError::Misconfigured(problem.clone().into())),
        }
    }

    /// Lets at most once run on a server that may forget what it was told: one that evicts keys,
    /// keeps no append-only file, or is a replica; and go on when it is seen to forget. A forgotten
    /// marker lets its message run again.
    #[must_use]
    pub fn allow_volatile_store(mut self) -> Self {
        self.forgetting = Forgetting::Accepted;
        self
    }

    /// Goes on after Redis was seen to forget.
    ///
    /// With each pipeline of claims at most once, and with each connection and every two seconds
    /// besides, it is seen whether the server still has what it was told. When its keys or its last
    /// writes are gone, or it evicted some, at most once claims nothing more
    /// ([`StoreError::NotApplied`]): what was handled would be taken for new. A person finds out
    /// which messages may come again, and calls this, in each process, on a clone of the store; or
    /// starts the process again. What was granted before is completed meanwhile; other guarantees
    /// go on, and the log and `oncegate_redis_findings_total` tell.
    ///
    /// ```
    /// # use oncegate_redis::Redis;
    /// # async fn a_person_says_so() {}
    /// # async fn example() {
    /// let store = Redis::at("redis://localhost:6379");
    /// let accepts = store.clone(); // The store itself goes to the consumer.
    /// tokio::spawn(async move {
    ///     a_person_says_so().await;
    ///     accepts.accept_loss().await;
    /// });
    /// # }
    /// ```
    ///
    /// What was lost until then is accepted, noticed here before or not: each server is looked at
    /// first. One that does not answer is looked at later, and its losses pause again.
    pub async fn accept_loss(&self) {
        self.watch
            .look(&self.route, &self.prefix, self.durability)
            .await;
        self.watch.accept();
    }

    /// Before claims, now and then. Who does not pause on what is seen does not wait for it.
    async fn look_at_servers(&self, waits: Waits) {
        if !self.watch.is_due() {
            return;
        }
        let (watch, route, prefix, durability) = (
            self.watch.clone(),
            self.route.clone(),
            self.prefix.clone(),
            self.durability,
        );
        let look = async move { watch.look(&route, &prefix, durability).await };
        match waits {
            Waits::ForIt => look.await,
            // It ends by itself, within the time that connecting and a reply may take.
            Waits::NotAtAll => drop(tokio::spawn(look)),
        }
    }

    /// The marker under a key as it is now: what an operator has to have seen before
    /// [`Ask::Forget`](oncegate_core::marker::Ask::Forget) or
    /// [`Ask::Resolve`](oncegate_core::marker::Ask::Resolve). Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::UnreadableMarker`] if the key holds no marker, [`StoreError::Misconfigured`]
    /// if a newer release wrote it; otherwise as for [`Store::apply`].
    pub async fn look(&self, key: &Key) -> Result<Marker, StoreError> {
        let key = [&self.prefix, key.as_bytes()].concat();
        let lanes = self.route.owner(&key).await?;
        let looked = one(&lanes, redis::cmd("GET").arg(key)).await;
        if looked.is_err() {
            self.route.distrust();
        }
        match looked? {
            Value::Nil => Ok(Marker::Absent),
            Value::BulkString(raw) => Ok(record::decode(&raw).map_err(Failure::unreadable)?),
            _ => Err(wrong_kind("GET").into()),
        }
    }
}

/// Reads URLs, of which there is at least one.
fn several(
    urls: impl IntoIterator<Item: AsRef<str>>,
    named_by: &'static str,
) -> Result<Vec<Server>, Problem> {
    let servers: Vec<Server> = urls
        .into_iter()
        .map(|url| Server::at(url.as_ref(), named_by))
        .collect::<Result<_, _>>()?;
    if servers.is_empty() {
        Err(Problem::new(format!(
            "{named_by}: it names no server; name at least one"
        )))
    } else {
        Ok(servers)
    }
}

/// One command that changes nothing.
async fn one(lanes: &Lanes, command: &Cmd) -> Result<Value, Failure> {
    let mut pipeline = Pipeline::with_capacity(1);
    pipeline.add_command(command.clone());
    match lanes.general.ask(&pipeline).await?.pop() {
        Some(Value::ServerError(error)) => Err(Failure::said_by_server(
            error.code(),
            error.details().unwrap_or_default(),
        )),
        Some(reply) => Ok(reply),
        None => Err(Failure::unknown("Redis gave no answer")),
    }
}

fn wrong_kind(command: &str) -> Failure {
    Failure::unknown(format!(
        "Redis gave an answer of the wrong kind to {command}"
    ))
}

#[async_trait]
impl Store for Redis {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = batch::unsent(operations);
        let is_claim = |operation: &&Operation| {
            operation.ask == Ask::Claim && operation.terms.guarantee != Guarantee::Bare
        };
        if operations.iter().any(|operation| is_claim(&operation)) {
            let pauses =
                self.forgetting == Forgetting::Told && operations.iter().any(batch::is_strict);
            self.look_at_servers(if pauses {
                Waits::ForIt
            } else {
                Waits::NotAtAll
            })
            .await;
            if self.forgetting == Forgetting::Told {
                for (operation, answer) in operations
                    .iter()
                    .zip(&mut answers)
                    .filter(|(operation, _)| is_claim(operation))
                {
                    *answer = self.watch.withholds(&operation.terms).map(Err);
                }
            }
        }
        let watch = (self.forgetting == Forgetting::Told).then_some(&*self.watch);
        batch::apply(
            &self.route,
            watch,
            self.durability,
            &self.prefix,
            operations,
            answers,
        )
        .await
    }

    fn described(&self) -> String {
        let is = match self.route.setting() {
            "Redis::cluster" => "Redis Cluster of",
            "Redis::sentinel" => "Redis, the primary",
            _ => "Redis at",
        };
        format!("{is} {}", self.route.described())
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        let asked = Asked {
            guarantee,
            durability: self.durability,
            prefix: &self.prefix,
        };
        Ok(preflight::preflight(&self.route, asked).await?)
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        let memory = memory::memory(&self.route).await?;
        Ok(match (memory, self.forgetting) {
            (Persistence::Volatile(why), Forgetting::Accepted) => Persistence::Durable(format!(
                "accepted by the user with allow_volatile_store(): {why}"
            )),
            (memory, _) => memory,
        })
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        let connect = self.timeout.clamp(CONNECTING_TO_RENEW, CONNECTING);
        Some(Arc::new(self.clone().connecting_within(connect)))
    }

    fn parallel_applies(&self) -> usize {
        // One is being written and read here while the server works on the other.
        2
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("address", &self.route.described())
            .field("prefix", &String::from_utf8_lossy(&self.prefix))
            .field("timeout", &self.timeout)
            .field("durability", &self.durability)
            .field("forgetting", &self.forgetting)
            .finish()
    }
}
