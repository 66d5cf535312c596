//! Why an operation has no verdict, and whether it may be repeated.

pub(crate) use oncegate_core::internal::{Problem, StoreFailure};

use crate::record::{DecodeError, VERSION};
use crate::tool_rights;

/// Whether a Cluster node replies with this code that it does not serve a key, or that no node does
/// at the moment.
pub(crate) fn is_not_served(code: &str) -> bool {
    matches!(code, "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN")
}

/// The migrating slot of an error `ASK <slot> <host:port>`.
pub(crate) fn migrating_slot(code: &str, detail: &str) -> Option<u16> {
    detail
        .split(' ')
        .next()
        .filter(|_| code == "ASK")?
        .parse()
        .ok()
}

/// The meaning of an error reply.
pub(crate) fn of_reply(error: &redis::ServerError) -> StoreFailure {
    from_server_error(error.code(), error.details().unwrap_or_default())
}

/// The meaning of an error reply; its code is the first word of the reply.
pub(crate) fn from_server_error(code: &str, detail: &str) -> StoreFailure {
    let reply = format!("Redis replied {code} {detail}");
    match code {
        "OOM" => StoreFailure::not_applied(format!(
            "{reply}: the server is full; raise its maxmemory, or shorten the dedup window"
        )),
        "MISCONF" => StoreFailure::not_applied(format!(
            "{reply}: the server cannot write to its disk; free space on it"
        )),
        "NOREPLICAS" => StoreFailure::not_applied(format!(
            "{reply}: start as many replicas as min-replicas-to-write of the server requires"
        )),
        "LOADING" | "READONLY" | "BUSY" | "MASTERDOWN" | "TRYAGAIN" => {
            StoreFailure::not_applied(reply)
        }
        "NOPERM" => StoreFailure::misconfigured(format!("{reply}: {}", permission_remedy(detail))),
        "NOAUTH" | "WRONGPASS" => {
            StoreFailure::misconfigured(format!("{reply}: correct user and password in the URL"))
        }
        "WRONGTYPE" => {
            let text = format!(
                "{reply}: another program uses this key; set a separate key prefix with Redis::prefix"
            );
            StoreFailure::UnreadableMarker(Problem::new(text))
        }
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => StoreFailure::misconfigured(format!(
            "{reply}: Redis::at names a node of a Cluster; use Redis::cluster"
        )),
        "ERR" if detail.contains("syntax error") => StoreFailure::misconfigured(format!(
            "{reply}: the server is older than 7.0; upgrade it, or choose Guarantee::Bare"
        )),
        "ERR" if detail.starts_with("unknown command") => StoreFailure::misconfigured(format!(
            "{reply}: the server must support SET, GET, MGET, DEL, PTTL, PEXPIRE, EVAL and EVALSHA"
        )),
        _ if is_denied(code, detail) => from_server_error("NOPERM", detail),
        "ERR" if detail.contains("max number of clients") => StoreFailure::not_applied(reply),
        // A script may have been stopped midway; repeating it with the same token is safe.
        _ => StoreFailure::unknown(reply),
    }
}

/// Whether the user lacks a right.
pub(crate) fn is_denied(code: &str, detail: &str) -> bool {
    // The replies of Redis 7.0 and of later releases when the user of a script lacks a right.
    let in_script = detail.contains("user executing the script can't")
        || detail.starts_with("ACL failure in script");
    code == "NOPERM" || code == "ERR" && in_script
}

/// The user that the reply to a denied command names.
pub(crate) fn denied_user(detail: &str) -> Option<&str> {
    let (_, user) = detail.split_once("User ")?;
    Some(user.split_once(" has no permissions")?.0)
}

/// The failure for a value that this release cannot decode as a marker.
pub(crate) fn unreadable(why: DecodeError) -> StoreFailure {
    match why {
        DecodeError::UnknownVersion(version) => {
            StoreFailure::UnreadableMarker(Problem::new(format!(
                "a newer release wrote this marker (record version {version}, this release reads {VERSION}): upgrade oncegate here; the key \
             is unchanged"
            )))
        }
        DecodeError::NotAMarker => StoreFailure::UnreadableMarker(Problem::new(
            "another program wrote this key, or the value is truncated: set a separate key prefix with Redis::prefix, or delete the \
                 key; the key is unchanged",
        )),
    }
}

/// The remedy for a `NOPERM` reply, with the `ACL SETUSER` command that grants what is missing.
fn permission_remedy(detail: &str) -> String {
    let user = denied_user(detail).unwrap_or("<user>");
    let denied = detail
        .split_once("run the '")
        .and_then(|(_, command)| command.split_once('\''))
        .map(|(command, _)| format!("+{}", command.to_ascii_lowercase()));
    match denied {
        // All rights at once: otherwise each run of a tool reports only the next missing one.
        Some(right) if tool_rights::rights().any(|tool| tool == right) => format!(
            "the user in the URL needs this right for operator commands: run ACL SETUSER {user} {}",
            tool_rights::rights().collect::<Vec<_>>().join(" ")
        ),
        _ => format!(
            "run ACL SETUSER {user} ~<prefix>* +set +get +mget +del +pttl +pexpire +eval +evalsha +info; Durability::Replicas also needs \
             +wait, and Redis::cluster +cluster|slots +asking"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denied_command_names_the_acl_command_that_grants_it() {
        let tools = "+xadd +xrange +scan +type +strlen";
        for (detail, remedy) in [
            (
                "User ops has no permissions to run the 'xrange' command",
                format!("ACL SETUSER ops {tools}"),
            ),
            (
                "this user has no permissions to run the 'scan' command or its subcommand",
                format!("ACL SETUSER <user> {tools}"),
            ),
            (
                "ACL failure in script: User ops has no permissions to run the 'set' command script: 1f",
                "ACL SETUSER ops ~<prefix>* +set +get".into(),
            ),
            (
                "No permissions to access a key",
                "ACL SETUSER <user> ~<prefix>* +set +get".into(),
            ),
        ] {
            let failure = from_server_error("NOPERM", detail);
            let StoreFailure::Misconfigured(problem) = &failure else {
                panic!("{detail}: {failure:?}");
            };
            let text = problem.to_string();
            assert!(text.contains(detail) && text.contains(&remedy), "{text}");
        }
    }

    #[test]
    fn error_replies_are_retryable_or_misconfigured() {
        for transient in [
            "LOADING",
            "READONLY",
            "OOM",
            "MISCONF",
            "NOREPLICAS",
            "BUSY",
            "MASTERDOWN",
            "TRYAGAIN",
        ] {
            assert!(
                matches!(
                    from_server_error(transient, "x"),
                    StoreFailure::NotApplied(_)
                ),
                "{transient}"
            );
        }
        for wrong in ["NOPERM", "NOAUTH", "WRONGPASS", "MOVED", "CROSSSLOT"] {
            assert!(
                matches!(
                    from_server_error(wrong, "x"),
                    StoreFailure::Misconfigured(_)
                ),
                "{wrong}"
            );
        }
        assert!(matches!(
            from_server_error("WRONGTYPE", "x"),
            StoreFailure::UnreadableMarker(_)
        ));
        // Redis before 7.0 supports NX and GET, but not together.
        let old = from_server_error("ERR", "syntax error");
        assert!(
            matches!(&old, StoreFailure::Misconfigured(problem) if problem.to_string().contains("7.0")),
            "{old:?}"
        );
        assert!(matches!(
            from_server_error("ERR", "max number of clients reached"),
            StoreFailure::NotApplied(_)
        ));
        for (who, reply) in [
            (
                "Redis 7.0",
                "The user executing the script can't run this command or subcommand script: 1f, on @user_script:5.",
            ),
            (
                "Redis 8.2",
                "ACL failure in script: User some has no permissions to run the 'set' command script: 1f, on @user_script:5.",
            ),
        ] {
            let failure = from_server_error("ERR", reply);
            assert!(
                matches!(&failure, StoreFailure::Misconfigured(problem) if problem.to_string().to_ascii_lowercase().contains("pexpire")),
                "{who}: {failure:?}"
            );
        }
        assert!(matches!(
            from_server_error("SOMETHING", "new"),
            StoreFailure::Unknown(_)
        ));
    }
}
