//! Connects a Kafka source: checks settings, broker and topics, and joins the group.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{IdSource, SourceError};

use crate::client::connection_errors::ConnectionErrors;
use crate::context::CallbackContext;
use crate::dead_letters::DeadLetters;
use crate::kafka::Kafka;
use crate::poll;
use crate::shared::SharedState;
use crate::source::KafkaSource;
use crate::{client, topics, watch};

#[async_trait]
impl Connect for Kafka {
    type Source = KafkaSource;

    /// Refuses [`IdSource::message_id`], which Kafka messages do not have.
    fn check_id(&self, id: &IdSource) -> Result<(), SourceError> {
        if !id.reads_message_id() {
            return Ok(());
        }
        Err(SourceError::misconfigured(
            "id",
            "IdSource::message_id() reads a property of AMQP that Kafka messages do not have, so every message would be a dead letter",
            "use IdSource::header(\"…\"), IdSource::key(), IdSource::json_pointer(\"/…\") or IdSource::body_hash()",
        ))
    }

    /// Checks the settings, waits for a broker, checks or creates the topics, and joins the group.
    ///
    /// Logs a warning if the topics retain messages for longer than the dedup window. Requires a
    /// tokio runtime, on which dead letters are published.
    async fn connect(mut self, options: ConnectOptions) -> Result<KafkaSource, SourceError> {
        self.window = options.dedup_window;
        self.check()?;
        let shared = Arc::new(SharedState::default());
        let connection_errors = Arc::new(ConnectionErrors::new(&self.brokers));
        let new_consumer = || {
            let context = CallbackContext::new(shared.clone(), &self, connection_errors.clone());
            self.consumer_config()
                .create_with_context(context)
                .map_err(client::error::from_config)
        };
        let first_consumer = new_consumer()?;
        let dead_letters = DeadLetters::open(
            self.producer_config(),
            self.destinations.clone(),
            connection_errors.clone(),
        )
        .map_err(client::error::from_config)?;
        let consumer =
            topics::check(&self, first_consumer, new_consumer, &connection_errors).await?;

        poll::subscribe(&consumer, &self)?;
        self.status.attach(&shared);
        let (watch_config, topics) = (self.watch_config(), self.topics.clone());
        let (watch_shared, watch_errors, reconnect_backoff_max, stalled_after) = (
            shared.clone(),
            connection_errors.clone(),
            self.reconnect_backoff_max(),
            self.stalled_after,
        );
        tracing::info!(topics = ?self.topics, group = self.group, "reading from Kafka");
        let source = KafkaSource::new(shared, Arc::new(dead_letters), self.body_limit);
        spawn_thread("oncegate-kafka", move || {
            poll::run(self, Arc::new(consumer))
        })?;
        spawn_thread("oncegate-kafka-watch", move || {
            watch::run(
                &watch_config,
                &topics,
                &watch_shared,
                &watch_errors,
                reconnect_backoff_max,
                stalled_after,
            )
        })?;
        Ok(source)
    }
}

fn spawn_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), SourceError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
    spawned.map(drop).map_err(|error| {
        SourceError::Unavailable(
            format!("cannot start a thread ({error}); check the thread limit of the process")
                .into(),
        )
    })
}
