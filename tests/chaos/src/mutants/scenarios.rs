//! The scenarios of the mutants; the unmodified code passes all of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use oncegate_testkit::proxy::Proxy;

use crate::check::{Checked, Invariant, TestedGuarantee};
use crate::ledger::{Ledger, SettlementKind, What};
use crate::matrix::consumer::TestedStore;
use crate::matrix::group::{Combination, ConsumerGroup};
use crate::matrix::servers::MatrixServers;
use crate::matrix::step::CrashStep;
use crate::matrix::{message, run_cell, run_service_cell};
use crate::worker::Broker;
use crate::{Error, check::CheckRules};

/// The time limit until the ledger has an expected record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(30);
/// [`CheckRules::grace`] in the scenario with concurrent handlers: shorter than the delay of the reply to
/// the renewal.
const SHORT_GRACE: Duration = Duration::from_millis(200);

/// Additional environment variables of the consumers.
pub(super) type Environment<'a> = &'a [(&'a str, &'a str)];
/// Runs a scenario and returns the violations.
pub(super) type RunScenario =
    fn(&MatrixServers, Environment<'_>, &Path) -> Result<ViolationCounts, Error>;
/// The violated invariants, with counts.
pub(super) type ViolationCounts = BTreeMap<Invariant, usize>;

const fn combination(
    broker: Broker,
    markers: TestedStore,
    guarantee: TestedGuarantee,
) -> Combination {
    Combination {
        broker,
        markers,
        guarantee,
    }
}

fn violated(checked: &Checked) -> ViolationCounts {
    let mut broken = ViolationCounts::new();
    for violation in &checked.violations {
        *broken.entry(violation.invariant).or_default() += 1;
    }
    broken
}

fn cell(
    servers: &MatrixServers,
    step: &str,
    combination: Combination,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let step = CrashStep::named(step).ok_or("no such step")?;
    let result = run_cell(servers, step, combination, environment, folder)?;
    Ok(violated(&result.checked))
}

/// A cell of the matrix: crashes while copies of the handled message arrive.
pub(super) fn crash_beside_copies(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let combination = combination(
        Broker::Rabbitmq,
        TestedStore::Redis,
        TestedGuarantee::EffectivelyOnce,
    );
    cell(servers, "handler.before", combination, environment, folder)
}

/// A cell of the matrix: crashes in the handler, before its effect.
pub(super) fn crash_in_the_handler(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let combination = combination(
        Broker::Kafka,
        TestedStore::Sqlite,
        TestedGuarantee::AtMostOnce,
    );
    cell(servers, "effect.before", combination, environment, folder)
}

/// A cell of the matrix: crashes before a completion is sent.
pub(super) fn crash_before_completion(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let combination = combination(
        Broker::Rabbitmq,
        TestedStore::Sqlite,
        TestedGuarantee::EffectivelyOnce,
    );
    cell(servers, "complete.before", combination, environment, folder)
}

/// A cell of the matrix with an inbox: crashes after the commit, before the settlement.
pub(super) fn crash_after_commit(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    inbox_cell(
        servers,
        "inbox.commit.after",
        Broker::Kafka,
        TestedStore::PostgresInbox,
        environment,
        folder,
    )
}

/// A cell of the matrix with an inbox: crashes before the commit of a batch.
pub(super) fn crash_before_commit(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    inbox_cell(
        servers,
        "postgres.commit.before",
        Broker::Rabbitmq,
        TestedStore::PostgresBatches,
        environment,
        folder,
    )
}

/// A cell of the matrix with an inbox: crashes before a message of the outbox is published.
pub(super) fn crash_before_publishing(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    inbox_cell(
        servers,
        "relay.publish.before",
        Broker::Rabbitmq,
        TestedStore::PostgresInbox,
        environment,
        folder,
    )
}

/// Lost rows violate [`Invariant::I1`], and doubled ones [`Invariant::I2`]: with an inbox no second
/// row has an excuse.
fn inbox_cell(
    servers: &MatrixServers,
    step: &str,
    broker: Broker,
    markers: TestedStore,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let step = CrashStep::named(step).ok_or("no such step")?;
    let combination = combination(broker, markers, TestedGuarantee::EffectivelyOnce);
    let runs = step.passes.len() as u64;
    let result = run_service_cell(servers, step, combination, environment, runs, folder)?;
    let rows_are_right = result.lost == 0 && result.doubled == 0;
    if result.aborted < runs || rows_are_right && !result.wrong.is_empty() {
        return Err(result.wrong.join("; ").into());
    }
    let violated = [
        (Invariant::I1, result.lost),
        (Invariant::I2, result.doubled),
    ];
    let violated = violated.into_iter().filter(|(_, rows)| *rows > 0);
    Ok(violated
        .map(|(invariant, rows)| (invariant, rows as usize))
        .collect())
}

/// Many messages complete behind a long one; then the process is killed.
pub(super) fn killed_with_a_gap(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(
            Broker::Kafka,
            TestedStore::Sqlite,
            TestedGuarantee::EffectivelyOnce,
        ),
        folder,
    )?;
    let consumer = group.start("c0.1", environment, &[])?;
    // Enough for at least one message in each partition.
    group.publish(
        (0..8)
            .map(|number| message(format!("u-{number}"), None, 6_000))
            .collect(),
    )?;
    group.until(RECORD_TIMEOUT, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) == 8
    })?;
    group.publish(
        (10..50)
            .map(|number| message(format!("u-{number}"), None, 5))
            .collect(),
    )?;
    group.until(Duration::from_secs(5), |ledger| {
        count(ledger, accepted) >= 40
    })?;
    // A commit follows within 200 ms.
    std::thread::sleep(Duration::from_millis(600));
    group.kill(consumer, "kill-consumer")?;
    end(&mut group, environment)
}

/// Handlers panic after their effect.
pub(super) fn panics_after_effects(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(
            Broker::Rabbitmq,
            TestedStore::Redis,
            TestedGuarantee::AtMostOnce,
        ),
        folder,
    )?;
    let consumer = group.start("c0.1", environment, &[])?;
    group.publish(
        (0..5)
            .map(|number| message(format!("late-{number}"), None, 10))
            .collect(),
    )?;
    group.drain(vec![consumer], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

/// A handler fails, and the clear of its claim is applied during the next run, while a copy waits.
pub(super) fn late_clear(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    late(
        servers,
        Broker::Kafka,
        "once",
        "late-clear",
        environment,
        folder,
    )
}

/// The outcome is unknown, `reconcile` finds that the effect did not happen, and the repeated
/// resolve is applied during the next run.
pub(super) fn late_resolve(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    late(
        servers,
        Broker::Rabbitmq,
        "trip",
        "late-resolve",
        environment,
        folder,
    )
}

fn late(
    servers: &MatrixServers,
    broker: Broker,
    prefix: &str,
    store_fault: &str,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(broker, TestedStore::Sqlite, TestedGuarantee::AtMostOnce),
        folder,
    )?;
    let consumer = group.start(
        "c0.1",
        environment,
        &[&format!("--store-fault={store_fault}")],
    )?;
    let originals: Vec<_> = (0..4)
        .map(|number| {
            message(
                format!("{prefix}-{number}"),
                Some(format!("k{number:02}")),
                3_000,
            )
        })
        .collect();
    // Without a key, the copies do not wait for other messages.
    let copies = originals
        .iter()
        .map(|it| crate::message::OutgoingMessage {
            key: None,
            ..it.clone()
        })
        .collect();
    group.publish(originals)?;
    group.until(RECORD_TIMEOUT, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) >= 8
    })?;
    group.publish(copies)?;
    group.drain(vec![consumer], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

/// The reply to the first claim of each id is lost. Without copies and crashes only the claimant
/// can hold the id.
pub(super) fn lost_claims(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(
            Broker::Rabbitmq,
            TestedStore::Sqlite,
            TestedGuarantee::EffectivelyOnce,
        ),
        folder,
    )?;
    let consumer = group.start("c0.1", environment, &["--store-fault=lost-claim"])?;
    group.publish(
        (0..6)
            .map(|number| message(format!("u-{number}"), None, 10))
            .collect(),
    )?;
    group.drain(vec![consumer], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

/// For one consumer the reply to a renewal is slow, and then the store does not reply; another
/// consumer has a copy of the handled message.
pub(super) fn slow_renewal(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(
            Broker::Rabbitmq,
            TestedStore::Sqlite,
            TestedGuarantee::EffectivelyOnce,
        ),
        folder,
    )?;
    group.set("in-flight", "1");
    let holder = group.start("a", environment, &["--store-fault=slow-renewal"])?;
    group.set("in-flight", "16");
    group.publish(vec![message("u-1".into(), None, 6_000)])?;
    group.until(RECORD_TIMEOUT, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) > 0
    })?;
    let other = group.start("b", environment, &["--longest-pause-ms=60"])?;
    // The holder receives at most one of them, the other consumer the rest.
    group.publish((0..3).map(|_| message("u-1".into(), None, 6_000)).collect())?;
    let begun = |ledger: &Ledger| {
        ledger
            .records()
            .iter()
            .any(|it| it.by == "b" && matches!(it.what, What::Started { .. }))
    };
    group.until(RECORD_TIMEOUT, begun)?;
    std::thread::sleep(Duration::from_millis(900));
    group.kill(holder, "kill-consumer")?;
    group.drain(vec![other], environment)?;
    let rules = CheckRules {
        grace: SHORT_GRACE,
        ..group.rules()
    };
    Ok(violated(&group.check(&rules)?))
}

/// A process crashes after the effect, and the message is redelivered after the window.
pub(super) fn longer_than_the_window(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(
            Broker::Rabbitmq,
            TestedStore::Redis,
            TestedGuarantee::AtMostOnce,
        ),
        folder,
    )?;
    group.set("window-ms", "3000");
    let armed: Vec<_> = environment
        .iter()
        .copied()
        .chain([("ONCEGATE_FAILPOINT", "effect.after:1")])
        .collect();
    let mut consumer = group.start("c0.1", &armed, &[])?;
    group.publish(vec![message("u-1".into(), None, 20)])?;
    let status = group
        .ended(&mut consumer, RECORD_TIMEOUT)?
        .ok_or("the process did not abort after its effect")?;
    group.was_ended(&consumer, "effect.after", status);
    std::thread::sleep(Duration::from_millis(3_500));
    end(&mut group, environment)
}

/// Connections are closed while handlers run; the process is killed after they have ended.
pub(super) fn another_channel(
    servers: &MatrixServers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<ViolationCounts, Error> {
    let mut group = ConsumerGroup::open(
        servers,
        combination(
            Broker::Rabbitmq,
            TestedStore::Sqlite,
            TestedGuarantee::EffectivelyOnce,
        ),
        folder,
    )?;
    let (proxy, direct) = (
        Proxy::to(servers.rabbit_port())?,
        servers.url(Broker::Rabbitmq),
    );
    group.set(
        "url",
        &format!("amqp://guest:guest@127.0.0.1:{}/%2f", proxy.port()),
    );
    group.set("in-flight", "4");
    let consumer = group.start("c0.1", environment, &[])?;
    group.publish(
        (0..4)
            .map(|number| message(format!("u-{number}"), None, 10))
            .collect(),
    )?;
    group.until(RECORD_TIMEOUT, |ledger| count(ledger, accepted) >= 4)?;
    group.publish(
        (4..16)
            .map(|number| message(format!("u-{number}"), None, 2_500))
            .collect(),
    )?;
    group.until(RECORD_TIMEOUT, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) >= 8
    })?;
    // Until the earlier acknowledgements are written on the channel that will be closed.
    std::thread::sleep(Duration::from_millis(300));
    proxy.reset();
    group.until(RECORD_TIMEOUT, |ledger| count(ledger, accepted) >= 8)?;
    std::thread::sleep(Duration::from_millis(200));
    group.kill(consumer, "kill-consumer")?;
    group.set("url", &direct);
    end(&mut group, environment)
}

/// Settles the remaining messages with another consumer, and checks the ledger.
fn end(
    group: &mut ConsumerGroup<'_>,
    environment: Environment<'_>,
) -> Result<ViolationCounts, Error> {
    let last = group.start("z0", environment, &[])?;
    group.drain(vec![last], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

fn accepted(what: &What) -> bool {
    matches!(
        what,
        What::Settled {
            how: SettlementKind::Accepted,
            ..
        }
    )
}

fn count(ledger: &Ledger, wanted: impl Fn(&What) -> bool) -> usize {
    ledger
        .records()
        .iter()
        .filter(|record| wanted(&record.what))
        .count()
}
