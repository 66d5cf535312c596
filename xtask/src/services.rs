//! `services up|down|status`: servers that run in the background until `services down`.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use oncegate_testkit::servers::{
    KafkaServer, PostgresServer, RabbitServer, RedisOptions, RedisPersistence, RedisServer, Server,
    ServerKind, ServerSet,
};

use crate::Error;
use crate::setup;
use crate::state::{Service, State};
use crate::stopping::StopSignals;

/// How long a server may take to end after SIGTERM before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Starts the servers on free ports, prints their addresses and writes them to
    /// target/services.env.
    ///
    /// If they already run, prints their addresses again. To use them in a shell: `export $(cargo
    /// xtask services up)`.
    Up,
    /// Stops the servers and removes their data.
    Down,
    /// Prints which servers run, and their addresses.
    Status,
}

pub(crate) fn run(command: Command) -> Result<(), Error> {
    match command {
        Command::Up => up(),
        Command::Down => down(),
        Command::Status => status(),
    }
}

fn up() -> Result<(), Error> {
    let stopping = StopSignals::on_signals()?;
    let state = load()?;
    let set = ServerSet::current()?;
    if !state.services.is_empty() && state.set == set && state.services.iter().all(is_up) {
        print!("{}", state.environment());
        return Ok(());
    }
    // The state is removed if its processes no longer exist, as after a restart of the machine.
    // Servers are stopped if only some of them run, or if they are of another set.
    stop(&state)?;
    set.fetch()?;
    eprintln!(
        "services: starting Kafka, RabbitMQ, Redis and PostgreSQL ({})",
        set.name()
    );
    let (kafka, rabbitmq, redis, postgres) = std::thread::scope(|scope| {
        const NO_PANIC: &str = "starting a server returns its failures and does not panic";
        let kafka = scope.spawn(KafkaServer::start);
        let rabbitmq = scope.spawn(RabbitServer::start);
        let postgres = scope.spawn(|| PostgresServer::start(&[]));
        let redis =
            RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond));
        (
            kafka.join().expect(NO_PANIC),
            rabbitmq.join().expect(NO_PANIC),
            redis,
            postgres.join().expect(NO_PANIC),
        )
    });
    let (kafka, rabbitmq, redis, postgres) = (kafka?, rabbitmq?, redis?, postgres?);
    stopping.check()?;
    let (brokers, amqp, url) = (kafka.brokers(), rabbitmq.url(), redis.url());
    let database = postgres.url();
    let state = State {
        set,
        services: vec![
            service("ONCEGATE_KAFKA", brokers, kafka),
            service("ONCEGATE_RABBITMQ", amqp, rabbitmq),
            service("ONCEGATE_REDIS", url, redis),
            service("ONCEGATE_POSTGRES", database, postgres),
        ],
    };
    write_state(&state, &state_path(), &environment_path())?;
    print!("{}", state.environment());
    eprintln!(
        "services: the servers run; their addresses are in {}; stop them with `cargo xtask services down`",
        environment_path().display()
    );
    Ok(())
}

/// Writes the state file, which `services down` reads, and the file with the addresses. If that
/// fails, stops the servers.
fn write_state(
    state: &State,
    state_path: &PathBuf,
    environment_path: &PathBuf,
) -> Result<(), Error> {
    let written = write(state_path, &state.to_text())
        .and_then(|()| write(environment_path, &state.environment()));
    if written.is_err() {
        // The write error is returned; an error of the cleanup is only printed.
        if let Err(error) =
            stop_processes(state).and_then(|()| remove_files([state_path, environment_path]))
        {
            eprintln!("services: {error}");
        }
    }
    written
}

fn service<K: ServerKind>(variable: &str, address: String, server: Server<K>) -> Service {
    Service {
        name: K::NAME.to_owned(),
        variable: variable.to_owned(),
        address,
        detached: server.detach(),
    }
}

fn down() -> Result<(), Error> {
    let state = load()?;
    if state.services.is_empty() {
        println!("services: no server is running");
        return Ok(());
    }
    stop(&state)
}

fn stop(state: &State) -> Result<(), Error> {
    stop_processes(state)?;
    remove_files([&state_path(), &environment_path()])
}

fn stop_processes(state: &State) -> Result<(), Error> {
    for service in &state.services {
        eprintln!("services: stopping {}", service.name);
        for process in &service.detached.processes {
            process.stop(STOP_TIMEOUT);
        }
        remove(
            std::fs::remove_dir_all(&service.detached.directory),
            &service.detached.directory,
        )?;
    }
    Ok(())
}

fn remove_files(paths: [&PathBuf; 2]) -> Result<(), Error> {
    for path in paths {
        remove(std::fs::remove_file(path), path)?;
    }
    Ok(())
}

fn status() -> Result<(), Error> {
    let state = load()?;
    if state.services.is_empty() {
        println!("services: no server is running");
    }
    for service in &state.services {
        let state = if is_up(service) { "running" } else { "stopped" };
        println!(
            "{state} {}={} log: {}/server.log",
            service.variable,
            service.address,
            service.detached.directory.display()
        );
    }
    Ok(())
}

/// Whether all processes of a server run and it accepts connections.
fn is_up(service: &Service) -> bool {
    service
        .detached
        .processes
        .iter()
        .all(|process| process.is_running())
        && accepts_connections(&service.address)
}

/// Whether a server listens on this address: `host:port`, or a URL that contains it.
fn accepts_connections(address: &str) -> bool {
    let after_scheme = address.split_once("//").map_or(address, |(_, rest)| rest);
    let after_user = after_scheme
        .rsplit_once('@')
        .map_or(after_scheme, |(_, rest)| rest);
    let host_and_port = after_user
        .split_once('/')
        .map_or(after_user, |(first, _)| first);
    TcpStream::connect(host_and_port).is_ok()
}

fn load() -> Result<State, Error> {
    match std::fs::read_to_string(state_path()) {
        Ok(text) => Ok(State::parse(&text)?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(State::default()),
        Err(source) => Err(Error::File {
            path: state_path(),
            source,
        }),
    }
}

/// Writes a file in the target directory, which it creates if nothing was built yet.
fn write(path: &PathBuf, text: &str) -> Result<(), Error> {
    let directory = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    directory
        .and_then(|()| std::fs::write(path, text))
        .map_err(|source| Error::File {
            path: path.clone(),
            source,
        })
}

/// The result of removing a file or directory, which is not an error if it does not exist.
fn remove(outcome: std::io::Result<()>, path: &Path) -> Result<(), Error> {
    match outcome {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::File {
            path: path.to_path_buf(),
            source,
        }),
        _ => Ok(()),
    }
}

fn state_path() -> PathBuf {
    setup::target_directory().join("services.state")
}

fn environment_path() -> PathBuf {
    setup::target_directory().join("services.env")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use oncegate_testkit::servers::{Detached, ProcessId};

    use super::*;

    #[test]
    fn servers_are_stopped_if_the_state_cannot_be_written() {
        let directory_of_test = tempfile::tempdir().unwrap();
        let (written, not_written) = (
            directory_of_test.path().join("services.state"),
            // Its directory is a file.
            directory_of_test.path().join("file/services.env"),
        );
        std::fs::write(directory_of_test.path().join("file"), "").unwrap();
        for (state_path, environment_path) in [(&not_written, &written), (&written, &not_written)] {
            let mut server = Command::new("sleep").arg("60").spawn().unwrap();
            let directory = directory_of_test.path().join("data");
            std::fs::create_dir(&directory).unwrap();
            let detached = Detached {
                processes: vec![ProcessId::running(server.id()).unwrap()],
                directory: directory.clone(),
            };
            let service = Service {
                name: "A".to_owned(),
                variable: "ONCEGATE_A".to_owned(),
                address: "a:1".to_owned(),
                detached,
            };

            let outcome = write_state(
                &State {
                    set: ServerSet::default(),
                    services: vec![service],
                },
                state_path,
                environment_path,
            );

            assert!(matches!(outcome, Err(Error::File { path, .. }) if path == not_written));
            assert!(
                server.try_wait().unwrap().is_some(),
                "the server still runs"
            );
            assert!(!directory.exists() && !written.exists());
        }
    }
}
