//! Real servers as child processes: on free ports of 127.0.0.1, with their data in a temporary
//! directory.
//!
//! A server keeps its ports and its directory for as long as its value lives, so one that was
//! stopped or killed comes back at the same address with what it had written. Dropping the value
//! stops the server and removes the directory. Each server is the leader of a session of its own:
//! Ctrl-C in the terminal does not reach it.

mod certificates;
mod cluster;
mod kafka;
mod kafka_cluster;
mod kafka_distribution;
mod kafka_doors;
mod mirror_maker;
mod port;
mod process;
mod rabbit;
mod rabbit_cluster;
mod redis;
mod sentinel;
mod server;

use std::fmt;
use std::path::PathBuf;

pub use cluster::ClusterServers;
pub use kafka::{Kafka, KafkaServer};
pub use kafka_cluster::KafkaServers;
pub use kafka_distribution::{cache, fetch_kafka, kafka_is_fetched};
pub use kafka_doors::{KafkaDoor, KafkaUser};
pub use mirror_maker::{MirrorMaker, MirrorMakerServer};
pub use process::ProcessId;
pub use rabbit::{RABBITMQ_CLIENT, RABBITMQ_SERVER, Rabbit, RabbitOptions, RabbitServer};
pub use rabbit_cluster::RabbitCluster;
pub use redis::{Redis, RedisOptions, RedisPersistence, RedisServer};
pub use sentinel::{SENTINEL_NAME, Sentinel, SentinelServers};
pub use server::{Detached, Kind, Server};

/// Why a server could not be started or spoken to.
#[derive(thiserror::Error)]
pub enum ServerError {
    /// A file, directory, port or program could not be used.
    #[error("{server}: cannot {action}: {source}")]
    Io {
        /// The server that was to start.
        server: &'static str,
        /// What was tried.
        action: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The server's process ended, or did not answer in time.
    #[error("{server} did not start: {reason}\n{log}\n{advice}")]
    DidNotStart {
        /// The server that was to start.
        server: &'static str,
        /// What was seen.
        reason: String,
        /// The end of the server's log.
        log: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// A program beside the server failed.
    #[error("{server}: `{program}` failed\n{output}\n{advice}")]
    ProgramFailed {
        /// The server it was for.
        server: &'static str,
        /// What was run.
        program: String,
        /// What it printed.
        output: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// Maven copied something, but no broker.
    #[error(
        "Kafka: no broker in {directory} though Maven said so; remove the directory and try again"
    )]
    NoBroker {
        /// Where it should be.
        directory: PathBuf,
    },
}

/// As it reads for people, the log in lines: a test shows it by `unwrap`.
impl fmt::Debug for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn io(server: &'static str, action: &str, source: std::io::Error) -> ServerError {
    ServerError::Io {
        server,
        action: action.into(),
        source,
    }
}
