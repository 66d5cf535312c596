//! A PostgreSQL server for tests.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::ServerError;
use super::port::free_ports;
use super::server::{Server, ServerKind, run_program, temporary_directory};
use super::server_set::ServerSet;

/// Where Debian installs PostgreSQL, each release in a directory of its own.
const PROGRAMS: &str = "/usr/lib/postgresql";

/// The user that runs the server, because PostgreSQL refuses to run as root.
const USER: &str = "postgres";

/// A PostgreSQL server with one superuser `postgres`, without a password. Needs Debian's package
/// `postgresql`.
pub type PostgresServer = Server<Postgres>;

/// The kind of a [`PostgresServer`].
#[derive(Debug)]
pub struct Postgres {
    port: u16,
    settings: Vec<(String, String)>,
}

impl PostgresServer {
    /// Starts a server with these settings of `postgresql.conf` and returns when it answers. All
    /// other settings are PostgreSQL's defaults: each commit is synced to the disk.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, when it does not start.
    pub fn start(settings: &[(&str, &str)]) -> Result<Self, ServerError> {
        let directory = owned_directory()?;
        let mut create = program("initdb");
        create
            .arg("-D")
            .arg(data(directory.path()))
            .args(["-A", "trust", "-U", USER, "-E", "UTF8"])
            .args(["--no-sync", "--no-instructions"]);
        run(&create, "initdb")?;
        Self::launch_in(directory, settings)
    }

    /// Starts a streaming replica of this server with these settings, and returns when it answers
    /// queries. Commits wait for it if the server's `synchronous_standby_names` is `*`.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_replica(&self, settings: &[(&str, &str)]) -> Result<Self, ServerError> {
        let directory = owned_directory()?;
        let mut copy = program("pg_basebackup");
        copy.arg("-D")
            .arg(data(directory.path()))
            .args(["-h", "127.0.0.1", "-p", &self.port().to_string()])
            .args(["-U", USER, "-R", "-X", "stream", "-c", "fast", "--no-sync"]);
        run(&copy, "pg_basebackup")?;
        Self::launch_in(directory, settings)
    }

    /// Makes a replica the primary, and returns when it accepts writes.
    ///
    /// # Errors
    /// [`ServerError`] with the error of `pg_ctl promote`.
    pub fn promote(&self) -> Result<(), ServerError> {
        let mut promote = program("pg_ctl");
        promote.arg("promote").arg("-D");
        promote.arg(data(self.directory()));
        run(&promote, "pg_ctl promote")
    }

    fn launch_in(directory: TempDir, settings: &[(&str, &str)]) -> Result<Self, ServerError> {
        let [port] = free_ports(Postgres::NAME)?;
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let settings = settings.iter().map(owned).collect();
        Self::launch(Postgres { port, settings }, directory)
    }

    /// The URL of the database `postgres` for its superuser.
    pub fn url(&self) -> String {
        format!("postgres://{USER}@127.0.0.1:{}/{USER}", self.port())
    }

    /// The port on 127.0.0.1. It does not change.
    pub fn port(&self) -> u16 {
        self.kind().port
    }
}

impl ServerKind for Postgres {
    const NAME: &'static str = "PostgreSQL";
    const ADVICE: &'static str = "`cargo xtask setup` installs it (Debian's package is postgresql)";
    const START_TIMEOUT: Duration = Duration::from_secs(60);
    const IN_SERVER_SET: bool = true;
    const SERVES_IN_CHILDREN: bool = true;
    // With SIGTERM the server would wait until all clients have disconnected.
    const STOP_SIGNAL: Signal = Signal::INT;

    fn commands(&self, directory: &Path) -> Vec<Command> {
        let mut command = program("postgres");
        command.arg("-D").arg(data(directory));
        command.args(["-p", &self.port.to_string()]);
        command.args(["-c", "listen_addresses=127.0.0.1"]);
        command.args(["-c", "unix_socket_directories="]);
        for (name, value) in &self.settings {
            command.args(["-c", &format!("{name}={value}")]);
        }
        vec![command]
    }

    fn answers(&self, _: u32, _: &str) -> bool {
        accepts_sessions(self.port).unwrap_or(false)
    }
}

/// Whether the server accepts a session; it refuses sessions while it starts or recovers.
fn accepts_sessions(port: u16) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    // The startup message: its length (filled in below), the version of the protocol (3.0), and
    // parameters that end with an empty name.
    let mut startup = vec![0, 0, 0, 0, 0, 3, 0, 0];
    startup.extend_from_slice(b"user\0postgres\0database\0postgres\0\0");
    startup[3] = startup.len() as u8; // less than 256
    stream.write_all(&startup)?;
    let mut reply = [0];
    stream.read_exact(&mut reply)?;
    Ok(reply == *b"R") // authentication; an error would be `E`
}

/// A temporary directory that belongs to the server's user.
fn owned_directory() -> Result<TempDir, ServerError> {
    let directory = temporary_directory(Postgres::NAME)?;
    if rustix::process::geteuid().is_root() {
        let mut chown = Command::new("chown");
        chown.arg(USER).arg(directory.path());
        run_program(Postgres::NAME, &mut chown, "chown", Postgres::ADVICE)?;
    }
    Ok(directory)
}

/// Runs a program of the current server set.
fn run(command: &Command, shown: &str) -> Result<(), ServerError> {
    let mut command = ServerSet::current()?.command(command);
    run_program(Postgres::NAME, &mut command, shown, Postgres::ADVICE).map(drop)
}

fn data(directory: &Path) -> PathBuf {
    directory.join("data")
}

/// A program of the newest release, run as [`USER`] if this process runs as root. A shell finds the
/// release when the command runs, because only then are the files of another [`ServerSet`] mounted.
fn program(name: &str) -> Command {
    let find = format!("exec \"$(ls -d {PROGRAMS}/*/bin/{name} | sort -V | tail -n 1)\" \"$@\"");
    let mut command = if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", USER, "--regid", USER, "--init-groups", "sh"]);
        command
    } else {
        Command::new("sh")
    };
    command.args(["-c", &find, name]);
    command
}

/// Whether PostgreSQL is installed on the host.
pub fn postgres_is_installed() -> bool {
    std::fs::read_dir(PROGRAMS).is_ok_and(|releases| {
        releases
            .flatten()
            .any(|release| release.path().join("bin/postgres").exists())
    })
}
