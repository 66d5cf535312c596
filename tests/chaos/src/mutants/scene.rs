//! The scenes before which wrong versions are put: each is one in which the right version keeps its
//! promise.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use oncegate_testkit::proxy::Proxy;

use crate::check::{Checked, Invariant, Promise};
use crate::ledger::{Ledger, Settling, What};
use crate::matrix::consumer::Markers;
use crate::matrix::group::{Group, Made};
use crate::matrix::servers::Servers;
use crate::matrix::step::Step;
use crate::matrix::{message, play_cell};
use crate::worker::Broker;
use crate::{Error, check::Rules};

/// How long something may take to show in the ledger.
const PATIENCE: Duration = Duration::from_secs(30);
/// For how long a handler may run beside another in the scene that is about that alone: less than a
/// renewal's reply is late.
const SHORT_GRACE: Duration = Duration::from_millis(200);

/// What a process is started with.
pub(super) type Environment<'a> = &'a [(&'a str, &'a str)];
/// Plays a scene, and says what does not hold.
pub(super) type Play = fn(&Servers, Environment<'_>, &Path) -> Result<Broken, Error>;
/// What is violated, with how often.
pub(super) type Broken = BTreeMap<Invariant, usize>;

const fn made(broker: Broker, markers: Markers, promise: Promise) -> Made {
    Made {
        broker,
        markers,
        promise,
    }
}

fn violated(checked: &Checked) -> Broken {
    let mut broken = Broken::new();
    for violation in &checked.violations {
        *broken.entry(violation.invariant).or_default() += 1;
    }
    broken
}

fn cell(
    servers: &Servers,
    step: &str,
    made: Made,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let step = Step::named(step).ok_or("no such step")?;
    let played = play_cell(servers, step, made, environment, folder)?;
    Ok(violated(&played.checked))
}

/// A cell of the matrix: crashes while copies of a message that is handled come in.
pub(super) fn crash_beside_copies(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let made = made(Broker::Rabbitmq, Markers::Redis, Promise::EffectivelyOnce);
    cell(servers, "handler.before", made, environment, folder)
}

/// A cell of the matrix: crashes in the handler, before its effect.
pub(super) fn crash_in_the_handler(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let made = made(Broker::Kafka, Markers::Sqlite, Promise::AtMostOnce);
    cell(servers, "effect.before", made, environment, folder)
}

/// A cell of the matrix: crashes before a completion is sent.
pub(super) fn crash_before_completion(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let made = made(Broker::Rabbitmq, Markers::Sqlite, Promise::EffectivelyOnce);
    cell(servers, "complete.before", made, environment, folder)
}

/// Many messages are done behind one that takes long; then the process is killed.
pub(super) fn killed_with_a_gap(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(Broker::Kafka, Markers::Sqlite, Promise::EffectivelyOnce),
        folder,
    )?;
    let consumer = group.start("c0.1", environment, &[])?;
    // One for each partition, whichever they come to.
    group.publish(
        (0..8)
            .map(|number| message(format!("u-{number}"), None, 6_000))
            .collect(),
    )?;
    group.until(PATIENCE, |ledger| {
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

/// Handlers have their effect and panic then.
pub(super) fn panics_after_effects(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(Broker::Rabbitmq, Markers::Redis, Promise::AtMostOnce),
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

/// A handler fails, the clear of its claim comes late, when the next run has begun, and a copy
/// stands by.
pub(super) fn late_clear(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    late(
        servers,
        Broker::Kafka,
        "once",
        "late-clear",
        environment,
        folder,
    )
}

/// Nobody knows, it is found out that it did not happen, and that comes a second time, late, when
/// the next run has begun.
pub(super) fn late_resolve(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
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
    servers: &Servers,
    broker: Broker,
    prefix: &str,
    trick: &str,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(broker, Markers::Sqlite, Promise::AtMostOnce),
        folder,
    )?;
    let consumer = group.start("c0.1", environment, &[&format!("--trick={trick}")])?;
    let originals: Vec<_> = (0..4)
        .map(|number| {
            message(
                format!("{prefix}-{number}"),
                Some(format!("k{number:02}")),
                3_000,
            )
        })
        .collect();
    // The copies have no key: they wait behind nothing.
    let copies = originals
        .iter()
        .map(|it| crate::message::Outgoing {
            key: None,
            ..it.clone()
        })
        .collect();
    group.publish(originals)?;
    group.until(PATIENCE, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) >= 8
    })?;
    group.publish(copies)?;
    group.drain(vec![consumer], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

/// The reply to each first claim is lost. No message is sent twice and nobody crashes, so nobody
/// but the asker holds any.
pub(super) fn lost_claims(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(Broker::Rabbitmq, Markers::Sqlite, Promise::EffectivelyOnce),
        folder,
    )?;
    let consumer = group.start("c0.1", environment, &["--trick=lost-claim"])?;
    group.publish(
        (0..6)
            .map(|number| message(format!("u-{number}"), None, 10))
            .collect(),
    )?;
    group.drain(vec![consumer], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

/// A renewal's reply is slow, and then the store is silent, to one consumer; another has a copy of
/// what it handles.
pub(super) fn slow_renewal(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(Broker::Rabbitmq, Markers::Sqlite, Promise::EffectivelyOnce),
        folder,
    )?;
    group.set("in-flight", "1");
    let holder = group.start("a", environment, &["--trick=slow-renewal"])?;
    group.set("in-flight", "16");
    group.publish(vec![message("u-1".into(), None, 6_000)])?;
    group.until(PATIENCE, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) > 0
    })?;
    let other = group.start("b", environment, &["--longest-pause-ms=60"])?;
    // The holder takes one more at the most, the other consumer the rest.
    group.publish((0..3).map(|_| message("u-1".into(), None, 6_000)).collect())?;
    let begun = |ledger: &Ledger| {
        ledger
            .records()
            .iter()
            .any(|it| it.by == "b" && matches!(it.what, What::Started { .. }))
    };
    group.until(PATIENCE, begun)?;
    std::thread::sleep(Duration::from_millis(900));
    group.kill(holder, "kill-consumer")?;
    group.drain(vec![other], environment)?;
    let rules = Rules {
        grace: SHORT_GRACE,
        ..group.rules()
    };
    Ok(violated(&group.check(&rules)?))
}

/// A process crashes after the effect, and what it handled comes again when its window is over.
pub(super) fn longer_than_the_window(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(Broker::Rabbitmq, Markers::Redis, Promise::AtMostOnce),
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
        .ended(&mut consumer, PATIENCE)?
        .ok_or("it did not end after its effect")?;
    group.was_ended(&consumer, "effect.after", status);
    std::thread::sleep(Duration::from_millis(3_500));
    end(&mut group, environment)
}

/// Connections are closed while handlers run; when these are over, the process is killed.
pub(super) fn another_channel(
    servers: &Servers,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Broken, Error> {
    let mut group = Group::open(
        servers,
        made(Broker::Rabbitmq, Markers::Sqlite, Promise::EffectivelyOnce),
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
    group.until(PATIENCE, |ledger| count(ledger, accepted) >= 4)?;
    group.publish(
        (4..16)
            .map(|number| message(format!("u-{number}"), None, 2_500))
            .collect(),
    )?;
    group.until(PATIENCE, |ledger| {
        count(ledger, |what| matches!(what, What::Started { .. })) >= 8
    })?;
    // Until they are acknowledged on the channel that goes.
    std::thread::sleep(Duration::from_millis(300));
    proxy.reset();
    group.until(PATIENCE, |ledger| count(ledger, accepted) >= 8)?;
    std::thread::sleep(Duration::from_millis(200));
    group.kill(consumer, "kill-consumer")?;
    group.set("url", &direct);
    end(&mut group, environment)
}

/// Another consumer takes over what is left.
fn end(group: &mut Group<'_>, environment: Environment<'_>) -> Result<Broken, Error> {
    let last = group.start("z0", environment, &[])?;
    group.drain(vec![last], environment)?;
    Ok(violated(&group.check(&group.rules())?))
}

fn accepted(what: &What) -> bool {
    matches!(
        what,
        What::Settled {
            how: Settling::Accepted,
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
