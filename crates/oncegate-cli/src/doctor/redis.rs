//! Redis: checks durability, permissions and memory.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate::redis::{Load, Markers, ServerInfo, ToolRights, plan};
use oncegate::{Durability, Guarantee, Redis, Store, StoreError};

use super::settings::volatile_store_severity;
use super::{DoctorFindings, Severity};
use crate::config::Config;
use crate::error::CliError;
use crate::marker_store::REPLY_TIMEOUT;
use crate::plan::bytes;

/// The maximum difference between the clocks of this machine and Redis.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(5);

pub(super) async fn check(config: &Config, findings: &mut DoctorFindings) -> Result<(), CliError> {
    let redis = config.redis(Some(REPLY_TIMEOUT))?;
    match redis.servers().await {
        Ok(servers) => servers
            .iter()
            .for_each(|server| check_server(server, servers.len() as u64, config, findings)),
        // The user may not run INFO. The preflight names the commands that consumers need and the
        // user may not run.
        Err(error) if is_permission_error(&error.to_string()) => {
            check_rights(&redis, config, findings).await?;
            if !findings.has("store-permission-missing") {
                let what = "the user may not run INFO, so durability and memory cannot be checked";
                findings.warning(
                    "store-permission-missing",
                    "Redis",
                    what,
                    "ACL SETUSER <user> +info",
                );
            }
            return Ok(());
        }
        Err(error) => {
            let unavailable = is_unavailable(&error);
            add_store_error(error, findings);
            if unavailable || findings.has("store-login-rejected") {
                return Ok(());
            }
        }
    }
    // The preflight would add a second finding for each of these causes.
    if ["store-too-old", "store-is-cluster-node", "store-is-replica"]
        .iter()
        .any(|code| findings.has(code))
    {
        return Ok(());
    }
    check_rights(&redis, config, findings).await
}

/// Checks that the user may run the commands of consumers, and then those that only this program
/// runs. The remedy grants all of them.
///
/// # Errors
/// The rights of this program cannot be determined.
async fn check_rights(
    redis: &Redis,
    config: &Config,
    findings: &mut DoctorFindings,
) -> Result<(), CliError> {
    let mut lacks_right = false;
    if let Err(error) = redis.preflight(config.guarantee()).await {
        lacks_right = is_permission_error(&error.to_string());
        add_store_error(error, findings);
        if !lacks_right {
            return Ok(());
        }
    }
    let ToolRights {
        mut missing, grant, ..
    } = redis.tool_rights(config.guarantee()).await?;
    if config.has("audit.file") {
        missing.retain(|command| !["XADD", "XRANGE"].contains(command));
    }
    let tool_commands = (!missing.is_empty()).then(|| {
        format!(
            "only the commands of `oncegate` need {} (XADD and XRANGE: the audit; SCAN: `marker list`; TYPE and STRLEN: `explain`), consumers do not",
            missing.join(", ")
        )
    });
    if lacks_right {
        findings.amend("store-permission-missing", tool_commands, grant);
    } else if let Some(tool_commands) = tool_commands {
        findings.add(
            Severity::Advice,
            "tool-permission-missing",
            "Redis",
            format!(
                "the user may not run {}: {tool_commands}",
                missing.join(", ")
            ),
            format!("{grant}, or give operators a user of their own"),
        );
    }
    Ok(())
}

/// Whether the server cannot be reached or does not answer, so that a retry may succeed.
fn is_unavailable(error: &StoreError) -> bool {
    !matches!(
        error,
        StoreError::Misconfigured(_) | StoreError::UnreadableMarker(_)
    )
}

/// Whether the text of an error says that the user lacks a permission.
fn is_permission_error(text: &str) -> bool {
    text.contains("NOPERM") || text.contains("does not let")
}

/// Adds a finding for an error of the store, whose text contains the remedy.
fn add_store_error(error: StoreError, findings: &mut DoctorFindings) {
    let text = oncegate_config::with_store_keys(&error.to_string());
    if is_unavailable(&error) {
        findings.error(
            "store-unreachable",
            "Redis",
            text,
            "start it, or correct store.url",
        );
    } else if text.contains("rejected the user or the password") {
        findings.error(
            "store-login-rejected",
            "Redis",
            text,
            "correct the user and password in store.url",
        );
    } else if is_permission_error(&text) {
        let (what, remedy) = match text.split_once(": ACL SETUSER ") {
            Some((what, rights)) => (what.to_owned(), format!("ACL SETUSER {rights}")),
            None => (
                text,
                "grant the user the rights in https://github.com/oncegate/oncegate/blob/main/docs/src/stores.md#acl-rights".to_owned(),
            ),
        };
        findings.error("store-permission-missing", "Redis", what, remedy);
    } else if !findings.has("store-unusable") {
        findings.error(
            "store-unusable",
            "Redis",
            text,
            "fix the cause that the error names",
        );
    }
}

/// Adds findings about the settings and the state of one server.
fn check_server(
    server: &ServerInfo,
    primaries: u64,
    config: &Config,
    findings: &mut DoctorFindings,
) {
    let at = format!("Redis at {}", server.address);
    let guarantee = config.guarantee();
    let volatile_severity = volatile_store_severity(config);
    if server.field("cluster_enabled") == Some("1") && config.has("store.url") {
        findings.error(
            "store-is-cluster-node",
            &at,
            "it is a node of a Cluster and serves only part of the keys",
            "list its nodes in store.cluster",
        );
    }
    let version = server.field("redis_version").unwrap_or("unknown");
    let major: Option<u32> = version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok());
    if major.is_some_and(|major| major < 7) && guarantee != Guarantee::Bare {
        let what = format!("it has version {version}; consumers need commands of 7.0");
        findings.error(
            "store-too-old",
            &at,
            what,
            "upgrade it to 7.0 or newer, or use the guarantee bare with its documented limits",
        );
    }
    if server.field("role") != Some("master") {
        let what = "it is a replica: it accepts no writes and lags behind its primary";
        findings.error(
            "store-is-replica",
            &at,
            what,
            "set store.url to the primary, or store.sentinels to the Sentinels",
        );
    }
    if let Some(policy) = server
        .field("maxmemory_policy")
        .filter(|policy| *policy != "noeviction")
    {
        let what = format!(
            "it evicts keys when its memory is full (maxmemory-policy {policy}), so messages may be handled again"
        );
        findings.add(
            volatile_severity,
            "store-evicts-keys",
            &at,
            what,
            "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
        );
    }
    if server.field("aof_enabled") != Some("1") {
        let what = "it has no append-only file: a crash loses markers since the last snapshot, or all of them";
        findings.add(
            volatile_severity,
            "store-without-append-only-file",
            &at,
            what,
            "CONFIG SET appendonly yes, and the same in redis.conf",
        );
    } else if server.field("aof_last_write_status") == Some("err") {
        let what = "it cannot write its append-only file and rejects writes until it can";
        findings.error(
            "store-append-only-file-error",
            &at,
            what,
            "check that its disk is not full",
        );
    }
    check_memory(server, primaries, config, &at, findings);
    let local_time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let skew = server
        .number("server_time_usec")
        .map_or(Duration::ZERO, |theirs| {
            Duration::from_micros(theirs).abs_diff(local_time)
        });
    if skew > MAX_CLOCK_SKEW {
        let what = format!(
            "its clock differs by {} from the local clock, which determines the age of messages",
            crate::output::duration_text(skew)
        );
        findings.warning("clocks-differ", &at, what, "run NTP on both");
    }
    if let (Durability::Replicas { count, .. }, Some(connected)) =
        (config.durability(), server.number("connected_slaves"))
        && connected < u64::from(count)
        && guarantee != Guarantee::Bare
    {
        let what = format!(
            "{connected} replicas are connected, and store.replicas requires {count}: no claim is granted until {count} are connected"
        );
        findings.error(
            "too-few-replicas",
            &at,
            what,
            "start them, or lower store.replicas",
        );
    }
}

/// Adds findings about memory that is nearly full, or too small for `gate.rate`.
fn check_memory(
    server: &ServerInfo,
    primaries: u64,
    config: &Config,
    at: &str,
    findings: &mut DoctorFindings,
) {
    let limited = server.number("maxmemory").filter(|limit| *limit > 0);
    let Some(limit) = limited.or_else(|| server.number("total_system_memory")) else {
        return;
    };
    if let Some(used) = server
        .number("used_memory")
        .filter(|used| used.saturating_mul(100) > limit.saturating_mul(80))
    {
        let policy = server.field("maxmemory_policy");
        let evicts = policy.is_some_and(|policy| policy != "noeviction");
        let what = format!(
            "it uses {} of {} of memory; when memory is full, {}",
            bytes(used),
            bytes(limit),
            if evicts {
                "it evicts markers"
            } else {
                "no claim is granted"
            }
        );
        let severity = if limited.is_some_and(|limit| used >= limit) {
            Severity::Error
        } else {
            Severity::Warning
        };
        findings.add(
            severity,
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
        let load = Load::new(rate, config.dedup_window())
            .with_markers(markers)
            .with_primaries(primaries);
        let needs = plan(&load).memory;
        if needs > limit {
            let what = format!(
                "{rate} new ids per second for the window need {} of memory, and it has {}",
                bytes(needs),
                bytes(limit)
            );
            findings.warning(
                "store-memory-too-small",
                at,
                what,
                "give it more (`oncegate plan` estimates it), shorten the window, or use a Cluster",
            );
        }
    }
}
