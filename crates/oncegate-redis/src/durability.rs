//! How many servers have to know of a claim before it counts.

use std::time::Duration;

use redis::Value;

use crate::failure::Failure;

/// How many servers have to know of a claim before it is granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The primary. A failover forgets what it had not passed on yet, and such a message may run
    /// again.
    #[default]
    Primary,
    /// The primary, and so many replicas. What was granted outlives a failover to any server that
    /// has as much as these: Sentinel and Cluster promote the replica that is furthest, of those
    /// that they reach. Name as many as there are replicas, and it is any of them.
    ///
    /// Claims, and renewals at most once, travel on a connection used for nothing else, whose every
    /// pipeline ends in `WAIT`. Where too few replicas answer in time nothing is granted: the claim
    /// is asked again with the same token; and nothing is renewed: the lease ends.
    Replicas {
        /// At least 1.
        count: u32,
        /// How long they may take. It is added to the timeout of a reply.
        timeout: Duration,
    },
}

impl Durability {
    /// How much longer a reply may take.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Self::Primary => Duration::ZERO,
            Self::Replicas { timeout, .. } => timeout,
        }
    }
}

/// Whether the replicas know what the commands before `WAIT` wrote.
///
/// # Errors
/// Why nothing that these commands granted counts.
pub(crate) fn covered(count: u32, reply: &Value) -> Result<(), Failure> {
    match reply {
        Value::Int(know) if *know >= i64::from(count) => Ok(()),
        Value::Int(know) => Err(Failure::unknown(format!(
            "{know} of the {count} replicas that have to know of it do"
        ))),
        // The claims before it may stand.
        Value::ServerError(error) => Err(Failure::said_by_server(
            error.code(),
            error.details().unwrap_or_default(),
        )
        .though_it_may_stand()),
        _ => Err(Failure::unknown(
            "Redis gave an answer of the wrong kind to WAIT",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_replicas_cover_nothing() {
        assert!(covered(1, &Value::Int(1)).is_ok() && covered(1, &Value::Int(2)).is_ok());
        assert!(
            matches!(covered(2, &Value::Int(1)), Err(Failure::Unknown(why)) if why.to_string().contains("1 of the 2"))
        );
        assert!(matches!(covered(1, &Value::Nil), Err(Failure::Unknown(_))));
    }
}
