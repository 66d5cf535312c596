//! [`Durability`], and the check of the reply to `WAIT`.

use std::time::Duration;

use redis::Value;

use crate::failure::StoreFailure;
use crate::reply;

/// How many servers must have a claim before it is granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// The primary. A failover loses the claims that were not replicated yet, and their messages
    /// may run again.
    #[default]
    Primary,
    /// The primary and `count` replicas. A granted claim survives a failover to a replica with the
    /// highest replication offset, which Sentinel and Cluster promote if they reach it; with `count`
    /// equal to the number of replicas, a failover to any of them.
    ///
    /// Claims and at-most-once renewals use a separate connection, and each of their pipelines ends
    /// in `WAIT`. If too few replicas acknowledge in time, nothing is granted, and the claim is sent
    /// again with the same token; nothing is renewed, and the lease expires.
    Replicas {
        /// At least 1.
        count: u32,
        /// The timeout of `WAIT`, added to the timeout of a reply.
        timeout: Duration,
    },
}

impl Durability {
    /// The time that `WAIT` adds to a reply.
    pub(crate) fn extra_reply_time(self) -> Duration {
        match self {
            Self::Primary => Duration::ZERO,
            Self::Replicas { timeout, .. } => timeout,
        }
    }
}

/// Checks the reply to `WAIT`: whether the replicas have the writes before it.
///
/// # Errors
/// Why these writes grant nothing.
pub(crate) fn check_replicas(count: u32, reply: &Value) -> Result<(), StoreFailure> {
    match reply {
        Value::Int(acknowledged) if *acknowledged >= i64::from(count) => Ok(()),
        Value::Int(acknowledged) => Err(StoreFailure::unknown(format!(
            "{acknowledged} of the {count} required replicas acknowledged the write in time; check that they are connected"
        ))),
        // The writes before it may have been applied.
        Value::ServerError(error) => Err(crate::failure::of_reply(error).possibly_applied()),
        _ => Err(reply::wrong_type("WAIT")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_replicas_are_an_unknown_outcome() {
        assert!(
            check_replicas(1, &Value::Int(1)).is_ok() && check_replicas(1, &Value::Int(2)).is_ok()
        );
        assert!(
            matches!(check_replicas(2, &Value::Int(1)), Err(StoreFailure::Unknown(why)) if why.to_string().contains("1 of the 2"))
        );
        assert!(matches!(
            check_replicas(1, &Value::Nil),
            Err(StoreFailure::Unknown(_))
        ));
    }
}
