//! Whether this server remembers: read from `INFO`, which needs no right to `CONFIG`.

use oncegate_core::Memory;

use crate::failure::Failure;

/// What the user took the server for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Single,
    Cluster,
}

/// Judges what `INFO` says.
///
/// # Errors
/// `Misconfigured` if the server is a node of a Cluster and the user does not know it.
pub(crate) fn judge(info: &str, shape: Shape) -> Result<Memory, Failure> {
    let field = |name: &str| info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'));
    if field("cluster_enabled") == Some("1") && shape == Shape::Single {
        return Err(Failure::misconfigured("Redis::at names a node of a cluster; give its nodes to Redis::cluster"));
    }
    let mut forgets = Vec::new();
    let version = field("redis_version").unwrap_or("unknown");
    if version.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major < 7) {
        forgets.push(format!("it is Redis {version}, where only Guarantee::Bare works: upgrade it to 7.0 or newer"));
    }
    match field("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => {
            forgets.push(format!("it evicts keys when memory is full (maxmemory-policy {policy}): set maxmemory-policy noeviction"))
        }
        None => forgets.push("it does not say whether it evicts keys: let its INFO show maxmemory_policy".into()),
    }
    if field("aof_enabled") != Some("1") {
        forgets.push("it keeps no append-only file and forgets in a crash: set appendonly yes".into());
    }
    if field("role") != Some("master") {
        forgets.push("it is a replica: give Redis::at the primary".into());
    }
    if forgets.is_empty() {
        Ok(Memory::Survives(format!(
            "Redis {version} with an append-only file, evicting nothing; with appendfsync everysec a power cut may cost the last second, and a \
             failover what was not replicated"
        )))
    } else {
        Ok(Memory::Forgets(format!("{}; or accept it with accept_forgetful_store()", forgets.join("; "))))
    }
}

/// What all servers together are worth: one that forgets is enough.
pub(crate) fn all(judged: Vec<(String, Memory)>) -> Memory {
    let mut forgets = Vec::new();
    let mut survives = String::new();
    for (address, memory) in judged {
        match memory {
            Memory::Survives(why) => survives = why,
            Memory::Forgets(why) if address.is_empty() => forgets.push(why),
            Memory::Forgets(why) => forgets.push(format!("{address}: {why}")),
        }
    }
    if forgets.is_empty() { Memory::Survives(survives) } else { Memory::Forgets(forgets.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "# Server\r\nredis_version:7.0.15\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\nrole:master\r\ncluster_enabled:0\r\n";

    #[test]
    fn a_server_that_keeps_what_it_was_told_survives() {
        assert!(matches!(judge(GOOD, Shape::Single), Ok(Memory::Survives(text)) if text.contains("7.0.15")));
    }

    #[test]
    fn each_way_to_forget_is_named_with_its_remedy() {
        for (good, bad, remedy) in [
            ("maxmemory_policy:noeviction", "maxmemory_policy:volatile-lru", "maxmemory-policy noeviction"),
            ("aof_enabled:1", "aof_enabled:0", "appendonly yes"),
            ("role:master", "role:slave", "primary"),
            ("redis_version:7.0.15", "redis_version:6.2.14", "7.0 or newer"),
            ("maxmemory_policy:noeviction\r\n", "", "maxmemory_policy"),
        ] {
            let judged = judge(&GOOD.replace(good, bad), Shape::Single);
            assert!(matches!(&judged, Ok(Memory::Forgets(text)) if text.contains(remedy)), "{judged:?}");
        }
    }

    #[test]
    fn a_cluster_that_the_user_does_not_know_of_is_refused() {
        let node = GOOD.replace("cluster_enabled:0", "cluster_enabled:1");
        assert!(matches!(judge(&node, Shape::Single), Err(Failure::Misconfigured(_))));
        assert!(matches!(judge(&node, Shape::Cluster), Ok(Memory::Survives(_))));
    }

    #[test]
    fn one_server_that_forgets_is_enough() {
        let good = judge(GOOD, Shape::Single).expect("judged");
        let bad = judge(&GOOD.replace("aof_enabled:1", "aof_enabled:0"), Shape::Single).expect("judged");
        assert_eq!(all(vec![("a:1".into(), good.clone()), ("b:2".into(), good.clone())]), good);
        assert!(matches!(all(vec![("a:1".into(), good), ("b:2".into(), bad)]), Memory::Forgets(why) if why.starts_with("b:2: ")));
    }
}
