//! Real servers as child processes: on free ports of 127.0.0.1, with their data in a temporary
//! directory.
//!
//! A server keeps its ports and its directory until its value is dropped, so a stopped or killed
//! server starts again with the same address and data. Dropping the value stops the server and
//! removes the directory. Each server is the leader of its own session: Ctrl-C in the terminal does
//! not reach it.

mod certificates;
mod cluster;
mod kafka;
mod kafka_cluster;
mod kafka_distribution;
mod kafka_listeners;
mod mirror_maker;
mod port;
mod postgres;
mod process;
mod rabbit;
mod rabbit_cluster;
mod redis;
mod sentinel;
mod server;
mod server_set;

use std::fmt;
use std::path::PathBuf;

pub use cluster::ClusterServers;
pub use kafka::{Kafka, KafkaServer};
pub use kafka_cluster::KafkaServers;
pub use kafka_distribution::{cache, fetch_kafka, kafka_is_fetched};
pub use kafka_listeners::{KafkaListener, KafkaUser};
pub use mirror_maker::{MirrorMaker, MirrorMakerServer};
pub use postgres::{Postgres, PostgresServer, postgres_is_installed};
pub use process::ProcessId;
pub use rabbit::{RABBITMQ_CLIENT, RABBITMQ_SERVER, Rabbit, RabbitOptions, RabbitServer};
pub use rabbit_cluster::RabbitCluster;
pub use redis::{Redis, RedisOptions, RedisPersistence, RedisServer};
pub use sentinel::{SENTINEL_NAME, Sentinel, SentinelServers};
pub use server::{Detached, Server, ServerKind};
pub use server_set::{SERVER_SET, ServerSet};

/// Why a server could not be started or controlled.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// A file, directory, port or program could not be used.
    #[error("{server}: cannot {action}: {source}")]
    Io {
        /// The server.
        server: &'static str,
        /// The action that failed.
        action: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The server's process ended, or did not answer in time.
    #[error("{server} did not start: {reason}\n{log}\n{advice}")]
    DidNotStart {
        /// The server.
        server: &'static str,
        /// The reason.
        reason: String,
        /// The end of the server's log.
        log: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// A program of the server's package failed.
    #[error("{server}: `{program}` failed\n{output}\n{advice}")]
    ProgramFailed {
        /// The server.
        server: &'static str,
        /// The command.
        program: String,
        /// Its output.
        output: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// The environment variable [`SERVER_SET`] has an unknown value.
    #[error("{SERVER_SET}={name}: unknown; use debian12, today, today-redis or kafka-3.9")]
    UnknownServerSet {
        /// The value.
        name: String,
    },
    /// Maven succeeded, but Kafka's distribution, which it downloads, is incomplete.
    #[error(
        "Kafka: Maven succeeded, but {directory} is incomplete; remove the directory and try again"
    )]
    IncompleteDownload {
        /// The directory of the distribution.
        directory: PathBuf,
    },
}

/// Prints the text of `Display` with line breaks, because `unwrap` in a test prints the `Debug`
/// form.
impl fmt::Debug for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn io_error(
    server: &'static str,
    action: impl Into<String>,
    source: std::io::Error,
) -> ServerError {
    ServerError::Io {
        server,
        action: action.into(),
        source,
    }
}
