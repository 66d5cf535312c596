//! The bare RabbitMQ client and oncegate, by prefetch and kind of queue.

use super::{Extent, ROUNDS};
use crate::Outcome;
use crate::load::QueueKind;
use crate::report::Table;
use crate::rounds::{Side, alternate};
use crate::side::{Spawned, Took, Way};
use crate::stage::Stage;

pub(super) fn run(stage: &Stage, extent: Extent, tell: &mut dyn FnMut(Table) -> Outcome<()>) -> Outcome<()> {
    for kind in [QueueKind::Classic, QueueKind::Quorum] {
        for prefetch in extent.pick(&[1000][..], &[1, 50, 256, 1000][..]) {
            tell(by_prefetch(stage, extent, kind, *prefetch, 100)?)?;
        }
        if extent == Extent::Full {
            tell(by_prefetch(stage, extent, kind, 256, 4096)?)?;
        }
    }
    Ok(())
}

fn by_prefetch(stage: &Stage, extent: Extent, kind: QueueKind, prefetch: u16, body: usize) -> Outcome<Table> {
    let messages = match prefetch {
        1 => 5_000,
        50 => 25_000,
        _ if body > 1000 => 25_000,
        _ => extent.pick(40_000, 50_000),
    };
    let on = |way: Way, messages: usize| -> Outcome<Took> {
        stage.empty_redis()?;
        let queue = stage.queue(kind, messages, body)?;
        let took = stage.on_rabbitmq(&queue, prefetch, way).run_apart()?;
        stage.delete(&queue)?;
        Ok(took)
    };
    let mut sides =
        vec![Side::new("bare", || on(Way::Bare, messages)), Side::new("Redis, in place", || on(stage.redis(Spawned::No), messages))];
    if extent == Extent::Full {
        sides.push(Side::new("Redis, spawned", || on(stage.redis(Spawned::Yes), messages)));
        if body <= 1000 {
            sides.push(Side::new("memory, in place", || on(stage.memory(Spawned::No), messages)));
            sides.push(Side::new("naive, Redis", || on(stage.naive(), messages.min(10_000))));
        }
    }
    let kind = kind.name();
    let size = if body > 1000 { format!("{} KiB", body / 1024) } else { format!("{body} bytes") };
    let rows = alternate(&format!("RabbitMQ, {kind}, prefetch {prefetch}, {size}"), ROUNDS, || stage.go_on(), sides)?;
    let table = Table::new(format!("RabbitMQ, {kind} queue, prefetch {prefetch}, {size}; the handler does nothing"), &rows);
    let name = match (prefetch, body > 1000) {
        // The prefetch that the figures to be reached are for.
        (1000, false) => format!("rabbitmq_{kind}_redis"),
        (_, false) => format!("rabbitmq_{kind}_redis_{prefetch}"),
        (_, true) => format!("rabbitmq_{kind}_redis_{prefetch}_4k"),
    };
    Ok(table.ratio(&name, "Redis, in place", 1.0, "bare"))
}
