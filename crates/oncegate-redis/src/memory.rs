//! Whether a server remembers what it was told, as far as `INFO` says.

use oncegate_core::Persistence;

use crate::failure::Failure;
use crate::info::Info;
use crate::route::Route;

/// What was found. Each way to forget is one line that says what to do.
#[derive(Debug, Default)]
struct Found {
    version: String,
    forgets: Vec<String>,
}

/// Looks at each server.
///
/// # Errors
/// One could not be asked; the servers are looked for anew the next time.
pub(crate) async fn memory(route: &Route) -> Result<Persistence, Failure> {
    let looked = look(route).await;
    if looked.is_err() {
        route.distrust();
    }
    looked
}

async fn look(route: &Route) -> Result<Persistence, Failure> {
    let mut all = Found::default();
    let servers = route.primaries().await?;
    for lanes in &servers {
        let info = Info::of(lanes).await?;
        route.still_a_primary(&info)?;
        cannot_write(&info)?;
        let found = judge(&info);
        let at = |line: String| {
            if servers.len() > 1 {
                format!("{}: {line}", lanes.general.described())
            } else {
                line
            }
        };
        all.version = found.version;
        all.forgets.extend(found.forgets.into_iter().map(at));
    }
    Ok(all.memory())
}

/// A full disk is no setting: Redis takes no writes until it has room again, and goes on by itself
/// then. Who begins meanwhile waits.
fn cannot_write(info: &Info) -> Result<(), Failure> {
    match (
        info.field("aof_enabled"),
        info.field("aof_last_write_status"),
    ) {
        (Some("1"), Some("err")) => Err(Failure::not_applied(
            "Redis cannot write its append-only file: look at its disk",
        )),
        _ => Ok(()),
    }
}

fn judge(info: &Info) -> Found {
    let mut found = Found {
        version: info.field("redis_version").unwrap_or("unknown").to_owned(),
        ..Found::default()
    };
    match info.field("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => {
            found.forgets.push(format!("it evicts keys when memory is full (maxmemory-policy {policy}): set maxmemory-policy noeviction"))
        }
        None => found.forgets.push("it does not say whether it evicts keys: let its INFO show maxmemory_policy".into()),
    }
    if info.field("aof_enabled") != Some("1") {
        found
            .forgets
            .push("it keeps no append-only file and forgets in a crash: set appendonly yes".into());
    }
    if info.field("role") != Some("master") {
        found.forgets.push(
            "it is a replica: give Redis::at the primary, or the Sentinels to Redis::sentinel"
                .into(),
        );
    }
    found
}

impl Found {
    fn memory(&self) -> Persistence {
        if self.forgets.is_empty() {
            Persistence::Durable(format!(
                "Redis {} with an append-only file, evicting nothing; with appendfsync everysec a power cut, and a crash beside a busy \
                 disk, may cost the last second or two, and a failover what was not replicated",
                self.version
            ))
        } else {
            Persistence::Volatile(self.forgets.join("; "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::GOOD;

    #[test]
    fn a_server_that_keeps_what_it_was_told_survives() {
        assert!(
            matches!(judge(&GOOD.into()).memory(), Persistence::Durable(text) if text.contains("7.0.15"))
        );
    }

    #[test]
    fn a_disk_that_is_full_is_waited_for() {
        assert!(cannot_write(&GOOD.into()).is_ok());
        let full = GOOD.replace("aof_last_write_status:ok", "aof_last_write_status:err");
        let waits = cannot_write(&full.as_str().into());
        assert!(
            matches!(&waits, Err(Failure::NotApplied(problem)) if problem.to_string().contains("disk")),
            "{waits:?}"
        );
        // Who keeps no such file has no such trouble; and what it forgets is a setting.
        assert!(
            cannot_write(
                &full
                    .replace("aof_enabled:1", "aof_enabled:0")
                    .as_str()
                    .into()
            )
            .is_ok()
        );
    }

    #[test]
    fn each_way_to_forget_is_named_with_its_remedy() {
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
            let memory = judge(&GOOD.replace(good, bad).as_str().into()).memory();
            assert!(
                matches!(&memory, Persistence::Volatile(text) if text.contains(remedy)),
                "{memory:?}"
            );
        }
    }
}
