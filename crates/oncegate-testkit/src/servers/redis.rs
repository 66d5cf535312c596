//! A Redis server for tests.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit};

use super::certificates;
use super::port::free_ports;
use super::server::{Server, ServerKind, temporary_directory};
use super::server_set::ServerSet;
use super::{ServerError, io_error};

/// A Redis server. Needs `redis-server`.
pub type RedisServer = Server<Redis>;

/// The persistence of a [`RedisServer`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RedisPersistence {
    /// No persistence: a restarted server is empty.
    #[default]
    Nothing,
    /// The append-only file with `appendfsync everysec`: a power cut, or a crash of the process
    /// while its disk is busy, may lose the last two seconds.
    EverySecond,
    /// The append-only file with `appendfsync always`.
    EveryWrite,
}

/// Options of a [`RedisServer`]. The default is without persistence, password and eviction.
#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    persistence: RedisPersistence,
    password: Option<String>,
    pub(super) replica_of: Option<u16>,
    transport: Transport,
    clients: Clients,
    disk: Disk,
    settings: Vec<(String, String)>,
}

/// The protocol of clients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Transport {
    #[default]
    Plain,
    /// With new certificates.
    Tls,
    /// With the certificates in this directory.
    TlsFrom(PathBuf),
}

/// Whether TLS clients need a certificate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Clients {
    #[default]
    Anyone,
    Certified,
}

/// Whether a full disk can be simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Disk {
    #[default]
    Large,
    MayFill,
}

impl RedisOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the persistence.
    #[must_use]
    pub fn persistence(mut self, persistence: RedisPersistence) -> Self {
        self.persistence = persistence;
        self
    }

    /// Requires this password (letters and digits).
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Makes this server a replica of the server on this port of 127.0.0.1, with the same password.
    #[must_use]
    pub fn replica_of(mut self, port: u16) -> Self {
        self.replica_of = Some(port);
        self
    }

    /// Enables TLS, with a new certificate for `localhost` and 127.0.0.1: [`RedisServer::url`] is a
    /// `rediss://` URL, and [`RedisServer::certificate_authority`] the authority to trust. Needs
    /// `openssl`.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.transport = Transport::Tls;
        self
    }

    /// As [`tls`](Self::tls), with the certificates of another server, in its directory.
    #[must_use]
    pub(crate) fn tls_from(mut self, directory: &Path) -> Self {
        self.transport = Transport::TlsFrom(directory.to_owned());
        self
    }

    /// Refuses TLS clients without a certificate of the same authority, such as
    /// [`RedisServer::client_certificate`].
    #[must_use]
    pub fn certified_clients(mut self) -> Self {
        self.clients = Clients::Certified;
        self
    }

    /// Allows [`RedisServer::fill_disk`]. Needs `env` of GNU coreutils 8.31 or newer.
    #[must_use]
    pub fn disk_may_fill(mut self) -> Self {
        self.disk = Disk::MayFill;
        self
    }

    /// Any other setting of `redis.conf`, for instance `maxmemory` and `10mb`. A later value of a
    /// setting replaces an earlier one.
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
    pub(super) options: RedisOptions,
}

impl RedisServer {
    /// Starts a server and returns when it answers.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, when it does not start.
    pub fn start(options: RedisOptions) -> Result<Self, ServerError> {
        let [port, tls_port] = free_ports(Redis::NAME)?;
        let directory = temporary_directory(Redis::NAME)?;
        match &options.transport {
            Transport::Plain => {}
            Transport::Tls => {
                certificates::make(Redis::NAME, directory.path())?;
                certificates::make_client(Redis::NAME, directory.path())?;
            }
            Transport::TlsFrom(from) => copy_certificates(from, directory.path())?,
        }
        Self::launch(
            Redis {
                port,
                tls_port,
                options,
            },
            directory,
        )
    }

    /// The URL for clients, with the password.
    pub fn url(&self) -> String {
        let Redis {
            port,
            tls_port,
            options,
        } = self.kind();
        let login = options
            .password
            .as_ref()
            .map_or_else(String::new, |password| format!(":{password}@"));
        match &options.transport {
            Transport::Plain => format!("redis://{login}127.0.0.1:{port}"),
            Transport::Tls | Transport::TlsFrom(_) => {
                format!("rediss://{login}localhost:{tls_port}")
            }
        }
    }

    /// Prevents all files of the server from growing, like a full disk, until
    /// [`free_disk`](Self::free_disk). The server must be started with
    /// [`RedisOptions::disk_may_fill`], or it ends.
    ///
    /// # Errors
    /// The operating system's.
    pub fn fill_disk(&self) -> std::io::Result<()> {
        self.limit_file_size(Some(1))
    }

    /// Ends [`fill_disk`](Self::fill_disk).
    ///
    /// # Errors
    /// The operating system's.
    pub fn free_disk(&self) -> std::io::Result<()> {
        self.limit_file_size(None)
    }

    fn limit_file_size(&self, current: Option<u64>) -> std::io::Result<()> {
        // Only the soft limit: an unprivileged process cannot raise the hard limit again.
        let limit = Rlimit {
            current,
            maximum: None,
        };
        rustix::process::prlimit(
            Pid::from_raw(self.pid().cast_signed()),
            Resource::Fsize,
            limit,
        )?;
        Ok(())
    }

    /// Starts a stopped server so that it replies with `LOADING` for about this long before it
    /// executes commands. The time is shorter if there is little to load: an append-only file of a
    /// thousand commands takes 0.5 s.
    ///
    /// # Errors
    /// [`ServerError`] if it does not start.
    pub fn start_again_loading(&mut self, lasts: Duration) -> Result<(), ServerError> {
        let (port, password) = (self.kind().port, self.kind().options.password.clone());
        let settings = self.kind().options.settings.len();
        // The delay applies to each loaded command; Redis handles client connections after every
        // 1,024 commands.
        self.kind_mut()
            .options
            .settings
            .push(("key-load-delay".into(), LOAD_DELAY.to_string()));
        let end_of_loading = std::thread::spawn(move || {
            std::thread::sleep(lasts);
            // Fails only if the server does not listen yet; then it does not load either.
            let _ = send_command(port, password.as_deref(), "CONFIG SET key-load-delay 0");
        });
        let started = self.start_again();
        let _ = end_of_loading.join();
        self.kind_mut().options.settings.truncate(settings);
        started
    }

    /// The port for TLS.
    pub(crate) fn tls_port(&self) -> u16 {
        self.kind().tls_port
    }

    /// Sends one inline command, for instance `CONFIG SET maxmemory 1`, and returns the first line
    /// of the reply.
    ///
    /// # Errors
    /// The connection's.
    pub fn command(&self, line: &str) -> std::io::Result<String> {
        Ok(self
            .reply(line)?
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned())
    }

    /// Sends one inline command and returns the whole reply.
    ///
    /// # Errors
    /// The connection's.
    pub fn reply(&self, line: &str) -> std::io::Result<String> {
        self.kind().ask(line)
    }

    /// The port on 127.0.0.1. It does not change.
    pub fn port(&self) -> u16 {
        self.kind().port
    }
}

impl ServerKind for Redis {
    const NAME: &'static str = "Redis";
    const ADVICE: &'static str =
        "`cargo xtask setup` installs it (Debian's package is redis-server)";
    const START_TIMEOUT: Duration = Duration::from_secs(30);
    const IN_SERVER_SET: bool = true;

    fn commands(&self, directory: &Path) -> Vec<Command> {
        // If the set is unknown, `Server` reports the error.
        let program = ServerSet::current().unwrap_or_default().redis_server();
        let mut command = match self.options.disk {
            Disk::Large => Command::new(program),
            Disk::MayFill => {
                // With SIGXFSZ ignored, a write beyond the file size limit fails as on a full disk.
                let mut command = Command::new("env");
                command.args(["--ignore-signal=XFSZ", program]);
                command
            }
        };
        command.args([
            "--port",
            &self.port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ]);
        command.arg("--dir").arg(directory);
        command.args(["--maxmemory-policy", "noeviction"]);
        match self.options.persistence {
            RedisPersistence::Nothing => command.args(["--appendonly", "no"]),
            RedisPersistence::EverySecond => {
                command.args(["--appendonly", "yes", "--appendfsync", "everysec"])
            }
            RedisPersistence::EveryWrite => {
                command.args(["--appendonly", "yes", "--appendfsync", "always"])
            }
        };
        if let Some(password) = &self.options.password {
            command.args(["--requirepass", password, "--masterauth", password]);
        }
        if let Some(primary) = self.options.replica_of {
            command.args([
                "--replicaof",
                "127.0.0.1",
                &primary.to_string(),
                "--repl-diskless-sync-delay",
                "0",
            ]);
        }
        if self.options.transport != Transport::Plain {
            for (name, value) in tls_settings(directory, self.tls_port) {
                command.args([&format!("--{name}"), &value]);
            }
            let certified = match self.options.clients {
                Clients::Anyone => "no",
                Clients::Certified => "yes",
            };
            command.args(["--tls-auth-clients", certified]);
        }
        for (name, value) in &self.options.settings {
            command.args([&format!("--{name}"), value]);
        }
        vec![command]
    }

    fn answers(&self, process_id: u32, _: &str) -> bool {
        // The process id in the reply rules out another server on the same port.
        let line = format!("\r\nprocess_id:{process_id}\r\n");
        self.ask("INFO")
            .is_ok_and(|answer| answer.contains(&line) && answer.contains("\r\nloading:0\r\n"))
    }
}

impl Redis {
    fn ask(&self, command: &str) -> std::io::Result<String> {
        send_command(self.port, self.options.password.as_deref(), command)
    }
}

/// The settings of `redis.conf` that name files of certificates and keys, and the files.
const CERTIFICATES: [(&str, &str); 5] = [
    ("tls-cert-file", certificates::CERTIFICATE),
    ("tls-key-file", certificates::KEY),
    ("tls-ca-cert-file", certificates::AUTHORITY),
    // Redis servers are clients of each other.
    ("tls-client-cert-file", certificates::CLIENT_CERTIFICATE),
    ("tls-client-key-file", certificates::CLIENT_KEY),
];

/// The settings of `redis.conf` for a server with TLS on this port and the certificates in this
/// directory.
pub(crate) fn tls_settings(directory: &Path, port: u16) -> Vec<(&'static str, String)> {
    let files =
        CERTIFICATES.map(|(setting, file)| (setting, directory.join(file).display().to_string()));
    [("tls-port", port.to_string())]
        .into_iter()
        .chain(files)
        .collect()
}

fn copy_certificates(from: &Path, to: &Path) -> Result<(), ServerError> {
    for (_, file) in CERTIFICATES {
        std::fs::copy(from.join(file), to.join(file))
            .map_err(|source| io_error(Redis::NAME, "copy certificates", source))?;
    }
    Ok(())
}

/// The value of `key-load-delay` in microseconds, with which a server [loads
/// slowly](RedisServer::start_again_loading): the pause after each key or command.
const LOAD_DELAY: u32 = 400;

/// The reply to PING.
const PING_REPLY: &str = "+PONG\r\n";

/// Sends an inline command to the server on this port and returns the whole reply.
pub(crate) fn send_command(
    port: u16,
    password: Option<&str>,
    command: &str,
) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let login = password.map_or_else(String::new, |password| format!("AUTH {password}\r\n"));
    // The reply to PING marks the end of the reply, because a Sentinel has no QUIT.
    write!(stream, "{login}{command}\r\nPING\r\nQUIT\r\n")?;
    let mut answer = String::new();
    let mut buffer = [0; 4096];
    while let read @ 1.. = stream.read(&mut buffer)? {
        answer.push_str(&String::from_utf8_lossy(&buffer[..read]));
        if let Some(end) = answer.find(PING_REPLY) {
            answer.truncate(end);
            break;
        }
    }
    Ok(match password {
        None => answer,
        // Removes the reply to AUTH, `+OK`.
        Some(_) => answer
            .split_once("\r\n")
            .map_or_else(String::new, |(_, rest)| rest.to_owned()),
    })
}
