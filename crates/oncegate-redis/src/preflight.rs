//! Whether a server offers what a guarantee asks of it: its version, its commands, the rights of
//! its user.
//!
//! Each command is tried, on keys of our own, since nothing else tells what a server and its user
//! may do. What a guarantee needs and does not have is an error; what may go wrong later is a line
//! in the log.

use std::time::{Duration, SystemTime};

use oncegate_core::marker::Guarantee;
use redis::{Cmd, Pipeline, Value};

use crate::durability::Durability;
use crate::failure::{Failure, is_elsewhere, moving};
use crate::info::Info;
use crate::route::{Lanes, Route};
use crate::script::{self, By};

/// From which share of its memory on a server is nearly full.
const NEARLY_FULL_PERCENT: u64 = 80;

/// How far the clocks of this machine and of Redis may differ.
const CLOCKS_DIFFER: Duration = Duration::from_secs(5);

/// What is asked of the servers.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) guarantee: Guarantee,
    pub(crate) durability: Durability,
    pub(crate) prefix: &'a [u8],
}

/// Looks at each server, and tells the log what a person should change.
///
/// # Errors
/// `Misconfigured`, with the setting, if a server is not what the user took it for or lacks what
/// the guarantee needs; otherwise it cannot be asked, and the servers are looked for anew the next
/// time.
pub(crate) async fn preflight(route: &Route, asked: Asked<'_>) -> Result<(), Failure> {
    let looked = look(route, asked).await;
    if looked.is_err() {
        route.distrust();
    }
    looked
}

async fn look(route: &Route, asked: Asked<'_>) -> Result<(), Failure> {
    let probes = route
        .keys_on_each(&[asked.prefix, b"!probe"].concat())
        .await?;
    for (probe, lanes) in &probes {
        let at = format!(
            "{}: Redis at {}",
            route.setting(),
            lanes.general.described()
        );
        // First of all: who cannot even connect lacks no right to a command.
        lanes.general.open().await?;
        let mut found = match Info::of(lanes).await {
            Ok(info) => {
                route.still_a_primary(&info)?;
                judge(&info, route, asked, SystemTime::now())
            }
            Err(Failure::Misconfigured(_)) => without_info(asked.guarantee),
            Err(failure) => return Err(failure),
        };
        if found.lacks.is_empty() {
            let tried = try_commands(lanes, probe, route, asked).await?;
            found.forbidden.extend(tried.forbidden);
            found.lacks.extend(tried.lacks);
            found.notes.extend(tried.notes);
        }
        if !found.forbidden.is_empty() {
            found.lacks.push(lacks_rights(
                &found.forbidden,
                lanes.general.user(),
                route,
                asked,
            ));
        }
        if !found.lacks.is_empty() {
            return Err(Failure::misconfigured(format!(
                "{at} {}",
                found.lacks.join("; ")
            )));
        }
        for note in found.notes {
            tracing::warn!("{at} {note}");
        }
    }
    Ok(())
}

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Commands that the guarantee needs and the user may not run, or not on these keys.
    forbidden: Vec<String>,
    /// What the guarantee needs and does not have.
    lacks: Vec<String>,
    /// What may go wrong later, or heals by itself.
    notes: Vec<String>,
}

impl Found {
    fn lacking(lack: impl Into<String>) -> Self {
        Self {
            lacks: vec![lack.into()],
            ..Self::default()
        }
    }
}

/// At most once goes by `INFO` while it runs.
fn without_info(guarantee: Guarantee) -> Found {
    match guarantee {
        Guarantee::AtMostOnce => Found { forbidden: vec!["INFO".into()], ..Found::default() },
        Guarantee::Bare => Found::default(),
        _ => Found {
            notes: vec!["does not let INFO be read: what it loses will not be seen (ACL SETUSER <user> +info)".into()],
            ..Found::default()
        },
    }
}

/// Judges what `INFO` says.
fn judge(info: &Info, route: &Route, asked: Asked<'_>, now: SystemTime) -> Found {
    if info.field("cluster_enabled") == Some("1") && matches!(route, Route::One(_)) {
        return Found::lacking("is a node of a cluster; give its nodes to Redis::cluster");
    }
    let mut notes = Vec::new();
    let version = info.field("redis_version").unwrap_or("unknown");
    if version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok())
        .is_some_and(|major: u32| major < 7)
    {
        if asked.guarantee != Guarantee::Bare {
            return Found::lacking(format!(
                "is of version {version}, where only Guarantee::Bare works: upgrade it to 7.0 or newer"
            ));
        }
        notes.push(format!(
            "is of version {version}, where only Guarantee::Bare works, as chosen here"
        ));
    }
    let limit = info
        .number("maxmemory")
        .filter(|limit| *limit > 0)
        .or_else(|| info.number("total_system_memory"));
    if let (Some(used), Some(limit)) = (info.number("used_memory"), limit)
        && used.saturating_mul(100) > limit.saturating_mul(NEARLY_FULL_PERCENT)
    {
        notes.push(format!("uses {used} of {limit} bytes of memory: raise maxmemory before it is full, or shorten the window"));
    }
    if let (Some(theirs), Ok(ours)) = (
        info.number("server_time_usec"),
        now.duration_since(SystemTime::UNIX_EPOCH),
    ) {
        let apart = Duration::from_micros(theirs).abs_diff(ours);
        if apart > CLOCKS_DIFFER {
            notes.push(format!("has a clock {apart:.0?} apart from this machine's, which tells the age of messages: run NTP on both"));
        }
    }
    if let (Durability::Replicas { count, .. }, Some(follow)) =
        (asked.durability, info.number("connected_slaves"))
        && follow < u64::from(count)
        && asked.guarantee != Guarantee::Bare
    {
        notes.push(format!("is followed by {follow} replicas, and Durability::Replicas needs {count}: nothing is granted until they do"));
    }
    Found {
        notes,
        ..Found::default()
    }
}

/// One sentence, and one command that grants all that is needed.
fn lacks_rights(
    forbidden: &[String],
    user: Option<&str>,
    route: &Route,
    asked: Asked<'_>,
) -> String {
    let mut rights: Vec<&str> = trials(asked.prefix, route, asked)
        .iter()
        .map(|trial| trial.right)
        .collect();
    if asked.guarantee == Guarantee::AtMostOnce || asked.guarantee == Guarantee::EffectivelyOnce {
        rights.push("+info");
    }
    if let Route::Cluster(_) = route {
        rights.push("+cluster|slots");
    }
    format!(
        "does not let the user in the URL run {} on its keys, which Guarantee::{:?} needs (NOPERM): ACL SETUSER {} ~{}* {}",
        forbidden.join(", "),
        asked.guarantee,
        user.unwrap_or("<user>"),
        String::from_utf8_lossy(asked.prefix),
        rights.join(" "),
    )
}

/// A command to be tried.
struct Trial {
    name: &'static str,
    /// What the user has to be given for it.
    right: &'static str,
    command: Cmd,
}

fn trials(probe: &[u8], route: &Route, asked: Asked<'_>) -> Vec<Trial> {
    let of = |name: &str| redis::cmd(name).arg(probe).to_owned();
    let trial = |name, right, command| Trial {
        name,
        right,
        command,
    };
    let delete = trial("DEL", "+del", of("DEL"));
    if asked.guarantee == Guarantee::Bare {
        return vec![
            trial(
                "SET with EX and NX",
                "+set",
                of("SET").arg("1").arg("EX").arg(1).arg("NX").to_owned(),
            ),
            delete,
        ];
    }
    let mut trials = vec![
        trial(
            "SET with NX, GET and PX",
            "+set",
            of("SET")
                .arg("1")
                .arg("NX")
                .arg("GET")
                .arg("PX")
                .arg(1_000)
                .to_owned(),
        ),
        trial("GET", "+get", of("GET")),
        trial("MGET", "+mget", of("MGET")),
        trial("PTTL", "+pttl", of("PTTL")),
        trial("PEXPIRE", "+pexpire", of("PEXPIRE").arg(1_000).to_owned()),
        delete,
        trial("EVAL", "+eval", script::nothing(By::Text)),
        trial("EVALSHA", "+evalsha", script::nothing(By::Hash)),
    ];
    if let Durability::Replicas { .. } = asked.durability {
        trials.push(trial(
            "WAIT",
            "+wait",
            redis::cmd("WAIT").arg(0).arg(1).to_owned(),
        ));
    }
    if let Route::Cluster(_) = route {
        trials.push(trial("ASKING", "+asking", redis::cmd("ASKING")));
    }
    trials
}

/// Tries what claims and their ends need.
///
/// # Errors
/// The server could not be asked, is still reading its file, or is no longer the one to ask.
async fn try_commands(
    lanes: &Lanes,
    probe: &[u8],
    route: &Route,
    asked: Asked<'_>,
) -> Result<Found, Failure> {
    let trials = trials(probe, route, asked);
    let mut pipeline = Pipeline::with_capacity(trials.len());
    trials.iter().for_each(|trial| {
        pipeline.add_command(trial.command.clone());
    });
    let mut tried = Found::default();
    for (trial, reply) in trials.iter().zip(lanes.general.ask(&pipeline).await?) {
        let Value::ServerError(error) = reply else {
            continue;
        };
        let (code, detail) = (error.code(), error.details().unwrap_or_default());
        let name = &trial.name;
        match Failure::said_by_server(code, detail) {
            // Its slots are on the way to another node, as in a failover: who serves them is asked
            // again.
            _ if matches!(route, Route::Cluster(_)) && is_elsewhere(code) => {
                route.distrust_slot(moving(code, detail));
                return Err(Failure::not_applied(format!(
                    "Redis says {code} {detail} of {}",
                    String::from_utf8_lossy(probe)
                )));
            }
            Failure::Misconfigured(_) if code == "NOPERM" => {
                tried.forbidden.push((*name).to_owned())
            }
            Failure::Misconfigured(_) | Failure::UnreadableMarker(_) => {
                tried.lacks.push(format!(
                    "does not offer {name}, which Guarantee::{:?} needs ({code} {detail})",
                    asked.guarantee
                ));
            }
            failure @ Failure::NotApplied(_) if code == "LOADING" => return Err(failure),
            Failure::NotApplied(_) | Failure::Unknown(_) => tried
                .notes
                .push(format!("refuses {name} at the moment ({code} {detail})")),
        }
    }
    Ok(tried)
}

/// What a server says that needs no change.
#[cfg(test)]
pub(crate) const GOOD: &str = "# Server\r\nredis_version:7.0.15\r\nserver_time_usec:1000000000\r\nmaxmemory_policy:noeviction\r\n\
                               used_memory:79\r\nmaxmemory:100\r\naof_enabled:1\r\naof_last_write_status:ok\r\nrole:master\r\n\
                               connected_slaves:1\r\ncluster_enabled:0\r\n";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Problem;
    use crate::link::Patience;

    fn judged(info: &str, guarantee: Guarantee) -> Found {
        let patience = Patience {
            connect: Duration::ZERO,
            reply: Duration::ZERO,
        };
        let route = Route::to(&Err(Problem::new("nowhere")), patience, Durability::Primary);
        let durability = Durability::Replicas {
            count: 1,
            timeout: Duration::ZERO,
        };
        let asked = Asked {
            guarantee,
            durability,
            prefix: b"processed:",
        };
        judge(
            &info.into(),
            &route,
            asked,
            SystemTime::UNIX_EPOCH + Duration::from_secs(1_001),
        )
    }

    const GUARANTEES: [Guarantee; 3] = [
        Guarantee::AtMostOnce,
        Guarantee::EffectivelyOnce,
        Guarantee::Bare,
    ];

    #[test]
    fn what_may_go_wrong_later_is_told_with_what_to_do() {
        assert_eq!(judged(GOOD, Guarantee::EffectivelyOnce), Found::default());
        for (good, bad, remedy) in [
            ("used_memory:79", "used_memory:81", "raise maxmemory"),
            (
                "maxmemory:100",
                "maxmemory:0\r\ntotal_system_memory:90",
                "raise maxmemory",
            ),
            ("connected_slaves:1", "connected_slaves:0", "needs 1"),
            (
                "server_time_usec:1000000000",
                "server_time_usec:900000000",
                "run NTP",
            ),
        ] {
            let found = judged(&GOOD.replace(good, bad), Guarantee::EffectivelyOnce);
            assert!(
                found.lacks.is_empty() && found.notes.len() == 1 && found.notes[0].contains(remedy),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_redis_of_before_7_serves_bare_alone() {
        for old in ["6.2.14", "6.0.16", "5.0.7"] {
            for guarantee in GUARANTEES {
                let found = judged(&GOOD.replace("7.0.15", old), guarantee);
                match (guarantee, &found.lacks[..], &found.notes[..]) {
                    (Guarantee::Bare, [], [note]) => assert!(
                        note.contains(old) && note.contains("only Guarantee::Bare"),
                        "{note}"
                    ),
                    (_, [lack], []) if guarantee != Guarantee::Bare => {
                        assert!(
                            lack.contains(old) && lack.contains("7.0 or newer"),
                            "{lack}"
                        )
                    }
                    _ => panic!("{guarantee:?}: {found:?}"),
                }
            }
        }
        for new in ["7.0.0", "7.2.4", "8.2.3", "10.0.0"] {
            assert_eq!(
                judged(&GOOD.replace("7.0.15", new), Guarantee::AtMostOnce),
                Found::default()
            );
        }
    }

    #[test]
    fn a_cluster_that_the_user_does_not_know_of_is_refused() {
        let node = GOOD.replace("cluster_enabled:0", "cluster_enabled:1");
        for guarantee in GUARANTEES {
            assert!(
                judged(&node, guarantee)
                    .lacks
                    .iter()
                    .any(|lack| lack.contains("Redis::cluster"))
            );
        }
    }
}
