//! The admin port of a consumer that is wired from its configuration.

use oncegate::{ConsumerStatus, Readiness};
use oncegate_admin::{Admin, LastErrors, Metrics, AdminServer};

use crate::config::Config;
use crate::error::{Broker, Error};

/// What the admin port asks: clones of these are with the consumer and its source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watched {
    pub(crate) readiness: Readiness,
    pub(crate) status: ConsumerStatus,
    #[cfg(feature = "kafka")]
    pub(crate) kafka: oncegate::KafkaStatus,
    #[cfg(feature = "rabbitmq")]
    pub(crate) rabbitmq: oncegate::RabbitMqStatus,
}

/// Opens the port, if one is wanted. Called before the consumer is built: what is counted before
/// goes nowhere.
pub(crate) fn open(
    config: &Config,
    broker: Broker,
    watched: &Watched,
    errors: LastErrors,
) -> Result<Option<AdminServer>, Error> {
    let Some(address) = config.listens_at()? else {
        return Ok(None);
    };
    let name = match broker {
        Broker::Kafka => config.text("kafka.topic"),
        Broker::RabbitMq => config.text("rabbitmq.queue"),
    };
    let name = name.unwrap_or_default();
    let mut admin = Admin::new()
        .listen(address)
        .consumer(name, watched.readiness.clone(), watched.status.clone())
        .last_errors(errors);
    match Metrics::install() {
        Ok(metrics) => admin = admin.metrics(metrics),
        // The program keeps its metrics itself.
        Err(error) => tracing::info!(%error, "the admin port has no /metrics"),
    }
    match broker {
        #[cfg(feature = "kafka")]
        Broker::Kafka => admin = admin.kafka(name, watched.kafka.clone()),
        #[cfg(feature = "rabbitmq")]
        Broker::RabbitMq => admin = admin.rabbitmq(name, watched.rabbitmq.clone()),
        #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
        _ => {}
    }
    let serving = admin
        .serve()
        .map_err(|error| Error::misconfigured(format!("admin.listen: {error}")))?;
    tracing::info!("admin port http://{}/status", serving.address());
    Ok(Some(serving))
}
