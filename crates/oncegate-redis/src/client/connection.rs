//! One connection to a server: opened on first use, reopened after it breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ErrorKind, Pipeline, ProtocolVersion, PushInfo, PushKind, RedisError,
    Value,
};
use tokio::sync::Mutex;

use crate::claim_groups::ClaimGroups;
use crate::client::frozen_server::ConsecutiveTimeouts;
use crate::client::sentinel::Sentinels;
use crate::client::server::ServerConfig;
use crate::conditional::ConditionalSupport;
use crate::failure::{Problem, StoreFailure};

/// The time limits of one connection.
#[derive(Clone, Copy)]
pub(crate) struct Timeouts {
    /// For connecting, with DNS and authentication.
    pub(crate) connect: Duration,
    pub(crate) reply: Duration,
}

/// How the address of the server is found.
#[derive(Clone)]
pub(crate) enum Endpoint {
    /// A fixed address.
    Fixed(ServerConfig),
    /// The primary that the Sentinels name; they are queried for each new connection.
    Sentinel(Sentinels),
}

/// A multiplexed connection that all callers share.
pub(crate) struct SharedConnection {
    endpoint: Result<Endpoint, Problem>,
    timeouts: Timeouts,
    /// Whether to reconnect before the next command.
    invalidated: AtomicBool,
    /// Which conditional commands the server of the current connection has.
    pub(crate) conditional: ConditionalSupport,
    pub(crate) claim_groups: ClaimGroups,
    state: Mutex<ConnectionState>,
}

#[derive(Default)]
struct ConnectionState {
    live: Option<LiveConnection>,
    /// When and why connecting last failed: callers that waited for that attempt get its error
    /// instead of an attempt each.
    last_failure: Option<(Instant, StoreFailure)>,
}

#[derive(Clone)]
struct LiveConnection {
    connection: MultiplexedConnection,
    /// Whether the connection must not be used again.
    broken: Arc<AtomicBool>,
    timeouts: Arc<ConsecutiveTimeouts>,
    /// See [`PinnedConnection::is_checked`].
    checked: Arc<AtomicBool>,
}

/// One established connection, for callers that must send two pipelines over the same one.
pub(crate) struct PinnedConnection<'a> {
    shared: &'a SharedConnection,
    live: LiveConnection,
}

impl LiveConnection {
    fn count_timeout(&self) {
        if self.timeouts.count() {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Counts a timeout if the request is cancelled: the caller has a shorter time limit than the
/// connection.
struct CancelGuard<'a>(&'a LiveConnection);

impl Drop for CancelGuard<'_> {
    fn drop(&mut self) {
        self.0.count_timeout();
    }
}

impl SharedConnection {
    pub(crate) fn new(endpoint: Result<Endpoint, Problem>, timeouts: Timeouts) -> Self {
        Self {
            endpoint,
            timeouts,
            invalidated: AtomicBool::new(false),
            conditional: ConditionalSupport::default(),
            claim_groups: ClaimGroups::default(),
            state: Mutex::default(),
        }
    }

    /// The host of a server with a fixed address; otherwise empty.
    pub(crate) fn host(&self) -> &str {
        match &self.endpoint {
            Ok(Endpoint::Fixed(server)) => server.host(),
            _ => "",
        }
    }

    /// The setting that names the server, for messages.
    pub(crate) fn setting(&self) -> &'static str {
        match &self.endpoint {
            Ok(Endpoint::Sentinel(_)) => "Redis::sentinel",
            _ => "Redis::at",
        }
    }

    /// The user of the login, for a fixed address: the one in the URL, or `default`.
    pub(crate) fn user(&self) -> Option<&str> {
        match &self.endpoint {
            Ok(Endpoint::Fixed(server)) => Some(server.user()),
            _ => None,
        }
    }

    /// The address, or the name and the Sentinels of the primary, for messages.
    pub(crate) fn described(&self) -> String {
        match &self.endpoint {
            Ok(Endpoint::Fixed(server)) => server.address().to_owned(),
            Ok(Endpoint::Sentinel(sentinels)) => sentinels.described(),
            Err(_) => "(invalid settings)".into(),
        }
    }

    /// Sends the pipeline and returns one reply for each command; a reply may be
    /// [`Value::ServerError`].
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured` if nothing was sent; `Unknown` if it may have been.
    pub(crate) async fn send(&self, commands: &Pipeline) -> Result<Vec<Value>, StoreFailure> {
        self.pin().await?.send(commands).await
    }

    /// The current connection; connects first if it is missing.
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured` if connecting fails.
    pub(crate) async fn pin(&self) -> Result<PinnedConnection<'_>, StoreFailure> {
        Ok(PinnedConnection {
            shared: self,
            live: self.live().await?,
        })
    }

    /// Reconnects before the next command: the address may belong to another server now.
    pub(crate) fn invalidate(&self) {
        self.invalidated.store(true, Ordering::Relaxed);
    }

    /// The current connection; connects first if it is missing, broken or invalidated.
    async fn live(&self) -> Result<LiveConnection, StoreFailure> {
        let requested = Instant::now();
        let mut state = self.state.lock().await;
        if self.invalidated.swap(false, Ordering::Relaxed)
            && let Some(live) = &state.live
        {
            live.broken.store(true, Ordering::Relaxed);
        }
        if let Some(live) = &state.live
            && !live.broken.load(Ordering::Relaxed)
        {
            return Ok(live.clone());
        }
        state.live = None;
        if let Some((at, failure)) = &state.last_failure
            && *at >= requested
        {
            return Err(failure.clone());
        }
        match self.connect().await {
            Ok(live) => {
                self.conditional.reset();
                self.claim_groups.reset();
                state.live = Some(live.clone());
                Ok(live)
            }
            Err(failure) => {
                tracing::debug!(?failure, "cannot connect to Redis");
                state.last_failure = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    async fn connect(&self) -> Result<LiveConnection, StoreFailure> {
        let endpoint = self
            .endpoint
            .as_ref()
            .map_err(|problem| StoreFailure::Misconfigured(problem.clone()))?;
        match endpoint {
            Endpoint::Fixed(server) => self.connect_to(server).await,
            Endpoint::Sentinel(sentinels) => {
                let primary = sentinels.primary().await?;
                let mut live = self.connect_to(&primary.server).await?;
                self.check_is_primary(&mut live, &primary.server).await?;
                sentinels.prefer(&primary);
                Ok(live)
            }
        }
    }

    async fn connect_to(&self, server: &ServerConfig) -> Result<LiveConnection, StoreFailure> {
        let broken = Arc::new(AtomicBool::new(false));
        let on_disconnect = Arc::clone(&broken);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeouts.connect))
            .set_response_timeout(Some(self.timeouts.reply));
        // Over RESP3 the driver reports a lost connection even while no request is pending.
        let with_push = config.clone().set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                on_disconnect.store(true, Ordering::Relaxed);
            }
            Ok::<(), ()>(())
        });
        let connection = match open(server, ProtocolVersion::RESP3, &with_push).await {
            Err(error) if lacks_resp3(server, &error) => {
                open(server, ProtocolVersion::RESP2, &config).await
            }
            opened => opened,
        };
        let connection =
            connection.map_err(|error| server.connection_failure(&error, self.timeouts.connect))?;
        Ok(LiveConnection {
            connection,
            broken,
            timeouts: Arc::default(),
            checked: Arc::default(),
        })
    }

    /// Checks the role: Sentinels may name a server shortly before it is promoted.
    async fn check_is_primary(
        &self,
        live: &mut LiveConnection,
        server: &ServerConfig,
    ) -> Result<(), StoreFailure> {
        let info: String = redis::cmd("INFO")
            .arg("replication")
            .query_async(&mut live.connection)
            .await
            .map_err(|error| server.connection_failure(&error, self.timeouts.reply))?;
        if info.contains("role:master") {
            return Ok(());
        }
        Err(StoreFailure::not_applied(format!(
            "Redis at {} is not yet the primary that the Sentinels report; waiting for the failover",
            server.address()
        )))
    }
}

impl PinnedConnection<'_> {
    /// As [`SharedConnection::send`], but on this connection even if it was replaced meanwhile.
    pub(crate) async fn send(&self, commands: &Pipeline) -> Result<Vec<Value>, StoreFailure> {
        let Self { shared, live } = self;
        let guard = CancelGuard(live);
        let sent = live
            .connection
            .clone()
            .send_packed_commands(commands, 0, commands.len())
            .await;
        std::mem::forget(guard);
        match sent {
            Ok(replies) if replies.len() == commands.len() => {
                live.timeouts.reset();
                Ok(replies)
            }
            Ok(replies) => {
                live.broken.store(true, Ordering::Relaxed);
                Err(StoreFailure::unknown(format!(
                    "Redis sent {} replies to {} commands",
                    replies.len(),
                    commands.len()
                )))
            }
            Err(error) if error.is_timeout() => {
                live.count_timeout();
                Err(StoreFailure::Unknown(Problem::of(
                    format!("no reply from Redis within {:?}", shared.timeouts.reply),
                    error,
                )))
            }
            Err(error) => {
                live.broken.store(true, Ordering::Relaxed);
                Err(StoreFailure::Unknown(Problem::of(
                    format!("the connection to Redis broke: {error}"),
                    error,
                )))
            }
        }
    }

    /// Whether [`LossDetector`](crate::loss_detector::LossDetector) has checked the server for lost
    /// data over this connection.
    pub(crate) fn is_checked(&self) -> bool {
        self.live.checked.load(Ordering::Relaxed)
    }

    pub(crate) fn set_checked(&self) {
        self.live.checked.store(true, Ordering::Relaxed);
    }
}

async fn open(
    server: &ServerConfig,
    protocol: ProtocolVersion,
    config: &AsyncConnectionConfig,
) -> Result<MultiplexedConnection, RedisError> {
    server
        .client(protocol)?
        .get_multiplexed_async_connection_with_config(config)
        .await
}

/// Whether the server has no `HELLO`: it is older than 6.0, or the command was renamed. Before
/// authentication Valkey replies `NOAUTH` instead of `unknown command`. A server that has `HELLO` never
/// replies `NOAUTH` to a `HELLO` with a password; if the password is wrong, it replies `WRONGPASS`.
fn lacks_resp3(server: &ServerConfig, error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || (error.code() == Some("NOAUTH") && server.has_password())
        || error
            .detail()
            .is_some_and(|detail| detail.starts_with("unknown command"))
}
