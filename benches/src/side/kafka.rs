//! The sides with the plain Kafka client, without and with hand-written deduplication.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::Message as _;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{BorrowedMessage, Headers as _};
use tokio::sync::Semaphore;

use super::latency::sent_ago;
use super::{DedupMethod, HandlerWork, Id, Measurement, MessageSource, Meter, Task};
use crate::BenchResult;

/// The time that a waiting handler waits.
pub(super) const WAIT: Duration = Duration::from_millis(1);
/// How many of them wait concurrently: the same number as in flight in oncegate.
const AT_ONCE: usize = 512;

pub(super) async fn run(task: &Task) -> BenchResult<Measurement> {
    let meter = Arc::new(Meter::new(task.messages, task.servers.clone()));
    consume(task, &meter).await?;
    meter.took()
}

/// Consumes until all messages are measured.
pub(super) async fn consume(task: &Task, meter: &Arc<Meter>) -> BenchResult<()> {
    let MessageSource::Kafka {
        brokers,
        topic,
        group,
        id,
    } = &task.from
    else {
        return Err("this is no Kafka topic".into());
    };
    let mut config = ClientConfig::new();
    // The only setting that is not the default of librdkafka: its pause of one second after a full
    // queue would make the client slow.
    config
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .set("fetch.queue.backoff.ms", "10");
    config.set("auto.offset.reset", "earliest");
    let consumer: StreamConsumer = config.create()?;
    consumer.subscribe(&[topic])?;
    match (&task.method, task.work) {
        (DedupMethod::Bare, HandlerWork::Nothing) => {
            while !meter.is_over() {
                let message = consumer.recv().await?;
                std::hint::black_box(message.payload());
                meter.saw();
            }
        }
        (DedupMethod::Bare, HandlerWork::NotesLatency) => {
            while !meter.is_over() {
                let message = consumer.recv().await?;
                meter.saw_after(sent_ago(message.payload().unwrap_or_default()));
            }
        }
        (DedupMethod::Bare, HandlerWork::Waits) => {
            let places = Arc::new(Semaphore::new(AT_ONCE));
            while !meter.is_over() {
                let place = places.clone().acquire_owned().await?;
                tokio::select! {
                    message = consumer.recv() => {
                        std::hint::black_box(message?.payload());
                        let meter = meter.clone();
                        tokio::spawn(async move {
                            tokio::time::sleep(WAIT).await;
                            meter.saw();
                            drop(place);
                        });
                    }
                    () = meter.over() => {}
                }
            }
        }
        (DedupMethod::Naive { redis }, work) => {
            let mut store = redis::Client::open(redis.as_str())?
                .get_multiplexed_async_connection()
                .await?;
            while !meter.is_over() {
                let message = consumer.recv().await?;
                if super::store::is_first(&mut store, id_of(&message, *id).unwrap_or_default())
                    .await?
                {
                    if work == HandlerWork::Waits {
                        tokio::time::sleep(WAIT).await;
                    }
                    meter.saw();
                }
            }
        }
        (DedupMethod::Gated { .. }, _) => return Err("this method has a gate".into()),
    }
    tokio::time::sleep(task.linger).await;
    Ok(())
}

fn id_of<'a>(message: &'a BorrowedMessage<'_>, id: Id) -> Option<&'a [u8]> {
    match id {
        Id::Key => message.key(),
        Id::Header => {
            message
                .headers()?
                .iter()
                .find(|header| header.key == "id")?
                .value
        }
    }
}
