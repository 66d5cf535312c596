//! The addresses of the servers that all tests share.

use std::fmt;

use crate::servers::{
    KafkaServer, PostgresServer, RabbitServer, RedisOptions, RedisPersistence, RedisServer,
    ServerError,
};

/// The variable with Kafka's bootstrap servers, as `host:port`.
const KAFKA: &str = "ONCEGATE_KAFKA";
/// The variable with RabbitMQ's address, as an `amqp://` URL.
const RABBITMQ: &str = "ONCEGATE_RABBITMQ";
/// The variable with Redis's address, as a `redis://` URL.
const REDIS: &str = "ONCEGATE_REDIS";
/// The variable with PostgreSQL's address, as a `postgres://` URL.
const POSTGRES: &str = "ONCEGATE_POSTGRES";

/// The address of a server is not configured.
#[derive(thiserror::Error)]
#[error("no address for {server}: run `cargo xtask test`, or set {variable}={example}")]
pub struct MissingServer {
    server: &'static str,
    variable: &'static str,
    example: &'static str,
}

/// Prints the text of `Display`, because `unwrap` in a test prints the `Debug` form.
impl fmt::Debug for MissingServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The bootstrap servers of the Kafka broker that all tests share.
///
/// # Errors
/// [`MissingServer`] when `ONCEGATE_KAFKA` is not set or empty.
pub fn kafka_brokers() -> Result<String, MissingServer> {
    address("Kafka", KAFKA, "127.0.0.1:9092")
}

/// The URL of the RabbitMQ node that all tests share.
///
/// # Errors
/// [`MissingServer`] when `ONCEGATE_RABBITMQ` is not set or empty.
pub fn rabbitmq_url() -> Result<String, MissingServer> {
    address(
        "RabbitMQ",
        RABBITMQ,
        "amqp://guest:guest@127.0.0.1:5672/%2f",
    )
}

/// The URL of the Redis server that all tests share. It has `appendfsync everysec` and no eviction.
///
/// # Errors
/// [`MissingServer`] when `ONCEGATE_REDIS` is not set or empty.
pub fn redis_url() -> Result<String, MissingServer> {
    address("Redis", REDIS, "redis://127.0.0.1:6379")
}

/// The URL of the PostgreSQL database that all tests share, for its superuser.
///
/// # Errors
/// [`MissingServer`] when `ONCEGATE_POSTGRES` is not set or empty.
pub fn postgres_url() -> Result<String, MissingServer> {
    address(
        "PostgreSQL",
        POSTGRES,
        "postgres://postgres@127.0.0.1:5432/postgres",
    )
}

fn address(
    server: &'static str,
    variable: &'static str,
    example: &'static str,
) -> Result<String, MissingServer> {
    std::env::var(variable)
        .ok()
        .filter(|address| !address.is_empty())
        .ok_or(MissingServer {
            server,
            variable,
            example,
        })
}

/// One Kafka broker, one RabbitMQ node, one Redis server and one PostgreSQL server. Each is named
/// by an environment variable or was started by [`from_env_or_start`](Self::from_env_or_start).
///
/// Dropping the value stops the servers that it started.
pub struct Servers {
    kafka: Provided<KafkaServer>,
    rabbitmq: Provided<RabbitServer>,
    redis: Provided<RedisServer>,
    postgres: Provided<PostgresServer>,
}

/// A server that an environment variable names, or that this process started.
enum Provided<S> {
    Configured(String),
    Started(S),
}

impl Servers {
    /// Uses the servers that environment variables name and starts the others in parallel.
    ///
    /// # Errors
    /// The error of the first server that did not start; the others are stopped.
    pub fn from_env_or_start() -> Result<Self, ServerError> {
        std::thread::scope(|scope| {
            let kafka = scope.spawn(|| provide(kafka_brokers(), KafkaServer::start));
            let rabbitmq = scope.spawn(|| provide(rabbitmq_url(), RabbitServer::start));
            let postgres = scope.spawn(|| provide(postgres_url(), || PostgresServer::start(&[])));
            let redis = provide(redis_url(), start_shared_redis);
            let kafka = kafka
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let rabbitmq = rabbitmq
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let postgres = postgres
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok(Self {
                kafka: kafka?,
                rabbitmq: rabbitmq?,
                redis: redis?,
                postgres: postgres?,
            })
        })
    }

    /// The bootstrap servers of Kafka.
    pub fn kafka_brokers(&self) -> String {
        self.kafka.address(KafkaServer::brokers)
    }

    /// The URL of RabbitMQ.
    pub fn rabbitmq_url(&self) -> String {
        self.rabbitmq.address(RabbitServer::url)
    }

    /// The URL of Redis.
    pub fn redis_url(&self) -> String {
        self.redis.address(RedisServer::url)
    }

    /// The URL of PostgreSQL.
    pub fn postgres_url(&self) -> String {
        self.postgres.address(PostgresServer::url)
    }

    /// The environment variables with which [`kafka_brokers`], [`rabbitmq_url`], [`redis_url`] and
    /// [`postgres_url`] in a child process return these servers.
    pub fn variables(&self) -> [(&'static str, String); 4] {
        [
            (KAFKA, self.kafka_brokers()),
            (RABBITMQ, self.rabbitmq_url()),
            (REDIS, self.redis_url()),
            (POSTGRES, self.postgres_url()),
        ]
    }
}

/// Redis as the guarantees require it: `appendfsync everysec`, no eviction.
fn start_shared_redis() -> Result<RedisServer, ServerError> {
    RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond))
}

fn provide<S>(
    configured: Result<String, MissingServer>,
    start: fn() -> Result<S, ServerError>,
) -> Result<Provided<S>, ServerError> {
    match configured {
        Ok(address) => Ok(Provided::Configured(address)),
        Err(MissingServer { .. }) => start().map(Provided::Started),
    }
}

impl<S> Provided<S> {
    fn address(&self, address_of: fn(&S) -> String) -> String {
        match self {
            Self::Configured(address) => address.clone(),
            Self::Started(server) => address_of(server),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_address_says_what_to_do() {
        let error = address("Redis", "ONCEGATE_NEVER_SET", "redis://127.0.0.1:6379").unwrap_err();
        assert_eq!(
            error.to_string(),
            "no address for Redis: run `cargo xtask test`, or set ONCEGATE_NEVER_SET=redis://127.0.0.1:6379"
        );
    }
}
