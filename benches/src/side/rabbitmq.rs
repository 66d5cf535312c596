//! The bare RabbitMQ client, and the loop that one writes by hand.

use std::sync::Arc;

use futures_util::stream::FuturesOrdered;
use futures_util::{FutureExt, StreamExt};
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};

use super::latency::sent_ago;
use super::{From, Meter, Task, Took, Way, Work};
use crate::Outcome;

pub(super) async fn run(task: &Task) -> Outcome<Took> {
    let meter = Arc::new(Meter::new(task.messages, task.servers.clone()));
    consume(task, &meter).await?;
    meter.took()
}

/// Consumes until the meter is over.
pub(super) async fn consume(task: &Task, meter: &Arc<Meter>) -> Outcome<()> {
    let From::RabbitMq { url, queue, prefetch } = &task.from else { return Err("this is no RabbitMQ queue".into()) };
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(*prefetch, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut deliveries = channel.basic_consume(queue.as_str().into(), "bench".into(), options, FieldTable::default()).await?;
    // As oncegate does it: what has been handled is acknowledged with one frame, a quarter of the prefetch at a time, and at once
    // when nothing more is there.
    let chunk = usize::from(*prefetch).div_ceil(4);
    match &task.way {
        Way::Bare if task.work == Work::Waits => {
            // As many at once as the prefetch allows; acknowledged in the order in which they came, as below.
            let mut running = FuturesOrdered::new();
            while !meter.is_over() {
                tokio::select! {
                    delivery = deliveries.next() => {
                        let (delivery, meter) = (delivery.ok_or("the queue ended")??, meter.clone());
                        running.push_back(tokio::spawn(async move {
                            tokio::time::sleep(super::kafka::WAIT).await;
                            handle(&meter, Work::Waits, &delivery.data, delivery.acker)
                        }));
                    }
                    Some(handled) = running.next() => {
                        let mut last = handled?;
                        for _ in 1..chunk {
                            let Some(Some(handled)) = running.next().now_or_never() else { break };
                            last = handled?;
                        }
                        last.ack(BasicAckOptions { multiple: true }).await?;
                    }
                    () = meter.over() => {}
                }
            }
        }
        Way::Bare => {
            while !meter.is_over() {
                let delivery = deliveries.next().await.ok_or("the queue ended")??;
                let mut last = handle(meter, task.work, &delivery.data, delivery.acker);
                for _ in 1..chunk {
                    if meter.is_over() {
                        break;
                    }
                    let Some(delivery) = deliveries.next().now_or_never() else { break };
                    let delivery = delivery.ok_or("the queue ended")??;
                    last = handle(meter, task.work, &delivery.data, delivery.acker);
                }
                last.ack(BasicAckOptions { multiple: true }).await?;
            }
        }
        Way::Naive { redis } => {
            let mut store = redis::Client::open(redis.as_str())?.get_multiplexed_async_connection().await?;
            while !meter.is_over() {
                let delivery = deliveries.next().await.ok_or("the queue ended")??;
                let id = delivery.properties.message_id().as_ref().map_or("", |id| id.as_str());
                if super::store::is_first(&mut store, id.as_bytes()).await? {
                    if task.work == Work::Waits {
                        tokio::time::sleep(super::kafka::WAIT).await;
                    }
                    meter.saw();
                }
                delivery.ack(BasicAckOptions::default()).await?;
            }
        }
        Way::Gated { .. } => return Err("this way has a gate".into()),
    }
    connection.close(200, "over".into()).await?;
    Ok(())
}

fn handle(meter: &Meter, work: Work, body: &[u8], acker: lapin::Acker) -> lapin::Acker {
    match work {
        Work::NotesLatency => meter.saw_after(sent_ago(body)),
        Work::Nothing | Work::Waits => {
            std::hint::black_box(body);
            meter.saw();
        }
    }
    acker
}
