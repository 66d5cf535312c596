//! A consumer that is wired from its configuration alone.

use std::future::Future;

use oncegate::{Consumer, Handler, Shadow, ShadowReport, shutdown_signal};

use crate::admin::{self, Watched};
use crate::config::Config;
use crate::error::{Broker, Error};
use crate::log;
use crate::store::AnyStore;

impl Config {
    /// Wires source, store, gate, log and admin port, and handles messages until SIGTERM or Ctrl-C;
    /// then it drains and returns. Bodies are JSON; for others, and for whatever else a file cannot
    /// say, wire a builder with [`Config::consumer`].
    ///
    /// It logs on standard error, unless the program has installed a subscriber of its own.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] names the key that has to be changed; [`Error::Consumer`] is what
    /// the consumer ended with.
    pub async fn run<H: Handler>(self, handler: H) -> Result<(), Error> {
        self.run_until(handler, shutdown_signal()).await
    }

    /// The same until `shutdown` is over.
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
        let told = log::begin(&self)?;
        let watched = Watched::default();
        let _serving = admin::open(&self, broker, &watched, told.errors.clone())?;
        let report = (self.text("gate.mode") == Some("trial")).then(ShadowReport::new);
        let store = match &report {
            Some(report) => AnyStore::of(Shadow::new(self.store()?, report.clone())),
            None => self.store()?,
        };
        let consumer = self
            .consumer(Consumer::builder())?
            .store(store)
            .handler(handler);
        let consumer = consumer
            .readiness(watched.readiness.clone())
            .status(watched.status.clone());
        let ended: Result<(), oncegate::Error> = match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => {
                consumer
                    .source(self.kafka()?.status(watched.kafka.clone()))
                    .run_until(shutdown)
                    .await
            }
            #[cfg(feature = "rabbitmq")]
            Broker::RabbitMq => {
                consumer
                    .source(self.rabbitmq()?.status(watched.rabbitmq.clone()))
                    .run_until(shutdown)
                    .await
            }
            #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
            _ => {
                drop((consumer, shutdown));
                Err(left_out(broker))
            }
        };
        if let Some(report) = report {
            tracing::info!("on trial: {report}");
        }
        ended.map_err(|error| self.explain(error))
    }
}

/// A broker that was left out when the program was built.
#[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
fn left_out(broker: Broker) -> oncegate::Error {
    let feature = match broker {
        Broker::Kafka => "add the feature `kafka` of oncegate-config",
        Broker::RabbitMq => "add the feature `rabbitmq` of oncegate-config",
    };
    let problem = format!(
        "[{}] is configured, and this program was built without it",
        broker.section()
    );
    oncegate::Error::Misconfigured {
        setting: "broker",
        problem,
        remedy: feature,
    }
}
