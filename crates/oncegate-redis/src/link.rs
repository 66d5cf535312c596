//! One connection to the server, made when it is first used and made anew when it breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2};
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, ErrorKind, Pipeline, ProtocolVersion, PushInfo, PushKind, RedisError, Value};
use tokio::sync::Mutex;

use crate::failure::{Failure, Problem};

/// How long connecting may take, with DNS and authentication.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// After so many timeouts in a row the connection is made anew: a frozen server or a silent network never closes it.
const TIMEOUTS_IN_A_ROW: u32 = 3;

/// What was sent and is not acknowledged by the other machine for so long ends the connection: the keepalive does not
/// act meanwhile.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// A silent peer is probed after this long.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Where the server is, and who we are there. Debug and the address hold no secret.
#[derive(Clone)]
pub(crate) struct Server {
    info: ConnectionInfo,
    address: String,
}

impl Server {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong with it, without quoting it: it may hold a password.
    pub(crate) fn at(url: &str) -> Result<Self, Problem> {
        let client = Client::open(url).map_err(|error| {
            let why = match error.kind() {
                // The detail may quote the URL; the description is a fixed text.
                ErrorKind::InvalidClientConfig if url.starts_with("rediss:") => "TLS is not built in",
                _ => "it is not a Redis URL",
            };
            Problem::new(format!("Redis::at: {why}; write redis://[user[:password]@]host[:port][/database]"))
        })?;
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(socket2::TcpKeepalive::new().with_time(KEEPALIVE));
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(USER_TIMEOUT);
        let info = client.get_connection_info().clone().set_tcp_settings(tcp);
        Ok(Self { address: info.addr().to_string(), info })
    }

    /// Host and port.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    fn client(&self, protocol: ProtocolVersion) -> Result<Client, RedisError> {
        let redis = self.info.redis_settings().clone().set_protocol(protocol);
        Client::open(self.info.clone().set_redis_settings(redis))
    }
}

/// The connection, shared by all who ask through it.
pub(crate) struct Link {
    server: Result<Server, Problem>,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: Option<Live>,
    /// When connecting last failed, and why: who waited meanwhile gets the same answer instead of a wait of its own.
    refused: Option<(Instant, Failure)>,
}

#[derive(Clone)]
struct Live {
    connection: MultiplexedConnection,
    broken: Arc<AtomicBool>,
    timeouts: Arc<AtomicU32>,
}

impl Live {
    fn timed_out(&self) {
        if self.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= TIMEOUTS_IN_A_ROW {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Who asked has not waited for the reply, and had a bound of its own that was shorter than ours: a timeout like any.
struct Abandoned<'a>(&'a Live);

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.0.timed_out();
    }
}

impl Link {
    pub(crate) fn new(server: Result<Server, Problem>, timeout: Duration) -> Self {
        Self { server, timeout, state: Mutex::default() }
    }

    pub(crate) fn server(&self) -> &Result<Server, Problem> {
        &self.server
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sends the commands in one go and reads a reply to each; a reply may be [`Value::ServerError`].
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured` if nothing was sent; `Unknown` if it may have been.
    pub(crate) async fn ask(&self, commands: &Pipeline) -> Result<Vec<Value>, Failure> {
        let live = self.live().await?;
        let abandoned = Abandoned(&live);
        let sent = live.connection.clone().send_packed_commands(commands, 0, commands.len()).await;
        std::mem::forget(abandoned);
        match sent {
            Ok(replies) if replies.len() == commands.len() => {
                live.timeouts.store(0, Ordering::Relaxed);
                Ok(replies)
            }
            Ok(replies) => {
                live.broken.store(true, Ordering::Relaxed);
                Err(Failure::unknown(format!("{} commands were answered {} times", commands.len(), replies.len())))
            }
            Err(error) if error.is_timeout() => {
                live.timed_out();
                Err(Failure::Unknown(Problem::of(format!("no reply from Redis within {:?}", self.timeout), error)))
            }
            Err(error) => {
                live.broken.store(true, Ordering::Relaxed);
                Err(Failure::Unknown(Problem::of(format!("the connection to Redis broke: {error}"), error)))
            }
        }
    }

    /// Connects anew before the next command: the name may mean another server by now.
    pub(crate) async fn distrust(&self) {
        if let Some(live) = &self.state.lock().await.live {
            live.broken.store(true, Ordering::Relaxed);
        }
    }

    async fn live(&self) -> Result<Live, Failure> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(live) = &state.live
            && !live.broken.load(Ordering::Relaxed)
        {
            return Ok(live.clone());
        }
        state.live = None;
        if let Some((at, failure)) = &state.refused
            && *at >= asked
        {
            return Err(failure.clone());
        }
        match self.connect().await {
            Ok(live) => {
                state.live = Some(live.clone());
                Ok(live)
            }
            Err(failure) => {
                tracing::debug!(?failure, "no connection to Redis");
                state.refused = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    async fn connect(&self) -> Result<Live, Failure> {
        let server = self.server.as_ref().map_err(|problem| Failure::Misconfigured(problem.clone()))?;
        let broken = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&broken);
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(Some(self.timeout));
        // Over RESP3 the driver says so when the connection is lost, even while nobody asks.
        let watched = config.clone().set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                tell.store(true, Ordering::Relaxed);
            }
            Ok::<(), ()>(())
        });
        let connection = match open(server, ProtocolVersion::RESP3, &watched).await {
            Err(error) if knows_no_resp3(&error) => open(server, ProtocolVersion::RESP2, &config).await,
            opened => opened,
        };
        let connection = connection.map_err(|error| refused(server, &error))?;
        Ok(Live { connection, broken, timeouts: Arc::default() })
    }
}

async fn open(server: &Server, protocol: ProtocolVersion, config: &AsyncConnectionConfig) -> Result<MultiplexedConnection, RedisError> {
    server.client(protocol)?.get_multiplexed_async_connection_with_config(config).await
}

/// Redis before 6.0.
fn knows_no_resp3(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported || error.detail().is_some_and(|detail| detail.starts_with("unknown command"))
}

/// Why there is no connection. The server's own words are left out: they may repeat the password.
fn refused(server: &Server, error: &RedisError) -> Failure {
    let address = server.address();
    let code = error.code().unwrap_or_default();
    let detail = error.detail().unwrap_or_default();
    if error.is_timeout() {
        return Failure::not_applied(format!("no answer from Redis at {address} within {CONNECT_TIMEOUT:?}"));
    }
    match (error.kind(), code) {
        (ErrorKind::Io, _) => Failure::not_applied(format!("no connection to Redis at {address}: {error}")),
        (ErrorKind::Parse | ErrorKind::UnexpectedReturnType, _) => Failure::misconfigured(format!(
            "Redis::at: what answers at {address} does not speak like Redis; correct host and port in the URL"
        )),
        (ErrorKind::AuthenticationFailed, _) | (_, "WRONGPASS" | "NOAUTH") => Failure::misconfigured(format!(
            "Redis::at: {address} refuses the user or the password, or wants one; put the right ones into the URL, redis://user:password@host"
        )),
        (_, "NOPERM") => Failure::misconfigured(format!(
            "Redis::at: {address} does not let this user connect (NOPERM); let it run HELLO, SELECT, SET, GET, DEL, PTTL, PEXPIRE, EVAL, \
             EVALSHA and INFO"
        )),
        (_, "DENIED") => Failure::misconfigured(format!(
            "Redis::at: {address} runs in protected mode and refuses other machines; set a password there, and in the URL"
        )),
        _ if detail.contains("DB index") || error.to_string().contains("switch database") => {
            Failure::misconfigured(format!("Redis::at: {address} has no such database; correct the number at the end of the URL"))
        }
        _ => Failure::not_applied(format!(
            "Redis at {address} does not take the connection ({})",
            if code.is_empty() { error.category() } else { code }
        )),
    }
}
