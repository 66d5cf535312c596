//! Finds the primary through its Sentinels.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::{AsyncConnectionConfig, ErrorKind, FromRedisValue, ProtocolVersion, RedisError, Value};

use crate::client::server::ServerConfig;
use crate::failure::StoreFailure;

/// The time limit for connecting to a Sentinel, and the one for its reply.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(700);

/// The Sentinels that monitor one primary.
#[derive(Clone)]
pub(crate) struct Sentinels {
    /// With the login and TLS options of the Redis servers; at least one.
    sentinels: Arc<[ServerConfig]>,
    /// The name under which they monitor the primary.
    name: Arc<str>,
    /// The index of the Sentinel to query first: the one that named the current primary, otherwise
    /// the one after the last queried.
    first: Arc<AtomicUsize>,
}

/// The primary that a Sentinel named.
pub(crate) struct NamedPrimary {
    pub(crate) server: ServerConfig,
    /// The index of that Sentinel.
    index: usize,
}

/// The reply of one Sentinel.
enum SentinelReply {
    Primary(String, u16),
    UnknownName,
}

impl Sentinels {
    pub(crate) fn new(sentinels: Vec<ServerConfig>, name: &str) -> Self {
        Self {
            sentinels: sentinels.into(),
            name: name.into(),
            first: Arc::default(),
        }
    }

    pub(crate) fn servers(&self) -> &[ServerConfig] {
        &self.sentinels
    }

    /// The same Sentinels with other connection settings.
    pub(crate) fn with_servers(&self, servers: Vec<ServerConfig>) -> Self {
        Self {
            sentinels: servers.into(),
            name: self.name.clone(),
            first: Arc::default(),
        }
    }

    pub(crate) fn described(&self) -> String {
        let addresses: Vec<&str> = self.sentinels.iter().map(ServerConfig::address).collect();
        format!("{} by {}", self.name, addresses.join(", "))
    }

    /// Queries one Sentinel after the other until one names the primary. The next call starts with
    /// the next Sentinel, unless [`prefer`](Self::prefer) is called: a partitioned Sentinel may name
    /// an old primary.
    ///
    /// # Errors
    /// `Misconfigured` if all Sentinels fail in a way that needs another configuration, such as an
    /// unknown name; `NotApplied` otherwise.
    pub(crate) async fn primary(&self) -> Result<NamedPrimary, StoreFailure> {
        let count = self.sentinels.len();
        let first = self.first.load(Ordering::Relaxed);
        let mut last_failure = None;
        for index in (0..count).map(|offset| (first + offset) % count) {
            let sentinel = &self.sentinels[index];
            // Before the query: a caller that is cancelled before this Sentinel replies queries
            // another one the next time.
            self.first.store((index + 1) % count, Ordering::Relaxed);
            let failure = match self.query(sentinel).await {
                Ok(SentinelReply::Primary(host, port)) => {
                    return Ok(NamedPrimary {
                        server: sentinel.with_address(&host, port),
                        index,
                    });
                }
                Ok(SentinelReply::UnknownName) => StoreFailure::misconfigured(format!(
                    "Redis::sentinel: {} monitors no primary named {:?}; correct the name",
                    sentinel.address(),
                    self.name
                )),
                Err(error) if is_not_a_sentinel(&error) => StoreFailure::misconfigured(format!(
                    "Redis::sentinel: {} is a Redis server, not a Sentinel; configure the Sentinels, or give this server to Redis::at",
                    sentinel.address()
                )),
                Err(error) => sentinel.connection_failure(&error, REQUEST_TIMEOUT),
            };
            last_failure = Some(failure.prefer_retryable(last_failure));
        }
        Err(last_failure.unwrap_or_else(|| {
            StoreFailure::misconfigured(
                "Redis::sentinel: no Sentinel is configured; name at least one",
            )
        }))
    }

    /// Queries this Sentinel first from now on: the server that it named is the primary.
    pub(crate) fn prefer(&self, primary: &NamedPrimary) {
        self.first.store(primary.index, Ordering::Relaxed);
    }

    /// Connects without a login first: most Sentinels need none and reject one. A Sentinel has no
    /// databases.
    async fn query(&self, sentinel: &ServerConfig) -> Result<SentinelReply, RedisError> {
        match self.query_as(&sentinel.without_login()).await {
            Err(error)
                if error.code() == Some("NOAUTH")
                    || error.kind() == ErrorKind::AuthenticationFailed =>
            {
                self.query_as(&sentinel.without_database()).await
            }
            reply => reply,
        }
    }

    async fn query_as(&self, sentinel: &ServerConfig) -> Result<SentinelReply, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(REQUEST_TIMEOUT))
            .set_response_timeout(Some(REQUEST_TIMEOUT));
        let client = sentinel.client(ProtocolVersion::RESP2)?;
        let mut connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let reply: Value = redis::cmd("SENTINEL")
            .arg("get-master-addr-by-name")
            .arg(&*self.name)
            .query_async(&mut connection)
            .await?;
        match reply {
            Value::Nil => Ok(SentinelReply::UnknownName),
            reply => {
                let (host, port) = <(String, u16)>::from_redis_value(reply)?;
                Ok(SentinelReply::Primary(host, port))
            }
        }
    }
}

/// Whether a server does not have the `SENTINEL` command.
fn is_not_a_sentinel(error: &RedisError) -> bool {
    error.code() == Some("ERR")
        && error
            .detail()
            .is_some_and(|detail| detail.starts_with("unknown command"))
}
