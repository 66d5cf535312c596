//! Rate and memory with more markers, more partitions, and a longer backlog.

use oncegate_testkit::servers::{RedisOptions, RedisServer};

use super::{Extent, ROUNDS};
use crate::BenchResult;
use crate::load::{fill_redis, finish_redis_rehashing};
use crate::report::BenchTable;
use crate::rounds::{Side, SideRounds, alternate};
use crate::side::{DedupMethod, GateStore, Id, Measurement, Spawned};
use crate::stage::BenchServers;

pub(super) fn run(
    stage: &BenchServers,
    extent: Extent,
    tell: &mut dyn FnMut(BenchTable) -> BenchResult<()>,
) -> BenchResult<()> {
    tell(partitions(stage)?)?;
    tell(memory_markers(stage, extent)?)?;
    tell(redis_markers(stage, extent)?)?;
    tell(backlog(stage, extent)?)?;
    Ok(())
}

fn partitions(stage: &BenchServers) -> BenchResult<BenchTable> {
    let messages = 500_000;
    let mut sides = Vec::new();
    for partitions in [1, 16, 64] {
        let topic = stage.topic(partitions, messages, 100, Id::Header)?;
        let bare = topic.clone();
        sides.push(Side::new(format!("bare, {partitions}"), move || {
            stage
                .on_kafka(&bare, DedupMethod::Bare, messages)
                .run_in_process()
        }));
        let memory = move || {
            stage
                .on_kafka(&topic, stage.memory(Spawned::No), messages)
                .run_in_process()
        };
        sides.push(Side::new(format!("memory, {partitions}"), memory));
    }
    let rows = alternate("growth, partitions", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Kafka, 1, 16 and 64 partitions, 100 bytes, id in a header; memory store",
        &rows,
    );
    Ok(table
        .ratio("growth_partitions_16", "memory, 16", 1.0, "memory, 1")
        .ratio("growth_partitions_64", "memory, 64", 1.0, "memory, 1")
        .ratio(
            "growth_partitions_64_to_bare",
            "memory, 64",
            1.0,
            "bare, 64",
        ))
}

/// Markers before the first message, the name of the side, and its ratio.
const MARKERS: [(usize, &str, &str); 3] = [
    (10_000, "10 k markers", "10k"),
    (1_000_000, "1 M markers", "1m"),
    (10_000_000, "10 M markers", "10m"),
];

fn markers(extent: Extent) -> &'static [(usize, &'static str, &'static str)] {
    extent.pick(&MARKERS[..2], &MARKERS)
}

/// The rate of each side divided by that of the first.
fn by_markers(extent: Extent, title: &str, ratio: &str, rows: &[SideRounds]) -> BenchTable {
    let sides = markers(extent);
    let names = sides
        .iter()
        .map(|(_, name, _)| *name)
        .collect::<Vec<_>>()
        .join(", ");
    let table = BenchTable::new(format!("{title}: {names}"), rows);
    sides[1..].iter().fold(table, |table, (_, name, short)| {
        table.ratio(&format!("{ratio}_{short}"), name, 1.0, sides[0].1)
    })
}

fn memory_markers(stage: &BenchServers, extent: Extent) -> BenchResult<BenchTable> {
    let messages = 500_000;
    let topic = stage.topic(4, messages, 100, Id::Header)?;
    let topic = &topic;
    let sides = markers(extent).iter().map(|(markers, name, _)| {
        let method = DedupMethod::Gated {
            store: GateStore::Memory { markers: *markers },
            spawned: Spawned::No,
        };
        Side::new(*name, move || {
            stage
                .on_kafka(topic, method.clone(), messages)
                .run_in_process()
        })
    });
    let rows = alternate(
        "growth, markers in memory",
        ROUNDS,
        || stage.go_on(),
        sides.collect(),
    )?;
    Ok(by_markers(
        extent,
        "Kafka, memory store that remembers so many ids already",
        "growth_memory_markers",
        &rows,
    ))
}

/// New ids in each round; their markers are removed afterwards, so that the number of markers stays
/// constant.
fn redis_markers(stage: &BenchServers, extent: Extent) -> BenchResult<BenchTable> {
    let messages = 200_000;
    let topic = stage.topic(4, messages, 100, Id::Header)?;
    let topic = &topic;
    let servers = markers(extent)
        .iter()
        .map(|(markers, ..)| {
            let server =
                RedisServer::start(RedisOptions::new().setting("enable-debug-command", "local"))?;
            stage.block_on(fill_redis(&server.url(), *markers))?;
            stage.block_on(finish_redis_rehashing(&server, *markers))?;
            Ok(server)
        })
        .collect::<BenchResult<Vec<RedisServer>>>()?;
    let sides = markers(extent)
        .iter()
        .zip(&servers)
        .map(|((_, name, _), server)| {
            Side::new(*name, move || -> BenchResult<Measurement> {
                let prefix = stage.name("oncegate") + ":";
                let store = GateStore::Redis {
                    url: server.url(),
                    prefix: prefix.clone(),
                };
                let mut task = stage.on_kafka(
                    topic,
                    DedupMethod::Gated {
                        store,
                        spawned: Spawned::No,
                    },
                    messages,
                );
                task.servers = vec![stage.kafka.pid(), server.pid()];
                let took = task.run_in_process()?;
                stage.block_on(crate::load::clear_redis(&server.url(), &prefix, messages))?;
                Ok(took)
            })
        });
    let rows = alternate(
        "growth, markers in Redis",
        ROUNDS,
        || stage.go_on(),
        sides.collect(),
    )?;
    Ok(by_markers(
        extent,
        "Kafka, Redis that holds so many done markers already",
        "growth_markers",
        &rows,
    ))
}

/// The memory of the client with a short and a long backlog and the same number of handled
/// messages.
fn backlog(stage: &BenchServers, extent: Extent) -> BenchResult<BenchTable> {
    let long = extent.pick(1_000_000, 5_000_000);
    let short = stage.topic(4, 50_000, 100, Id::Header)?;
    let long = stage.topic(4, long, 100, Id::Header)?;
    let handled = 50_000;
    let on = |topic| {
        stage
            .on_kafka(topic, stage.redis(Spawned::No), handled)
            .run_in_process()
    };
    let sides = vec![
        Side::new("backlog of 50 k", || on(&short)),
        Side::new("long backlog", || on(&long)),
    ];
    let rows = alternate("growth, backlog", ROUNDS, || stage.go_on(), sides)?;
    let title = format!(
        "Kafka and Redis, backlogs of 50 k and {} M: the peak of memory",
        long.messages / 1_000_000
    );
    Ok(BenchTable::new(title, &rows).peak_ratio(
        "growth_rss_backlog",
        "long backlog",
        "backlog of 50 k",
    ))
}
