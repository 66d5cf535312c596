//! Checks at start whether a server offers what a guarantee needs: its version, its commands, the
//! rights of the user.
//!
//! Each command is run on a probe key, since no query lists all that a server supports and its user
//! may run. A missing requirement is an error; a risk is a warning in the log.

use std::time::{Duration, SystemTime};

use oncegate_core::marker::Guarantee;
use redis::{Cmd, Pipeline, Value};

use crate::durability::Durability;
use crate::failure::{StoreFailure, is_not_served, migrating_slot};
use crate::info::InfoReply;
use crate::router::{CommandRouter, ConnectionPair};
use crate::script::{self, ScriptRef};

/// The share of its memory above which a server counts as nearly full.
const NEARLY_FULL_PERCENT: u64 = 80;

/// A larger difference between the clocks of this machine and of Redis is a warning.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(5);

/// The requirements that the servers must meet.
#[derive(Clone, Copy)]
pub(crate) struct PreflightRequest<'a> {
    pub(crate) guarantee: Guarantee,
    pub(crate) durability: Durability,
    pub(crate) prefix: &'a [u8],
}

/// Checks each primary, and logs a warning for each risk.
///
/// # Errors
/// `Misconfigured`, with the setting, if a server lacks a requirement of the guarantee; otherwise a
/// server could not be queried, and the topology is refreshed before the next command.
pub(crate) async fn preflight(
    router: &CommandRouter,
    request: PreflightRequest<'_>,
) -> Result<(), StoreFailure> {
    let checked = check_servers(router, request).await;
    if checked.is_err() {
        router.invalidate();
    }
    checked
}

async fn check_servers(
    router: &CommandRouter,
    request: PreflightRequest<'_>,
) -> Result<(), StoreFailure> {
    let probes = router
        .keys_on_each_primary(&[request.prefix, b"!probe"].concat())
        .await?;
    for (probe, connections) in &probes {
        let server = format!(
            "{}: Redis at {}",
            router.setting(),
            connections.general.described()
        );
        // First, so that a failure to connect is not reported as a missing right.
        connections.general.pin().await?;
        let mut report = match InfoReply::of(connections).await {
            Ok(info) => {
                router.check_role(&info)?;
                // Retried, because the server may be the primary again after a failover. At most
                // once refuses a replica: see `persistence`.
                if info.field("role") == Some("slave") && request.guarantee != Guarantee::AtMostOnce
                {
                    return Err(StoreFailure::not_applied(format!(
                        "{server} is a replica, which rejects writes: name the primary, or use Redis::sentinel"
                    )));
                }
                assess(&info, router, request, SystemTime::now())
            }
            Err(StoreFailure::Misconfigured(_)) => without_info(request.guarantee),
            Err(failure) => return Err(failure),
        };
        if report.missing.is_empty() {
            let tried = try_commands(connections, probe, router, request).await?;
            report.forbidden.extend(tried.forbidden);
            report.missing.extend(tried.missing);
            report.warnings.extend(tried.warnings);
        }
        if !report.forbidden.is_empty() {
            report.missing.push(missing_rights(
                &report.forbidden,
                connections.general.user(),
                router,
                request,
            ));
        }
        if !report.missing.is_empty() {
            return Err(StoreFailure::misconfigured(format!(
                "{server} {}",
                report.missing.join("; ")
            )));
        }
        for warning in report.warnings {
            tracing::warn!("{server} {warning}");
        }
    }
    Ok(())
}

/// The result of the checks of one server.
#[derive(Debug, Default, PartialEq, Eq)]
struct PreflightReport {
    /// Required commands that the user may not run, or not on these keys.
    forbidden: Vec<String>,
    /// Other requirements that are not met.
    missing: Vec<String>,
    /// Risks, and errors that may be transient.
    warnings: Vec<String>,
}

impl PreflightReport {
    fn missing(missing: impl Into<String>) -> Self {
        Self {
            missing: vec![missing.into()],
            ..Self::default()
        }
    }
}

/// The report for a user without the right to `INFO`, which the loss detector reads.
fn without_info(guarantee: Guarantee) -> PreflightReport {
    match guarantee {
        Guarantee::AtMostOnce => PreflightReport { forbidden: vec!["INFO".into()], ..PreflightReport::default() },
        Guarantee::Bare => PreflightReport::default(),
        _ => PreflightReport {
            warnings: vec!["does not let this user run INFO, so evictions, restarts and clock jumps stay undetected: ACL SETUSER <user> +info".into()],
            ..PreflightReport::default()
        },
    }
}

/// Evaluates `INFO`.
fn assess(
    info: &InfoReply,
    router: &CommandRouter,
    request: PreflightRequest<'_>,
    now: SystemTime,
) -> PreflightReport {
    if info.field("cluster_enabled") == Some("1") && matches!(router, CommandRouter::Single(_)) {
        return PreflightReport::missing("is a node of a Cluster: use Redis::cluster");
    }
    let mut warnings = Vec::new();
    let version = info.field("redis_version").unwrap_or("unknown");
    if version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok())
        .is_some_and(|major: u32| major < 7)
    {
        if request.guarantee != Guarantee::Bare {
            return PreflightReport::missing(format!(
                "has version {version}, which supports only Guarantee::Bare: upgrade it to 7.0 or newer"
            ));
        }
        warnings.push(format!(
            "has version {version}, which supports only Guarantee::Bare, as configured"
        ));
    }
    // At most once refuses such a server, or has accepted it: see `persistence`.
    if let Some(policy) = info
        .field("maxmemory_policy")
        .filter(|policy| *policy != "noeviction")
        && request.guarantee != Guarantee::AtMostOnce
    {
        warnings.push(format!(
            "has maxmemory-policy {policy}: when its memory is full it evicts markers, and redelivered messages are handled again: set \
             maxmemory-policy noeviction (CONFIG SET and redis.conf)"
        ));
    }
    let limit = info
        .number("maxmemory")
        .filter(|limit| *limit > 0)
        .or_else(|| info.number("total_system_memory"));
    if let (Some(used), Some(limit)) = (info.number("used_memory"), limit)
        && used.saturating_mul(100) > limit.saturating_mul(NEARLY_FULL_PERCENT)
    {
        warnings.push(format!(
            "uses {used} of {limit} bytes of memory: raise maxmemory, or shorten the window"
        ));
    }
    if let (Some(redis_clock), Ok(local_clock)) = (
        info.number("server_time_usec"),
        now.duration_since(SystemTime::UNIX_EPOCH),
    ) {
        let difference = Duration::from_micros(redis_clock).abs_diff(local_clock);
        if difference > MAX_CLOCK_DIFFERENCE {
            warnings.push(format!("has a clock that differs by {difference:.0?} from this machine's clock, which determines the age of messages: run NTP on both"));
        }
    }
    if let (Durability::Replicas { count, .. }, Some(replicas)) =
        (request.durability, info.number("connected_slaves"))
        && replicas < u64::from(count)
        && request.guarantee != Guarantee::Bare
    {
        warnings.push(format!("has {replicas} replicas, and Durability::Replicas needs {count}: no claim is granted until they are connected"));
    }
    PreflightReport {
        warnings,
        ..PreflightReport::default()
    }
}

/// The missing rights and the command that grants all rights of a consumer, in one line.
fn missing_rights(
    forbidden: &[String],
    user: Option<&str>,
    router: &CommandRouter,
    request: PreflightRequest<'_>,
) -> String {
    format!(
        "does not let the user in the URL run {} on its keys, which Guarantee::{:?} needs (NOPERM): {}",
        forbidden.join(", "),
        request.guarantee,
        grant(user, router, request, std::iter::empty()),
    )
}

/// The command that grants a user the rights of a consumer and these rights.
pub(crate) fn grant(
    user: Option<&str>,
    router: &CommandRouter,
    request: PreflightRequest<'_>,
    more: impl Iterator<Item = &'static str>,
) -> String {
    let mut rights: Vec<&str> = trials(request.prefix, router, request)
        .iter()
        .map(|trial| trial.right)
        .collect();
    if request.guarantee == Guarantee::AtMostOnce || request.guarantee == Guarantee::EffectivelyOnce
    {
        rights.push("+info");
    }
    if let CommandRouter::Cluster(_) = router {
        rights.push("+cluster|slots");
    }
    rights.extend(more);
    format!(
        "ACL SETUSER {} ~{}* {}",
        user.unwrap_or("<user>"),
        String::from_utf8_lossy(request.prefix),
        rights.join(" "),
    )
}

/// A command to run on the probe key.
struct TrialCommand {
    name: &'static str,
    /// The right that it needs, as in `ACL SETUSER`.
    right: &'static str,
    command: Cmd,
}

/// The commands that the guarantee needs, with their rights.
fn trials(
    probe: &[u8],
    router: &CommandRouter,
    request: PreflightRequest<'_>,
) -> Vec<TrialCommand> {
    let on_probe = |name: &str| redis::cmd(name).arg(probe).to_owned();
    let trial = |name, right, command| TrialCommand {
        name,
        right,
        command,
    };
    let delete = trial("DEL", "+del", on_probe("DEL"));
    if request.guarantee == Guarantee::Bare {
        return vec![
            trial(
                "SET with EX and NX",
                "+set",
                on_probe("SET")
                    .arg("1")
                    .arg("EX")
                    .arg(1)
                    .arg("NX")
                    .to_owned(),
            ),
            delete,
        ];
    }
    let mut trials = vec![
        trial(
            "SET with NX, GET and PX",
            "+set",
            on_probe("SET")
                .arg("1")
                .arg("NX")
                .arg("GET")
                .arg("PX")
                .arg(1_000)
                .to_owned(),
        ),
        trial("GET", "+get", on_probe("GET")),
        trial("MGET", "+mget", on_probe("MGET")),
        trial("PTTL", "+pttl", on_probe("PTTL")),
        trial(
            "PEXPIRE",
            "+pexpire",
            on_probe("PEXPIRE").arg(1_000).to_owned(),
        ),
        delete,
        trial("EVAL", "+eval", script::empty_call(ScriptRef::Source)),
        trial("EVALSHA", "+evalsha", script::empty_call(ScriptRef::Digest)),
    ];
    if let Durability::Replicas { .. } = request.durability {
        trials.push(trial(
            "WAIT",
            "+wait",
            redis::cmd("WAIT").arg(0).arg(1).to_owned(),
        ));
    }
    if let CommandRouter::Cluster(_) = router {
        trials.push(trial("ASKING", "+asking", redis::cmd("ASKING")));
    }
    trials
}

/// Runs every command that the guarantee needs.
///
/// # Errors
/// The server could not be queried, is still loading its data, or no longer serves the probe key.
async fn try_commands(
    connections: &ConnectionPair,
    probe: &[u8],
    router: &CommandRouter,
    request: PreflightRequest<'_>,
) -> Result<PreflightReport, StoreFailure> {
    let trials = trials(probe, router, request);
    let mut pipeline = Pipeline::with_capacity(trials.len());
    trials.iter().for_each(|trial| {
        pipeline.add_command(trial.command.clone());
    });
    let mut tried = PreflightReport::default();
    for (trial, reply) in trials
        .iter()
        .zip(connections.general.send(&pipeline).await?)
    {
        let Value::ServerError(error) = reply else {
            continue;
        };
        let (code, detail) = (error.code(), error.details().unwrap_or_default());
        let name = &trial.name;
        match crate::failure::from_server_error(code, detail) {
            // A slot of this server is migrating, or a failover is in progress.
            _ if matches!(router, CommandRouter::Cluster(_)) && is_not_served(code) => {
                router.invalidate_slot(migrating_slot(code, detail));
                return Err(StoreFailure::not_applied(format!(
                    "Redis replied {code} {detail} for the key {}",
                    String::from_utf8_lossy(probe)
                )));
            }
            StoreFailure::Misconfigured(_) if code == "NOPERM" => {
                tried.forbidden.push((*name).to_owned())
            }
            StoreFailure::Misconfigured(_) | StoreFailure::UnreadableMarker(_) => {
                tried.missing.push(format!(
                    "does not support {name}, which Guarantee::{:?} needs ({code} {detail})",
                    request.guarantee
                ));
            }
            failure @ StoreFailure::NotApplied(_) if code == "LOADING" => return Err(failure),
            StoreFailure::NotApplied(_) | StoreFailure::Unknown(_) => tried
                .warnings
                .push(format!("rejects {name} at the moment ({code} {detail})")),
        }
    }
    Ok(tried)
}

/// `INFO` of a server without risks.
#[cfg(test)]
pub(crate) const INFO_WITHOUT_RISKS: &str = "# Server\r\nredis_version:7.0.15\r\nserver_time_usec:1000000000\r\nmaxmemory_policy:noeviction\r\n\
                               used_memory:79\r\nmaxmemory:100\r\naof_enabled:1\r\naof_last_write_status:ok\r\nrole:master\r\n\
                               connected_slaves:1\r\ncluster_enabled:0\r\n";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::connection::Timeouts;
    use crate::failure::Problem;

    fn report_for(info: &str, guarantee: Guarantee) -> PreflightReport {
        let timeouts = Timeouts {
            connect: Duration::ZERO,
            reply: Duration::ZERO,
        };
        let router = CommandRouter::to(
            &Err(Problem::new("no server")),
            timeouts,
            Durability::Primary,
        );
        let durability = Durability::Replicas {
            count: 1,
            timeout: Duration::ZERO,
        };
        let request = PreflightRequest {
            guarantee,
            durability,
            prefix: b"processed:",
        };
        assess(
            &info.into(),
            &router,
            request,
            SystemTime::UNIX_EPOCH + Duration::from_secs(1_001),
        )
    }

    const GUARANTEES: [Guarantee; 3] = [
        Guarantee::AtMostOnce,
        Guarantee::EffectivelyOnce,
        Guarantee::Bare,
    ];

    #[test]
    fn each_risk_is_a_warning_with_its_remedy() {
        assert_eq!(
            report_for(INFO_WITHOUT_RISKS, Guarantee::EffectivelyOnce),
            PreflightReport::default()
        );
        for (good, bad, remedy) in [
            ("used_memory:79", "used_memory:81", "raise maxmemory"),
            (
                "maxmemory_policy:noeviction",
                "maxmemory_policy:allkeys-lru",
                "set maxmemory-policy noeviction",
            ),
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
            let report = report_for(
                &INFO_WITHOUT_RISKS.replace(good, bad),
                Guarantee::EffectivelyOnce,
            );
            assert!(
                report.missing.is_empty()
                    && report.warnings.len() == 1
                    && report.warnings[0].contains(remedy),
                "{report:?}"
            );
        }
    }

    /// At most once does not start on such a server.
    #[test]
    fn eviction_is_a_warning_unless_it_is_refused() {
        let evicting = INFO_WITHOUT_RISKS.replace("noeviction", "volatile-ttl");
        for guarantee in GUARANTEES {
            let warnings = report_for(&evicting, guarantee).warnings;
            let expected = usize::from(guarantee != Guarantee::AtMostOnce);
            assert_eq!(warnings.len(), expected, "{guarantee:?}: {warnings:?}");
        }
    }

    #[test]
    fn redis_before_7_supports_only_bare() {
        for old in ["6.2.14", "6.0.16", "5.0.7"] {
            for guarantee in GUARANTEES {
                let report = report_for(&INFO_WITHOUT_RISKS.replace("7.0.15", old), guarantee);
                match (guarantee, &report.missing[..], &report.warnings[..]) {
                    (Guarantee::Bare, [], [warning]) => assert!(
                        warning.contains(old) && warning.contains("only Guarantee::Bare"),
                        "{warning}"
                    ),
                    (_, [missing], []) if guarantee != Guarantee::Bare => {
                        assert!(
                            missing.contains(old) && missing.contains("7.0 or newer"),
                            "{missing}"
                        )
                    }
                    _ => panic!("{guarantee:?}: {report:?}"),
                }
            }
        }
        for new in ["7.0.0", "7.2.4", "8.2.3", "10.0.0"] {
            assert_eq!(
                report_for(
                    &INFO_WITHOUT_RISKS.replace("7.0.15", new),
                    Guarantee::AtMostOnce
                ),
                PreflightReport::default()
            );
        }
    }

    #[test]
    fn a_cluster_node_as_a_single_server_is_rejected() {
        let node = INFO_WITHOUT_RISKS.replace("cluster_enabled:0", "cluster_enabled:1");
        for guarantee in GUARANTEES {
            assert!(
                report_for(&node, guarantee)
                    .missing
                    .iter()
                    .any(|missing| missing.contains("Redis::cluster"))
            );
        }
    }
}
