//! The public store type.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::marker::{Guarantee, Marker, Operation, OperationKind, Verdict};
use oncegate_core::{Key, Persistence, ResultStore, Store, StoreError};

use crate::client::connection::{Endpoint, Timeouts};
use crate::client::sentinel::Sentinels;
use crate::client::server::ServerConfig;
use crate::client::tls::TlsOptions;
use crate::durability::Durability;
use crate::failure::Problem;
use crate::loss_detector::LossDetector;
use crate::preflight::PreflightRequest;
use crate::router::{Deployment, Router};
use crate::{batch, persistence, preflight, results};

/// The default timeout of a reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

/// The timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout with which renewals connect, unless the timeout of a reply is longer: a renewal must
/// end within a part of the lease, which leaves time to try another server.
const RENEWAL_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// The default prefix of keys.
const PREFIX: &str = "processed:";

/// Stores markers in Redis 7.0 or newer: a single server, a primary that Sentinels monitor, or a
/// Cluster. [`Guarantee::Bare`](oncegate_core::Guarantee::Bare) also works with older releases.
///
/// Each operation is atomic on its key and uses the server's clock. The store connects on first use
/// and reconnects after a failure; operations that were in flight then are [`StoreError::Unknown`].
/// Clones share the connection.
///
/// ```
/// # use std::time::Duration;
/// use oncegate_redis::{Durability, Redis};
///
/// let store = Redis::at("redis://localhost:6379").prefix("payments:").timeout(Duration::from_secs(1));
/// let sentinels = ["redis://:secret@10.0.0.1:26379", "redis://:secret@10.0.0.2:26379", "redis://:secret@10.0.0.3:26379"];
/// let with_replicas = Redis::sentinel(sentinels, "mymaster")
///     .durability(Durability::Replicas { count: 1, timeout: Duration::from_millis(200) });
/// let cluster = Redis::cluster(["rediss://10.0.0.1:6379", "rediss://10.0.0.2:6379"]);
/// ```
#[derive(Clone)]
pub struct Redis {
    /// The configured servers, or the first invalid setting.
    deployment: Result<Deployment, Problem>,
    tls: TlsOptions,
    timeout: Duration,
    durability: Durability,
    router: Arc<Router>,
    loss_detector: Arc<LossDetector>,
    prefix: Arc<[u8]>,
    data_loss: DataLossPolicy,
}

/// How at most once treats a server that may lose, or has lost, data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataLossPolicy {
    /// Refuses to start on a server that may lose data, and pauses claims after a loss.
    Pause,
    /// Starts on such a server, and does not pause claims.
    Accept,
}

/// Whether claims wait for a check of the servers.
enum CheckMode {
    Wait,
    /// The check runs while the claims are sent.
    Background,
}

impl Redis {
    /// The server at `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or
    /// `redis+unix:///path/to/socket`.
    ///
    /// Does not connect yet. An invalid URL is [`StoreError::Misconfigured`] at the first use. The
    /// server's TLS certificate is always verified, against the system's authorities or that of
    /// [`ca_certificate`](Self::ca_certificate).
    pub fn at(url: impl AsRef<str>) -> Self {
        Self::of(
            ServerConfig::parse(url.as_ref(), "Redis::at")
                .map(|server| Deployment::Single(Endpoint::Fixed(server))),
        )
    }

    /// The primary that these Sentinels monitor under this name.
    ///
    /// They are queried for each new connection: at the start, after a connection breaks, after an
    /// error `READONLY`, and after three consecutive timeouts. User, password and database in the
    /// URLs are those of the Redis servers; a Sentinel that requires a login gets the same one.
    pub fn sentinel(urls: impl IntoIterator<Item: AsRef<str>>, name: impl AsRef<str>) -> Self {
        let sentinels = parse_urls(urls, "Redis::sentinel");
        Self::of(sentinels.map(|sentinels| {
            Deployment::Single(Endpoint::Sentinel(Sentinels::new(sentinels, name.as_ref())))
        }))
    }

    /// The Cluster that these nodes belong to. One reachable node is enough to discover the others.
    ///
    /// The commands for a key go to the node that serves its slot; a batch is sent to all its nodes
    /// concurrently. User and password of the URLs apply to all nodes.
    pub fn cluster(urls: impl IntoIterator<Item: AsRef<str>>) -> Self {
        Self::of(parse_urls(urls, "Redis::cluster").map(Deployment::Cluster))
    }

    fn of(deployment: Result<Deployment, Problem>) -> Self {
        let (timeout, durability) = (REPLY_TIMEOUT, Durability::default());
        let router = Arc::new(Router::to(
            &deployment,
            Timeouts {
                connect: CONNECT_TIMEOUT,
                reply: timeout,
            },
            durability,
        ));
        let loss_detector = Arc::default();
        Self {
            deployment,
            tls: TlsOptions::default(),
            timeout,
            durability,
            router,
            loss_detector,
            prefix: PREFIX.as_bytes().into(),
            data_loss: DataLossPolicy::Pause,
        }
    }

    pub(crate) fn router(&self) -> &Router {
        &self.router
    }

    pub(crate) fn durability_setting(&self) -> Durability {
        self.durability
    }

    pub(crate) fn prefix_bytes(&self) -> &[u8] {
        &self.prefix
    }

    /// The same store with new connections, after a setting changed.
    fn rebuild(self) -> Self {
        self.with_connect_timeout(CONNECT_TIMEOUT)
    }

    fn with_connect_timeout(self, connect: Duration) -> Self {
        let timeouts = Timeouts {
            connect,
            reply: self.timeout,
        };
        Self {
            router: Arc::new(Router::to(&self.deployment, timeouts, self.durability)),
            loss_detector: Arc::default(),
            ..self
        }
    }

    /// Trusts only the certificate authority in this file (PEM), for `rediss://`.
    ///
    /// A file that cannot be read, or a URL that is not `rediss://`, is
    /// [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn ca_certificate(self, path: impl AsRef<Path>) -> Self {
        self.with_tls(|tls| tls.with_ca_certificate(path.as_ref()))
    }

    /// Sends this client certificate (PEM), with its chain if needed, to servers that request one,
    /// for `rediss://`. The second file is its key (PEM). Sentinels and Cluster nodes get the same
    /// certificate.
    ///
    /// A file that cannot be read, or a URL that is not `rediss://`, is
    /// [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn client_certificate(self, certificate: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        self.with_tls(|tls| tls.with_client_certificate(certificate.as_ref(), key.as_ref()))
    }

    fn with_tls(mut self, set: impl FnOnce(TlsOptions) -> Result<TlsOptions, Problem>) -> Self {
        self.deployment = self.deployment.and_then(|deployment| {
            self.tls = set(std::mem::take(&mut self.tls))?;
            deployment.map_servers(|server| server.with_tls(&self.tls))
        });
        self.rebuild()
    }

    /// How many servers must have a claim before it is granted: only the primary by default.
    ///
    /// A count or a timeout of 0 is [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        let problem = match durability {
            Durability::Replicas { count: 0, .. } => {
                Some("count is 0; set at least 1, or use Durability::Primary")
            }
            Durability::Replicas {
                timeout: Duration::ZERO,
                ..
            } => Some("timeout is 0; set at least a network round trip, such as 200 ms"),
            _ => None,
        };
        self.durability = durability;
        self.with_setting_error(
            problem.map(|problem| format!("Redis::durability: Durability::Replicas {problem}")),
        )
    }

    /// The prefix of each key: `processed:` by default. Two services on one server need different
    /// prefixes or scopes, or they skip each other's messages.
    #[must_use]
    pub fn prefix(mut self, prefix: impl AsRef<str>) -> Self {
        self.prefix = prefix.as_ref().as_bytes().into();
        self.rebuild()
    }

    /// The timeout of a reply, after which the outcome is unknown: 500 ms by default. Connecting
    /// has a separate timeout of 2 s; that of renewals is the timeout of a reply, but within
    /// 500 ms to 2 s.
    ///
    /// 0 is [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        let problem = timeout.is_zero().then_some(
            "Redis::timeout: the timeout is 0; set at least a network round trip, such as 500 ms",
        );
        self.with_setting_error(problem.map(String::from))
    }

    /// The same store with new connections; with a problem, the first use fails.
    fn with_setting_error(mut self, problem: Option<String>) -> Self {
        if let Some(problem) = problem {
            self.deployment = self.deployment.and(Err(Problem::new(problem)));
        }
        self.rebuild()
    }

    /// Checks URLs, certificate files and settings without connecting.
    ///
    /// # Errors
    /// [`StoreError::Misconfigured`], as at the first use.
    pub fn check(&self) -> Result<(), StoreError> {
        match &self.deployment {
            Ok(_) => Ok(()),
            Err(problem) => Err(StoreError::Misconfigured(problem.clone().into())),
        }
    }

    /// Allows at most once on a server that may lose data: one that evicts keys, has no append-only
    /// file, or is a replica. Claims do not pause after a detected loss. A message whose marker is
    /// lost is handled again.
    #[must_use]
    pub fn allow_volatile_store(mut self) -> Self {
        self.data_loss = DataLossPolicy::Accept;
        self
    }

    /// Resumes at-most-once claims after Redis lost data.
    ///
    /// Each pipeline of at-most-once claims, each new connection and a check every two seconds
    /// detect whether the server lost keys, its last writes, or evicted keys. After a loss,
    /// at-most-once claims pause ([`StoreError::NotApplied`]), because messages already handled could
    /// be granted again. Find out which messages may be redelivered, then call this in each process,
    /// on a clone of the store, or restart the process. Granted claims complete during the pause, and
    /// other guarantees continue. The loss is logged and counted in `oncegate_redis_anomalies_total`.
    ///
    /// ```
    /// # use oncegate_redis::Redis;
    /// # async fn operator_confirms() {}
    /// # async fn example() {
    /// let store = Redis::at("redis://localhost:6379");
    /// let handle = store.clone(); // The store itself goes to the consumer.
    /// tokio::spawn(async move {
    ///     operator_confirms().await;
    ///     handle.accept_loss().await;
    /// });
    /// # }
    /// ```
    ///
    /// Accepts all losses up to now, detected before or not: it checks each server first. The losses
    /// of a server that does not reply are detected later and pause claims again.
    pub async fn accept_loss(&self) {
        self.loss_detector
            .check(&self.router, &self.prefix, self.durability)
            .await;
        self.loss_detector.accept_loss();
    }

    /// Checks the servers before claims, if a check is due.
    async fn check_servers(&self, mode: CheckMode) {
        if !self.loss_detector.start_if_due() {
            return;
        }
        let (detector, router, prefix, durability) = (
            self.loss_detector.clone(),
            self.router.clone(),
            self.prefix.clone(),
            self.durability,
        );
        let check = async move { detector.check(&router, &prefix, durability).await };
        match mode {
            CheckMode::Wait => check.await,
            // Not awaited: it ends within the timeouts for connecting and for a reply.
            CheckMode::Background => drop(tokio::spawn(check)),
        }
    }

    /// Reads the current marker of a key, for the field `seen` of
    /// [`OperationKind::Redrive`](oncegate_core::marker::OperationKind::Redrive) and
    /// [`OperationKind::Forget`](oncegate_core::marker::OperationKind::Forget). Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::UnreadableMarker`] if the key holds no marker, or one of a newer release;
    /// otherwise as for [`Store::apply`].
    pub async fn read_marker(&self, key: &Key) -> Result<Marker, StoreError> {
        Ok(self.read_marker_with_expiry(key).await?.marker)
    }
}

/// Parses URLs; there must be at least one.
fn parse_urls(
    urls: impl IntoIterator<Item: AsRef<str>>,
    setting: &'static str,
) -> Result<Vec<ServerConfig>, Problem> {
    let servers: Vec<ServerConfig> = urls
        .into_iter()
        .map(|url| ServerConfig::parse(url.as_ref(), setting))
        .collect::<Result<_, _>>()?;
    if servers.is_empty() {
        Err(Problem::new(format!(
            "{setting}: no URL is set; set at least one"
        )))
    } else {
        Ok(servers)
    }
}

#[async_trait]
impl Store for Redis {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = batch::local_answers(operations);
        let is_claim = |operation: &&Operation| {
            operation.kind == OperationKind::Claim && operation.terms.guarantee != Guarantee::Bare
        };
        if operations.iter().any(|operation| is_claim(&operation)) {
            let pauses = self.data_loss == DataLossPolicy::Pause
                && operations.iter().any(batch::is_at_most_once_claim);
            self.check_servers(if pauses {
                CheckMode::Wait
            } else {
                CheckMode::Background
            })
            .await;
            if self.data_loss == DataLossPolicy::Pause {
                for (operation, answer) in operations
                    .iter()
                    .zip(&mut answers)
                    .filter(|(operation, _)| is_claim(operation))
                {
                    *answer = self.loss_detector.claim_refusal(&operation.terms).map(Err);
                }
            }
        }
        for (operation, answer) in operations.iter().zip(&mut answers) {
            if let OperationKind::Forget { seen } = operation.kind
                && operation.terms.guarantee != Guarantee::Bare
            {
                let deleted = self.delete_result(&operation.key, seen).await;
                *answer = deleted.err().map(Err);
            }
        }
        let detector = (self.data_loss == DataLossPolicy::Pause).then_some(&*self.loss_detector);
        batch::apply(
            &self.router,
            detector,
            self.durability,
            &self.prefix,
            operations,
            answers,
        )
        .await
    }

    fn described(&self) -> String {
        let kind = match self.router.setting() {
            "Redis::cluster" => "Redis Cluster of",
            "Redis::sentinel" => "Redis primary",
            _ => "Redis at",
        };
        format!("{kind} {}", self.router.described())
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        let request = PreflightRequest {
            guarantee,
            durability: self.durability,
            prefix: &self.prefix,
        };
        Ok(preflight::preflight(&self.router, request).await?)
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        let persistence = persistence::inspect(&self.router).await?;
        Ok(match (persistence, self.data_loss) {
            (Persistence::Volatile(why), DataLossPolicy::Accept) => {
                Persistence::Durable(format!("risk accepted with allow_volatile_store(): {why}"))
            }
            (persistence, _) => persistence,
        })
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        let connect = self.timeout.clamp(RENEWAL_CONNECT_TIMEOUT, CONNECT_TIMEOUT);
        Some(Arc::new(self.clone().with_connect_timeout(connect)))
    }

    fn parallel_applies(&self) -> usize {
        // One batch is encoded or decoded here while the server applies the other.
        2
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        let is_possible =
            matches!(&*self.router, Router::Single(_)) || results::have_one_slot(&self.prefix);
        is_possible.then_some(self)
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("address", &self.router.described())
            .field("prefix", &String::from_utf8_lossy(&self.prefix))
            .field("timeout", &self.timeout)
            .field("durability", &self.durability)
            .field("data_loss", &self.data_loss)
            .finish()
    }
}
