//! Detects, while the consumer runs, that a server lost data.
//!
//! The [canary](crate::canary) shows lost keys and lost writes; `INFO` shows evicted keys, a
//! restart and a clock that jumped.

mod snapshot;

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_core::internal::Lock;
use oncegate_core::marker::{Guarantee, Terms, Token};
use redis::{Pipeline, Value};

use crate::anomaly::Anomaly;
use crate::canary::{self, COUNT_VALID_FOR, Canary, CanaryError, CanaryKeys};
use crate::client::connection::PinnedConnection;
use crate::durability::Durability;
use crate::failure::StoreFailure;
use crate::info::InfoReply;
use crate::metric::{ANOMALIES, PAUSED};
use crate::router::{CommandRouter, ConnectionPair};
use snapshot::{ServerSnapshot, detect_anomalies};

/// How often a server is checked while claims are sent.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// How often a server is checked while this process has a canary generation to replace.
const CHECK_INTERVAL_WHILE_REPLACING: Duration = Duration::from_millis(100);

/// How long at most once pauses after a restart of the server. Meanwhile each other process that
/// lost its last writes and has messages detects this with its next claim, and replaces the canary
/// generation.
const RESTART_PAUSE: Duration = Duration::from_secs(3);

/// The tolerated clock error between two checks. Half of the shortest at-most-once lease applies if
/// that is less, since a lease is renewed after a third; a thousandth of the elapsed time is added.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

/// Checks the servers periodically and compares each check with the ones before.
pub(crate) struct LossDetector {
    /// Identifies the count keys of this process.
    process: Token,
    state: Lock<DetectorState>,
}

impl Default for LossDetector {
    fn default() -> Self {
        Self {
            process: Token::random(),
            state: Lock::default(),
        }
    }
}

#[derive(Default)]
struct DetectorState {
    last_check: Option<Instant>,
    /// The configuration error that made the last checks fail, as it was logged.
    misconfigured: Option<String>,
    /// The last observation of each canary, by its key. In a Cluster each primary has a canary,
    /// which moves with its slot to another node.
    canaries: HashMap<Vec<u8>, KnownCanary>,
    /// The minimum of each write count, by its key.
    counts: HashMap<Vec<u8>, KnownCount>,
    /// The last snapshot of each server process, by its `run_id`.
    servers: HashMap<String, ServerSnapshot>,
    /// The first unaccepted loss of data.
    data_loss: Option<String>,
    /// When the clock jumped forward, and how far.
    clock_jump: Option<(Instant, Duration)>,
    /// The shortest lease of an at-most-once claim.
    shortest_lease: Option<Duration>,
    /// When a server with another `run_id` was seen, which may lack the last writes of the one
    /// before.
    restarted_at: Option<Instant>,
}

/// The last observation of a canary's generation.
#[derive(Clone, Debug, Default)]
struct KnownCanary {
    /// `None` once it was seen to be missing.
    generation: Option<Vec<u8>>,
    /// The `run_id` of the server process that had it last.
    server: Option<String>,
    /// Whether a missing generation is a loss. With [`Durability::Replicas`] only after replicas
    /// have acknowledged the generation: before that a failover may lose it without losing a claim.
    is_baseline: bool,
    /// Whether this process must replace the generation, because the server lost writes of this
    /// process.
    replace: bool,
}

/// The write count that a server must have reached: granted claims were written before it.
#[derive(Clone, Copy, Debug)]
struct KnownCount {
    minimum: u64,
    /// When the minimum was set.
    at: Instant,
}

/// The last observation of a canary when a request for it is sent.
pub(crate) struct CanaryExpectation {
    pub(crate) keys: CanaryKeys,
    canary: KnownCanary,
    pub(crate) minimum: u64,
}

/// Which values of a canary reply the server must keep from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CanaryBaseline {
    /// Generation and count: granted claims depend on them.
    Full,
    /// The generation: a check increments the count too, but losing that increment loses no claim.
    GenerationOnly,
    /// Neither: claims wait for replicas, and the replicas may not have these values.
    Unchanged,
}

impl LossDetector {
    fn state(&self) -> MutexGuard<'_, DetectorState> {
        self.state.lock()
    }

    /// Whether a check is due. The caller that gets `true` must perform it.
    pub(crate) fn start_if_due(&self) -> bool {
        let mut state = self.state();
        let is_replacing = state.canaries.values().any(|canary| canary.replace);
        let interval = if is_replacing {
            CHECK_INTERVAL_WHILE_REPLACING
        } else {
            CHECK_INTERVAL
        };
        let is_due = state.last_check.is_none_or(|at| at.elapsed() >= interval);
        if is_due {
            state.last_check = Some(Instant::now());
        }
        is_due
    }

    /// Checks all servers concurrently. One that does not reply is checked the next time.
    pub(crate) async fn check(
        &self,
        router: &CommandRouter,
        prefix: &[u8],
        durability: Durability,
    ) {
        let Ok(servers) = router.primaries().await else {
            return;
        };
        let checks = join_all(
            servers
                .iter()
                .map(|connections| self.check_server(connections, router, prefix, durability)),
        )
        .await;
        match checks.into_iter().collect::<Result<Vec<_>, _>>() {
            Ok(keys) => {
                self.forget_removed_canaries(&keys);
                self.state().misconfigured = None;
            }
            Err(StoreFailure::Misconfigured(problem)) => {
                let problem = problem.to_string();
                let mut state = self.state();
                if state.misconfigured.as_ref() != Some(&problem) {
                    tracing::error!(
                        error = problem,
                        "cannot check Redis for lost data: correct what `error` names"
                    );
                    state.misconfigured = Some(problem);
                }
            }
            Err(failure) => tracing::debug!(?failure, "cannot check Redis for lost data"),
        }
    }

    async fn check_server(
        &self,
        connections: &ConnectionPair,
        router: &CommandRouter,
        prefix: &[u8],
        durability: Durability,
    ) -> Result<Option<CanaryKeys>, StoreFailure> {
        let keys = self.canary_keys(router, connections, prefix).await?;
        self.check_connection(
            &connections.general.pin().await?,
            router,
            keys.clone(),
            durability,
        )
        .await?;
        Ok(keys)
    }

    /// Forgets a canary whose generation is to be replaced, if no server has it any more. `keys` are
    /// the canaries of all servers.
    fn forget_removed_canaries(&self, keys: &[Option<CanaryKeys>]) {
        let exists = |key: &Vec<u8>| keys.iter().flatten().any(|keys| keys.shared == *key);
        self.state()
            .canaries
            .retain(|key, canary| !canary.replace || exists(key));
    }

    /// The canary keys on one server; `None` if it serves no slot.
    pub(crate) async fn canary_keys(
        &self,
        router: &CommandRouter,
        connections: &ConnectionPair,
        prefix: &[u8],
    ) -> Result<Option<CanaryKeys>, StoreFailure> {
        let shared = router
            .key_on_server(connections, &canary::shared_key(prefix))
            .await?;
        let own = router
            .key_on_server(connections, &canary::own_key(prefix, self.process))
            .await?;
        Ok(shared
            .zip(own)
            .map(|(shared, own)| CanaryKeys { shared, own }))
    }

    /// Checks the server behind a new connection, once: it may be another server, or the same
    /// without its keys. A Cluster node that serves no slot yet has no canary.
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured`: the check failed, and no claim was sent.
    pub(crate) async fn ensure_checked(
        &self,
        connection: &PinnedConnection<'_>,
        router: &CommandRouter,
        connections: &Arc<ConnectionPair>,
        prefix: &[u8],
        durability: Durability,
    ) -> Result<(), StoreFailure> {
        if connection.is_checked() {
            return Ok(());
        }
        let keys = self.canary_keys(router, connections, prefix).await?;
        self.check_connection(connection, router, keys, durability)
            .await
            .map_err(|failure| match failure {
                // The outcome of the check is unknown, but no claim was sent.
                StoreFailure::Unknown(problem) => StoreFailure::NotApplied(problem),
                failure => failure,
            })
    }

    /// Checks the server, and once more if the first check found that this process must replace the
    /// canary's generation.
    async fn check_connection(
        &self,
        connection: &PinnedConnection<'_>,
        router: &CommandRouter,
        keys: Option<CanaryKeys>,
        durability: Durability,
    ) -> Result<(), StoreFailure> {
        self.check_once(connection, router, keys.clone(), durability)
            .await?;
        match keys {
            // Replaces the generation at once, so that the other processes detect the loss.
            Some(keys) if self.expectation(keys.clone()).canary.replace => {
                self.check_once(connection, router, Some(keys), durability)
                    .await
            }
            _ => Ok(()),
        }
    }

    /// Sends one check and records its result.
    async fn check_once(
        &self,
        connection: &PinnedConnection<'_>,
        router: &CommandRouter,
        keys: Option<CanaryKeys>,
        durability: Durability,
    ) -> Result<(), StoreFailure> {
        let expected = keys.map(|keys| self.expectation(keys));
        let mut pipeline = Pipeline::with_capacity(3);
        pipeline.cmd("INFO");
        if let Some(CanaryExpectation {
            keys,
            canary,
            minimum,
        }) = &expected
        {
            let replaces = canary.generation.as_deref().filter(|_| canary.replace);
            for command in canary::check(keys, replaces, *minimum) {
                pipeline.add_command(command);
            }
        }
        let sent_at = Instant::now();
        let mut replies = connection.send(&pipeline).await?.into_iter();
        let mut next = || replies.next().unwrap_or(Value::Nil);
        let snapshot = ServerSnapshot::read(&InfoReply::read(next())?, sent_at);
        let reply = match expected {
            Some(expected) => match canary::read(next(), &next()) {
                Ok(canary) => Some((expected, canary)),
                Err(error) => {
                    if let CanaryError::Moved { migrating, .. } = error {
                        router.invalidate_slot(migrating);
                    }
                    return Err(error.into());
                }
            },
            None => None,
        };
        let baseline = match durability {
            Durability::Primary => CanaryBaseline::GenerationOnly,
            Durability::Replicas { .. } => CanaryBaseline::Unchanged,
        };
        self.state().record_check(reply, snapshot, baseline);
        connection.set_checked();
        Ok(())
    }

    /// The values that the server must have, as of the moment before the request is sent.
    pub(crate) fn expectation(&self, keys: CanaryKeys) -> CanaryExpectation {
        let state = self.state();
        let canary = state
            .canaries
            .get(&keys.shared)
            .cloned()
            .unwrap_or_default();
        let count = state
            .counts
            .get(&keys.own)
            .filter(|count| count.at.elapsed() < COUNT_VALID_FOR);
        CanaryExpectation {
            minimum: count.map_or(0, |count| count.minimum),
            canary,
            keys,
        }
    }

    /// Compares a reply with its expectation.
    pub(crate) fn record_reply(
        &self,
        expected: CanaryExpectation,
        canary: Canary,
        baseline: CanaryBaseline,
    ) {
        let mut state = self.state();
        let anomaly = state.record_canary(expected, canary, baseline);
        anomaly
            .into_iter()
            .for_each(|anomaly| state.report(&anomaly));
    }

    /// Why a claim on these terms must not be sent now; `None` if it may. Updates the gauge
    /// [`PAUSED`] and the shortest lease.
    pub(crate) fn claim_refusal(&self, terms: &Terms) -> Option<StoreFailure> {
        if terms.guarantee != Guarantee::AtMostOnce {
            return None;
        }
        let mut state = self.state();
        state.shortest_lease = Some(
            state
                .shortest_lease
                .map_or(terms.lease, |shortest| shortest.min(terms.lease)),
        );
        // After a jump of half the window, markers may have expired while their messages can still be
        // redelivered and are younger than `max_age`.
        let long_jump = state
            .clock_jump
            .filter(|(_, by)| *by >= terms.window / 2)
            .map(|(_, by)| Anomaly::ClockForward(by).description());
        if let Some(why) = state.data_loss.clone().or(long_jump) {
            metrics::gauge!(PAUSED).set(1);
            return Some(paused(&why));
        }
        if state
            .restarted_at
            .is_some_and(|at| at.elapsed() < RESTART_PAUSE)
        {
            return Some(StoreFailure::claims_paused(format!(
                "Redis restarted or failed over (another run_id); at-most-once claims pause for {RESTART_PAUSE:?}, until consumers that lost \
                 writes have reported it"
            )));
        }
        match state.clock_jump {
            Some((at, by)) if at.elapsed() < terms.lease => {
                Some(StoreFailure::claims_paused(format!(
                    "{}; at-most-once claims pause for one lease",
                    Anomaly::ClockForward(by).description()
                )))
            }
            _ => None,
        }
    }

    /// Accepts all losses so far. The pause after a restart stays.
    pub(crate) fn accept_loss(&self) {
        let mut state = self.state();
        (state.data_loss, state.clock_jump) = (None, None);
        metrics::gauge!(PAUSED).set(0);
    }
}

fn paused(why: &str) -> StoreFailure {
    StoreFailure::claims_paused(format!(
        "{why}; at-most-once claims are paused, because messages already handled may be granted again: find out which messages may be \
         redelivered, then call Redis::accept_loss or restart the consumer"
    ))
}

impl DetectorState {
    /// Compares a check with the ones before.
    fn record_check(
        &mut self,
        reply: Option<(CanaryExpectation, Canary)>,
        snapshot: ServerSnapshot,
        baseline: CanaryBaseline,
    ) {
        let mut anomalies = Vec::new();
        let key = reply
            .as_ref()
            .map(|(expected, _)| expected.keys.shared.clone());
        if let Some((expected, canary)) = reply {
            anomalies.extend(self.record_canary(expected, canary, baseline));
        }
        let predecessor = key.and_then(|key| {
            self.canaries
                .get_mut(&key)?
                .server
                .replace(snapshot.run_id.clone())
        });
        let before = match (self.servers.get(&snapshot.run_id), predecessor) {
            // A known server: the canary may have moved to it with its slot.
            (Some(same), _) => Some(same),
            (None, Some(other)) => {
                let before = self.servers.get(&other);
                if anomalies.is_empty() {
                    anomalies.push(Anomaly::Restarted);
                    // A promoted replica has every claim that waited for replicas. A primary that
                    // came back without its last writes is followed by its replicas, which then
                    // lose them too.
                    let lost_nothing = baseline == CanaryBaseline::Unchanged
                        && before.is_some_and(|before| snapshot.was_replica_of(before));
                    if !lost_nothing {
                        self.restarted_at = Some(Instant::now());
                    }
                }
                before
            }
            (None, None) => None,
        };
        let tolerance = self
            .shortest_lease
            .map_or(CLOCK_TOLERANCE, |lease| CLOCK_TOLERANCE.min(lease / 2));
        anomalies.extend(
            before
                .map(|before| detect_anomalies(before, &snapshot, tolerance))
                .unwrap_or_default(),
        );
        self.servers.insert(snapshot.run_id.clone(), snapshot);
        anomalies.iter().for_each(|anomaly| self.report(anomaly));
    }

    /// Compares a canary with the last observation. Returns each anomaly once, even if several requests
    /// were pending.
    fn record_canary(
        &mut self,
        expected: CanaryExpectation,
        canary: Canary,
        baseline: CanaryBaseline,
    ) -> Option<Anomaly> {
        let CanaryExpectation {
            keys,
            canary: expected,
            minimum,
        } = expected;
        let now = Instant::now();
        let count = self.counts.entry(keys.own).or_insert(KnownCount {
            minimum: 0,
            at: now,
        });
        if count.at.elapsed() >= COUNT_VALID_FOR {
            count.minimum = 0;
        }
        // Compared with both values: after the request was sent, the minimum may have been lowered
        // by a reply that showed this loss, or raised by one that overtook this reply.
        let is_behind = canary.count < minimum.min(count.minimum);
        if baseline == CanaryBaseline::Full || is_behind {
            let minimum = if is_behind {
                canary.count
            } else {
                count.minimum.max(canary.count)
            };
            *count = KnownCount { minimum, at: now };
        }
        let known = self.canaries.entry(keys.shared).or_default();
        if known.generation != expected.generation {
            // Another reply has shown a new generation since the request was sent, and was reported.
            return None;
        }
        if canary.generation != known.generation {
            let replaced_here = std::mem::take(&mut known.replace);
            let was_baseline = known.is_baseline;
            known.is_baseline =
                baseline != CanaryBaseline::Unchanged && canary.generation.is_some();
            known.generation = canary.generation;
            return (was_baseline && !replaced_here).then_some(Anomaly::CanaryLost);
        }
        known.is_baseline |= baseline != CanaryBaseline::Unchanged && known.generation.is_some();
        known.replace |= is_behind;
        is_behind.then_some(Anomaly::WritesLost)
    }

    fn report(&mut self, anomaly: &Anomaly) {
        let description = anomaly.description();
        metrics::counter!(ANOMALIES, "anomaly" => anomaly.label()).increment(1);
        if anomaly.is_data_loss() {
            tracing::error!(anomaly = anomaly.label(), "{description}");
            self.data_loss.get_or_insert(description);
        } else {
            tracing::warn!(anomaly = anomaly.label(), "{description}");
        }
        if let Anomaly::ClockForward(by) = anomaly {
            // A smaller jump does not cancel the pause for a larger one.
            let by = self.clock_jump.map_or(*by, |(_, before)| before.max(*by));
            self.clock_jump = Some((Instant::now(), by));
        }
    }
}

#[cfg(test)]
mod tests;
