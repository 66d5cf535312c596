//! Notices, while running, that a server forgot what it was told.
//!
//! The [canary](crate::canary) tells of lost keys and lost writes, `INFO` the rest: evicted keys,
//! another process, a clock that jumped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_core::marker::{Guarantee, Terms, Token};
use redis::{Pipeline, Value};

use crate::canary::{self, COUNT_STANDS, Canary, Keys, NoCanary};
use crate::durability::Durability;
use crate::failure::Failure;
use crate::finding::Finding;
use crate::info::Info;
use crate::link::Open;
use crate::metric::{FINDINGS, PAUSED};
use crate::route::{Lanes, Route};

/// How often a server is looked at while it is asked for claims.
const EVERY: Duration = Duration::from_secs(2);

/// The same, while others are to be told of a loss.
const EVERY_TO_TELL: Duration = Duration::from_millis(100);

/// How long at most once waits after a restart: who lost its last writes finds out when it asks
/// again, at least once a second, and tells.
const OTHERS_MAY_TELL: Duration = Duration::from_secs(3);

/// A clock may go wrong by so much between two looks, or by half of the shortest at-most-once lease
/// if that is less, since a lease is renewed at a third; and by a thousandth of the time between
/// them besides.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

/// Looks at servers now and then, and remembers what it saw.
pub(crate) struct Watch {
    /// Whose counts are ours.
    process: Token,
    state: Mutex<State>,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            process: Token::random(),
            state: Mutex::default(),
        }
    }
}

#[derive(Default)]
struct State {
    looked: Option<Instant>,
    /// By key. In a Cluster each primary has one; it moves to another node with its slot.
    births: HashMap<Vec<u8>, Birth>,
    /// By key, as well.
    counts: HashMap<Vec<u8>, Counted>,
    /// What each process of Redis showed last, by its `run_id`.
    processes: HashMap<String, Shown>,
    /// Until a person accepts it.
    forgot: Option<String>,
    /// When a forward jump of the clock was noticed, and how far it went.
    jumped: Option<(Instant, Duration)>,
    /// The shortest lease that was claimed at most once.
    shortest_lease: Option<Duration>,
    /// When another process was noticed, where the last one may have taken writes with it.
    restarted: Option<Instant>,
}

/// What is known of a canary that all share.
#[derive(Clone, Debug, Default)]
struct Birth {
    /// `None` once it was seen to be gone.
    birth: Option<Vec<u8>>,
    /// The `run_id` of the process that had it last.
    process: Option<String>,
    /// Whether it outlives what may go wrong without a loss, such as a failover.
    is_counted_on: bool,
    /// Whether it is to end, because what we wrote is gone.
    ends: bool,
}

/// The count that no server may be behind: claims that were granted stand with it.
#[derive(Clone, Copy, Debug)]
struct Counted {
    least: u64,
    at: Instant,
}

/// What a process showed of itself.
#[derive(Clone, Debug)]
struct Shown {
    run_id: String,
    /// Of what it wrote; and of what it followed before that, if it was a replica.
    history: String,
    followed: Option<String>,
    /// How long it ran.
    up: Duration,
    evicted: u64,
    clock: Duration,
    /// It showed this after it was asked, and before that was read.
    asked: Instant,
    at: Instant,
}

/// What was known of a canary when it was asked.
pub(crate) struct Asked {
    pub(crate) keys: Keys,
    birth: Birth,
    pub(crate) least: u64,
}

/// What of a canary must not be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stands {
    /// Birth and count: claims stand with them.
    Firmly,
    /// The birth: a look counts too, but no claim is gone if its count is.
    Born,
    /// Nothing: replicas have to know of claims, and may not know of this.
    Perhaps,
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is time to look again; the one who is told so looks.
    pub(crate) fn is_due(&self) -> bool {
        let mut state = self.state();
        let to_tell = state.births.values().any(|birth| birth.ends);
        let every = if to_tell { EVERY_TO_TELL } else { EVERY };
        let is_due = state.looked.is_none_or(|at| at.elapsed() >= every);
        if is_due {
            state.looked = Some(Instant::now());
        }
        is_due
    }

    /// Looks at each server, side by side. One that does not answer is left for the next time.
    pub(crate) async fn look(&self, route: &Route, prefix: &[u8], durability: Durability) {
        let Ok(servers) = route.primaries().await else {
            return;
        };
        let looks = join_all(
            servers
                .iter()
                .map(|lanes| self.look_on(lanes, route, prefix, durability)),
        )
        .await;
        match looks.into_iter().collect::<Result<Vec<_>, _>>() {
            Ok(keys) => self.saw_all(&keys),
            Err(failure) => tracing::debug!(?failure, "Redis could not be looked at"),
        }
    }

    async fn look_on(
        &self,
        lanes: &Lanes,
        route: &Route,
        prefix: &[u8],
        durability: Durability,
    ) -> Result<Option<Keys>, Failure> {
        let keys = self.keys_on(route, lanes, prefix).await?;
        self.look_at(
            &lanes.general.open().await?,
            route,
            keys.clone(),
            durability,
        )
        .await?;
        Ok(keys)
    }

    /// These are the canaries of all servers: a birth that is to end and is none of them goes when
    /// it is one again.
    fn saw_all(&self, keys: &[Option<Keys>]) {
        let is_one = |key: &Vec<u8>| keys.iter().flatten().any(|keys| keys.shared == *key);
        self.state()
            .births
            .retain(|key, birth| !birth.ends || is_one(key));
    }

    /// The keys on one server; `None` where that serves no slot.
    pub(crate) async fn keys_on(
        &self,
        route: &Route,
        lanes: &Lanes,
        prefix: &[u8],
    ) -> Result<Option<Keys>, Failure> {
        let shared = route.key_on(lanes, &canary::shared(prefix)).await?;
        let own = route
            .key_on(lanes, &canary::own(prefix, self.process))
            .await?;
        Ok(shared.zip(own).map(|(shared, own)| Keys { shared, own }))
    }

    /// Looks at the server behind a connection that was made since the last look: it may be another
    /// one, or the same with its keys lost. A node of a Cluster that serves no slot of its own yet
    /// has no canary.
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured`: it could not be looked at, and nothing is known of it.
    pub(crate) async fn vouch(
        &self,
        open: &Open<'_>,
        route: &Route,
        lanes: &Arc<Lanes>,
        prefix: &[u8],
        durability: Durability,
    ) -> Result<(), Failure> {
        if open.was_looked_at() {
            return Ok(());
        }
        let keys = self.keys_on(route, lanes, prefix).await?;
        self.look_at(open, route, keys, durability)
            .await
            .map_err(|failure| match failure {
                // Of the claims nothing was sent.
                Failure::Unknown(problem) => Failure::NotApplied(problem),
                failure => failure,
            })
    }

    async fn look_at(
        &self,
        open: &Open<'_>,
        route: &Route,
        keys: Option<Keys>,
        durability: Durability,
    ) -> Result<(), Failure> {
        self.look_once(open, route, keys.clone(), durability)
            .await?;
        match keys {
            // The others are told at once.
            Some(keys) if self.asks(keys.clone()).birth.ends => {
                self.look_once(open, route, Some(keys), durability).await
            }
            _ => Ok(()),
        }
    }

    async fn look_once(
        &self,
        open: &Open<'_>,
        route: &Route,
        keys: Option<Keys>,
        durability: Durability,
    ) -> Result<(), Failure> {
        let asked = keys.map(|keys| self.asks(keys));
        let mut pipeline = Pipeline::with_capacity(3);
        pipeline.cmd("INFO");
        if let Some(Asked { keys, birth, least }) = &asked {
            let ends = birth.birth.as_deref().filter(|_| birth.ends);
            for command in canary::look(keys, ends, *least) {
                pipeline.add_command(command);
            }
        }
        let sent = Instant::now();
        let mut replies = open.ask(&pipeline).await?.into_iter();
        let mut next = || replies.next().unwrap_or(Value::Nil);
        let shown = Shown::read(&Info::read(next())?, sent);
        let told = match asked {
            Some(asked) => match canary::read(next(), &next()) {
                Ok(canary) => Some((asked, canary)),
                Err(why) => {
                    if let NoCanary::Elsewhere { moving, .. } = why {
                        route.distrust_slot(moving);
                    }
                    return Err(why.into());
                }
            },
            None => None,
        };
        let stands = match durability {
            Durability::Primary => Stands::Born,
            Durability::Replicas { .. } => Stands::Perhaps,
        };
        self.state().take(told, shown, stands);
        open.set_looked_at();
        Ok(())
    }

    /// Before a canary is asked: what it has to be beyond.
    pub(crate) fn asks(&self, keys: Keys) -> Asked {
        let state = self.state();
        let birth = state.births.get(&keys.shared).cloned().unwrap_or_default();
        let counted = state
            .counts
            .get(&keys.own)
            .filter(|counted| counted.at.elapsed() < COUNT_STANDS);
        Asked {
            least: counted.map_or(0, |counted| counted.least),
            birth,
            keys,
        }
    }

    /// After it told.
    pub(crate) fn told(&self, asked: Asked, canary: Canary, stands: Stands) {
        let mut state = self.state();
        let finding = state.told(asked, canary, stands);
        finding.into_iter().for_each(|finding| state.note(&finding));
    }

    /// Why a claim on these terms is not to be asked at this moment.
    pub(crate) fn withholds(&self, terms: &Terms) -> Option<Failure> {
        if terms.guarantee != Guarantee::AtMostOnce {
            return None;
        }
        let mut state = self.state();
        state.shortest_lease = Some(
            state
                .shortest_lease
                .map_or(terms.lease, |shortest| shortest.min(terms.lease)),
        );
        // Markers that should still stand may have expired, and `max_age` does not speak for their
        // messages.
        let far = state
            .jumped
            .filter(|(_, by)| *by >= terms.window / 2)
            .map(|(_, by)| Finding::ClockForward(by).told());
        if let Some(why) = state.forgot.clone().or(far) {
            metrics::gauge!(PAUSED).set(1);
            return Some(paused(&why));
        }
        if state
            .restarted
            .is_some_and(|at| at.elapsed() < OTHERS_MAY_TELL)
        {
            return Some(Failure::not_applied(format!(
                "another Redis process answers; at most once waits {OTHERS_MAY_TELL:?}, in which consumers that lost writes with the last one \
                 tell the others"
            )));
        }
        match state.jumped {
            Some((at, by)) if at.elapsed() < terms.lease => Some(Failure::not_applied(format!(
                "{}; at most once pauses for one lease",
                Finding::ClockForward(by).told()
            ))),
            _ => None,
        }
    }

    /// A person accepts what was forgotten. After a restart the others are waited for all the same.
    pub(crate) fn accept(&self) {
        let mut state = self.state();
        (state.forgot, state.jumped) = (None, None);
        metrics::gauge!(PAUSED).set(0);
    }
}

fn paused(why: &str) -> Failure {
    Failure::not_applied(format!(
        "{why}; at most once pauses, because what was handled may be taken for new: see which messages may come again, then call \
         Redis::accept_loss or start again"
    ))
}

impl State {
    /// What a look showed.
    fn take(&mut self, told: Option<(Asked, Canary)>, shown: Shown, stands: Stands) {
        let mut findings = Vec::new();
        let key = told.as_ref().map(|(asked, _)| asked.keys.shared.clone());
        if let Some((asked, canary)) = told {
            findings.extend(self.told(asked, canary, stands));
        }
        let predecessor = key.and_then(|key| {
            self.births
                .get_mut(&key)?
                .process
                .replace(shown.run_id.clone())
        });
        let before = match (self.processes.get(&shown.run_id), predecessor) {
            // A node that was seen before: the canary may have come to it with its slot.
            (Some(same), _) => Some(same),
            (None, Some(other)) => {
                let before = self.processes.get(&other);
                if findings.is_empty() {
                    findings.push(Finding::Restarted);
                    // What replicas had to know of is there on the one that took over. A primary
                    // that came back without its last writes is believed by its replicas, which
                    // forget them too.
                    let lost_nothing = stands == Stands::Perhaps
                        && before.is_some_and(|before| shown.took_over_from(before));
                    if !lost_nothing {
                        self.restarted = Some(Instant::now());
                    }
                }
                before
            }
            (None, None) => None,
        };
        let tolerance = self
            .shortest_lease
            .map_or(CLOCK_TOLERANCE, |lease| CLOCK_TOLERANCE.min(lease / 2));
        findings.extend(
            before
                .map(|before| compare(before, &shown, tolerance))
                .unwrap_or_default(),
        );
        self.processes.insert(shown.run_id.clone(), shown);
        findings.iter().for_each(|finding| self.note(finding));
    }

    /// What a canary told. A finding is told once, whoever else was under way.
    fn told(&mut self, asked: Asked, canary: Canary, stands: Stands) -> Option<Finding> {
        let Asked {
            keys,
            birth: known,
            least,
        } = asked;
        let now = Instant::now();
        let counted = self
            .counts
            .entry(keys.own)
            .or_insert(Counted { least: 0, at: now });
        if counted.at.elapsed() >= COUNT_STANDS {
            counted.least = 0;
        }
        // Only what is not behind was counted up. Behind what it was since seen to be, or no loss
        // of its own.
        let behind = canary.count < least.min(counted.least);
        if stands == Stands::Firmly || behind {
            let least = if behind {
                canary.count
            } else {
                counted.least.max(canary.count)
            };
            *counted = Counted { least, at: now };
        }
        let birth = self.births.entry(keys.shared).or_default();
        if birth.birth != known.birth {
            // Another was noticed meanwhile, and what is behind with it.
            return None;
        }
        if canary.birth != birth.birth {
            let ended = std::mem::take(&mut birth.ends);
            let was_counted_on = birth.is_counted_on;
            birth.is_counted_on = stands != Stands::Perhaps && canary.birth.is_some();
            birth.birth = canary.birth;
            // Ended by us, or never counted on.
            return (was_counted_on && !ended).then_some(Finding::CanaryLost);
        }
        birth.is_counted_on |= stands != Stands::Perhaps && birth.birth.is_some();
        birth.ends |= behind;
        behind.then_some(Finding::WritesLost)
    }

    fn note(&mut self, finding: &Finding) {
        let told = finding.told();
        metrics::counter!(FINDINGS, "finding" => finding.label()).increment(1);
        if finding.forgot() {
            tracing::error!(finding = finding.label(), "{told}");
            self.forgot.get_or_insert(told);
        } else {
            tracing::warn!(finding = finding.label(), "{told}");
        }
        if let Finding::ClockForward(by) = finding {
            // A smaller one does not make up for it.
            let by = self.jumped.map_or(*by, |(_, before)| before.max(*by));
            self.jumped = Some((Instant::now(), by));
        }
    }
}

impl Shown {
    fn read(info: &Info, asked: Instant) -> Self {
        Self {
            run_id: info.field("run_id").unwrap_or_default().to_owned(),
            history: info.field("master_replid").unwrap_or_default().to_owned(),
            followed: info.field("master_replid2").map(str::to_owned),
            up: Duration::from_secs(info.number("uptime_in_seconds").unwrap_or(0)),
            evicted: info.number("evicted_keys").unwrap_or(0),
            clock: Duration::from_micros(info.number("server_time_usec").unwrap_or(0)),
            asked,
            at: Instant::now(),
        }
    }

    /// Whether it followed that one, and ran already when that one was asked last: one that was
    /// started since may have read its history from a file.
    fn took_over_from(&self, before: &Self) -> bool {
        !before.history.is_empty()
            && self.followed.as_deref() == Some(&before.history)
            && self.up > self.at.saturating_duration_since(before.asked)
    }
}

/// What happened between two looks: at the same process, or at one and the one that took its place.
fn compare(before: &Shown, now: &Shown, tolerance: Duration) -> Vec<Finding> {
    let mut findings = Vec::new();
    // A new process counts from 0.
    let evicted_before = if now.run_id == before.run_id {
        before.evicted
    } else {
        0
    };
    if now.evicted > evicted_before {
        findings.push(Finding::Evicted(now.evicted - evicted_before));
    }
    // How long it may have been between the moments at which they were shown: a reply may lie
    // unread, a request unsent.
    let (least, most) = (
        now.asked.saturating_duration_since(before.at),
        now.at.saturating_duration_since(before.asked),
    );
    let tolerance = tolerance + most / 1_000;
    match now.clock.checked_sub(before.clock) {
        Some(shown) if shown > most + tolerance => {
            findings.push(Finding::ClockForward(shown - most))
        }
        Some(shown) if shown + tolerance < least => {
            findings.push(Finding::ClockBackward(least - shown))
        }
        None if before.clock - now.clock > tolerance => {
            findings.push(Finding::ClockBackward(before.clock - now.clock + least))
        }
        _ => {}
    }
    findings
}

#[cfg(test)]
mod tests;
