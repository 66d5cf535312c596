//! A cell of the matrix with an inbox: aborts processes at the same step, one after the other, while
//! messages arrive, and counts the rows in PostgreSQL.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_postgres::Postgres;
use rustix::process::Signal;
use sqlx::{AssertSqlSafe, Executor, PgPool};

use super::cell::{ABORTED, STEP_TIMEOUT, message};
use super::group::{Combination, GroupMember};
use super::servers::MatrixServers;
use super::step::CrashStep;
use crate::Error;
use crate::broker_client::BrokerClient;
use crate::fleet::status_text;
use crate::ledger::Log;
use crate::message::OutgoingMessage;
use crate::run::ConsumerMode;
use crate::worker::Broker;

/// If a process has not reached its step after this time, more messages are sent.
const WAVE_INTERVAL: Duration = Duration::from_secs(15);
/// The time limit until the last process has handled everything.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// If everything is settled, rows that are missing for this time are lost.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// How many messages the first service sends to the second one for each that it handles.
const SENT_FOR_EACH: u64 = 2;

/// The counts of a cell.
pub(crate) struct ServiceResult {
    /// The number of processes that aborted at the step.
    pub(crate) aborted: u64,
    /// The number of different messages to the first service.
    pub(crate) sent: u64,
    /// Missing rows of the two services and of the outbox.
    pub(crate) lost: u64,
    /// Rows of these tables after the first of their message.
    pub(crate) doubled: u64,
    /// What else is wrong.
    pub(crate) wrong: Vec<String>,
}

/// Runs the cell with these environment variables and the one that arms the step, and aborts that
/// many processes.
pub(crate) fn run(
    servers: &MatrixServers,
    step: &CrashStep,
    combination: Combination,
    environment: &[(&str, &str)],
    runs: u64,
    folder: &Path,
) -> Result<ServiceResult, Error> {
    let mut cell = ServiceCell::open(servers, combination, folder)?;
    let (mut aborted, mut wrong) = (0, Vec::new());
    for (run, pass) in (0..runs).zip(step.passes.into_iter().cycle()) {
        let armed = format!("{}:{pass}", step.name);
        let armed_too = [environment, &[("ONCEGATE_FAILPOINT", armed.as_str())]].concat();
        let mut process = cell.start(&format!("c{run}"), &armed_too)?;
        let until = Instant::now() + STEP_TIMEOUT;
        let status = loop {
            cell.publish_wave()?;
            let status = process.ended_within(WAVE_INTERVAL)?;
            if status.is_some() || Instant::now() > until {
                break status;
            }
        };
        match status.map(status_text) {
            Some(how) if how == ABORTED && process.aborted_at(folder, &armed)? => aborted += 1,
            Some(how) => wrong.push(format!("run {run}: it ended with {how}, not at {armed}")),
            None => wrong.push(format!("run {run}: {armed} was not reached")),
        }
        if !wrong.is_empty() {
            break;
        }
    }
    let mut last = cell.start("last", environment)?;
    cell.until_done()?;
    last.signal(Signal::TERM)?;
    let status = last.ended_within(STEP_TIMEOUT)?.map(status_text);
    if status.as_deref() != Some("exit 0") {
        wrong.push(format!(
            "after SIGTERM the last process ended with {status:?}"
        ));
    }
    let counts = cell.counts()?;
    let sent = cell.ids.len() as u64;
    let (lost, doubled) = (counts.missing(), counts.repeated());
    if lost > 0 || doubled > 0 {
        wrong.push(format!("{sent} messages, and in the database {counts:?}"));
    }
    for client in [&cell.first, &cell.second] {
        for rejected in servers.runtime.block_on(client.rejected_messages())? {
            wrong.push(format!("rejected: {rejected:?}"));
        }
    }
    Ok(ServiceResult {
        aborted,
        sent,
        lost,
        doubled,
        wrong,
    })
}

/// What the tables contain: for each the expected number of messages, and the rows and different
/// ids.
#[derive(Debug, PartialEq, Eq)]
struct RowCounts {
    received: (u64, i64, i64),
    forwarded: (u64, i64, i64),
    parked: (u64, i64, i64),
    /// Messages in the outbox that are not parked.
    unsent: i64,
}

impl RowCounts {
    fn tables(&self) -> [(u64, i64, i64); 3] {
        [self.received, self.forwarded, self.parked]
    }

    fn missing(&self) -> u64 {
        let missing =
            |(expected, _, ids): (u64, i64, i64)| expected.saturating_sub(ids.max(0) as u64);
        self.tables().into_iter().map(missing).sum()
    }

    /// Also rows with ids beyond the expected number: the second run of a batch may send its messages
    /// with other ids.
    fn repeated(&self) -> u64 {
        let repeated = |(expected, rows, ids): (u64, i64, i64)| {
            rows.max(0) as u64 - expected.min(ids.max(0) as u64)
        };
        self.tables().into_iter().map(repeated).sum()
    }
}

struct ServiceCell<'a> {
    servers: &'a MatrixServers,
    folder: &'a Path,
    arguments: Vec<String>,
    pool: PgPool,
    first: BrokerClient,
    second: BrokerClient,
    log: Arc<Log>,
    ids: HashSet<String>,
    waves: u64,
}

impl<'a> ServiceCell<'a> {
    /// Creates the topics and the schema.
    fn open(
        servers: &'a MatrixServers,
        combination: Combination,
        folder: &'a Path,
    ) -> Result<Self, Error> {
        std::fs::create_dir_all(folder)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("service-{}-{number}", std::process::id());
        let (broker, url) = (combination.broker, servers.url(combination.broker));
        let schema = format!("{}?options[search_path]=cell_{number}", servers.postgres());
        let to = format!("{name}-next");
        let open = async {
            let pool = PgPool::connect(&servers.postgres()).await?;
            pool.execute(AssertSqlSafe(format!("CREATE SCHEMA cell_{number}")))
                .await?;
            pool.close().await;
            Postgres::url(&schema).migrate().await?;
            let pool = PgPool::connect(&schema).await?;
            let tables = "CREATE TABLE received (id text); CREATE TABLE forwarded (id text)";
            pool.execute(tables).await?;
            let mode = ConsumerMode::Competing;
            let first = BrokerClient::open(broker, &url, &name, mode).await?;
            let second = BrokerClient::open(broker, &url, &to, mode).await?;
            // Kafka confirms the creation of a topic before its metadata is available.
            let until = Instant::now() + STEP_TIMEOUT;
            while broker == Broker::Kafka
                && (first.unsettled().await.is_err() || second.unsettled().await.is_err())
            {
                if Instant::now() > until {
                    return Err(format!("Kafka has no metadata of {name}").into());
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            Ok::<_, Error>((pool, first, second))
        };
        let (pool, first, second) = servers.runtime.block_on(open)?;
        let arguments = [
            ("broker", broker.name()),
            ("url", &url),
            ("from", &name),
            ("to", &to),
            ("database", &schema),
            ("markers", combination.markers.name()),
        ];
        let arguments = arguments.map(|(name, value)| format!("--{name}={value}"));
        Ok(Self {
            servers,
            folder,
            arguments: arguments.into(),
            pool,
            first,
            second,
            log: Arc::new(Log::open(&folder.join("harness.jsonl"), "harness")?),
            ids: HashSet::new(),
            waves: 0,
        })
    }

    fn start(&self, name: &str, environment: &[(&str, &str)]) -> Result<GroupMember, Error> {
        let arguments = self.arguments.iter().map(String::as_str);
        let arguments = ["cell-service"].into_iter().chain(arguments);
        GroupMember::start(self.folder, name, arguments, environment)
    }

    /// Publishes 13 messages: two have the same id, two fail in their first run, and one causes a
    /// message that the broker refuses.
    fn publish_wave(&mut self) -> Result<(), Error> {
        let wave = self.waves;
        self.waves += 1;
        let kinds = "u u u once u refuse u once u u u u".split(' ');
        let mut messages: Vec<OutgoingMessage> = (0..)
            .zip(kinds)
            .map(|(number, kind)| message(format!("{kind}-{wave}-{number}"), None, 0))
            .collect();
        messages.push(messages[2].clone());
        self.ids
            .extend(messages.iter().map(|message| message.id.clone()));
        self.servers.runtime.block_on(async {
            self.first.publish(messages, &self.log).await?;
            self.first.flush().await;
            Ok(())
        })
    }

    /// Waits until all messages are settled, and each has its rows. Rows that stay missing are lost.
    fn until_done(&self) -> Result<(), Error> {
        let until = Instant::now() + DRAIN_TIMEOUT;
        let mut unsettled_at = Instant::now();
        loop {
            let counts = self.counts()?;
            let settled = self.servers.runtime.block_on(async {
                Ok::<_, Error>(self.first.unsettled().await? + self.second.unsettled().await?)
            });
            let is_settled = counts.unsent == 0 && settled.is_ok_and(|left| left == 0);
            if !is_settled {
                unsettled_at = Instant::now();
            }
            let is_complete = counts.missing() == 0 || unsettled_at.elapsed() > LOST_AFTER;
            if is_settled && is_complete || Instant::now() > until {
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn counts(&self) -> Result<RowCounts, Error> {
        let sent = self.ids.len() as u64;
        let refused = self.ids.iter().filter(|id| id.starts_with("refuse-"));
        let refused = refused.count() as u64;
        let count = async |table: &'static str| {
            let select = format!("SELECT count(*), count(DISTINCT id) FROM {table}");
            let select = sqlx::query_as::<_, (i64, i64)>(AssertSqlSafe(select));
            select.fetch_one(&self.pool).await
        };
        self.servers.runtime.block_on(async {
            let (received, forwarded) = (count("received").await?, count("forwarded").await?);
            let parked = count("oncegate_outbox WHERE error IS NOT NULL").await?;
            let (unsent, _) = count("oncegate_outbox WHERE error IS NULL").await?;
            Ok(RowCounts {
                received: (sent, received.0, received.1),
                forwarded: (SENT_FOR_EACH * sent, forwarded.0, forwarded.1),
                parked: (refused, parked.0, parked.1),
                unsent,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_repeated_rows_are_counted() {
        let counts = RowCounts {
            received: (3, 4, 4),
            forwarded: (6, 6, 5),
            parked: (1, 0, 0),
            unsent: 0,
        };
        assert_eq!((counts.missing(), counts.repeated()), (2, 2));
    }
}
