//! Whether the servers are there, before anything is started.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use oncegate::{Persistence, Redis, Store};

use super::{Error, Servers};
use crate::cli::{Broker, Guaranteed, StoreKind};

/// How long each server may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server of the demo, by its option and its variable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named(pub(super) &'static str, pub(super) &'static str);

pub(super) const REDIS: Named = Named("--redis", "ONCEGATE_REDIS");
#[cfg(feature = "kafka")]
pub(super) const KAFKA: Named = Named("--kafka", "ONCEGATE_KAFKA");
#[cfg(feature = "rabbitmq")]
pub(super) const RABBITMQ: Named = Named("--rabbitmq", "ONCEGATE_RABBITMQ");

impl Named {
    /// One line: the option, and what is wrong with what it names.
    pub(super) fn wrong(self, problem: impl Display) -> Error {
        format!("{} (or {}): {problem}", self.0, self.1).into()
    }
}

/// Asks all that the run needs, at the same time.
///
/// # Errors
/// A line for each that does not answer, or does not let us: its option, what is wrong, and what to
/// do.
pub(super) async fn check(
    servers: &Servers,
    broker: Broker,
    store: StoreKind,
    guaranteed: Guaranteed,
) -> Result<(), Error> {
    let (store, broker) = tokio::join!(
        check_store(servers, store, guaranteed),
        check_broker(servers, broker)
    );
    match (store, broker) {
        (Err(store), Err(broker)) => Err(format!("{store}\npayments: {broker}").into()),
        (store, broker) => store.and(broker),
    }
}

async fn check_store(
    servers: &Servers,
    store: StoreKind,
    guaranteed: Guaranteed,
) -> Result<(), Error> {
    if store != StoreKind::Redis {
        return Ok(());
    }
    let store = Redis::at(servers.redis()?);
    let asked = async {
        store.preflight(guaranteed.guarantee()).await?;
        if guaranteed == Guaranteed::AtMostOnce {
            store.persistence().await.map(Some)
        } else {
            Ok(None)
        }
    };
    in_time(REDIS, async {
        match asked.await {
            Ok(Some(Persistence::Volatile(why))) => Err(REDIS.wrong(format!(
                "at most once needs a store that does not forget, and {why}"
            ))),
            Ok(_) => Ok(()),
            Err(error) => Err(REDIS.wrong(error)),
        }
    })
    .await
}

async fn check_broker(servers: &Servers, broker: Broker) -> Result<(), Error> {
    match broker {
        #[cfg(feature = "kafka")]
        Broker::Kafka => super::kafka::check(&servers.kafka()?, PATIENCE).await,
        #[cfg(feature = "rabbitmq")]
        Broker::Rabbitmq => {
            let url = servers.rabbitmq()?;
            in_time(RABBITMQ, super::rabbitmq::check(&url)).await
        }
        broker => Err(super::wire::not_in_this_build(broker)),
    }
}

async fn in_time(
    named: Named,
    asked: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
        Err(named.wrong(format!("no answer within {PATIENCE:?}; is it running, are host and port right, and does that port speak it?")))
    })
}
