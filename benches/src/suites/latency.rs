//! The latency that oncegate adds at 1,000 messages per second.

use std::time::Duration;

use super::Extent;
use crate::BenchResult;
use crate::load::{BenchQueueKind, BenchTopic, Ids, MessagePersistence};
use crate::report::BenchTable;
use crate::rounds::{Side, alternate};
use crate::side::{
    DedupMethod, GateStore, HandlerWork, Id, Measurement, MessageSource, Spawned, Task,
};
use crate::stage::BenchServers;

/// The number of rounds.
const ROUNDS: usize = 5;
const ROUND_TRIP: &str = "one round trip to Redis";

pub(super) fn run(
    stage: &BenchServers,
    extent: Extent,
    tell: &mut dyn FnMut(BenchTable) -> BenchResult<()>,
) -> BenchResult<()> {
    let messages = extent.pick(5_000, 8_000);
    let round_trip = || Side::new(ROUND_TRIP, move || trip(stage, messages).run_in_process());

    let on = |method: DedupMethod| kafka(stage, method, messages);
    let sides = vec![
        Side::new("bare", || on(DedupMethod::Bare)),
        Side::new("memory, inline", || on(stage.memory(Spawned::No))),
        Side::new("Redis, inline", || on(stage.redis(Spawned::No))),
        Side::new("Redis, spawned", || on(stage.redis(Spawned::Yes))),
        round_trip(),
    ];
    let rows = alternate("latency, Kafka", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Latency on Kafka at 1,000 messages a second, from sending to the handler",
        &rows,
    );
    tell(table.added_p99(
        "latency_kafka_added_p99_ms",
        "Redis, inline",
        "bare",
        ROUND_TRIP,
    ))?;

    let on = |method: DedupMethod| rabbitmq(stage, method, messages);
    let sides = vec![
        Side::new("bare", || on(DedupMethod::Bare)),
        Side::new("memory, inline", || on(stage.memory(Spawned::No))),
        Side::new("Redis, inline", || on(stage.redis(Spawned::No))),
        round_trip(),
    ];
    let rows = alternate("latency, RabbitMQ", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Latency on RabbitMQ (classic queue) at 1,000 messages a second, from sending to the handler",
        &rows,
    );
    tell(table.added_p99(
        "latency_rabbitmq_added_p99_ms",
        "Redis, inline",
        "bare",
        ROUND_TRIP,
    ))
}

fn kafka(stage: &BenchServers, method: DedupMethod, messages: usize) -> BenchResult<Measurement> {
    stage.empty_redis()?;
    let topic = BenchTopic {
        name: stage.name("topic"),
        partitions: 4,
        messages: usize::MAX,
        body: 100,
        id: Id::Header,
        ids: Ids::InOrder,
    };
    stage.create(&topic)?;
    Task {
        work: HandlerWork::NotesLatency,
        ..stage.on_kafka(&topic, method, messages)
    }
    .run_in_process()
}

fn rabbitmq(
    stage: &BenchServers,
    method: DedupMethod,
    messages: usize,
) -> BenchResult<Measurement> {
    stage.empty_redis()?;
    let queue = stage.queue(BenchQueueKind::Classic, MessagePersistence::OnDisk, 0, 100)?;
    let task = Task {
        work: HandlerWork::NotesLatency,
        messages,
        ..stage.on_rabbitmq(&queue, 256, method)
    };
    let took = task.run_in_process()?;
    stage.delete(&queue)?;
    Ok(took)
}

fn trip(stage: &BenchServers, messages: usize) -> Task {
    let store = GateStore::Redis {
        url: stage.redis.url(),
        prefix: stage.name("trip") + ":",
    };
    let method = DedupMethod::Gated {
        store,
        spawned: Spawned::No,
    };
    Task {
        from: MessageSource::None,
        method,
        work: HandlerWork::NotesLatency,
        messages,
        servers: stage.processes(),
        linger: Duration::ZERO,
    }
}
