//! Redis: does it remember, is it let be asked, is it large enough?

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate::{Durability, Guarantee, Load, Markers, ServerInfo, Store, StoreError, plan};

use super::Findings;
use super::settings::forgetting;
use crate::config::Config;
use crate::failure::Failure;
use crate::markers::PATIENCE;
use crate::plan::bytes;

/// How far the clocks of this machine and of Redis may differ.
const CLOCKS_DIFFER: Duration = Duration::from_secs(5);

pub(super) async fn look(config: &Config, findings: &mut Findings) -> Result<(), Failure> {
    let redis = config.redis(Some(PATIENCE))?;
    match redis.servers().await {
        Ok(servers) => servers
            .iter()
            .for_each(|server| judge(server, servers.len() as u64, config, findings)),
        // Which commands it needs is told below.
        Err(error) if lacks_a_right(&error.to_string()) => {
            if let Err(error) = redis.preflight(config.guarantee()).await {
                unusable(error, findings);
            } else {
                let what = "the user may not run INFO: what the store loses is not seen";
                findings.warning(
                    "store-lacks-a-right",
                    "Redis",
                    what,
                    "ACL SETUSER <user> +info",
                );
            }
            return Ok(());
        }
        Err(error) => {
            let away = is_away(&error);
            unusable(error, findings);
            if away || findings.has("store-refuses-the-login") {
                return Ok(());
            }
        }
    }
    // What is known already is not said again in other words.
    if [
        "store-too-old",
        "store-is-a-cluster-node",
        "store-is-a-replica",
    ]
    .iter()
    .any(|code| findings.has(code))
    {
        return Ok(());
    }
    if let Err(error) = redis.preflight(config.guarantee()).await {
        unusable(error, findings);
    }
    Ok(())
}

fn is_away(error: &StoreError) -> bool {
    !matches!(
        error,
        StoreError::Misconfigured(_) | StoreError::UnreadableMarker(_)
    )
}

fn lacks_a_right(said: &str) -> bool {
    said.contains("NOPERM") || said.contains("does not let")
}

/// The store says itself what to do.
fn unusable(error: StoreError, findings: &mut Findings) {
    let said = error.to_string();
    if is_away(&error) {
        findings.error(
            "store-away",
            "Redis",
            said,
            "start it, or correct store.url",
        );
    } else if said.contains("rejected the user or the password") {
        findings.error(
            "store-refuses-the-login",
            "Redis",
            said,
            "put the right user and password into store.url",
        );
    } else if lacks_a_right(&said) {
        let (what, remedy) = match said.split_once(": ACL SETUSER ") {
            Some((what, rights)) => (what.to_owned(), format!("ACL SETUSER {rights}")),
            None => (
                said,
                "give the user the rights that the book lists under \"Stores\"".to_owned(),
            ),
        };
        findings.error("store-lacks-a-right", "Redis", what, remedy);
    } else if !findings.has("store-unusable") {
        findings.error("store-unusable", "Redis", said, "change what it says");
    }
}

fn judge(server: &ServerInfo, primaries: u64, config: &Config, findings: &mut Findings) {
    let at = format!("Redis at {}", server.address);
    let guarantee = config.guarantee();
    let forgets = forgetting(config);
    if server.field("cluster_enabled") == Some("1") && config.has("store.url") {
        findings.error(
            "store-is-a-cluster-node",
            &at,
            "it is a node of a Cluster, and serves a part of the keys",
            "name its nodes in store.cluster",
        );
    }
    let version = server.field("redis_version").unwrap_or("unknown");
    let major: Option<u32> = version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok());
    if major.is_some_and(|major| major < 7) && guarantee != Guarantee::Bare {
        let what = format!("it is of version {version}; what consumers ask of it came with 7.0");
        findings.error(
            "store-too-old",
            &at,
            what,
            "upgrade it to 7.0 or newer, or use the guarantee bare, with its documented losses",
        );
    }
    if server.field("role") != Some("master") {
        let what = "it is a replica: it takes no writes, and follows its primary late";
        findings.error(
            "store-is-a-replica",
            &at,
            what,
            "name the primary in store.url, or the Sentinels in store.sentinels",
        );
    }
    if let Some(policy) = server
        .field("maxmemory_policy")
        .filter(|policy| *policy != "noeviction")
    {
        let what = format!(
            "it evicts keys when its memory is full (maxmemory-policy {policy}): what was handled is handled again"
        );
        findings.add(
            forgets,
            "store-evicts",
            &at,
            what,
            "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
        );
    }
    if server.field("aof_enabled") != Some("1") {
        let what = "it keeps no append-only file: a crash forgets what was handled since its last snapshot, or all of it";
        findings.add(
            forgets,
            "store-keeps-no-file",
            &at,
            what,
            "CONFIG SET appendonly yes, and the same in redis.conf",
        );
    } else if server.field("aof_last_write_status") == Some("err") {
        let what = "it cannot write its append-only file, and takes no writes meanwhile";
        findings.error(
            "store-cannot-write-its-file",
            &at,
            what,
            "look at its disk: is it full?",
        );
    }
    memory(server, primaries, config, &at, findings);
    let ours = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let apart = server
        .number("server_time_usec")
        .map_or(Duration::ZERO, |theirs| {
            Duration::from_micros(theirs).abs_diff(ours)
        });
    if apart > CLOCKS_DIFFER {
        let what = format!(
            "its clock is {} apart from this machine's, which tells the age of messages",
            crate::say::span(apart)
        );
        findings.warning("clocks-differ", &at, what, "run NTP on both");
    }
    if let (Durability::Replicas { count, .. }, Some(follow)) =
        (config.durability(), server.number("connected_slaves"))
        && follow < u64::from(count)
    {
        let what = format!(
            "{follow} replicas follow it, and store.replicas wants {count}: no claim is granted until they do"
        );
        findings.error(
            "too-few-replicas",
            &at,
            what,
            "start them, or lower store.replicas",
        );
    }
}

fn memory(server: &ServerInfo, primaries: u64, config: &Config, at: &str, findings: &mut Findings) {
    let limited = server.number("maxmemory").filter(|limit| *limit > 0);
    let Some(limit) = limited.or_else(|| server.number("total_system_memory")) else {
        return;
    };
    if let Some(used) = server
        .number("used_memory")
        .filter(|used| used.saturating_mul(100) > limit.saturating_mul(80))
    {
        let what = format!(
            "it uses {} of {} of memory; when that is full it takes no claim any more",
            bytes(used),
            bytes(limit)
        );
        findings.warning(
            "store-nearly-full",
            at,
            what,
            "raise maxmemory, or shorten the window",
        );
    }
    if let Some(rate) = config.number("gate.rate") {
        let markers = if config.guarantee() == Guarantee::AtMostOnce {
            Markers::WithFingerprint
        } else {
            Markers::Plain
        };
        let load = Load {
            messages_per_second: rate,
            window: config.window(),
            markers,
            primaries,
            ..Load::default()
        };
        let needs = plan(&load).memory;
        if needs > limit {
            let what = format!(
                "{rate} new ids a second for the window need {} of memory, and it has {}",
                bytes(needs),
                bytes(limit)
            );
            findings.warning(
                "store-too-small",
                at,
                what,
                "give it more (`oncegate plan` says how much), shorten the window, or use a Cluster",
            );
        }
    }
}
