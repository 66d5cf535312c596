//! The admin port of a configured consumer.

use oncegate::{ConsumerStatus, Readiness};
use oncegate_admin::{Admin, AdminServer, LastErrors, Metrics};

use crate::config::Config;
use crate::error::{Broker, Error};

/// Status handles, shared with the consumer and its source.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatusHandles {
    pub(crate) readiness: Readiness,
    pub(crate) status: ConsumerStatus,
    #[cfg(feature = "kafka")]
    pub(crate) kafka: oncegate::KafkaStatus,
    #[cfg(feature = "rabbitmq")]
    pub(crate) rabbitmq: oncegate::RabbitMqStatus,
}

/// Starts the server of the admin port, if `admin.listen` is set. Called before the consumer is
/// built, because metrics are lost until this has installed the recorder.
pub(crate) fn open(
    config: &Config,
    broker: Broker,
    handles: &StatusHandles,
    errors: LastErrors,
) -> Result<Option<AdminServer>, Error> {
    let Some(address) = config.admin_address()? else {
        return Ok(None);
    };
    let name = match broker {
        Broker::Kafka => config.text("kafka.topic"),
        Broker::RabbitMq => config.text("rabbitmq.queue"),
    };
    let name = name.unwrap_or_default();
    let mut admin = Admin::new()
        .listen(address)
        .consumer(name, handles.readiness.clone(), handles.status.clone())
        .last_errors(errors);
    match Metrics::installed().map_or_else(Metrics::install, Ok) {
        Ok(metrics) => admin = admin.metrics(metrics),
        Err(error) => {
            tracing::info!(%error, "admin port serves no /metrics: the program has installed its own metrics recorder")
        }
    }
    match broker {
        #[cfg(feature = "kafka")]
        Broker::Kafka => admin = admin.kafka(name, handles.kafka.clone()),
        #[cfg(feature = "rabbitmq")]
        Broker::RabbitMq => admin = admin.rabbitmq(name, handles.rabbitmq.clone()),
        #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
        _ => {}
    }
    let server = admin
        .serve()
        .map_err(|error| Error::misconfigured(format!("admin.listen: {error}")))?;
    tracing::info!("admin port http://{}/status", server.address());
    Ok(Some(server))
}
