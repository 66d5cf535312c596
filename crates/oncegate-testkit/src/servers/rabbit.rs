//! A RabbitMQ node as a test server.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::certificates;
use super::port::free_ports;
use super::server::{Server, ServerKind, run_program, temporary_directory, write};
use super::server_set::ServerSet;
use super::{ServerError, io_error};

/// The start script of the server. Debian's wrapper on the `PATH` runs only as root or `rabbitmq`,
/// and with fixed directories.
pub const RABBITMQ_SERVER: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";
const RABBITMQCTL: &str = "/usr/lib/rabbitmq/bin/rabbitmqctl";

/// A RabbitMQ node, with the name server (`epmd`) that it needs. Needs `rabbitmq-server`.
pub type RabbitServer = Server<Rabbit>;

/// The kind of a [`RabbitServer`].
#[derive(Debug)]
pub struct Rabbit {
    port: u16,
    distribution_port: u16,
    name_server: NameServer,
    transport: Transport,
}

/// The protocol of clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Transport {
    #[default]
    Plain,
    Tls,
}

/// The `epmd` that the node uses, and its port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameServer {
    Own(u16),
    Shared(u16),
}

/// Options of a [`RabbitServer`]. The default is plain AMQP, without a cluster.
#[derive(Debug, Clone, Default)]
pub struct RabbitOptions {
    transport: Transport,
    name_server: Option<u16>,
    joins: Option<String>,
    settings: Vec<(String, String)>,
}

impl RabbitOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Accepts only TLS connections from clients with a certificate of the node's authority. The
    /// start of the node makes the certificates: [`RabbitServer::url`] is an `amqps://` URL,
    /// [`RabbitServer::certificate_authority`] the authority to trust and
    /// [`RabbitServer::client_certificate`] the client's certificate. With `EXTERNAL` the user is
    /// the certificate's common name, [`RABBITMQ_CLIENT`]. Needs `openssl`.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.transport = Transport::Tls;
        self
    }

    /// Any other setting of `rabbitmq.conf`.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Uses the `epmd` on this port and does not start one.
    pub(crate) fn name_server(mut self, port: u16) -> Self {
        self.name_server = Some(port);
        self
    }

    /// Makes the new node join the cluster of this running node.
    pub(crate) fn joins(mut self, node: &RabbitServer) -> Self {
        self.joins = Some(node.kind().name());
        self
    }

    /// The lines of `rabbitmq.conf`.
    fn lines(&self, port: u16, directory: &Path) -> Vec<String> {
        let mut lines = match self.transport {
            Transport::Plain => vec![format!("listeners.tcp.default = 127.0.0.1:{port}")],
            Transport::Tls => {
                let file = |name: &str| directory.join(name).display().to_string();
                vec![
                    "listeners.tcp = none".to_owned(),
                    format!("listeners.ssl.default = 127.0.0.1:{port}"),
                    format!("ssl_options.cacertfile = {}", file(certificates::AUTHORITY)),
                    format!("ssl_options.certfile = {}", file(certificates::CERTIFICATE)),
                    format!("ssl_options.keyfile = {}", file(certificates::KEY)),
                    "ssl_options.verify = verify_peer".to_owned(),
                    "ssl_options.fail_if_no_peer_cert = true".to_owned(),
                    "auth_mechanisms.1 = PLAIN".to_owned(),
                    "auth_mechanisms.2 = EXTERNAL".to_owned(),
                    "ssl_cert_login_from = common_name".to_owned(),
                ]
            }
        };
        if let Some(node) = &self.joins {
            lines.push("cluster_formation.peer_discovery_backend = classic_config".to_owned());
            lines.push(format!("cluster_formation.classic_config.nodes.1 = {node}"));
            lines.push(format!(
                "cluster_formation.classic_config.nodes.2 = {}",
                name(port)
            ));
        }
        lines.extend(
            self.settings
                .iter()
                .map(|(name, value)| format!("{name} = {value}")),
        );
        lines
    }
}

/// The common name of the certificate that [`RabbitServer::client_certificate`] names.
pub const RABBITMQ_CLIENT: &str = "oncegate test client";

/// The name of the node that listens on a port.
fn name(port: u16) -> String {
    format!("oncegate{port}@localhost")
}

impl RabbitServer {
    /// Starts a node and returns when it answers, which takes some seconds.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, when it does not start.
    pub fn start() -> Result<Self, ServerError> {
        Self::start_with(&RabbitOptions::new())
    }

    /// Starts a node with options.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(options: &RabbitOptions) -> Result<Self, ServerError> {
        let [port, distribution_port, own] = free_ports(Rabbit::NAME)?;
        let directory = temporary_directory(Rabbit::NAME)?;
        let cookie = directory.path().join(".erlang.cookie");
        write(Rabbit::NAME, &cookie, "ONCEGATE")?;
        std::fs::set_permissions(&cookie, std::fs::Permissions::from_mode(0o600))
            .map_err(|source| io_error(Rabbit::NAME, "protect the cookie", source))?;
        let plugins = match options.transport {
            Transport::Plain => "[].\n",
            Transport::Tls => "[rabbitmq_auth_mechanism_ssl].\n",
        };
        if options.transport == Transport::Tls {
            certificates::make(Rabbit::NAME, directory.path())?;
            certificates::make_client(Rabbit::NAME, directory.path())?;
        }
        let lines = options.lines(port, directory.path()).join("\n") + "\n";
        write(
            Rabbit::NAME,
            &directory.path().join("rabbitmq.conf"),
            &lines,
        )?;
        write(
            Rabbit::NAME,
            &directory.path().join("enabled_plugins"),
            plugins,
        )?;
        let name_server = options
            .name_server
            .map_or(NameServer::Own(own), NameServer::Shared);
        Self::launch(
            Rabbit {
                port,
                distribution_port,
                name_server,
                transport: options.transport,
            },
            directory,
        )
    }

    /// The URL for clients: user `guest`, virtual host `/`.
    pub fn url(&self) -> String {
        match self.kind().transport {
            Transport::Plain => format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.kind().port),
            Transport::Tls => format!("amqps://guest:guest@localhost:{}/%2f", self.kind().port),
        }
    }

    /// The port on 127.0.0.1. It does not change.
    pub fn port(&self) -> u16 {
        self.kind().port
    }

    /// Runs `rabbitmqctl` on this node, for instance with `["set_vm_memory_high_watermark", "0"]`,
    /// and returns its output.
    ///
    /// # Errors
    /// [`ServerError::ProgramFailed`] with its output.
    pub fn control(&self, arguments: &[&str]) -> Result<String, ServerError> {
        let mut command = Command::new(RABBITMQCTL);
        self.kind().set_environment(&mut command, self.directory());
        command.args(arguments);
        let shown = format!("rabbitmqctl {}", arguments.join(" "));
        run_program(
            Rabbit::NAME,
            &mut ServerSet::current()?.command(&command),
            &shown,
            "see `rabbitmqctl help`",
        )
    }
}

impl ServerKind for Rabbit {
    const NAME: &'static str = "RabbitMQ";
    const ADVICE: &'static str =
        "`cargo xtask setup` installs it (Debian's package is rabbitmq-server)";
    const START_TIMEOUT: Duration = Duration::from_secs(180);
    const IN_SERVER_SET: bool = true;

    fn commands(&self, directory: &Path) -> Vec<Command> {
        let mut node = Command::new(RABBITMQ_SERVER);
        self.set_environment(&mut node, directory);
        node.env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_DIST_PORT", self.distribution_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", directory.join("data"))
            .env("RABBITMQ_LOG_BASE", directory.join("log"))
            .env("RABBITMQ_LOGS", "-")
            .env("RABBITMQ_CONFIG_FILE", directory.join("rabbitmq.conf"))
            .env(
                "RABBITMQ_ENABLED_PLUGINS_FILE",
                directory.join("enabled_plugins"),
            )
            .env("RABBITMQ_PID_FILE", directory.join("pid"))
            // With these two variables the script replaces itself by the node (`exec`) instead of
            // waiting for it.
            .env("RABBITMQ_ALLOW_INPUT", "true")
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-noinput +S 2:2");
        match self.name_server {
            NameServer::Own(port) => vec![name_server(port), node],
            NameServer::Shared(_) => vec![node],
        }
    }

    fn answers(&self, _: u32, log: &str) -> bool {
        log.contains("Server startup complete") && self.answers_handshake().is_ok()
    }
}

impl Rabbit {
    /// The environment that the node and its tools share.
    fn set_environment(&self, command: &mut Command, directory: &Path) {
        let (NameServer::Own(port) | NameServer::Shared(port)) = self.name_server;
        command
            .env("HOME", directory)
            .env("RABBITMQ_NODENAME", self.name())
            .env("ERL_EPMD_PORT", port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1");
    }

    fn name(&self) -> String {
        name(self.port)
    }

    /// Sends AMQP's protocol header, which the node answers with a method frame (type 1),
    /// `connection.start`.
    fn answers_handshake(&self) -> std::io::Result<()> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        if self.transport == Transport::Tls {
            // RabbitMQ does not reply to plain AMQP on a TLS port; an open port is enough.
            return Ok(());
        }
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"AMQP\x00\x00\x09\x01")?;
        let mut frame_type = [0];
        stream.read_exact(&mut frame_type)?;
        if frame_type == [1] {
            Ok(())
        } else {
            Err(std::io::ErrorKind::InvalidData.into())
        }
    }
}

/// The command that starts `epmd`. If the node started `epmd` itself, `epmd` would outlive the
/// node.
pub(crate) fn name_server(port: u16) -> Command {
    let mut command = Command::new("epmd");
    command.args(["-port", &port.to_string(), "-address", "127.0.0.1"]);
    command
}
