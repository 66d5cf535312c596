//! Runs a consumer from its configuration.

use std::future::Future;

use oncegate::{
    Builder, Consumer, Handler, Inbox, Json, Shadow, ShadowReport, Store, TransactionalHandler,
    shutdown_signal,
};

use crate::admin::{self, StatusHandles};
use crate::config::Config;
use crate::error::{Broker, Error};
use crate::log;
use crate::store::AnyStore;

/// A builder without source, store and handler.
type EmptyBuilder = Builder<(), (), (), Json>;

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
        let report = (self.text("gate.mode") == Some("shadow")).then(ShadowReport::new);
        let shadow = report.clone();
        let build = |config: &Self, consumer: EmptyBuilder| {
            let store = match shadow {
                Some(report) => AnyStore::of(Shadow::new(config.store()?, report)),
                None => config.store()?,
            };
            Ok(consumer.store(store).handler(handler))
        };
        let result = self.run_built(build, shutdown).await;
        if let Some(report) = report {
            tracing::info!("shadow report: {report}");
        }
        result
    }

    /// Like [`Config::run_until`], with an inbox instead of a store. `store.url` is the database of
    /// the inbox, for the command line.
    ///
    /// # Errors
    /// As for [`Config::run`], and if `gate.mode` is `shadow`.
    pub async fn run_with_inbox<I: Inbox, H: TransactionalHandler<I>>(
        self,
        inbox: I,
        handler: H,
        shutdown: impl Future,
    ) -> Result<(), Error> {
        if self.text("gate.mode") == Some("shadow") {
            return Err(Error::misconfigured(
                "gate.mode: shadow cannot be used with an inbox; remove it",
            ));
        }
        let build = |_: &Self, consumer: EmptyBuilder| {
            Ok(consumer.inbox(inbox).transactional_handler(handler))
        };
        self.run_built(build, shutdown).await
    }

    /// Runs the consumer that `build` makes of a builder with the settings of `[gate]`.
    async fn run_built<T: Store + 'static, H: Handler>(
        self,
        build: impl FnOnce(&Self, EmptyBuilder) -> Result<Builder<(), T, H, Json>, Error>,
        shutdown: impl Future,
    ) -> Result<(), Error> {
        self.check_for_consumer()?;
        let broker = self.broker()?;
        let logging = log::init(&self)?;
        let handles = StatusHandles::default();
        let _admin_server = admin::open(&self, broker, &handles, logging.errors.clone())?;
        let consumer = build(&self, self.consumer(Consumer::builder())?)?
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
