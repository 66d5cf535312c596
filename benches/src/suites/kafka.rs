//! The plain Kafka client and oncegate with each store; Redis without a broker.

use std::time::Duration;

use super::{Extent, ONE_BY_ONE, ROUNDS};
use crate::Outcome;
use crate::load::Ids;
use crate::report::Table;
use crate::rounds::{Side, alternate};
use crate::side::{From, Id, Spawned, Store, Task, Took, Way, Work};
use crate::stage::Stage;

const PARTITIONS: i32 = 4;

pub(super) fn run(
    stage: &Stage,
    extent: Extent,
    tell: &mut dyn FnMut(Table) -> Outcome<()>,
) -> Outcome<()> {
    let messages = extent.pick(1_000_000, 2_000_000);
    tell(by_store(stage, extent, messages)?)?;
    tell(by_key(stage, messages)?)?;
    if extent == Extent::Full {
        tell(large(stage)?)?;
        tell(waiting(stage)?)?;
    }
    Ok(())
}

fn by_store(stage: &Stage, extent: Extent, messages: usize) -> Outcome<Table> {
    let topic = stage.topic(PARTITIONS, messages, 100, Id::Header)?;
    let on = |way: Way, messages| stage.on_kafka(&topic, way, messages).run_apart();
    let (on_redis, on_sqlite, at_random) = (
        messages / 5,
        extent.pick(messages / 10, messages / 2),
        messages / 10,
    );
    let in_no_order = stage.topic_of(Ids::Random, PARTITIONS, at_random, 100, Id::Header)?;
    let mut sides = vec![
        Side::new("bare", || on(Way::Bare, messages)),
        Side::new("memory, in place", || {
            on(stage.memory(Spawned::No), messages)
        }),
        Side::new("memory, spawned", || {
            on(stage.memory(Spawned::Yes), messages / 2)
        }),
        Side::new("SQLite, in place", || {
            on(stage.sqlite(Spawned::No), on_sqlite)
        }),
        Side::new("Redis, in place", || {
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
                .run_apart()
        };
        sides.push(Side::new("SQLite, in place, random ids", random));
        sides.push(Side::new("store alone, Redis", || {
            on_empty(stage, || store_alone(stage, on_redis).run_apart())
        }));
    }
    let rows = alternate("Kafka, 100 bytes", ROUNDS, || stage.go_on(), sides)?;
    let table = Table::new(
        "Kafka, 4 partitions, 100 bytes, id in a header; the handler does nothing",
        &rows,
    )
    .ratio("kafka_memory", "memory, in place", 1.0, "bare")
    .ratio("kafka_memory_spawned", "memory, spawned", 1.0, "bare")
    .ratio("kafka_sqlite", "SQLite, in place", 1.0, "bare")
    .ratio(
        "kafka_redis",
        "Redis, in place",
        0.5,
        "redis-benchmark, SET NX EX",
    )
    .ratio(
        "kafka_redis_to_naive",
        "Redis, in place",
        1.0,
        "naive, Redis",
    );
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

fn by_key(stage: &Stage, messages: usize) -> Outcome<Table> {
    let topic = stage.topic(PARTITIONS, messages, 100, Id::Key)?;
    let on = |way: Way| stage.on_kafka(&topic, way, messages).run_apart();
    let sides = vec![
        Side::new("bare", || on(Way::Bare)),
        Side::new("memory, in place", || on(stage.memory(Spawned::No))),
    ];
    let rows = alternate("Kafka, id as key", ROUNDS, || stage.go_on(), sides)?;
    let table = Table::new(
        "Kafka, 4 partitions, 100 bytes, id as key; the handler does nothing",
        &rows,
    );
    Ok(table.ratio("kafka_key_memory", "memory, in place", 1.0, "bare"))
}

fn large(stage: &Stage) -> Outcome<Table> {
    let messages = 200_000;
    let topic = stage.topic(PARTITIONS, messages, 4096, Id::Header)?;
    let on = |way: Way, messages| stage.on_kafka(&topic, way, messages).run_apart();
    let sides = vec![
        Side::new("bare", || on(Way::Bare, messages)),
        Side::new("memory, in place", || {
            on(stage.memory(Spawned::No), messages)
        }),
        Side::new("memory, spawned", || {
            on(stage.memory(Spawned::Yes), messages)
        }),
        Side::new("SQLite, in place", || {
            on(stage.sqlite(Spawned::No), messages)
        }),
        Side::new("Redis, in place", || {
            on_empty(stage, || on(stage.redis(Spawned::No), messages))
        }),
        Side::new("naive, Redis", || {
            on_empty(stage, || on(stage.naive(), 20_000))
        }),
    ];
    let rows = alternate("Kafka, 4 KiB", ROUNDS, || stage.go_on(), sides)?;
    let table = Table::new(
        "Kafka, 4 partitions, 4 KiB, id in a header; the handler does nothing",
        &rows,
    );
    Ok(table
        .ratio("kafka_4k_memory", "memory, in place", 1.0, "bare")
        .ratio("kafka_4k_memory_spawned", "memory, spawned", 1.0, "bare")
        .ratio("kafka_4k_sqlite", "SQLite, in place", 1.0, "bare")
        .ratio("kafka_4k_redis", "Redis, in place", 1.0, "bare"))
}

fn waiting(stage: &Stage) -> Outcome<Table> {
    let messages = 200_000;
    let topic = stage.topic(PARTITIONS, messages, 100, Id::Header)?;
    let on = |way: Way, messages| {
        Task {
            work: Work::Waits,
            ..stage.on_kafka(&topic, way, messages)
        }
        .run_apart()
    };
    let sides = vec![
        Side::new("bare, 512 at once", || on(Way::Bare, messages)),
        Side::new("memory, spawned", || {
            on(stage.memory(Spawned::Yes), messages)
        }),
        Side::new("memory, in place", || {
            on(stage.memory(Spawned::No), messages)
        }),
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
    let table = Table::new(
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

fn store_alone(stage: &Stage, messages: usize) -> Task {
    let store = Store::Redis {
        url: stage.redis.url(),
        prefix: stage.name("alone") + ":",
    };
    let way = Way::Gated {
        store,
        spawned: Spawned::No,
    };
    Task {
        from: From::Nowhere,
        way,
        work: Work::Nothing,
        messages,
        servers: stage.processes(),
        stays: Duration::ZERO,
    }
}

/// With an empty Redis server.
fn on_empty(stage: &Stage, run: impl FnOnce() -> Outcome<Took>) -> Outcome<Took> {
    stage.empty_redis()?;
    run()
}
