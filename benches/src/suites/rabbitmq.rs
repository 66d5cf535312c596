//! The plain RabbitMQ client and oncegate, by prefetch and queue type.

use super::{Extent, ONE_BY_ONE, ROUNDS};
use crate::BenchResult;
use crate::load::{BenchQueueKind, MessagePersistence};
use crate::report::BenchTable;
use crate::rounds::{Side, alternate};
use crate::side::{DedupMethod, HandlerWork, Measurement, Spawned, Task};
use crate::stage::BenchServers;

pub(super) fn run(
    stage: &BenchServers,
    extent: Extent,
    tell: &mut dyn FnMut(BenchTable) -> BenchResult<()>,
) -> BenchResult<()> {
    for kind in [BenchQueueKind::Classic, BenchQueueKind::Quorum] {
        for prefetch in extent.pick(&[1000][..], &[1, 50, 256, 1000][..]) {
            tell(by_prefetch(stage, extent, kind, *prefetch, 100)?)?;
        }
        if extent == Extent::Full {
            tell(by_prefetch(stage, extent, kind, 256, 4096)?)?;
            tell(waiting(stage, kind)?)?;
        }
    }
    if extent == Extent::Full {
        tell(in_memory(stage)?)?;
    }
    Ok(())
}

/// Compares the sides on a queue with these settings.
fn on(
    stage: &BenchServers,
    (kind, persistence): (BenchQueueKind, MessagePersistence),
    (messages, body): (usize, usize),
    prefetch: u16,
    task: impl Fn(Task) -> Task,
) -> BenchResult<Measurement> {
    stage.empty_redis()?;
    let queue = stage.queue(kind, persistence, messages, body)?;
    let took = task(stage.on_rabbitmq(&queue, prefetch, DedupMethod::Bare)).run_in_process()?;
    stage.delete(&queue)?;
    Ok(took)
}

/// What a classic queue need not write costs it less CPU time: there is the least to hide behind.
fn in_memory(stage: &BenchServers) -> BenchResult<BenchTable> {
    let on = |method: DedupMethod| {
        on(
            stage,
            (BenchQueueKind::Classic, MessagePersistence::InMemory),
            (50_000, 100),
            1000,
            |task| Task {
                method: method.clone(),
                ..task
            },
        )
    };
    let sides = vec![
        Side::new("bare", || on(DedupMethod::Bare)),
        Side::new("Redis, inline", || on(stage.redis(Spawned::No))),
    ];
    let rows = alternate(
        "RabbitMQ, classic, in memory",
        ROUNDS,
        || stage.go_on(),
        sides,
    )?;
    let title = "RabbitMQ, classic queue, messages that are not persistent, prefetch 1000, 100 bytes; the handler does nothing";
    Ok(BenchTable::new(title, &rows).ratio(
        "rabbitmq_classic_transient_redis",
        "Redis, inline",
        1.0,
        "bare",
    ))
}

fn waiting(stage: &BenchServers, kind: BenchQueueKind) -> BenchResult<BenchTable> {
    let on = |method: DedupMethod, messages| {
        on(
            stage,
            (kind, MessagePersistence::OnDisk),
            (messages, 100),
            256,
            |task| Task {
                work: HandlerWork::Waits,
                method: method.clone(),
                ..task
            },
        )
    };
    let sides = vec![
        Side::new("bare", || on(DedupMethod::Bare, 50_000)),
        Side::new("memory, spawned", || on(stage.memory(Spawned::Yes), 50_000)),
        Side::new("Redis, spawned", || on(stage.redis(Spawned::Yes), 50_000)),
        Side::new("naive, Redis", || on(stage.naive(), ONE_BY_ONE)),
    ];
    let kind = kind.name();
    let rows = alternate(
        &format!("RabbitMQ, {kind}, 1 ms"),
        ROUNDS,
        || stage.go_on(),
        sides,
    )?;
    let table = BenchTable::new(
        format!("RabbitMQ, {kind} queue, prefetch 256, 100 bytes; the handler waits for 1 ms"),
        &rows,
    );
    Ok(table.ratio(
        &format!("rabbitmq_{kind}_waiting_redis"),
        "Redis, spawned",
        1.0,
        "bare",
    ))
}

fn by_prefetch(
    stage: &BenchServers,
    extent: Extent,
    kind: BenchQueueKind,
    prefetch: u16,
    body: usize,
) -> BenchResult<BenchTable> {
    let messages = match prefetch {
        1 => 5_000,
        50 => 25_000,
        _ if body > 1000 => 25_000,
        _ => extent.pick(40_000, 50_000),
    };
    let on = |method: DedupMethod, messages: usize| {
        on(
            stage,
            (kind, MessagePersistence::OnDisk),
            (messages, body),
            prefetch,
            |task| Task {
                method: method.clone(),
                ..task
            },
        )
    };
    let mut sides = vec![
        Side::new("bare", || on(DedupMethod::Bare, messages)),
        Side::new("Redis, inline", || on(stage.redis(Spawned::No), messages)),
    ];
    if extent == Extent::Full {
        sides.push(Side::new("Redis, spawned", || {
            on(stage.redis(Spawned::Yes), messages)
        }));
        sides.push(Side::new("memory, inline", || {
            on(stage.memory(Spawned::No), messages)
        }));
        sides.push(Side::new("naive, Redis", || {
            on(stage.naive(), messages.min(10_000))
        }));
    }
    let kind = kind.name();
    let size = if body > 1000 {
        format!("{} KiB", body / 1024)
    } else {
        format!("{body} bytes")
    };
    let rows = alternate(
        &format!("RabbitMQ, {kind}, prefetch {prefetch}, {size}"),
        ROUNDS,
        || stage.go_on(),
        sides,
    )?;
    let table = BenchTable::new(
        format!("RabbitMQ, {kind} queue, prefetch {prefetch}, {size}; the handler does nothing"),
        &rows,
    );
    let name = match (prefetch, body > 1000) {
        // The prefetch of the targets.
        (1000, false) => format!("rabbitmq_{kind}_redis"),
        (_, false) => format!("rabbitmq_{kind}_redis_{prefetch}"),
        (_, true) => format!("rabbitmq_{kind}_redis_{prefetch}_4k"),
    };
    Ok(table.ratio(&name, "Redis, inline", 1.0, "bare"))
}
