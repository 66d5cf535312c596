//! RabbitMQ.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::ServerError;
use super::port::free_ports;
use super::server::{Kind, Server, temporary_directory, write};

/// The program of the server itself; the one on the `PATH` insists on a user and directories of its own.
pub const RABBITMQ_SERVER: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";
const RABBITMQCTL: &str = "/usr/lib/rabbitmq/bin/rabbitmqctl";

/// A RabbitMQ node of one's own, with the name server (`epmd`) that it needs. Needs `rabbitmq-server`.
pub type RabbitServer = Server<Rabbit>;

/// The kind of a [`RabbitServer`].
#[derive(Debug)]
pub struct Rabbit {
    port: u16,
    distribution_port: u16,
    name_server_port: u16,
}

impl RabbitServer {
    /// Starts a node and returns when it answers, which takes some seconds.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, when it does not start.
    pub fn start() -> Result<Self, ServerError> {
        let [port, distribution_port, name_server_port] = free_ports().map_err(|source| io("find free ports", source))?;
        let directory = temporary_directory(Rabbit::NAME)?;
        let cookie = directory.path().join(".erlang.cookie");
        write(Rabbit::NAME, &cookie, "ONCEGATE")?;
        std::fs::set_permissions(&cookie, std::fs::Permissions::from_mode(0o600)).map_err(|source| io("protect the cookie", source))?;
        let listener = format!("listeners.tcp.default = 127.0.0.1:{port}\n");
        write(Rabbit::NAME, &directory.path().join("rabbitmq.conf"), &listener)?;
        write(Rabbit::NAME, &directory.path().join("enabled_plugins"), "[].\n")?;
        Self::launch(Rabbit { port, distribution_port, name_server_port }, directory)
    }

    /// Its address for clients: user guest, virtual host `/`.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.kind().port)
    }

    /// Its port on 127.0.0.1, the same for as long as this value lives.
    pub fn port(&self) -> u16 {
        self.kind().port
    }

    /// Runs `rabbitmqctl` against this node, for instance with `["set_vm_memory_high_watermark", "0"]`, and answers
    /// with what it printed.
    ///
    /// # Errors
    /// [`ServerError::ProgramFailed`] with its output.
    pub fn control(&self, arguments: &[&str]) -> Result<String, ServerError> {
        let mut command = Command::new(RABBITMQCTL);
        self.kind().surround(&mut command, self.directory());
        let output = command.args(arguments).output().map_err(|source| io("run rabbitmqctl", source))?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(printed);
        }
        Err(ServerError::ProgramFailed {
            server: Rabbit::NAME,
            program: format!("rabbitmqctl {}", arguments.join(" ")),
            output: printed + &String::from_utf8_lossy(&output.stderr),
            advice: "see `rabbitmqctl help`",
        })
    }
}

impl Kind for Rabbit {
    const NAME: &'static str = "RabbitMQ";
    const ADVICE: &'static str = "`cargo xtask setup` installs it (Debian's package is rabbitmq-server)";
    const START_PATIENCE: Duration = Duration::from_secs(90);

    fn commands(&self, directory: &Path) -> Vec<Command> {
        // Started here and not by the node, which would leave it behind.
        let mut name_server = Command::new("epmd");
        name_server.args(["-port", &self.name_server_port.to_string(), "-address", "127.0.0.1"]);

        let mut node = Command::new(RABBITMQ_SERVER);
        self.surround(&mut node, directory);
        node.env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_DIST_PORT", self.distribution_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", directory.join("data"))
            .env("RABBITMQ_LOG_BASE", directory.join("log"))
            .env("RABBITMQ_LOGS", "-")
            .env("RABBITMQ_CONFIG_FILE", directory.join("rabbitmq.conf"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", directory.join("enabled_plugins"))
            .env("RABBITMQ_PID_FILE", directory.join("pid"))
            // With these two the script becomes the node instead of waiting for it as its child.
            .env("RABBITMQ_ALLOW_INPUT", "true")
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-noinput +S 2:2");
        vec![name_server, node]
    }

    fn answers(&self, _: u32, log: &str) -> bool {
        log.contains("Server startup complete") && self.greets().is_ok()
    }
}

impl Rabbit {
    /// What the node and its tools must agree on.
    fn surround(&self, command: &mut Command, directory: &Path) {
        command
            .env("HOME", directory)
            .env("RABBITMQ_NODENAME", format!("oncegate{}@localhost", self.port))
            .env("ERL_EPMD_PORT", self.name_server_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1");
    }

    /// Sends AMQP's protocol header, which the node answers with a method frame (type 1), `connection.start`.
    fn greets(&self) -> std::io::Result<()> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"AMQP\x00\x00\x09\x01")?;
        let mut frame_type = [0];
        stream.read_exact(&mut frame_type)?;
        if frame_type == [1] { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
    }
}

fn io(action: &str, source: std::io::Error) -> ServerError {
    ServerError::Io { server: Rabbit::NAME, action: action.into(), source }
}
