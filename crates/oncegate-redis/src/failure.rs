//! What went wrong, and what the caller does next.

use std::sync::Arc;

use oncegate_core::StoreError;
use redis::RedisError;

use crate::record::Unreadable;

/// Why there is no verdict. Can be cloned, because one lost reply fails many operations.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// Nothing was applied: ask again later.
    NotApplied(Problem),
    /// It may have been applied: ask again with the same token.
    Unknown(Problem),
    /// What is under the key is no marker; it concerns this key alone.
    UnreadableMarker(Problem),
    /// It will never work like this.
    Misconfigured(Problem),
}

/// One line for a person, and the error below it. Holds no secret.
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

/// Whether a node of a Cluster says by this code that it does not serve a key, or that nobody does
/// at the moment.
pub(crate) fn is_elsewhere(code: &str) -> bool {
    matches!(code, "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN")
}

/// The slot that is still on its way to another node, where one says `ASK <slot> <host:port>`.
pub(crate) fn moving(code: &str, detail: &str) -> Option<u16> {
    detail
        .split(' ')
        .next()
        .filter(|_| code == "ASK")?
        .parse()
        .ok()
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotApplied(problem) => Self::NotApplied(problem.into()),
            Failure::Unknown(problem) => Self::Unknown(problem.into()),
            Failure::UnreadableMarker(problem) => Self::UnreadableMarker(problem.into()),
            Failure::Misconfigured(problem) => Self::Misconfigured(problem.into()),
        }
    }
}

impl Failure {
    pub(crate) fn not_applied(text: impl AsRef<str>) -> Self {
        Self::NotApplied(Problem::new(text))
    }

    pub(crate) fn unknown(text: impl AsRef<str>) -> Self {
        Self::Unknown(Problem::new(text))
    }

    pub(crate) fn misconfigured(text: impl AsRef<str>) -> Self {
        Self::Misconfigured(Problem::new(text))
    }

    /// The same, where it may have been applied after all.
    pub(crate) fn though_it_may_stand(self) -> Self {
        match self {
            Self::NotApplied(problem) => Self::Unknown(problem),
            failure => failure,
        }
    }

    /// What to say when several were asked in vain: who may answer yet outranks those whose answer
    /// no time changes.
    pub(crate) fn beside(self, before: Option<Self>) -> Self {
        match (before, self) {
            (Some(before @ Self::Misconfigured(_)), Self::Misconfigured(_)) => before,
            (Some(before @ (Self::NotApplied(_) | Self::Unknown(_))), _) => before,
            (_, failure) => failure,
        }
    }

    /// What a command's error means: its code is the first word of what the server said.
    pub(crate) fn said_by_server(code: &str, detail: &str) -> Self {
        let said = format!("Redis says {code} {detail}");
        match code {
            "LOADING" | "READONLY" | "OOM" | "MISCONF" | "NOREPLICAS" | "BUSY" | "MASTERDOWN"
            | "TRYAGAIN" => Self::not_applied(said),
            "NOPERM" => Self::misconfigured(format!(
                "{said}: let the user in the URL run SET, GET, MGET, DEL, PTTL, PEXPIRE, EVAL, EVALSHA and INFO on the keys of the prefix, \
                 WAIT for Durability::Replicas, and CLUSTER SLOTS and ASKING for Redis::cluster"
            )),
            "NOAUTH" | "WRONGPASS" => Self::misconfigured(format!(
                "{said}: put the right user and password into the URL"
            )),
            "WRONGTYPE" => {
                let text = format!(
                    "{said}: another program uses this key; give markers a prefix of their own with Redis::prefix"
                );
                Self::UnreadableMarker(Problem::new(text))
            }
            "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => Self::misconfigured(format!(
                "{said}: Redis::at names a node of a cluster; give its nodes to Redis::cluster"
            )),
            "ERR" if detail.contains("syntax error") => Self::misconfigured(format!(
                "{said}: the server is older than 7.0; upgrade it, or choose Guarantee::Bare"
            )),
            "ERR" if detail.starts_with("unknown command") => Self::misconfigured(format!(
                "{said}: the server must offer SET, GET, MGET, DEL, PTTL, PEXPIRE, EVAL and EVALSHA"
            )),
            // What Redis 7.0 says, and what later ones say, when a script runs what its user may
            // not.
            "ERR"
                if detail.contains("user executing the script can't")
                    || detail.starts_with("ACL failure in script") =>
            {
                Self::said_by_server("NOPERM", detail)
            }
            "ERR" if detail.contains("max number of clients") => Self::not_applied(said),
            // A script may have been stopped midway; asking again with the same token is safe.
            _ => Self::unknown(said),
        }
    }

    /// What a value that is no marker of ours means.
    pub(crate) fn unreadable(why: Unreadable) -> Self {
        match why {
            // This concerns the deployment, not one id.
            Unreadable::UnknownVersion => Self::misconfigured(
                "a newer release wrote this marker (unknown record version): upgrade oncegate here; the marker is left as it is",
            ),
            Unreadable::NotAMarker => Self::UnreadableMarker(Problem::new(
                "another program wrote this key, or it was cut off: give markers a prefix of their own with Redis::prefix, or delete the key; \
                 it is left as it is",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_heals_is_not_applied_and_what_a_person_has_to_change_is_misconfigured() {
        for heals in [
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
                matches!(Failure::said_by_server(heals, "x"), Failure::NotApplied(_)),
                "{heals}"
            );
        }
        for wrong in ["NOPERM", "NOAUTH", "WRONGPASS", "MOVED", "CROSSSLOT"] {
            assert!(
                matches!(
                    Failure::said_by_server(wrong, "x"),
                    Failure::Misconfigured(_)
                ),
                "{wrong}"
            );
        }
        assert!(matches!(
            Failure::said_by_server("WRONGTYPE", "x"),
            Failure::UnreadableMarker(_)
        ));
        // Redis before 7.0 knows NX and GET, but not together.
        let old = Failure::said_by_server("ERR", "syntax error");
        assert!(
            matches!(&old, Failure::Misconfigured(problem) if problem.to_string().contains("7.0")),
            "{old:?}"
        );
        assert!(matches!(
            Failure::said_by_server("ERR", "max number of clients reached"),
            Failure::NotApplied(_)
        ));
        for (who, refuses) in [
            (
                "Redis 7.0",
                "The user executing the script can't run this command or subcommand script: 1f, on @user_script:5.",
            ),
            (
                "Redis 8.2",
                "ACL failure in script: User some has no permissions to run the 'set' command script: 1f, on @user_script:5.",
            ),
        ] {
            let told = Failure::said_by_server("ERR", refuses);
            assert!(
                matches!(&told, Failure::Misconfigured(problem) if problem.to_string().contains("PEXPIRE")),
                "{who}: {told:?}"
            );
        }
        assert!(matches!(
            Failure::said_by_server("SOMETHING", "new"),
            Failure::Unknown(_)
        ));
    }
}
