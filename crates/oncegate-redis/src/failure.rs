//! Why an operation has no verdict, and whether it may be repeated.

use std::sync::Arc;

use oncegate_core::StoreError;
use redis::RedisError;

use crate::record::{DecodeError, VERSION};
use crate::tool_rights;

/// Why an operation has no verdict. `Clone`, because one lost reply fails many operations.
#[derive(Clone, Debug)]
pub(crate) enum StoreFailure {
    /// Nothing was applied; may be repeated.
    NotApplied(Problem),
    /// It may have been applied; may be repeated with the same token.
    Unknown(Problem),
    /// The key holds no marker; other keys are not affected.
    UnreadableMarker(Problem),
    /// Fails until the configuration or the server is changed.
    Misconfigured(Problem),
}

/// A message of one line and its source. Contains no secret.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Problem {
    text: Arc<str>,
    source: Option<RedisError>,
}

impl Problem {
    pub(crate) fn new(text: impl AsRef<str>) -> Self {
        Self {
            text: text.as_ref().into(),
            source: None,
        }
    }

    pub(crate) fn of(text: impl AsRef<str>, source: RedisError) -> Self {
        Self {
            text: text.as_ref().into(),
            source: Some(source),
        }
    }
}

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

impl From<StoreFailure> for StoreError {
    fn from(failure: StoreFailure) -> Self {
        match failure {
            StoreFailure::NotApplied(problem) => Self::NotApplied(problem.into()),
            StoreFailure::Unknown(problem) => Self::Unknown(problem.into()),
            StoreFailure::UnreadableMarker(problem) => Self::UnreadableMarker(problem.into()),
            StoreFailure::Misconfigured(problem) => Self::Misconfigured(problem.into()),
        }
    }
}

impl StoreFailure {
    pub(crate) fn not_applied(text: impl AsRef<str>) -> Self {
        Self::NotApplied(Problem::new(text))
    }

    pub(crate) fn unknown(text: impl AsRef<str>) -> Self {
        Self::Unknown(Problem::new(text))
    }

    pub(crate) fn misconfigured(text: impl AsRef<str>) -> Self {
        Self::Misconfigured(Problem::new(text))
    }

    /// The same failure for an operation that may have been applied.
    pub(crate) fn possibly_applied(self) -> Self {
        match self {
            Self::NotApplied(problem) => Self::Unknown(problem),
            failure => failure,
        }
    }

    /// The failure to report after several servers failed: the first one that may be transient,
    /// otherwise the first one that needs another configuration.
    pub(crate) fn prefer_retryable(self, before: Option<Self>) -> Self {
        match (before, self) {
            (Some(before @ Self::Misconfigured(_)), Self::Misconfigured(_)) => before,
            (Some(before @ (Self::NotApplied(_) | Self::Unknown(_))), _) => before,
            (_, failure) => failure,
        }
    }

    /// The meaning of an error reply; its code is the first word of the reply.
    pub(crate) fn from_server_error(code: &str, detail: &str) -> Self {
        let reply = format!("Redis replied {code} {detail}");
        match code {
            "LOADING" | "READONLY" | "OOM" | "MISCONF" | "NOREPLICAS" | "BUSY" | "MASTERDOWN"
            | "TRYAGAIN" => Self::not_applied(reply),
            "NOPERM" => Self::misconfigured(format!("{reply}: {}", permission_remedy(detail))),
            "NOAUTH" | "WRONGPASS" => {
                Self::misconfigured(format!("{reply}: correct user and password in the URL"))
            }
            "WRONGTYPE" => {
                let text = format!(
                    "{reply}: another program uses this key; set a separate key prefix with Redis::prefix"
                );
                Self::UnreadableMarker(Problem::new(text))
            }
            "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => Self::misconfigured(format!(
                "{reply}: Redis::at names a node of a Cluster; use Redis::cluster"
            )),
            "ERR" if detail.contains("syntax error") => Self::misconfigured(format!(
                "{reply}: the server is older than 7.0; upgrade it, or choose Guarantee::Bare"
            )),
            "ERR" if detail.starts_with("unknown command") => Self::misconfigured(format!(
                "{reply}: the server must support SET, GET, MGET, DEL, PTTL, PEXPIRE, EVAL and EVALSHA"
            )),
            // The replies of Redis 7.0 and of later releases when the user of a script lacks a right.
            "ERR"
                if detail.contains("user executing the script can't")
                    || detail.starts_with("ACL failure in script") =>
            {
                Self::from_server_error("NOPERM", detail)
            }
            "ERR" if detail.contains("max number of clients") => Self::not_applied(reply),
            // A script may have been stopped midway; repeating it with the same token is safe.
            _ => Self::unknown(reply),
        }
    }

    /// The failure for a value that is no marker.
    pub(crate) fn unreadable(why: DecodeError) -> Self {
        match why {
            DecodeError::UnknownVersion(version) => Self::UnreadableMarker(Problem::new(format!(
                "a newer release wrote this marker (record version {version}, this release reads {VERSION}): upgrade oncegate here; the key \
                 is unchanged"
            ))),
            DecodeError::NotAMarker => Self::UnreadableMarker(Problem::new(
                "another program wrote this key, or the value is truncated: set a separate key prefix with Redis::prefix, or delete the \
                 key; the key is unchanged",
            )),
        }
    }
}

/// The remedy for a `NOPERM` reply, with the `ACL SETUSER` command that grants what is missing.
fn permission_remedy(detail: &str) -> String {
    let user = detail
        .split_once("User ")
        .and_then(|(_, user)| user.split_once(" has no permissions"))
        .map_or("<user>", |(user, _)| user);
    let denied = detail
        .split_once("run the '")
        .and_then(|(_, command)| command.split_once('\''))
        .map(|(command, _)| format!("+{}", command.to_ascii_lowercase()));
    match denied {
        // All rights at once: otherwise each run of a tool reports only the next missing one.
        Some(right) if tool_rights::rights().any(|tool| tool == right) => format!(
            "the user in the URL needs it for operator commands, run ACL SETUSER {user} {}",
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
            let failure = StoreFailure::from_server_error("NOPERM", detail);
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
                    StoreFailure::from_server_error(transient, "x"),
                    StoreFailure::NotApplied(_)
                ),
                "{transient}"
            );
        }
        for wrong in ["NOPERM", "NOAUTH", "WRONGPASS", "MOVED", "CROSSSLOT"] {
            assert!(
                matches!(
                    StoreFailure::from_server_error(wrong, "x"),
                    StoreFailure::Misconfigured(_)
                ),
                "{wrong}"
            );
        }
        assert!(matches!(
            StoreFailure::from_server_error("WRONGTYPE", "x"),
            StoreFailure::UnreadableMarker(_)
        ));
        // Redis before 7.0 supports NX and GET, but not together.
        let old = StoreFailure::from_server_error("ERR", "syntax error");
        assert!(
            matches!(&old, StoreFailure::Misconfigured(problem) if problem.to_string().contains("7.0")),
            "{old:?}"
        );
        assert!(matches!(
            StoreFailure::from_server_error("ERR", "max number of clients reached"),
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
            let failure = StoreFailure::from_server_error("ERR", reply);
            assert!(
                matches!(&failure, StoreFailure::Misconfigured(problem) if problem.to_string().to_ascii_lowercase().contains("pexpire")),
                "{who}: {failure:?}"
            );
        }
        assert!(matches!(
            StoreFailure::from_server_error("SOMETHING", "new"),
            StoreFailure::Unknown(_)
        ));
    }
}
