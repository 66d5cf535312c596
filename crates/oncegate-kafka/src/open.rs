//! Opens a Kafka source: settings, broker, topics, group.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::SourceError;
use oncegate_core::source::Open;

use crate::context::Context;
use crate::dead_letters::DeadLetters;
use crate::kafka::Kafka;
use crate::outage::Outage;
use crate::poll;
use crate::shared::Shared;
use crate::source::KafkaSource;
use crate::{refusal, topics, watch};

#[async_trait]
impl Open for Kafka {
    type Source = KafkaSource;

    /// Held against how long the topics keep their messages when it is opened; a window that is too
    /// short is a warning.
    fn for_window(mut self, window: Duration) -> Self {
        self.window = Some(window);
        self
    }

    /// Checks the settings, waits for a broker, checks or creates the topics, and joins the group.
    ///
    /// Needs a tokio runtime, which dead letters are published on.
    async fn open(self) -> Result<KafkaSource, SourceError> {
        self.check()?;
        let shared = Arc::new(Shared::default());
        let outage = Arc::new(Outage::of(&self.brokers));
        let consumer = || {
            let context = Context::new(shared.clone(), &self, outage.clone());
            self.consumer_config()
                .create_with_context(context)
                .map_err(refusal::of_setting)
        };
        let first = consumer()?;
        let dead_letters = DeadLetters::open(
            self.producer_config(),
            self.destinations.clone(),
            outage.clone(),
        )
        .map_err(refusal::of_setting)?;
        let consumer = topics::check(&self, first, consumer, &outage).await?;

        poll::subscribe(&consumer, &self)?;
        self.status.of(&shared);
        let (watch, topic) = (
            self.watch_config(),
            self.topics.first().cloned().unwrap_or_default(),
        );
        let (watched, told, tries_again, stalled_after) = (
            shared.clone(),
            outage.clone(),
            self.tries_again(),
            self.stalled_after,
        );
        tracing::info!(topics = ?self.topics, group = self.group, "reading from Kafka");
        let source = KafkaSource::new(shared, Arc::new(dead_letters), self.body_limit);
        on_a_thread("oncegate-kafka", move || {
            poll::run(self, Arc::new(consumer))
        })?;
        on_a_thread("oncegate-kafka-watch", move || {
            watch::run(&watch, &topic, &watched, &told, tries_again, stalled_after)
        })?;
        Ok(source)
    }
}

fn on_a_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), SourceError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
    spawned
        .map(drop)
        .map_err(|error| SourceError::Unavailable(error.into()))
}
