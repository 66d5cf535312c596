//! Which server is the primary, as the Sentinels know it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::{AsyncConnectionConfig, ErrorKind, FromRedisValue, ProtocolVersion, RedisError, Value};

use crate::failure::Failure;
use crate::server::Server;

/// How long one Sentinel may take to connect, and as long again to answer.
const PATIENCE: Duration = Duration::from_millis(700);

/// The Sentinels of one primary.
#[derive(Clone)]
pub(crate) struct Sentinels {
    /// With what the Redis servers ask of us; there is at least one.
    sentinels: Arc<[Server]>,
    name: Arc<str>,
    /// Which of them is asked first: the one whose word led to the primary last, else the one after
    /// those that were asked.
    first: Arc<AtomicUsize>,
}

/// What a Sentinel named.
pub(crate) struct Named {
    pub(crate) server: Server,
    which: usize,
}

/// What one Sentinel says.
enum Said {
    Primary(String, u16),
    NoSuchName,
}

impl Sentinels {
    pub(crate) fn new(sentinels: Vec<Server>, name: &str) -> Self {
        Self {
            sentinels: sentinels.into(),
            name: name.into(),
            first: Arc::default(),
        }
    }

    pub(crate) fn servers(&self) -> &[Server] {
        &self.sentinels
    }

    /// The same Sentinels, reached in another way.
    pub(crate) fn reached_by(&self, servers: Vec<Server>) -> Self {
        Self {
            sentinels: servers.into(),
            name: self.name.clone(),
            first: Arc::default(),
        }
    }

    pub(crate) fn described(&self) -> String {
        let addresses: Vec<&str> = self.sentinels.iter().map(Server::address).collect();
        format!("{} by {}", self.name, addresses.join(", "))
    }

    /// Asks one Sentinel after the other until one names the primary. The next call starts with the
    /// Sentinel after it, unless this one [proves right](Self::proved_right): a Sentinel that was
    /// cut off names a primary of the past.
    ///
    /// # Errors
    /// `Misconfigured` if all of them say what a person has to change, such as a name that they
    /// never heard of; `NotApplied` otherwise.
    pub(crate) async fn primary(&self) -> Result<Named, Failure> {
        let count = self.sentinels.len();
        let first = self.first.load(Ordering::Relaxed);
        let mut why = None;
        for which in (0..count).map(|it| (first + it) % count) {
            let sentinel = &self.sentinels[which];
            // Before it is asked: who waits no longer than this one is silent asks another the next
            // time.
            self.first.store((which + 1) % count, Ordering::Relaxed);
            let failure = match self.ask(sentinel).await {
                Ok(Said::Primary(host, port)) => {
                    return Ok(Named {
                        server: sentinel.elsewhere(&host, port),
                        which,
                    });
                }
                Ok(Said::NoSuchName) => Failure::misconfigured(format!(
                    "Redis::sentinel: {} watches no primary named {:?}; correct the name",
                    sentinel.address(),
                    self.name
                )),
                Err(error) if is_no_sentinel(&error) => Failure::misconfigured(format!(
                    "Redis::sentinel: {} is a Redis server and no Sentinel; name the Sentinels, or give this server to Redis::at",
                    sentinel.address()
                )),
                Err(error) => sentinel.refused(&error, PATIENCE),
            };
            why = Some(failure.beside(why));
        }
        Err(why.unwrap_or_else(|| {
            Failure::misconfigured("Redis::sentinel: name at least one Sentinel")
        }))
    }

    /// Where this Sentinel said that it is, the primary was.
    pub(crate) fn proved_right(&self, named: &Named) {
        self.first.store(named.which, Ordering::Relaxed);
    }

    /// Without a login first: most Sentinels ask for none, and refuse one that they did not ask
    /// for. They have no databases.
    async fn ask(&self, sentinel: &Server) -> Result<Said, RedisError> {
        match self.ask_as(&sentinel.without_login()).await {
            Err(error)
                if error.code() == Some("NOAUTH")
                    || error.kind() == ErrorKind::AuthenticationFailed =>
            {
                self.ask_as(&sentinel.without_database()).await
            }
            said => said,
        }
    }

    async fn ask_as(&self, sentinel: &Server) -> Result<Said, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let client = sentinel.client(ProtocolVersion::RESP2)?;
        let mut connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let said: Value = redis::cmd("SENTINEL")
            .arg("get-master-addr-by-name")
            .arg(&*self.name)
            .query_async(&mut connection)
            .await?;
        match said {
            Value::Nil => Ok(Said::NoSuchName),
            said => {
                let (host, port) = <(String, u16)>::from_redis_value(said)?;
                Ok(Said::Primary(host, port))
            }
        }
    }
}

/// Whether a server does not know what each Sentinel does.
fn is_no_sentinel(error: &RedisError) -> bool {
    error.code() == Some("ERR")
        && error
            .detail()
            .is_some_and(|detail| detail.starts_with("unknown command"))
}
