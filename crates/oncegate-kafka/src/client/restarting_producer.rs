//! An idempotent producer with `acks=all` that is replaced when it can no longer publish.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::internal::Lock;
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use super::connection_errors::ConnectionErrors;
use super::log::LogContext;

/// How long a producer whose message timed out may take to fetch the metadata of its topic before
/// it is replaced.
const METADATA_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a message waits for room in the queue of its producer.
const ENQUEUE_TIMEOUT: Duration = Duration::from_secs(30);

type OncegateProducer = FutureProducer<LogContext>;

/// Whether this code says that the message was not accepted: the broker rejected its batch, because
/// of this message or of another one, or the topic is missing or not permitted. With any other code,
/// the message was not sent or its outcome is unknown.
pub(crate) fn is_rejection(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    !matches!(
        code,
        E::MessageTimedOut | E::QueueFull | E::PurgeQueue | E::PurgeInflight | E::Fatal
    )
}

/// Two producers that differ only in the size of their requests.
pub(crate) struct ProducerPair {
    /// Sends several messages per request.
    pub(crate) batches: RestartingProducer,
    /// Sends one message per request. The broker acknowledges a batch as a whole, so only a message
    /// that is sent alone can be identified as the rejected one.
    pub(crate) singles: RestartingProducer,
}

impl ProducerPair {
    /// Starts the producer of batches. The producer of single messages starts when it is first
    /// needed.
    pub(crate) fn start(
        config: ClientConfig,
        connection_errors: Arc<ConnectionErrors>,
    ) -> Result<Self, KafkaError> {
        let mut singles_config = config.clone();
        singles_config.set("batch.num.messages", "1");
        let batches = RestartingProducer::new(config, connection_errors.clone());
        drop(batches.current()?);
        Ok(Self {
            batches,
            singles: RestartingProducer::new(singles_config, connection_errors),
        })
    }
}

/// A producer that is replaced after a fatal error, or if it has lost its broker metadata.
pub(crate) struct RestartingProducer {
    config: ClientConfig,
    connection_errors: Arc<ConnectionErrors>,
    current: Lock<Option<OncegateProducer>>,
}

impl RestartingProducer {
    fn new(config: ClientConfig, connection_errors: Arc<ConnectionErrors>) -> Self {
        Self {
            config,
            connection_errors,
            current: Lock::default(),
        }
    }

    /// Sends a record and waits for the confirm. Then replaces the producer if it has a fatal error
    /// or has lost its broker metadata.
    pub(crate) async fn send(
        &self,
        record: FutureRecord<'_, [u8], [u8]>,
    ) -> Result<(), KafkaError> {
        let (topic, producer) = (record.topic.to_owned(), self.current()?);
        let sent = producer.send(record, ENQUEUE_TIMEOUT).await;
        match &sent {
            Err(_) if producer.client().fatal_error().is_some() => {
                self.replace(&producer, "fatal error")
            }
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::MessageTimedOut), _)) => {
                self.replace_if_disconnected(producer, topic).await
            }
            _ => {}
        }
        sent.map(|_| ()).map_err(|(error, _)| error)
    }

    /// The current producer, which is created if there is none.
    fn current(&self) -> Result<OncegateProducer, KafkaError> {
        let mut producer = self.current.lock();
        match &*producer {
            Some(producer) => Ok(producer.clone()),
            None => Ok(producer
                .insert(
                    self.config
                        .create_with_context(LogContext(self.connection_errors.clone()))?,
                )
                .clone()),
        }
    }

    /// Replaces the producer if it cannot fetch the topic's metadata: a producer that has lost its
    /// broker metadata may never connect again (see `lost_metadata`). If no broker is available,
    /// the new producer fails too, and the message is retried.
    async fn replace_if_disconnected(&self, producer: OncegateProducer, topic: String) {
        let fetched = tokio::task::spawn_blocking(move || {
            let answer = producer
                .client()
                .fetch_metadata(Some(&topic), METADATA_TIMEOUT);
            (
                answer.is_ok_and(|answer| !answer.brokers().is_empty()),
                producer,
            )
        });
        if let Ok((false, producer)) = fetched.await {
            self.replace(&producer, "cannot fetch metadata");
            drop_on_thread(Some(producer));
        }
    }

    /// Removes a failed producer, unless another call already has removed it. The next call of
    /// `send` creates a new one. A fatal error of an idempotent producer is permanent.
    fn replace(&self, failed: &OncegateProducer, reason: &str) {
        let mut producer = self.current.lock();
        if producer
            .as_ref()
            .is_some_and(|current| current.client().native_ptr() == failed.client().native_ptr())
        {
            tracing::warn!(
                reason,
                "producer replaced; unconfirmed messages are published again; if this repeats, check the brokers' logs"
            );
            drop_on_thread(producer.take());
        }
    }
}

impl Drop for RestartingProducer {
    fn drop(&mut self) {
        drop_on_thread(self.current.lock().take());
    }
}

/// Drops a producer on a new thread: dropping joins the producer's thread, and a thread of the
/// tokio runtime must not block.
fn drop_on_thread(producer: Option<OncegateProducer>) {
    // If no thread can be spawned, the producer is dropped on the current thread.
    let _ = std::thread::Builder::new()
        .name("oncegate-kafka-drop".into())
        .spawn(move || drop(producer));
}
