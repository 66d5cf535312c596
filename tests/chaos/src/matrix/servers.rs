//! The servers that all cells of the matrix share.

use std::collections::BTreeMap;

use oncegate_testkit::servers::{
    KafkaServer, PostgresServer, RabbitServer, RedisOptions, RedisPersistence, RedisServer,
};
use sqlx::{Connection, PgConnection};
use tokio::runtime::Runtime;

use super::consumer::TestedStore;
use crate::Error;
use crate::worker::Broker;

/// One server of each kind, and a runtime for their clients.
pub struct MatrixServers {
    kafka: KafkaServer,
    rabbit: RabbitServer,
    redis: RedisServer,
    postgres: PostgresServer,
    pub(crate) runtime: Runtime,
}

impl MatrixServers {
    /// Starts them in parallel. Kafka allows session timeouts of one second.
    ///
    /// # Errors
    /// The error of the first server that does not start.
    pub fn start() -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        std::thread::scope(|scope| {
            let kafka = scope.spawn(KafkaServer::start);
            let rabbit = scope.spawn(RabbitServer::start);
            // Each process of a cell with an inbox has up to 16 sessions.
            let postgres = scope.spawn(|| PostgresServer::start(&[("max_connections", "400")]));
            let redis =
                RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond))?;
            let kafka = kafka.join().map_err(|_| "starting Kafka panicked")??;
            let rabbit = rabbit.join().map_err(|_| "starting RabbitMQ panicked")??;
            let postgres = postgres
                .join()
                .map_err(|_| "starting PostgreSQL panicked")??;
            Ok(Self {
                kafka,
                rabbit,
                redis,
                postgres,
                runtime,
            })
        })
    }

    pub(crate) fn url(&self, broker: Broker) -> String {
        match broker {
            Broker::Kafka => self.kafka.brokers(),
            Broker::Rabbitmq => self.rabbit.url(),
        }
    }

    pub(crate) fn rabbit_port(&self) -> u16 {
        self.rabbit.port()
    }

    pub(crate) fn redis(&self) -> String {
        self.redis.url()
    }

    pub(crate) fn postgres(&self) -> String {
        self.postgres.url()
    }

    /// The lines of RabbitMQ's log that refuse an acknowledgement (406), of all groups.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn refused_acknowledgements(&self) -> Result<Vec<String>, Error> {
        let text = std::fs::read(self.rabbit.directory().join("server.log"))?;
        Ok(crate::servers::refused_acknowledgements(
            &String::from_utf8_lossy(&text),
        ))
    }

    /// The versions of the servers and the tested commit.
    pub fn versions(&self) -> BTreeMap<String, String> {
        let text = self.redis.reply("INFO server").unwrap_or_default();
        let redis = text
            .lines()
            .find_map(|line| line.strip_prefix("redis_version:"))
            .unwrap_or("unknown")
            .trim()
            .to_owned();
        let rabbit = self
            .rabbit
            .control(&["-q", "version"])
            .unwrap_or_else(|_| "unknown".into())
            .trim()
            .to_owned();
        let kafka = crate::servers::kafka_version();
        let postgres = self.runtime.block_on(async {
            let mut connection = PgConnection::connect(&self.postgres()).await?;
            let version = sqlx::query_scalar("SHOW server_version");
            version.fetch_one(&mut connection).await
        });
        let commit = crate::servers::commit().to_owned();
        let named = [
            ("Redis", redis),
            ("RabbitMQ", rabbit),
            ("Kafka", kafka.unwrap_or_else(|| "unknown".into())),
            ("PostgreSQL", postgres.unwrap_or_else(|_| "unknown".into())),
            ("commit", commit),
        ];
        named
            .into_iter()
            .map(|(name, version)| (name.to_owned(), version))
            .collect()
    }
}

impl TestedStore {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Sqlite => "sqlite",
            Self::PostgresInbox => "postgres-inbox",
            Self::PostgresBatches => "postgres-batches",
        }
    }

    /// Whether messages are recorded by an inbox.
    pub(crate) fn is_inbox(self) -> bool {
        matches!(self, Self::PostgresInbox | Self::PostgresBatches)
    }
}
