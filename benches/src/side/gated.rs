//! The side with oncegate.

use std::sync::Arc;

use oncegate::source::Connect;
use oncegate::{
    Consumer, Context, Execution, Failure, Handler, IdSource, Kafka, MemoryStore, RabbitMq,
    RawBytes, Redis, Sqlite, Topology,
};
use serde::de::IgnoredAny;

use super::latency::sent_ago;
use super::{
    DedupMethod, GateStore, HandlerWork, Id, Measurement, MessageSource, Meter, Spawned, Task,
};
use crate::BenchResult;

/// The handler of the task. Does not copy the body, like the plain client.
struct MeteredHandler {
    meter: Arc<Meter>,
    work: HandlerWork,
}

impl Handler for MeteredHandler {
    type Payload = IgnoredAny;

    async fn handle(&self, _: IgnoredAny, cx: &Context) -> Result<(), Failure> {
        match self.work {
            HandlerWork::Nothing => self.meter.saw(),
            HandlerWork::Waits => {
                tokio::time::sleep(super::kafka::WAIT).await;
                self.meter.saw();
            }
            HandlerWork::NotesLatency => self.meter.saw_after(sent_ago(&cx.message().body)),
        }
        Ok(())
    }
}

pub(super) async fn run(task: &Task) -> BenchResult<Measurement> {
    let meter = Arc::new(Meter::new(task.messages, task.servers.clone()));
    consume(task, &meter).await?;
    meter.took()
}

/// Consumes until all messages are measured.
pub(super) async fn consume(task: &Task, meter: &Arc<Meter>) -> BenchResult<()> {
    match &task.from {
        MessageSource::Kafka {
            brokers,
            topic,
            group,
            id,
        } => {
            let id = match id {
                Id::Header => IdSource::header("id"),
                Id::Key => IdSource::key(),
            };
            past_the_gate(
                task,
                meter,
                Kafka::topic(topic).brokers(brokers).group(group),
                id,
                512,
            )
            .await
        }
        MessageSource::RabbitMq {
            url,
            queue,
            prefetch,
        } => {
            let source = RabbitMq::queue(queue)
                .url(url)
                .prefetch(u32::from(*prefetch))
                .topology(Topology::Trust);
            past_the_gate(
                task,
                meter,
                source,
                IdSource::message_id(),
                usize::from(*prefetch).max(512),
            )
            .await
        }
        MessageSource::None => Err("a consumer needs a broker".into()),
    }
}

async fn past_the_gate(
    task: &Task,
    meter: &Arc<Meter>,
    source: impl Connect,
    id: IdSource,
    in_flight: usize,
) -> BenchResult<()> {
    let DedupMethod::Gated { store, spawned } = &task.method else {
        return Err("this method has no gate".into());
    };
    let handlers = match spawned {
        Spawned::Yes => Execution::Spawned,
        Spawned::No => Execution::Inline,
    };
    let over = meter.clone();
    let builder = Consumer::builder()
        .source(source)
        .id(id)
        .decode(RawBytes)
        .execution(handlers)
        .max_in_flight(in_flight)
        .handler(MeteredHandler {
            meter: meter.clone(),
            work: task.work,
        });
    let linger = task.linger;
    let over = async move {
        over.over().await;
        tokio::time::sleep(linger).await;
    };
    match store {
        GateStore::Memory { markers } => {
            let store = MemoryStore::new();
            super::store::fill(&store, *markers).await?;
            builder.store(store).run_until(over).await?;
        }
        GateStore::Sqlite { file } => builder.store(Sqlite::file(file)).run_until(over).await?,
        GateStore::Redis { url, prefix } => {
            builder
                .store(Redis::at(url).prefix(prefix))
                .run_until(over)
                .await?
        }
    }
    Ok(())
}
