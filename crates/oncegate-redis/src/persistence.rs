//! Whether a server keeps its data after a crash, as far as `INFO` shows.

use oncegate_core::Persistence;

use crate::failure::StoreFailure;
use crate::info::InfoReply;
use crate::router::CommandRouter;

/// The version of one server, and the risks that the inspected servers lose data, each with the
/// setting to change.
#[derive(Debug, Default)]
struct PersistenceReport {
    version: String,
    risks: Vec<String>,
}

/// Inspects all primaries.
///
/// # Errors
/// A server could not be queried; the topology is refreshed before the next command.
pub(crate) async fn inspect(router: &CommandRouter) -> Result<Persistence, StoreFailure> {
    let inspected = inspect_servers(router).await;
    if inspected.is_err() {
        router.invalidate();
    }
    inspected
}

async fn inspect_servers(router: &CommandRouter) -> Result<Persistence, StoreFailure> {
    let mut all = PersistenceReport::default();
    let servers = router.primaries().await?;
    for connections in &servers {
        let info = InfoReply::of(connections).await?;
        router.check_role(&info)?;
        check_writable(&info)?;
        let report = assess(&info);
        let with_address = |line: String| {
            if servers.len() > 1 {
                format!("{}: {line}", connections.general.described())
            } else {
                line
            }
        };
        all.version = report.version;
        all.risks.extend(report.risks.into_iter().map(with_address));
    }
    Ok(all.persistence())
}

/// Fails while the append-only file cannot be written, for example because the disk is full. This
/// is not a risk but an outage: Redis rejects writes until it can write the file again.
fn check_writable(info: &InfoReply) -> Result<(), StoreFailure> {
    match (
        info.field("aof_enabled"),
        info.field("aof_last_write_status"),
    ) {
        (Some("1"), Some("err")) => Err(StoreFailure::not_applied(
            "Redis cannot write its append-only file: check its disk",
        )),
        _ => Ok(()),
    }
}

fn assess(info: &InfoReply) -> PersistenceReport {
    let mut report = PersistenceReport {
        version: info.field("redis_version").unwrap_or("unknown").to_owned(),
        ..PersistenceReport::default()
    };
    match info.field("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => {
            report.risks.push(format!("it evicts keys when its memory is full (maxmemory-policy {policy}): set maxmemory-policy noeviction"))
        }
        None => report.risks.push("its INFO lacks maxmemory_policy, so that eviction cannot be excluded: make INFO show it".into()),
    }
    if info.field("aof_enabled") != Some("1") {
        report.risks.push(
            "it has no append-only file and loses data in a crash: set appendonly yes".into(),
        );
    }
    if info.field("role") != Some("master") {
        report
            .risks
            .push("it is a replica: name the primary in Redis::at, or use Redis::sentinel".into());
    }
    report
}

impl PersistenceReport {
    fn persistence(&self) -> Persistence {
        if self.risks.is_empty() {
            Persistence::Durable(format!(
                "Redis {} with an append-only file and without eviction; with appendfsync everysec a power cut, or a crash while the \
                 disk is busy, may lose the last two seconds, and a failover loses writes that were not replicated",
                self.version
            ))
        } else {
            Persistence::Volatile(self.risks.join("; "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::INFO_WITHOUT_RISKS;

    #[test]
    fn a_server_with_an_append_only_file_is_durable() {
        assert!(
            matches!(assess(&INFO_WITHOUT_RISKS.into()).persistence(), Persistence::Durable(text) if text.contains("7.0.15"))
        );
    }

    #[test]
    fn a_full_disk_is_retried() {
        assert!(check_writable(&INFO_WITHOUT_RISKS.into()).is_ok());
        let full =
            INFO_WITHOUT_RISKS.replace("aof_last_write_status:ok", "aof_last_write_status:err");
        let failure = check_writable(&full.as_str().into());
        assert!(
            matches!(&failure, Err(StoreFailure::NotApplied(problem)) if problem.to_string().contains("disk")),
            "{failure:?}"
        );
        // Without an append-only file the status has no meaning.
        assert!(
            check_writable(
                &full
                    .replace("aof_enabled:1", "aof_enabled:0")
                    .as_str()
                    .into()
            )
            .is_ok()
        );
    }

    #[test]
    fn each_risk_is_reported_with_its_remedy() {
        for (good, bad, remedy) in [
            (
                "maxmemory_policy:noeviction",
                "maxmemory_policy:volatile-lru",
                "maxmemory-policy noeviction",
            ),
            ("aof_enabled:1", "aof_enabled:0", "appendonly yes"),
            ("role:master", "role:slave", "primary"),
            ("maxmemory_policy:noeviction\r\n", "", "maxmemory_policy"),
        ] {
            let persistence =
                assess(&INFO_WITHOUT_RISKS.replace(good, bad).as_str().into()).persistence();
            assert!(
                matches!(&persistence, Persistence::Volatile(text) if text.contains(remedy)),
                "{persistence:?}"
            );
        }
    }
}
