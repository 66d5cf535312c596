//! Redis.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::ServerError;
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
    settings: Vec<(String, String)>,
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
    options: RedisOptions,
}

impl RedisServer {
    /// Starts a server and returns when it answers.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, when it does not start.
    pub fn start(options: RedisOptions) -> Result<Self, ServerError> {
        let [port] = free_ports().map_err(|source| ServerError::Io { server: Redis::NAME, action: "find a free port".into(), source })?;
        Self::launch(Redis { port, options }, temporary_directory(Redis::NAME)?)
    }

    /// Its address for clients, the password in it.
    pub fn url(&self) -> String {
        let Redis { port, options } = self.kind();
        match &options.password {
            None => format!("redis://127.0.0.1:{port}"),
            Some(password) => format!("redis://:{password}@127.0.0.1:{port}"),
        }
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
            command.args(["--requirepass", password]);
        }
        for (name, value) in &self.options.settings {
            command.args([&format!("--{name}"), value]);
        }
        vec![command]
    }

    fn answers(&self, number: u32, _: &str) -> bool {
        // That the answer bears our process number rules out a stranger on the same port.
        self.ask().is_ok_and(|answer| answer.contains("+PONG\r\n") && answer.contains(&format!("\r\nprocess_id:{number}\r\n")))
    }
}

impl Redis {
    fn ask(&self) -> std::io::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        if let Some(password) = &self.options.password {
            write!(stream, "AUTH {password}\r\n")?;
        }
        stream.write_all(b"PING\r\nINFO server\r\nQUIT\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}
