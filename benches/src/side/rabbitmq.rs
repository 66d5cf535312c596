//! The sides with the plain RabbitMQ client, without and with hand-written deduplication.

use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Fuse, FusedFuture, FutureExt};
use futures_util::stream::{FuturesOrdered, StreamExt};
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};

use super::latency::sent_ago;
use super::{DedupMethod, HandlerWork, Measurement, MessageSource, Meter, Task};
use crate::BenchResult;

pub(super) async fn run(task: &Task) -> BenchResult<Measurement> {
    let meter = Arc::new(Meter::new(task.messages, task.servers.clone()));
    consume(task, &meter).await?;
    meter.took()
}

/// Consumes until all messages are measured.
pub(super) async fn consume(task: &Task, meter: &Arc<Meter>) -> BenchResult<()> {
    let MessageSource::RabbitMq {
        url,
        queue,
        prefetch,
    } = &task.from
    else {
        return Err("this is no RabbitMQ queue".into());
    };
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .basic_qos(*prefetch, BasicQosOptions::default())
        .await?;
    let options = BasicConsumeOptions::default();
    let mut deliveries = channel
        .basic_consume(
            queue.as_str().into(),
            "bench".into(),
            options,
            FieldTable::default(),
        )
        .await?;
    match &task.method {
        DedupMethod::Bare if task.work == HandlerWork::Waits => {
            // As many at once as the prefetch allows; acknowledged in the order in which they came,
            // as oncegate does it: what is over with one frame, while the next ones go on.
            let mut running = FuturesOrdered::new();
            let mut over = None;
            let mut acknowledging = pin!(Fuse::terminated());
            while !meter.is_over() {
                tokio::select! {
                    delivery = deliveries.next() => {
                        let (delivery, meter) = (delivery.ok_or("the queue ended")??, meter.clone());
                        running.push_back(tokio::spawn(async move {
                            tokio::time::sleep(super::kafka::WAIT).await;
                            handle(&meter, HandlerWork::Waits, &delivery.data);
                            delivery.delivery_tag
                        }));
                    }
                    Some(tag) = running.next() => over = Some(tag?),
                    acknowledged = &mut acknowledging => acknowledged?,
                    () = meter.over() => {}
                }
                if acknowledging.is_terminated()
                    && let Some(mut last) = over.take()
                {
                    while let Some(Some(tag)) = running.next().now_or_never() {
                        last = tag?;
                    }
                    acknowledging.set(
                        channel
                            .basic_ack(last, BasicAckOptions { multiple: true })
                            .fuse(),
                    );
                }
            }
        }
        DedupMethod::Bare => {
            // What has been handled is acknowledged with one frame, a quarter of the prefetch at a
            // time, and at once when nothing more is there.
            let chunk = usize::from(*prefetch).div_ceil(4);
            while !meter.is_over() {
                let delivery = deliveries.next().await.ok_or("the queue ended")??;
                handle(meter, task.work, &delivery.data);
                let mut last = delivery.delivery_tag;
                for _ in 1..chunk {
                    if meter.is_over() {
                        break;
                    }
                    let Some(delivery) = deliveries.next().now_or_never() else {
                        break;
                    };
                    let delivery = delivery.ok_or("the queue ended")??;
                    handle(meter, task.work, &delivery.data);
                    last = delivery.delivery_tag;
                }
                channel
                    .basic_ack(last, BasicAckOptions { multiple: true })
                    .await?;
            }
        }
        DedupMethod::Naive { redis } => {
            let mut store = redis::Client::open(redis.as_str())?
                .get_multiplexed_async_connection()
                .await?;
            while !meter.is_over() {
                let delivery = deliveries.next().await.ok_or("the queue ended")??;
                let id = delivery
                    .properties
                    .message_id()
                    .as_ref()
                    .map_or("", |id| id.as_str());
                if super::store::is_first(&mut store, id.as_bytes()).await? {
                    if task.work == HandlerWork::Waits {
                        tokio::time::sleep(super::kafka::WAIT).await;
                    }
                    meter.saw();
                }
                delivery.ack(BasicAckOptions::default()).await?;
            }
        }
        DedupMethod::Gated { .. } => return Err("this method has a gate".into()),
    }
    connection.close(200, "over".into()).await?;
    Ok(())
}

fn handle(meter: &Meter, work: HandlerWork, body: &[u8]) {
    match work {
        HandlerWork::NotesLatency => meter.saw_after(sent_ago(body)),
        HandlerWork::Nothing | HandlerWork::Waits => {
            std::hint::black_box(body);
            meter.saw();
        }
    }
}
