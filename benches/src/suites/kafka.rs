//! The plain Kafka client and oncegate with each store; Redis without a broker.

use std::time::Duration;

use super::{Extent, ONE_BY_ONE, ROUNDS};
use crate::BenchResult;
use crate::load::Ids;
use crate::report::BenchTable;
use crate::rounds::{Side, alternate};
use crate::side::{
    DedupMethod, GateStore, HandlerWork, Id, Measurement, MessageSource, Spawned, Task,
};
use crate::stage::BenchServers;

const PARTITIONS: i32 = 4;

pub(super) fn run(
    stage: &BenchServers,
    extent: Extent,
    tell: &mut dyn FnMut(BenchTable) -> BenchResult<()>,
) -> BenchResult<()> {
    let messages = extent.pick(1_000_000, 2_000_000);
    tell(by_store(stage, extent, messages)?)?;
    tell(by_key(stage, messages)?)?;
    if extent == Extent::Full {
        tell(large(stage)?)?;
        tell(waiting(stage)?)?;
    }
    Ok(())
}

fn by_store(stage: &BenchServers, extent: Extent, messages: usize) -> BenchResult<BenchTable> {
    let topic = stage.topic(PARTITIONS, messages, 100, Id::Header)?;
    let on =
        |method: DedupMethod, messages| stage.on_kafka(&topic, method, messages).run_in_process();
    let (on_redis, on_sqlite, at_random) = (
        messages / 5,
        extent.pick(messages / 10, messages / 2),
        messages / 10,
    );
    let in_no_order = stage.topic_of(Ids::Random, PARTITIONS, at_random, 100, Id::Header)?;
    let mut sides = vec![
        Side::new("bare", || on(DedupMethod::Bare, messages)),
        Side::new("memory, inline", || on(stage.memory(Spawned::No), messages)),
        Side::new("memory, spawned", || {
            on(stage.memory(Spawned::Yes), messages / 2)
        }),
        Side::new("SQLite, inline", || {
            on(stage.sqlite(Spawned::No), on_sqlite)
        }),
        Side::new("Redis, inline", || {
            on_empty(stage, || on(stage.redis(Spawned::No), on_redis))
        }),
        Side::new("naive, Redis", || {
            on_empty(stage, || on(stage.naive(), extent.pick(10_000, 40_000)))
        }),
        Side::rate("redis-benchmark, SET NX EX", || {
            stage.empty_redis()?;
            stage.redis_benchmark(2 * on_redis)
        }),
    ];
    if extent == Extent::Full {
        sides.push(Side::new("Redis, spawned", || {
            on_empty(stage, || on(stage.redis(Spawned::Yes), on_redis))
        }));
        let random = || {
            stage
                .on_kafka(&in_no_order, stage.sqlite(Spawned::No), at_random)
                .run_in_process()
        };
        sides.push(Side::new("SQLite, inline, random ids", random));
        sides.push(Side::new("store alone, Redis", || {
            on_empty(stage, || store_alone(stage, on_redis).run_in_process())
        }));
    }
    let rows = alternate("Kafka, 100 bytes", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Kafka, 4 partitions, 100 bytes, id in a header; the handler does nothing",
        &rows,
    )
    .ratio("kafka_memory", "memory, inline", 1.0, "bare")
    .ratio("kafka_memory_spawned", "memory, spawned", 1.0, "bare")
    .ratio("kafka_sqlite", "SQLite, inline", 1.0, "bare")
    .ratio(
        "kafka_redis",
        "Redis, inline",
        0.5,
        "redis-benchmark, SET NX EX",
    )
    .ratio("kafka_redis_to_naive", "Redis, inline", 1.0, "naive, Redis");
    if extent == Extent::Quick {
        return Ok(table);
    }
    Ok(table
        .ratio(
            "kafka_redis_spawned",
            "Redis, spawned",
            0.5,
            "redis-benchmark, SET NX EX",
        )
        .ratio(
            "redis_store",
            "store alone, Redis",
            0.5,
            "redis-benchmark, SET NX EX",
        ))
}

fn by_key(stage: &BenchServers, messages: usize) -> BenchResult<BenchTable> {
    let topic = stage.topic(PARTITIONS, messages, 100, Id::Key)?;
    let on = |method: DedupMethod| stage.on_kafka(&topic, method, messages).run_in_process();
    let sides = vec![
        Side::new("bare", || on(DedupMethod::Bare)),
        Side::new("memory, inline", || on(stage.memory(Spawned::No))),
    ];
    let rows = alternate("Kafka, id as key", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Kafka, 4 partitions, 100 bytes, id as key; the handler does nothing",
        &rows,
    );
    Ok(table.ratio("kafka_key_memory", "memory, inline", 1.0, "bare"))
}

fn large(stage: &BenchServers) -> BenchResult<BenchTable> {
    let messages = 200_000;
    let topic = stage.topic(PARTITIONS, messages, 4096, Id::Header)?;
    let on =
        |method: DedupMethod, messages| stage.on_kafka(&topic, method, messages).run_in_process();
    let sides = vec![
        Side::new("bare", || on(DedupMethod::Bare, messages)),
        Side::new("memory, inline", || on(stage.memory(Spawned::No), messages)),
        Side::new("memory, spawned", || {
            on(stage.memory(Spawned::Yes), messages)
        }),
        Side::new("SQLite, inline", || on(stage.sqlite(Spawned::No), messages)),
        Side::new("Redis, inline", || {
            on_empty(stage, || on(stage.redis(Spawned::No), messages))
        }),
        Side::new("naive, Redis", || {
            on_empty(stage, || on(stage.naive(), 20_000))
        }),
    ];
    let rows = alternate("Kafka, 4 KiB", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Kafka, 4 partitions, 4 KiB, id in a header; the handler does nothing",
        &rows,
    );
    Ok(table
        .ratio("kafka_4k_memory", "memory, inline", 1.0, "bare")
        .ratio("kafka_4k_memory_spawned", "memory, spawned", 1.0, "bare")
        .ratio("kafka_4k_sqlite", "SQLite, inline", 1.0, "bare")
        .ratio("kafka_4k_redis", "Redis, inline", 1.0, "bare"))
}

fn waiting(stage: &BenchServers) -> BenchResult<BenchTable> {
    let messages = 200_000;
    let topic = stage.topic(PARTITIONS, messages, 100, Id::Header)?;
    let on = |method: DedupMethod, messages| {
        Task {
            work: HandlerWork::Waits,
            ..stage.on_kafka(&topic, method, messages)
        }
        .run_in_process()
    };
    let sides = vec![
        Side::new("bare, 512 at once", || on(DedupMethod::Bare, messages)),
        Side::new("memory, spawned", || {
            on(stage.memory(Spawned::Yes), messages)
        }),
        Side::new("memory, inline", || on(stage.memory(Spawned::No), messages)),
        Side::new("SQLite, spawned", || {
            on(stage.sqlite(Spawned::Yes), messages)
        }),
        Side::new("Redis, spawned", || {
            on_empty(stage, || on(stage.redis(Spawned::Yes), messages))
        }),
        Side::new("naive, Redis", || {
            on_empty(stage, || on(stage.naive(), ONE_BY_ONE))
        }),
    ];
    let rows = alternate("Kafka, 1 ms", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Kafka, 4 partitions, 100 bytes, id in a header; the handler waits for 1 ms",
        &rows,
    );
    Ok(table
        .ratio(
            "kafka_waiting_memory",
            "memory, spawned",
            1.0,
            "bare, 512 at once",
        )
        .ratio(
            "kafka_waiting_sqlite",
            "SQLite, spawned",
            1.0,
            "bare, 512 at once",
        )
        .ratio(
            "kafka_waiting_redis",
            "Redis, spawned",
            1.0,
            "bare, 512 at once",
        ))
}

fn store_alone(stage: &BenchServers, messages: usize) -> Task {
    let store = GateStore::Redis {
        url: stage.redis.url(),
        prefix: stage.name("alone") + ":",
    };
    let method = DedupMethod::Gated {
        store,
        spawned: Spawned::No,
    };
    Task {
        from: MessageSource::None,
        method,
        work: HandlerWork::Nothing,
        messages,
        servers: stage.processes(),
        linger: Duration::ZERO,
    }
}

/// With an empty Redis server.
fn on_empty(
    stage: &BenchServers,
    run: impl FnOnce() -> BenchResult<Measurement>,
) -> BenchResult<Measurement> {
    stage.empty_redis()?;
    run()
}
