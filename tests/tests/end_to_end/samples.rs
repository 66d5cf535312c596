//! The samples of the documentation that run until a signal: SIGTERM under load, then a second run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use oncegate::defaults::DRAIN_TIMEOUT;
use rustix::process::{Pid, Signal, kill_process};

use crate::broker::{Broker, Sent};
use crate::world::World;

/// Messages that one run cannot handle before the signal.
const MESSAGES: usize = 3_000;

/// The account has the name of the world; each message adds a cent. The second run ends once the
/// outbox has no message of this world.
#[tokio::test(flavor = "multi_thread")]
async fn outbox() {
    let world = World::new(Broker::RabbitMq).await;
    let booked = format!("{}.booked", world.name);
    world.broker.create(&booked).await;
    let database = oncegate_testkit::postgres_url().unwrap_or_else(|missing| panic!("{missing}"));
    let pool = sqlx::PgPool::connect(&database).await.expect("PostgreSQL");
    sqlx::query("CREATE TABLE IF NOT EXISTS accounts (account TEXT PRIMARY KEY, cents BIGINT)")
        .execute(&pool)
        .await
        .expect("a table");
    sqlx::query("INSERT INTO accounts VALUES ($1, 0)")
        .bind(&world.name)
        .execute(&pool)
        .await
        .expect("an account");
    let body = format!(r#"{{"account":"{}","cents":1}}"#, world.name);
    let messages = (0..MESSAGES).map(|n| Sent::raw(Some(format!("id-{n:04}")), body.clone()));
    world.publish(messages).await;
    let balance = async || -> i64 {
        sqlx::query_scalar("SELECT cents FROM accounts WHERE account = $1")
            .bind(&world.name)
            .fetch_one(&pool)
            .await
            .expect("the account")
    };
    let unsent = async || -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM oncegate_outbox WHERE destination = $1")
            .bind(&booked)
            .fetch_one(&pool)
            .await
            .expect("a count")
    };
    let all = i64::try_from(MESSAGES).expect("a small number");
    for at_least in [all / 10, all] {
        let mut program = sample("outbox", Broker::RabbitMq, &world.name)
            .env("ONCEGATE_POSTGRES", &database)
            .spawn()
            .expect("the program of the samples");
        world
            .until(&format!("{at_least} cents"), async || {
                let status = program.try_wait().expect("it was started here");
                assert_eq!(status, None, "it ended");
                balance().await >= at_least && (at_least < all || unsent().await == 0)
            })
            .await;
        if at_least < all {
            assert!(balance().await < all, "it handled all before the signal");
        }
        tokio::task::spawn_blocking(move || terminate("outbox", &mut program))
            .await
            .expect("it ends");
    }
    assert_eq!(balance().await, all, "each message is handled once");
    assert_eq!(world.dead_letters().await, []);
    assert_eq!(world.in_doubt().await, []);
    let left = world.broker.left(&booked).await;
    assert_eq!(left, MESSAGES as u64, "each booking is published once");
    world.broker.remove(&booked).await;
    world.broker.remove(&world.name).await;
}

/// Whether the sample skips ids that an earlier run handled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Duplicates {
    Skipped,
    /// It only counts them. Each handler that starts has to end.
    Handled,
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq() {
    let body = r#"{"article":"tea","level":3}"#;
    stopped(Broker::RabbitMq, "rabbitmq", body, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replies() {
    let body = r#"{"cents":100}"#;
    stopped(Broker::RabbitMq, "replies", body, Duplicates::Skipped).await;
}

const PAYMENT: &str = r#"{"card":"4000","cents":100}"#;

#[tokio::test(flavor = "multi_thread")]
async fn kafka() {
    stopped(Broker::Kafka, "kafka", PAYMENT, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn coming_from() {
    stopped(Broker::Kafka, "coming_from", PAYMENT, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn admin() {
    stopped(Broker::Kafka, "admin", PAYMENT, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trial() {
    stopped(Broker::Kafka, "trial", PAYMENT, Duplicates::Handled).await;
}

/// Stops the sample in the middle of its work: it ends with 0 within the drain timeout and a second.
/// The next run handles the rest, and nothing twice: each handler that had started was finished.
async fn stopped(broker: Broker, sample: &'static str, body: &str, duplicates: Duplicates) {
    let world = World::new(broker).await;
    let messages = (0..MESSAGES).map(|n| Sent::raw(Some(format!("id-{n:04}")), body));
    world.publish(messages).await;
    let name = world.name.clone();
    let run = async |lines| {
        let name = name.clone();
        let run = tokio::task::spawn_blocking(move || run_until(broker, sample, &name, lines));
        run.await.expect("no panic")
    };
    let first = run(MESSAGES / 10).await;
    assert!(first.len() < MESSAGES, "it handled all before the signal");
    let rest = MESSAGES - first.len();
    let second = run(rest).await;
    let mut handled = BTreeMap::new();
    for id in first.into_iter().chain(second) {
        *handled.entry(id).or_insert(0) += 1;
    }
    if duplicates == Duplicates::Skipped {
        assert_eq!(handled.len(), MESSAGES, "each message is handled");
        let twice: Vec<_> = handled.iter().filter(|(_, count)| **count > 1).collect();
        assert!(twice.is_empty(), "{twice:?}");
        assert_eq!(world.in_doubt().await, []);
    } else {
        assert_eq!(handled.len(), MESSAGES, "each message is handled");
    }
    assert_eq!(world.dead_letters().await, []);
    world.broker.remove(&world.name).await;
}

/// Runs the sample until it has handled this many messages, then sends SIGTERM. Returns the ids in its
/// output.
fn run_until(broker: Broker, sample: &str, name: &str, count: usize) -> Vec<String> {
    let mut program = self::sample(sample, broker, name)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program of the samples");
    let output = BufReader::new(program.stdout.take().expect("it is piped"));
    let mut started = Vec::new();
    let mut ids = output.lines().filter_map(|line| {
        let line = line.expect("text");
        if let Some(id) = line.strip_prefix("start of ") {
            started.push(id.to_owned());
            return None;
        }
        let id = line.split(':').next().unwrap_or_default();
        id.starts_with("id-").then(|| id.to_owned())
    });
    let mut handled: Vec<String> = ids.by_ref().take(count).collect();
    send_sigterm(&program);
    let since = Instant::now();
    handled.extend(ids);
    wait(sample, &mut program, since);
    if !started.is_empty() {
        let (mut started, mut ended) = (started, handled.clone());
        started.sort();
        ended.sort();
        assert_eq!(started, ended, "{sample}: each handler that starts ends");
    }
    handled
}

/// The program of a sample, with the addresses of the servers.
fn sample(sample: &str, broker: Broker, name: &str) -> Command {
    let redis = oncegate_testkit::redis_url().unwrap_or_else(|missing| panic!("{missing}"));
    let address = match broker {
        Broker::Kafka => "ONCEGATE_KAFKA",
        Broker::RabbitMq => "ONCEGATE_RABBITMQ",
    };
    let mut program = Command::new(env!("CARGO_BIN_EXE_sample"));
    program
        .arg(sample)
        .envs([
            ("NAME", name),
            ("ONCEGATE_REDIS", &redis),
            (address, &broker.url()),
        ])
        .stdin(Stdio::null());
    program
}

/// Sends SIGTERM, after which the sample ends with 0 within the drain timeout and a second.
fn terminate(sample: &str, program: &mut Child) {
    send_sigterm(program);
    wait(sample, program, Instant::now());
}

fn send_sigterm(program: &Child) {
    kill_process(Pid::from_child(program), Signal::TERM).expect("it runs");
}

fn wait(sample: &str, program: &mut Child, since: Instant) {
    let status = program.wait().expect("it was started here");
    assert!(status.success(), "{sample}: {status}");
    assert!(since.elapsed() < DRAIN_TIMEOUT + Duration::from_secs(1));
}
