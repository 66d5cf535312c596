//! Redis.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::ServerError;
use super::certificates;
use super::port::free_ports;
use super::server::{Kind, Server, temporary_directory};

/// A Redis server of one's own. Needs `redis-server`.
pub type RedisServer = Server<Redis>;

/// What a [`RedisServer`] writes to disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RedisPersistence {
    /// Nothing: what is stopped is empty when it starts again.
    #[default]
    Nothing,
    /// The append-only file, flushed every second: a crash of the process loses nothing, one of the machine a second.
    EverySecond,
    /// The append-only file, flushed before each answer.
    EveryWrite,
}

/// How to start a [`RedisServer`]. By default it persists nothing, asks for no password and evicts nothing.
#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    persistence: RedisPersistence,
    password: Option<String>,
    replica_of: Option<u16>,
    transport: Transport,
    settings: Vec<(String, String)>,
}

/// How clients reach it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Transport {
    #[default]
    Plain,
    Tls,
}

impl RedisOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What it writes to disk.
    #[must_use]
    pub fn persistence(mut self, persistence: RedisPersistence) -> Self {
        self.persistence = persistence;
        self
    }

    /// Asks clients for this password (letters and digits).
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Follows the server on this port of 127.0.0.1, with the same password.
    #[must_use]
    pub fn replica_of(mut self, port: u16) -> Self {
        self.replica_of = Some(port);
        self
    }

    /// Gives clients TLS, with a certificate for `localhost` and 127.0.0.1 made when it starts: [`RedisServer::url`]
    /// is a `rediss://` one, and [`RedisServer::certificate_authority`] what to trust. Needs `openssl`.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.transport = Transport::Tls;
        self
    }

    /// Any other setting of `redis.conf`, say `maxmemory` and `10mb`. A later one wins.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }
}

/// The kind of a [`RedisServer`].
#[derive(Debug)]
pub struct Redis {
    port: u16,
    tls_port: u16,
    options: RedisOptions,
}

impl RedisServer {
    /// Starts a server and returns when it answers.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, when it does not start.
    pub fn start(options: RedisOptions) -> Result<Self, ServerError> {
        let [port, tls_port] =
            free_ports().map_err(|source| ServerError::Io { server: Redis::NAME, action: "find free ports".into(), source })?;
        let directory = temporary_directory(Redis::NAME)?;
        if options.transport == Transport::Tls {
            certificates::make(Redis::NAME, directory.path())?;
        }
        Self::launch(Redis { port, tls_port, options }, directory)
    }

    /// Its address for clients, the password in it.
    pub fn url(&self) -> String {
        let Redis { port, tls_port, options } = self.kind();
        let login = options.password.as_ref().map_or_else(String::new, |password| format!(":{password}@"));
        match options.transport {
            Transport::Plain => format!("redis://{login}127.0.0.1:{port}"),
            Transport::Tls => format!("rediss://{login}localhost:{tls_port}"),
        }
    }

    /// The certificate of the authority that signed this server's, where it was started with [`RedisOptions::tls`].
    pub fn certificate_authority(&self) -> PathBuf {
        self.directory().join(certificates::AUTHORITY)
    }

    /// Sends one command in its plain form, say `CONFIG SET maxmemory 1`, and answers with the first line of the reply.
    ///
    /// # Errors
    /// The connection's.
    pub fn command(&self, line: &str) -> std::io::Result<String> {
        Ok(self.reply(line)?.lines().next().unwrap_or_default().to_owned())
    }

    /// Sends one command in its plain form and answers with the whole reply, as it came.
    ///
    /// # Errors
    /// The connection's.
    pub fn reply(&self, line: &str) -> std::io::Result<String> {
        self.kind().ask(line)
    }

    /// Its port on 127.0.0.1, the same for as long as this value lives.
    pub fn port(&self) -> u16 {
        self.kind().port
    }
}

impl Kind for Redis {
    const NAME: &'static str = "Redis";
    const ADVICE: &'static str = "`cargo xtask setup` installs it (Debian's package is redis-server)";
    const START_PATIENCE: Duration = Duration::from_secs(30);

    fn commands(&self, directory: &Path) -> Vec<Command> {
        let mut command = Command::new("redis-server");
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command.arg("--dir").arg(directory);
        command.args(["--maxmemory-policy", "noeviction"]);
        match self.options.persistence {
            RedisPersistence::Nothing => command.args(["--appendonly", "no"]),
            RedisPersistence::EverySecond => command.args(["--appendonly", "yes", "--appendfsync", "everysec"]),
            RedisPersistence::EveryWrite => command.args(["--appendonly", "yes", "--appendfsync", "always"]),
        };
        if let Some(password) = &self.options.password {
            command.args(["--requirepass", password, "--masterauth", password]);
        }
        if let Some(primary) = self.options.replica_of {
            command.args(["--replicaof", "127.0.0.1", &primary.to_string(), "--repl-diskless-sync-delay", "0"]);
        }
        if self.options.transport == Transport::Tls {
            command.args(["--tls-port", &self.tls_port.to_string(), "--tls-auth-clients", "no"]);
            command.arg("--tls-cert-file").arg(directory.join(certificates::CERTIFICATE));
            command.arg("--tls-key-file").arg(directory.join(certificates::KEY));
            command.arg("--tls-ca-cert-file").arg(directory.join(certificates::AUTHORITY));
        }
        for (name, value) in &self.options.settings {
            command.args([&format!("--{name}"), value]);
        }
        vec![command]
    }

    fn answers(&self, number: u32, _: &str) -> bool {
        // That the answer bears our process number rules out a stranger on the same port.
        let mine = format!("\r\nprocess_id:{number}\r\n");
        self.ask("INFO").is_ok_and(|answer| answer.contains(&mine) && answer.contains("\r\nloading:0\r\n"))
    }
}

impl Redis {
    fn ask(&self, command: &str) -> std::io::Result<String> {
        tell(self.port, self.options.password.as_deref(), command)
    }
}

/// The reply to PING.
const END: &str = "+PONG\r\n";

/// Everything that whoever listens on this port replies to a command in its plain form.
pub(crate) fn tell(port: u16, password: Option<&str>, command: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let login = password.map_or_else(String::new, |password| format!("AUTH {password}\r\n"));
    // A Sentinel knows no QUIT: there, the reply to PING ends the answer.
    write!(stream, "{login}{command}\r\nPING\r\nQUIT\r\n")?;
    let mut answer = String::new();
    let mut buffer = [0; 4096];
    while let read @ 1.. = stream.read(&mut buffer)? {
        answer.push_str(&String::from_utf8_lossy(&buffer[..read]));
        if let Some(end) = answer.find(END) {
            answer.truncate(end);
            break;
        }
    }
    Ok(match password {
        None => answer,
        // Without the +OK to AUTH.
        Some(_) => answer.split_once("\r\n").map_or_else(String::new, |(_, rest)| rest.to_owned()),
    })
}
