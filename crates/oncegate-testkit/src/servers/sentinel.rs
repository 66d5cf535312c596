//! Three Redis servers, one primary and two replicas, and three Sentinels that monitor them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::ServerError;
use super::port::free_ports;
use super::redis::{RedisOptions, RedisPersistence, RedisServer, send_command, tls_settings};
use super::server::{Server, ServerKind, temporary_directory, wait_until, write};
use super::server_set::ServerSet;

/// The name of the primary in the Sentinels' configuration.
pub const SENTINEL_NAME: &str = "mymaster";

/// The time limit for replication to start, and for a failover.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The default of `down-after-milliseconds`.
const DOWN_AFTER: Duration = Duration::from_secs(1);

/// The default password of the Redis servers.
const PASSWORD: &str = "between-redis-servers";

/// The kind of a server that is a Sentinel.
#[derive(Debug)]
pub struct Sentinel {
    port: u16,
    tls_port: u16,
}

impl ServerKind for Sentinel {
    const NAME: &'static str = "Sentinel";
    const ADVICE: &'static str =
        "`cargo xtask setup` installs it (Debian's package is redis-server)";
    const START_TIMEOUT: Duration = Duration::from_secs(30);
    const IN_SERVER_SET: bool = true;

    fn commands(&self, directory: &Path) -> Vec<Command> {
        let mut command = Command::new(ServerSet::current().unwrap_or_default().redis_server());
        command
            .arg(directory.join("sentinel.conf"))
            .arg("--sentinel");
        vec![command]
    }

    fn answers(&self, process_id: u32, _: &str) -> bool {
        send_command(self.port, None, "INFO server")
            .is_ok_and(|answer| answer.contains(&format!("\r\nprocess_id:{process_id}\r\n")))
    }
}

/// A primary, two replicas and three Sentinels, which by default start a failover one second after
/// the primary stops answering. Needs `redis-server`. Dropping the value stops them.
pub struct SentinelServers {
    transport: Transport,
    password: String,
    down_after: Duration,
    sentinels: Vec<Server<Sentinel>>,
    redis: Vec<RedisServer>,
}

impl SentinelServers {
    /// Starts the servers and returns when both replicas are connected and the Sentinels have
    /// discovered each other.
    ///
    /// # Errors
    /// [`ServerError`] if one of them does not start.
    pub fn start() -> Result<Self, ServerError> {
        Self::start_with_transport(Transport::Plain, RedisOptions::new(), PASSWORD, DOWN_AFTER)
    }

    /// Like [`start`](Self::start), with this password (letters and digits) and this
    /// `down-after-milliseconds`. The default of one second is too short on a busy machine, where a
    /// live server may not answer for longer.
    ///
    /// # Errors
    /// [`ServerError`] if one of them does not start.
    pub fn start_with_down_after(
        password: &str,
        down_after: Duration,
    ) -> Result<Self, ServerError> {
        Self::start_with_transport(Transport::Plain, RedisOptions::new(), password, down_after)
    }

    /// Like [`start`](Self::start), with TLS between the servers and to clients, and with required
    /// client certificates. [`redis`](Self::redis)`()[0]` has the certificates.
    ///
    /// # Errors
    /// [`ServerError`] if one of them does not start.
    pub fn start_with_tls() -> Result<Self, ServerError> {
        Self::start_with_transport(
            Transport::Tls,
            RedisOptions::new().tls(),
            PASSWORD,
            DOWN_AFTER,
        )
    }

    fn start_with_transport(
        transport: Transport,
        options: RedisOptions,
        password: &str,
        down_after: Duration,
    ) -> Result<Self, ServerError> {
        let with_common_options = |options: RedisOptions| {
            let options = options
                .persistence(RedisPersistence::EverySecond)
                .password(password);
            match transport {
                Transport::Plain => options,
                Transport::Tls => options
                    .certified_clients()
                    .setting("tls-replication", "yes"),
            }
        };
        let primary = RedisServer::start(with_common_options(options))?;
        let port = transport.port(&primary);
        let mut servers = Self {
            transport,
            password: password.to_owned(),
            down_after,
            sentinels: Vec::new(),
            redis: vec![primary],
        };
        for _ in 0..2 {
            let options = match transport {
                Transport::Plain => RedisOptions::new(),
                Transport::Tls => RedisOptions::new().tls_from(servers.redis[0].directory()),
            };
            servers.redis.push(RedisServer::start(
                with_common_options(options).replica_of(port),
            )?);
        }
        servers.wait("both replicas to connect", |it| {
            it.redis[0]
                .command("WAIT 2 100")
                .is_ok_and(|reply| reply == ":2")
        })?;
        for _ in 0..3 {
            servers.sentinels.push(start_sentinel(&servers)?);
        }
        servers.wait("the Sentinels to discover each other", |it| {
            it.sentinels.iter().all(|sentinel| {
                send_command(sentinel.kind().port, None, "INFO sentinel")
                    .is_ok_and(|reply| reply.contains("slaves=2,sentinels=3"))
            })
        })?;
        Ok(servers)
    }

    /// The URLs of the Sentinels, with the password of the Redis servers:
    /// `redis://:password@host:port`. The Sentinels themselves require no password.
    pub fn urls(&self) -> Vec<String> {
        let password = &self.password;
        let url = |sentinel: &Sentinel| match self.transport {
            Transport::Plain => format!("redis://:{password}@127.0.0.1:{}", sentinel.port),
            Transport::Tls => format!("rediss://:{password}@127.0.0.1:{}", sentinel.tls_port),
        };
        self.sentinels
            .iter()
            .map(|sentinel| url(sentinel.kind()))
            .collect()
    }

    /// The three Redis servers. A failover does not change their order.
    pub fn redis(&self) -> &[RedisServer] {
        &self.redis
    }

    /// The index in [`redis`](Self::redis) of the primary according to the Sentinels.
    ///
    /// # Panics
    /// If no Sentinel replies, or they name an unknown server.
    pub fn primary(&self) -> usize {
        self.reported_primary()
            .expect("a Sentinel names one of the servers")
    }

    /// One of the Redis servers, for stopping, killing or freezing it.
    pub fn redis_mut(&mut self, which: usize) -> &mut RedisServer {
        &mut self.redis[which]
    }

    /// Disconnects both replicas from the primary; the Sentinels and clients still reach all
    /// servers.
    ///
    /// # Errors
    /// The connections'.
    pub fn cut_replication(&self) -> std::io::Result<()> {
        let primary = self.primary();
        for (which, server) in self.redis.iter().enumerate() {
            if which != primary {
                server.command("CONFIG SET masterauth no-such-password")?;
            }
        }
        self.redis[primary]
            .command("CLIENT KILL TYPE replica")
            .map(drop)
    }

    /// Waits until the Sentinels name a primary other than `from` and the new primary accepts
    /// writes. Returns its index.
    ///
    /// # Errors
    /// [`ServerError`] if that takes more than a minute.
    pub fn wait_for_failover(&self, from: usize) -> Result<usize, ServerError> {
        self.wait("a failover", |it| {
            it.reported_primary().is_some_and(|which| {
                which != from
                    && it.redis[which]
                        .command("SET oncegate-failover-probe 1 PX 1")
                        .is_ok_and(|reply| reply == "+OK")
            })
        })?;
        Ok(self.primary())
    }

    /// Undoes [`cut_replication`](Self::cut_replication) and the stop of a server: a stopped server
    /// is started as a replica. Returns when all Sentinels name the same primary and both replicas
    /// are connected to it.
    ///
    /// # Errors
    /// [`ServerError`] if a server does not start, or replication takes more than a minute to
    /// start.
    pub fn restore(&mut self) -> Result<(), ServerError> {
        let port = self.transport.port(&self.redis[self.primary()]);
        for server in &mut self.redis {
            let own = server.kind().options.replica_of;
            server.kind_mut().options.replica_of = Some(port);
            let started = server.start_again();
            server.kind_mut().options.replica_of = own;
            started?;
        }
        self.wait("both replicas to connect again", |it| {
            let primary = it.primary();
            let port = it.transport.port(&it.redis[primary]);
            let is_connected = |server: &RedisServer| {
                let reply = server.reply("INFO replication").unwrap_or_default();
                if reply.contains(&format!("master_port:{port}\r\nmaster_link_status:up")) {
                    return true;
                }
                // These commands are repeated until the replica is connected, because Sentinels
                // that still name another primary also reconfigure the server.
                let _ = server.command(&format!("CONFIG SET masterauth {}", it.password));
                if !reply.contains(&format!("master_port:{port}\r\n")) {
                    let _ = server.command(&format!("REPLICAOF 127.0.0.1 {port}"));
                }
                false
            };
            let replicas = it
                .redis
                .iter()
                .enumerate()
                .filter(|(which, _)| *which != primary);
            replicas.filter(|(_, server)| is_connected(server)).count() == 2
                && it
                    .sentinels
                    .iter()
                    .all(|sentinel| it.primary_according_to(sentinel) == Some(primary))
        })
    }

    fn reported_primary(&self) -> Option<usize> {
        self.sentinels
            .iter()
            .find_map(|sentinel| self.primary_according_to(sentinel))
    }

    fn primary_according_to(&self, sentinel: &Server<Sentinel>) -> Option<usize> {
        let ask = format!("SENTINEL get-master-addr-by-name {SENTINEL_NAME}");
        let reply = send_command(sentinel.kind().port, None, &ask).ok()?;
        // The reply has the lines *2, $9, 127.0.0.1, $5 and the port.
        let port: u16 = reply.lines().nth(4)?.parse().ok()?;
        self.redis
            .iter()
            .position(|server| self.transport.port(server) == port)
    }

    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) -> Result<(), ServerError> {
        wait_until(
            Sentinel::NAME,
            what,
            FAILOVER_TIMEOUT,
            "check the logs of the Redis servers and Sentinels",
            || done(self),
        )
    }
}

/// The protocol between servers and clients.
#[derive(Debug, Clone, Copy)]
enum Transport {
    Plain,
    Tls,
}

impl Transport {
    /// The port of a server for replicas and Sentinels.
    fn port(self, server: &RedisServer) -> u16 {
        match self {
            Self::Plain => server.port(),
            Self::Tls => server.tls_port(),
        }
    }
}

fn start_sentinel(servers: &SentinelServers) -> Result<Server<Sentinel>, ServerError> {
    let SentinelServers {
        transport,
        password,
        down_after,
        redis,
        ..
    } = servers;
    let (transport, primary, down_after) = (*transport, &redis[0], down_after.as_millis());
    let [port, tls_port] = free_ports(Sentinel::NAME)?;
    let directory = temporary_directory(Sentinel::NAME)?;
    let mut settings = format!(
        "port {port}\nbind 127.0.0.1\nprotected-mode no\ndir {}\n\
         sentinel monitor {SENTINEL_NAME} 127.0.0.1 {} 2\nsentinel auth-pass {SENTINEL_NAME} {password}\n\
         sentinel down-after-milliseconds {SENTINEL_NAME} {down_after}\nsentinel failover-timeout {SENTINEL_NAME} 5000\n",
        directory.path().display(),
        transport.port(primary)
    );
    if let Transport::Tls = transport {
        settings.extend(
            tls_settings(primary.directory(), tls_port)
                .into_iter()
                .map(|(name, value)| format!("{name} {value}\n")),
        );
        settings.push_str("tls-replication yes\ntls-auth-clients yes\n");
    }
    write(
        Sentinel::NAME,
        &directory.path().join("sentinel.conf"),
        &settings,
    )?;
    Server::launch(Sentinel { port, tls_port }, directory)
}
