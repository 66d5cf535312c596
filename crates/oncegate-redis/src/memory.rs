//! What can be known of a server at start: from `INFO`, which needs no right to `CONFIG`, and by trying each command.

use std::time::{Duration, SystemTime};

use oncegate_core::Memory;
use oncegate_core::marker::UNRESOLVED_AT_MOST_ONCE;
use redis::{Cmd, Pipeline, Value};

use crate::durability::Durability;
use crate::failure::Failure;
use crate::record;
use crate::route::{Lanes, Route};
use crate::script::{self, By};

/// From which share of its memory on a server is nearly full.
const NEARLY_FULL_PERCENT: u64 = 80;

/// How far the clocks of this machine and of Redis may differ.
const CLOCKS_DIFFER: Duration = Duration::from_secs(5);

/// What was found at start. Each finding is one line that says what to do.
#[derive(Debug, Default)]
pub(crate) struct Found {
    version: String,
    /// Ways to forget: at most once refuses them.
    forgets: Vec<String>,
    /// What may go wrong later.
    notes: Vec<String>,
}

/// Looks at each server, and tells the log what a person should change.
///
/// # Errors
/// `Misconfigured` if a server is not what the user took it for; otherwise it cannot be asked.
pub(crate) async fn preflight(route: &Route, prefix: &[u8], durability: Durability) -> Result<Memory, Failure> {
    let mut all = Found::default();
    let canaries = route.keys_on_each(&[prefix, b"!canary"].concat()).await?;
    let probes = route.keys_on_each(&[prefix, b"!probe"].concat()).await?;
    let several = canaries.len() > 1;
    for ((canary, lanes), (probe, _)) in canaries.iter().zip(&probes) {
        let info = info(lanes).await?;
        let mut found = judge(&info, route, durability, SystemTime::now())?;
        found.notes.extend(try_commands(lanes, canary, probe, durability).await?);
        let at = |line: String| if several { format!("{}: {line}", lanes.general.described()) } else { line };
        all.version = found.version;
        all.forgets.extend(found.forgets.into_iter().map(at));
        all.notes.extend(found.notes.into_iter().map(at));
    }
    for note in &all.notes {
        tracing::warn!("Redis: {note}");
    }
    Ok(all.memory())
}

/// The value of a field of `INFO`.
pub(crate) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
}

/// Judges what `INFO` says.
fn judge(info: &str, route: &Route, durability: Durability, now: SystemTime) -> Result<Found, Failure> {
    let field = |name: &str| field(info, name);
    let number = |name: &str| field(name).and_then(|value| value.parse::<u64>().ok());
    if field("cluster_enabled") == Some("1") && matches!(route, Route::One(_)) {
        return Err(Failure::misconfigured("Redis::at names a node of a cluster; give its nodes to Redis::cluster"));
    }
    let mut found = Found { version: field("redis_version").unwrap_or("unknown").to_owned(), ..Found::default() };
    let version = &found.version;
    if version.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major < 7) {
        let old = format!("it is Redis {version}, where only Guarantee::Bare works: upgrade it to 7.0 or newer");
        // Whatever the guarantee is, the log says it.
        found.notes.push(old.clone());
        found.forgets.push(old);
    }
    match field("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => {
            found.forgets.push(format!("it evicts keys when memory is full (maxmemory-policy {policy}): set maxmemory-policy noeviction"))
        }
        None => found.forgets.push("it does not say whether it evicts keys: let its INFO show maxmemory_policy".into()),
    }
    if field("aof_enabled") != Some("1") {
        found.forgets.push("it keeps no append-only file and forgets in a crash: set appendonly yes".into());
    } else if field("aof_last_write_status") == Some("err") {
        found.forgets.push("it cannot write its append-only file: look at its disk".into());
    }
    if field("role") != Some("master") {
        found.forgets.push("it is a replica: give Redis::at the primary, or the Sentinels to Redis::sentinel".into());
    }

    let limit = number("maxmemory").filter(|limit| *limit > 0).or_else(|| number("total_system_memory"));
    if let (Some(used), Some(limit)) = (number("used_memory"), limit)
        && used.saturating_mul(100) > limit.saturating_mul(NEARLY_FULL_PERCENT)
    {
        found.notes.push(format!("{used} of {limit} bytes of memory are used: raise maxmemory before it is full, or shorten the window"));
    }
    if let (Some(theirs), Ok(ours)) = (number("server_time_usec"), now.duration_since(SystemTime::UNIX_EPOCH)) {
        let apart = Duration::from_micros(theirs).abs_diff(ours);
        if apart > CLOCKS_DIFFER {
            found.notes.push(format!(
                "its clock and this machine's are {apart:.0?} apart, and the age of messages is told by this one: run NTP on both"
            ));
        }
    }
    if let (Durability::Replicas { count, .. }, Some(follow)) = (durability, number("connected_slaves"))
        && follow < u64::from(count)
    {
        found.notes.push(format!("{follow} replicas follow it, and Durability::Replicas needs {count}: nothing is granted until they do"));
    }
    Ok(found)
}

impl Found {
    fn memory(&self) -> Memory {
        if self.forgets.is_empty() {
            Memory::Survives(format!(
                "Redis {} with an append-only file, evicting nothing; with appendfsync everysec a power cut may cost the last second, and a \
                 failover what was not replicated",
                self.version
            ))
        } else {
            Memory::Forgets(format!("{}; or accept it with accept_forgetful_store()", self.forgets.join("; ")))
        }
    }
}

/// Tries what claims and their ends need, on keys of our own. Each refusal is a line.
async fn try_commands(lanes: &Lanes, canary: &[u8], probe: &[u8], durability: Durability) -> Result<Vec<String>, Failure> {
    let mut pipeline = Pipeline::new();
    let mut named = |name: &'static str, command: Cmd| {
        pipeline.add_command(command);
        name
    };
    let of = |name: &str, key: &[u8]| redis::cmd(name).arg(key).to_owned();
    let mut names = vec![
        named("SET with NX, GET and PX", of("SET", probe).arg("1").arg("NX").arg("GET").arg("PX").arg(1_000).to_owned()),
        named("GET", of("GET", canary)),
        named("PTTL", of("PTTL", canary)),
        named("PEXPIRE", of("PEXPIRE", canary).arg(record::expiry(UNRESOLVED_AT_MOST_ONCE)).to_owned()),
        named("DEL", of("DEL", probe)),
        named("EVAL", script::nothing(By::Text)),
        named("EVALSHA", script::nothing(By::Hash)),
    ];
    if let Durability::Replicas { .. } = durability {
        names.push(named("WAIT", redis::cmd("WAIT").arg(0).arg(1).to_owned()));
    }
    let replies = lanes.general.ask(&pipeline).await?;
    let refused = names.into_iter().zip(replies).filter_map(|(name, reply)| match reply {
        Value::ServerError(error) => Some(format!(
            "it refuses {name} ({} {}): a consumer needs it, unless its guarantee is bare",
            error.code(),
            error.details().unwrap_or_default()
        )),
        _ => None,
    });
    Ok(refused.collect())
}

async fn info(lanes: &Lanes) -> Result<String, Failure> {
    let mut pipeline = Pipeline::with_capacity(1);
    pipeline.cmd("INFO");
    match lanes.general.ask(&pipeline).await?.pop() {
        Some(Value::BulkString(info)) => Ok(String::from_utf8_lossy(&info).into_owned()),
        Some(Value::VerbatimString { text, .. }) => Ok(text),
        Some(Value::ServerError(error)) => Err(Failure::said_by_server(error.code(), error.details().unwrap_or_default())),
        _ => Err(Failure::unknown("Redis gave an answer of the wrong kind to INFO")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Problem;
    use crate::link::Patience;

    const GOOD: &str = "# Server\r\nredis_version:7.0.15\r\nserver_time_usec:1000000000\r\nmaxmemory_policy:noeviction\r\nused_memory:79\r\n\
                        maxmemory:100\r\naof_enabled:1\r\naof_last_write_status:ok\r\nrole:master\r\nconnected_slaves:1\r\ncluster_enabled:0\r\n";

    fn judged(info: &str) -> Result<Found, Failure> {
        let patience = Patience { connect: Duration::ZERO, reply: Duration::ZERO };
        let route = Route::to(&Err(Problem::new("nowhere")), patience, Durability::Primary);
        let replicas = Durability::Replicas { count: 1, timeout: Duration::ZERO };
        judge(info, &route, replicas, SystemTime::UNIX_EPOCH + Duration::from_secs(1_001))
    }

    #[test]
    fn a_server_that_keeps_what_it_was_told_survives() {
        let found = judged(GOOD).expect("judged");
        assert!(matches!(found.memory(), Memory::Survives(text) if text.contains("7.0.15")));
        assert!(found.notes.is_empty(), "{found:?}");
    }

    #[test]
    fn each_way_to_forget_is_named_with_its_remedy() {
        for (good, bad, remedy) in [
            ("maxmemory_policy:noeviction", "maxmemory_policy:volatile-lru", "maxmemory-policy noeviction"),
            ("aof_enabled:1", "aof_enabled:0", "appendonly yes"),
            ("aof_last_write_status:ok", "aof_last_write_status:err", "disk"),
            ("role:master", "role:slave", "primary"),
            ("redis_version:7.0.15", "redis_version:6.2.14", "7.0 or newer"),
            ("maxmemory_policy:noeviction\r\n", "", "maxmemory_policy"),
        ] {
            let memory = judged(&GOOD.replace(good, bad)).expect("judged").memory();
            assert!(matches!(&memory, Memory::Forgets(text) if text.contains(remedy)), "{memory:?}");
        }
    }

    #[test]
    fn what_may_go_wrong_later_is_told_with_what_to_do() {
        for (good, bad, remedy) in [
            ("used_memory:79", "used_memory:81", "raise maxmemory"),
            ("maxmemory:100", "maxmemory:0\r\ntotal_system_memory:90", "raise maxmemory"),
            ("connected_slaves:1", "connected_slaves:0", "needs 1"),
            ("server_time_usec:1000000000", "server_time_usec:900000000", "run NTP"),
        ] {
            let found = judged(&GOOD.replace(good, bad)).expect("judged");
            assert!(found.forgets.is_empty() && found.notes.len() == 1 && found.notes[0].contains(remedy), "{found:?}");
        }
    }

    #[test]
    fn a_cluster_that_the_user_does_not_know_of_is_refused() {
        let node = GOOD.replace("cluster_enabled:0", "cluster_enabled:1");
        assert!(matches!(judged(&node), Err(Failure::Misconfigured(_))));
    }
}
