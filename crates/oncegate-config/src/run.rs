//! Runs a consumer from its configuration.

use std::future::Future;

use oncegate::{Consumer, Handler, Shadow, ShadowReport, shutdown_signal};

use crate::admin::{self, StatusHandles};
use crate::config::Config;
use crate::error::{Broker, Error};
use crate::log;
use crate::store::AnyStore;

impl Config {
    /// Builds the consumer with its source and store, opens the admin port, and handles messages
    /// until SIGTERM or Ctrl-C; then drains and returns. Bodies are JSON; for other formats, use a
    /// builder with [`Config::consumer`].
    ///
    /// Logs on standard error, unless the program has installed a subscriber.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] names the key to change; [`Error::Consumer`] has any other failure
    /// of the consumer.
    pub async fn run<H: Handler>(self, handler: H) -> Result<(), Error> {
        self.run_until(handler, shutdown_signal()).await
    }

    /// Like [`Config::run`], until `shutdown` completes.
    ///
    /// # Errors
    /// As for [`Config::run`].
    pub async fn run_until<H: Handler>(
        self,
        handler: H,
        shutdown: impl Future,
    ) -> Result<(), Error> {
        self.check_for_consumer()?;
        let broker = self.broker()?;
        let logging = log::init(&self)?;
        let handles = StatusHandles::default();
        let _admin_server = admin::open(&self, broker, &handles, logging.errors.clone())?;
        let report = (self.text("gate.mode") == Some("shadow")).then(ShadowReport::new);
        let store = match &report {
            Some(report) => AnyStore::of(Shadow::new(self.store()?, report.clone())),
            None => self.store()?,
        };
        let consumer = self
            .consumer(Consumer::builder())?
            .store(store)
            .handler(handler);
        let consumer = consumer
            .readiness(handles.readiness.clone())
            .status(handles.status.clone());
        let result: Result<(), oncegate::Error> = match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => {
                consumer
                    .source(self.kafka()?.status(handles.kafka.clone()))
                    .run_until(shutdown)
                    .await
            }
            #[cfg(feature = "rabbitmq")]
            Broker::RabbitMq => {
                consumer
                    .source(self.rabbitmq()?.status(handles.rabbitmq.clone()))
                    .run_until(shutdown)
                    .await
            }
            #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
            _ => {
                drop((consumer, shutdown));
                Err(feature_missing(broker))
            }
        };
        if let Some(report) = report {
            tracing::info!("shadow report: {report}");
        }
        result.map_err(|error| self.explain(error))
    }
}

/// The error for a broker that this build does not include.
#[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
fn feature_missing(broker: Broker) -> oncegate::Error {
    let feature = match broker {
        Broker::Kafka => "add the feature `kafka` of oncegate-config",
        Broker::RabbitMq => "add the feature `rabbitmq` of oncegate-config",
    };
    let problem = format!(
        "[{}] is configured, and this program was built without this broker",
        broker.section()
    );
    oncegate::Error::Misconfigured {
        setting: "broker",
        problem,
        remedy: feature,
    }
}
