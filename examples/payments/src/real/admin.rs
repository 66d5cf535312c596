//! The admin port of a worker.

use std::net::SocketAddr;

use oncegate::{ConsumerStatus, Readiness};
use oncegate_admin::{Admin, AdminServer, LastErrors, Metrics};

use super::Error;
use crate::counters::Outcomes;

/// What the admin port asks: clones of these are with the consumer and its source.
#[derive(Clone, Debug, Default)]
pub(super) struct Watched {
    pub(super) readiness: Readiness,
    pub(super) status: ConsumerStatus,
    #[cfg(feature = "kafka")]
    pub(super) kafka: oncegate::KafkaStatus,
    #[cfg(feature = "rabbitmq")]
    pub(super) rabbitmq: oncegate::RabbitMqStatus,
}

/// Counts what happens in this process, and opens the port if one is wanted. Called once, before
/// the consumer is built.
///
/// # Errors
/// If the port cannot be opened.
pub(super) fn open(
    wanted: Option<SocketAddr>,
    watched: &Watched,
    errors: LastErrors,
) -> Result<(Outcomes, Option<AdminServer>), Error> {
    let Some(address) = wanted else {
        return Ok((Outcomes::install(), None));
    };
    let (metrics, recorder) = Metrics::recorder();
    let outcomes = Outcomes::install_beside(recorder);
    Metrics::begin();
    let admin = Admin::new().listen(address).consumer(
        "payments",
        watched.readiness.clone(),
        watched.status.clone(),
    );
    #[cfg(feature = "kafka")]
    let admin = admin.kafka("payments", watched.kafka.clone());
    #[cfg(feature = "rabbitmq")]
    let admin = admin.rabbitmq("payments", watched.rabbitmq.clone());
    let serving = admin.last_errors(errors).metrics(metrics).serve()?;
    eprintln!("payments: admin port http://{}/status", serving.address());
    Ok((outcomes, Some(serving)))
}
