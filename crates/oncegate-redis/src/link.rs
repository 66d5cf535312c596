//! One connection to the server, made when it is first used and made anew when it breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ErrorKind, Pipeline, ProtocolVersion, PushInfo, PushKind, RedisError,
    Value,
};
use tokio::sync::Mutex;

use crate::failure::{Failure, Problem};
use crate::sentinel::Sentinels;
use crate::server::Server;

/// How long is waited for a server.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// For connecting, with DNS and authentication.
    pub(crate) connect: Duration,
    pub(crate) reply: Duration,
}

/// After so many timeouts in a row the connection is made anew: a frozen server or a silent network
/// never closes it.
const TIMEOUTS_IN_A_ROW: u32 = 3;

/// Where the server is.
#[derive(Clone)]
pub(crate) enum Place {
    /// Always the same.
    Fixed(Server),
    /// Where the Sentinels say that the primary is: they are asked each time a connection is made.
    Primary(Sentinels),
}

/// The connection, shared by all who ask through it.
pub(crate) struct Link {
    place: Result<Place, Problem>,
    patience: Patience,
    /// Whether to connect anew before the next command.
    distrusted: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: Option<Live>,
    /// When connecting last failed, and why: who waited meanwhile gets the same answer instead of a
    /// wait of its own.
    refused: Option<(Instant, Failure)>,
}

#[derive(Clone)]
struct Live {
    connection: MultiplexedConnection,
    broken: Arc<AtomicBool>,
    timeouts: Arc<AtomicU32>,
    looked_at: Arc<AtomicBool>,
}

/// A connection, for who has to know that two things are asked on the same one.
pub(crate) struct Open<'a> {
    link: &'a Link,
    live: Live,
}

impl Live {
    fn timed_out(&self) {
        if self.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= TIMEOUTS_IN_A_ROW {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Who asked has not waited for the reply, and had a bound of its own that was shorter than ours: a
/// timeout like any.
struct Abandoned<'a>(&'a Live);

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.0.timed_out();
    }
}

impl Link {
    pub(crate) fn new(place: Result<Place, Problem>, patience: Patience) -> Self {
        Self {
            place,
            patience,
            distrusted: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// The host of a server that is always the same.
    pub(crate) fn host(&self) -> &str {
        match &self.place {
            Ok(Place::Fixed(server)) => server.host(),
            _ => "",
        }
    }

    /// The setting that names the server, for messages.
    pub(crate) fn setting(&self) -> &'static str {
        match &self.place {
            Ok(Place::Primary(_)) => "Redis::sentinel",
            _ => "Redis::at",
        }
    }

    /// The user who logs in, where a URL tells; `default` where it names none.
    pub(crate) fn user(&self) -> Option<&str> {
        match &self.place {
            Ok(Place::Fixed(server)) => Some(server.user()),
            _ => None,
        }
    }

    /// For people.
    pub(crate) fn described(&self) -> String {
        match &self.place {
            Ok(Place::Fixed(server)) => server.address().to_owned(),
            Ok(Place::Primary(sentinels)) => sentinels.described(),
            Err(_) => "unreadable URL".into(),
        }
    }

    /// Sends the commands in one go and reads a reply to each; a reply may be
    /// [`Value::ServerError`].
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured` if nothing was sent; `Unknown` if it may have been.
    pub(crate) async fn ask(&self, commands: &Pipeline) -> Result<Vec<Value>, Failure> {
        self.open().await?.ask(commands).await
    }

    /// The connection, made if there is none.
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured`: there is none.
    pub(crate) async fn open(&self) -> Result<Open<'_>, Failure> {
        Ok(Open {
            link: self,
            live: self.live().await?,
        })
    }

    /// Connects anew before the next command: the name may mean another server by now.
    pub(crate) fn distrust(&self) {
        self.distrusted.store(true, Ordering::Relaxed);
    }

    async fn live(&self) -> Result<Live, Failure> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if self.distrusted.swap(false, Ordering::Relaxed)
            && let Some(live) = &state.live
        {
            // Who still holds it is to know.
            live.broken.store(true, Ordering::Relaxed);
        }
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
        let place = self
            .place
            .as_ref()
            .map_err(|problem| Failure::Misconfigured(problem.clone()))?;
        match place {
            Place::Fixed(server) => self.connect_to(server).await,
            Place::Primary(sentinels) => {
                let named = sentinels.primary().await?;
                let mut live = self.connect_to(&named.server).await?;
                self.is_primary(&mut live, &named.server).await?;
                sentinels.proved_right(&named);
                Ok(live)
            }
        }
    }

    async fn connect_to(&self, server: &Server) -> Result<Live, Failure> {
        let broken = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&broken);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.patience.connect))
            .set_response_timeout(Some(self.patience.reply));
        // Over RESP3 the driver says so when the connection is lost, even while nobody asks.
        let watched = config.clone().set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                tell.store(true, Ordering::Relaxed);
            }
            Ok::<(), ()>(())
        });
        let connection = match open(server, ProtocolVersion::RESP3, &watched).await {
            Err(error) if knows_no_resp3(&error) => {
                open(server, ProtocolVersion::RESP2, &config).await
            }
            opened => opened,
        };
        let connection =
            connection.map_err(|error| server.refused(&error, self.patience.connect))?;
        Ok(Live {
            connection,
            broken,
            timeouts: Arc::default(),
            looked_at: Arc::default(),
        })
    }

    /// Sentinels may name a server a moment before it knows.
    async fn is_primary(&self, live: &mut Live, server: &Server) -> Result<(), Failure> {
        let info: String = redis::cmd("INFO")
            .arg("replication")
            .query_async(&mut live.connection)
            .await
            .map_err(|error| server.refused(&error, self.patience.reply))?;
        if info.contains("role:master") {
            return Ok(());
        }
        Err(Failure::not_applied(format!(
            "Redis at {} is not yet the primary that the Sentinels say it is",
            server.address()
        )))
    }
}

impl Open<'_> {
    /// As [`Link::ask`], on this connection and no other.
    pub(crate) async fn ask(&self, commands: &Pipeline) -> Result<Vec<Value>, Failure> {
        let Self { link, live } = self;
        let abandoned = Abandoned(live);
        let sent = live
            .connection
            .clone()
            .send_packed_commands(commands, 0, commands.len())
            .await;
        std::mem::forget(abandoned);
        match sent {
            Ok(replies) if replies.len() == commands.len() => {
                live.timeouts.store(0, Ordering::Relaxed);
                Ok(replies)
            }
            Ok(replies) => {
                live.broken.store(true, Ordering::Relaxed);
                Err(Failure::unknown(format!(
                    "{} commands were answered {} times",
                    commands.len(),
                    replies.len()
                )))
            }
            Err(error) if error.is_timeout() => {
                live.timed_out();
                Err(Failure::Unknown(Problem::of(
                    format!("no reply from Redis within {:?}", link.patience.reply),
                    error,
                )))
            }
            Err(error) => {
                live.broken.store(true, Ordering::Relaxed);
                Err(Failure::Unknown(Problem::of(
                    format!("the connection to Redis broke: {error}"),
                    error,
                )))
            }
        }
    }

    /// Whether the server was looked at since this connection was made.
    pub(crate) fn was_looked_at(&self) -> bool {
        self.live.looked_at.load(Ordering::Relaxed)
    }

    pub(crate) fn set_looked_at(&self) {
        self.live.looked_at.store(true, Ordering::Relaxed);
    }
}

async fn open(
    server: &Server,
    protocol: ProtocolVersion,
    config: &AsyncConnectionConfig,
) -> Result<MultiplexedConnection, RedisError> {
    server
        .client(protocol)?
        .get_multiplexed_async_connection_with_config(config)
        .await
}

/// Redis before 6.0.
fn knows_no_resp3(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || error
            .detail()
            .is_some_and(|detail| detail.starts_with("unknown command"))
}
