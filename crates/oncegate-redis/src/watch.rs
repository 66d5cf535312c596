//! Notices, while running, that a server forgot what it was told.
//!
//! A canary stands under `<prefix>!canary` and is counted up with every look. Gone or born anew, the server lost its keys;
//! counted back, it lost its last writes. `INFO` tells the rest: evicted keys, another process, a clock that jumped.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{Guarantee, Terms, Token, UNRESOLVED_AT_MOST_ONCE};
use redis::{Cmd, Pipeline, Value};
use tokio::sync::Mutex;

use crate::durability::Durability;
use crate::failure::Failure;
use crate::link::Open;
use crate::memory::field;
use crate::record;
use crate::route::{Lanes, Route};

/// How often a server is looked at while it is asked for claims.
const EVERY: Duration = Duration::from_secs(2);

/// A clock may go wrong by so much between two looks, and by a thousandth of the time between them.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

/// What was noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The canary is gone: the keys were lost, deleted or evicted.
    CanaryLost,
    /// The canary counts back: the last writes were lost, as in a failover or a power cut.
    WritesLost,
    /// Keys were evicted.
    Evicted(u64),
    /// Another process answers; it still has the keys.
    Restarted,
    /// The clock went on by this much more than time did.
    ClockForward(Duration),
    /// The clock went on by this much less.
    ClockBackward(Duration),
}

impl Finding {
    /// The label of the counter.
    fn label(&self) -> &'static str {
        match self {
            Self::CanaryLost => "canary_lost",
            Self::WritesLost => "writes_lost",
            Self::Evicted(_) => "evicted",
            Self::Restarted => "restarted",
            Self::ClockForward(_) => "clock_forward",
            Self::ClockBackward(_) => "clock_backward",
        }
    }

    fn told(&self) -> String {
        match self {
            Self::CanaryLost => "the canary key is gone: Redis lost its keys, or someone deleted them".into(),
            Self::WritesLost => "the canary key counts back: Redis lost its last writes, as in a failover or a power cut".into(),
            Self::Evicted(keys) => format!("Redis evicted {keys} keys: set maxmemory-policy noeviction, and give it more memory"),
            Self::Restarted => "another Redis process answers; it still has the keys".into(),
            Self::ClockForward(by) => {
                format!("the clock of Redis jumped forward by {by:?}: leases and markers end early; slew it with NTP")
            }
            Self::ClockBackward(by) => format!("the clock of Redis jumped back by {by:?}: leases and markers end late; slew it with NTP"),
        }
    }

    /// Whether markers may be gone, so that what was handled would be taken for new. Where replicas know of every claim,
    /// the last writes that a failover loses are others: their ids are in progress again, and then in doubt.
    fn forgot(&self, durability: Durability) -> bool {
        match self {
            Self::CanaryLost | Self::Evicted(_) => true,
            Self::WritesLost => durability == Durability::Primary,
            Self::Restarted | Self::ClockForward(_) | Self::ClockBackward(_) => false,
        }
    }
}

/// Looks at servers now and then, and remembers what it saw.
#[derive(Default)]
pub(crate) struct Watch {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    looked: Option<Instant>,
    /// What each server showed last, by its canary's key.
    seen: HashMap<Vec<u8>, Seen>,
    /// How many keys each process had evicted, by its `run_id`: in a Cluster a canary moves to another node with its slot.
    evicted: HashMap<String, u64>,
    /// Until a person accepts it.
    forgot: Option<String>,
    /// When a forward jump of the clock was noticed, and how far it went.
    jumped: Option<(Instant, Duration)>,
}

/// What a server showed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    birth: Vec<u8>,
    count: u64,
    run_id: String,
    evicted: u64,
    clock: Duration,
    at: Instant,
}

impl Watch {
    /// Looks at each server, unless that was done a moment ago. A server that does not answer is left for the next time.
    pub(crate) async fn look(&self, route: &Route, prefix: &[u8], durability: Durability) {
        let mut state = self.state.lock().await;
        if state.looked.is_some_and(|at| at.elapsed() < EVERY) {
            return;
        }
        state.looked = Some(Instant::now());
        let Ok(servers) = route.keys_on_each(&[prefix, b"!canary"].concat()).await else { return };
        for (key, lanes) in servers {
            let looked = match lanes.general.open().await {
                Ok(open) => state.look_at(&open, key, durability).await,
                Err(failure) => Err(failure),
            };
            if let Err(failure) = looked {
                tracing::debug!(?failure, "Redis could not be looked at");
            }
        }
    }

    /// Looks at the server behind a connection that was made since the last look: it may be another one, or the same with
    /// its keys lost. A node of a Cluster that serves no slot of its own yet is not looked at.
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
        let servers = route.keys_on_each(&[prefix, b"!canary"].concat()).await?;
        let Some((key, _)) = servers.into_iter().find(|(_, its)| Arc::ptr_eq(its, lanes)) else { return Ok(()) };
        let mut state = self.state.lock().await;
        if open.was_looked_at() {
            return Ok(());
        }
        state.look_at(open, key, durability).await.map_err(|failure| match failure {
            // Of the claims nothing was sent.
            Failure::Unknown(problem) => Failure::NotApplied(problem),
            failure => failure,
        })
    }

    /// Why a claim on these terms is not to be asked at this moment.
    pub(crate) async fn withholds(&self, terms: &Terms) -> Option<Failure> {
        if terms.guarantee != Guarantee::AtMostOnce {
            return None;
        }
        let state = self.state.lock().await;
        if let Some(why) = &state.forgot {
            return Some(paused(why));
        }
        match state.jumped {
            // Markers that should still stand may have expired, and `max_age` does not speak for their messages.
            Some((_, by)) if by >= terms.window / 2 => Some(paused(&Finding::ClockForward(by).told())),
            Some((at, by)) if at.elapsed() < terms.lease => {
                Some(Failure::not_applied(format!("{}; at most once pauses for one lease", Finding::ClockForward(by).told())))
            }
            _ => None,
        }
    }

    /// A person accepts what was forgotten.
    pub(crate) async fn accept(&self) {
        let mut state = self.state.lock().await;
        (state.forgot, state.jumped) = (None, None);
        metrics::gauge!("oncegate_redis_paused").set(0);
    }
}

fn paused(why: &str) -> Failure {
    Failure::not_applied(format!(
        "{why}; at most once pauses, because what was handled may be taken for new: see which messages may come again, then call \
         Redis::accept_loss or start again"
    ))
}

impl State {
    async fn look_at(&mut self, open: &Open<'_>, key: Vec<u8>, durability: Durability) -> Result<(), Failure> {
        let now = look_at(open, &key).await?;
        self.take(key, now, durability);
        open.set_looked_at();
        Ok(())
    }

    fn take(&mut self, key: Vec<u8>, now: Seen, durability: Durability) {
        // A new process counts from 0.
        let evicted_before = self.evicted.insert(now.run_id.clone(), now.evicted).unwrap_or(0);
        if let Some(before) = self.seen.get(&key) {
            for finding in compare(before, &now, evicted_before) {
                let told = finding.told();
                metrics::counter!("oncegate_redis_findings_total", "finding" => finding.label()).increment(1);
                if finding.forgot(durability) {
                    tracing::error!(finding = finding.label(), "{told}");
                    metrics::gauge!("oncegate_redis_paused").set(1);
                    self.forgot.get_or_insert(told);
                } else {
                    tracing::warn!(finding = finding.label(), "{told}");
                }
                if let Finding::ClockForward(by) = finding {
                    self.jumped = Some((Instant::now(), by));
                }
            }
        }
        self.seen.insert(key, now);
    }
}

/// What happened between two looks.
fn compare(before: &Seen, now: &Seen, evicted_before: u64) -> Vec<Finding> {
    let mut findings = Vec::new();
    let restarted = now.run_id != before.run_id;
    if now.birth != before.birth {
        findings.push(Finding::CanaryLost);
    } else if now.count <= before.count {
        findings.push(Finding::WritesLost);
    } else if restarted {
        findings.push(Finding::Restarted);
    }
    if now.evicted > evicted_before {
        findings.push(Finding::Evicted(now.evicted - evicted_before));
    }
    let (passed, shown) = (now.at.saturating_duration_since(before.at), now.clock.checked_sub(before.clock));
    let tolerance = CLOCK_TOLERANCE + passed / 1_000;
    match shown {
        Some(shown) if shown > passed + tolerance => findings.push(Finding::ClockForward(shown - passed)),
        Some(shown) if shown + tolerance < passed => findings.push(Finding::ClockBackward(passed - shown)),
        None if before.clock - now.clock > tolerance => findings.push(Finding::ClockBackward(before.clock - now.clock + passed)),
        _ => {}
    }
    findings
}

async fn look_at(open: &Open<'_>, key: &[u8]) -> Result<Seen, Failure> {
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.add_command(count_up(key)).cmd("INFO");
    let replies = open.ask(&pipeline).await?;
    let at = Instant::now();
    let [canary, info] = <[Value; 2]>::try_from(replies).map_err(|_| Failure::unknown("Redis answered half"))?;
    let wrong = |what: &Value| match what {
        Value::ServerError(error) => Failure::said_by_server(error.code(), error.details().unwrap_or_default()),
        what => Failure::unknown(format!("Redis gave an answer of the wrong kind to a look: {what:?}")),
    };
    let info = match &info {
        Value::BulkString(info) => String::from_utf8_lossy(info).into_owned(),
        Value::VerbatimString { text, .. } => text.clone(),
        other => return Err(wrong(other)),
    };
    let Value::Array(counted) = &canary else { return Err(wrong(&canary)) };
    let [Value::BulkString(birth), Value::BulkString(count)] = counted.as_slice() else { return Err(wrong(&canary)) };
    let number = |name: &str| field(&info, name).and_then(|value| value.parse().ok()).unwrap_or(0);
    Ok(Seen {
        birth: birth.clone(),
        count: String::from_utf8_lossy(count).parse().map_err(|_| wrong(&canary))?,
        run_id: field(&info, "run_id").unwrap_or_default().to_owned(),
        evicted: number("evicted_keys"),
        clock: Duration::from_micros(number("server_time_usec")),
        at,
    })
}

/// Counts the canary up, or gives it a birth that nobody had.
fn count_up(key: &[u8]) -> Cmd {
    let mut eval = Cmd::new();
    eval.arg("EVAL").arg(include_str!("canary.lua")).arg(1).arg(key);
    eval.arg(record::token(Token::random())).arg(record::expiry(UNRESOLVED_AT_MOST_ONCE));
    eval
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn seen(at: Instant) -> Seen {
        Seen { birth: b"b".into(), count: 5, run_id: "r".into(), evicted: 3, clock: 1_000 * SECOND, at }
    }

    #[test]
    fn each_loss_is_told_from_the_others() {
        let at = Instant::now();
        let before = seen(at);
        let after = Seen { count: 6, clock: 1_010 * SECOND, at: at + 10 * SECOND, ..before.clone() };
        let compare = |before: &Seen, now: &Seen| compare(before, now, if now.run_id == before.run_id { before.evicted } else { 0 });
        assert_eq!(compare(&before, &after), []);
        let restarted = Seen { run_id: "s".into(), evicted: 0, ..after.clone() };
        for (now, findings) in [
            (Seen { birth: b"c".into(), count: 1, ..after.clone() }, vec![Finding::CanaryLost]),
            (Seen { count: 5, ..after.clone() }, vec![Finding::WritesLost]),
            (Seen { count: 2, ..restarted.clone() }, vec![Finding::WritesLost]),
            (Seen { evicted: 9, ..after.clone() }, vec![Finding::Evicted(6)]),
            (restarted.clone(), vec![Finding::Restarted]),
            (Seen { evicted: 2, ..restarted }, vec![Finding::Restarted, Finding::Evicted(2)]),
            (Seen { clock: 1_016 * SECOND, ..after.clone() }, vec![Finding::ClockForward(6 * SECOND)]),
            (Seen { clock: 1_004 * SECOND, ..after.clone() }, vec![Finding::ClockBackward(6 * SECOND)]),
            (Seen { clock: 990 * SECOND, ..after.clone() }, vec![Finding::ClockBackward(20 * SECOND)]),
            (Seen { clock: 1_011 * SECOND, ..after }, vec![]),
        ] {
            assert_eq!(compare(&before, &now), findings, "{now:?}");
        }
    }

    #[tokio::test]
    async fn a_canary_that_moves_to_a_node_which_evicted_keys_long_ago_tells_of_none() {
        let at_most_once = Terms { guarantee: Guarantee::AtMostOnce, lease: SECOND, window: 60 * SECOND, fingerprint: None };
        let at = Instant::now();
        let (one, other) = (Seen { evicted: 0, ..seen(at) }, Seen { run_id: "other".into(), evicted: 9, ..seen(at) });
        let watch = Watch::default();
        let mut looks = vec![(b"1", one.clone()), (b"2", other.clone()), (b"1", Seen { count: 6, ..other.clone() })];
        for (more, withheld) in [(None, false), (Some((b"1", Seen { count: 7, evicted: 10, ..other })), true)] {
            looks.extend(more);
            for (key, now) in looks.drain(..) {
                watch.state.lock().await.take(key.to_vec(), now, Durability::Primary);
            }
            assert_eq!(watch.withholds(&at_most_once).await.is_some(), withheld);
        }
    }

    #[tokio::test]
    async fn a_failover_that_no_claim_was_lost_in_pauses_nothing() {
        let at_most_once = Terms { guarantee: Guarantee::AtMostOnce, lease: SECOND, window: 60 * SECOND, fingerprint: None };
        let before = seen(Instant::now());
        let after = Seen { count: 4, run_id: "s".into(), evicted: 0, ..before.clone() };
        let replicas = Durability::Replicas { count: 1, timeout: SECOND };
        for (durability, withheld) in [(replicas, false), (Durability::Primary, true)] {
            let watch = Watch::default();
            for now in [&before, &after] {
                watch.state.lock().await.take(b"k".to_vec(), now.clone(), durability);
            }
            assert_eq!(watch.withholds(&at_most_once).await.is_some(), withheld, "{durability:?}");
        }
    }

    #[tokio::test]
    async fn a_forward_jump_pauses_for_a_lease_and_a_long_one_until_it_is_accepted() {
        let at_most_once = Terms { guarantee: Guarantee::AtMostOnce, lease: SECOND, window: 60 * SECOND, fingerprint: None };
        let watch = Watch::default();
        let jump = |by: Duration, ago: Duration| (Instant::now().checked_sub(ago).expect("the machine is up longer"), by);
        for (jumped, withheld) in
            [(jump(3 * SECOND, Duration::ZERO), true), (jump(3 * SECOND, SECOND), false), (jump(30 * SECOND, 9 * SECOND), true)]
        {
            watch.state.lock().await.jumped = Some(jumped);
            assert_eq!(watch.withholds(&at_most_once).await.is_some(), withheld, "{jumped:?}");
            assert!(watch.withholds(&Terms { guarantee: Guarantee::EffectivelyOnce, ..at_most_once }).await.is_none());
        }
        watch.accept().await;
        assert!(watch.withholds(&at_most_once).await.is_none());
    }
}
