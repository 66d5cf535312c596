//! Canary keys: two keys on each server that show whether the server lost writes.
//!
//! The shared key `!canary` holds a random generation and is missing after a loss of keys. The key
//! `!canary:<process>:` holds the write count of one process, incremented with each check and, as
//! the last write, with each pipeline of at-most-once claims. A crash or a failover loses the end
//! of the log, so a process whose count is complete has all of its claims. A process whose count
//! decreased replaces the generation, which shows the loss to all other processes. A decreased
//! count is not incremented before its process has read it.

use std::time::Duration;

use oncegate_core::marker::{Token, UNRESOLVED_AT_MOST_ONCE};
use redis::{Cmd, Value};

use crate::failure::{StoreFailure, is_not_served, migrating_slot};
use crate::record;

/// The expiry of a process's count, renewed by each increment.
const COUNT_TTL: Duration = Duration::from_secs(24 * 3600);

/// How long after its last increment a count is used. It cannot have expired by then, unless the
/// clock of Redis jumped.
pub(crate) const COUNT_VALID_FOR: Duration = Duration::from_secs(12 * 3600);

/// The canary keys on one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CanaryKeys {
    /// The key of the generation, which all processes share.
    pub(crate) shared: Vec<u8>,
    /// The key of this process's write count.
    pub(crate) own: Vec<u8>,
}

/// The values of the canary keys: the generation, if there is one, and the count of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Canary {
    pub(crate) generation: Option<Vec<u8>>,
    pub(crate) count: u64,
}

/// Why the canary could not be read.
pub(crate) enum CanaryError {
    /// Another server has the keys: their slot is migrating or was migrated, or the server is no
    /// longer the primary.
    Moved {
        /// The slot, if it is still migrating.
        migrating: Option<u16>,
        failure: StoreFailure,
    },
    Failed(StoreFailure),
}

/// The name of the shared key; in a Cluster a number is appended.
pub(crate) fn shared_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"!canary"].concat()
}

/// The name of the key of one process; in a Cluster a number is appended.
pub(crate) fn own_key(prefix: &[u8], process: Token) -> Vec<u8> {
    [prefix, b"!canary:", record::token(process).as_bytes(), b":"].concat()
}

/// The two commands of a check. The first sets a generation if the key has none or the current one is
/// `replaces`; the second increments the count if it is at least `minimum`.
pub(crate) fn check(keys: &CanaryKeys, replaces: Option<&[u8]>, minimum: u64) -> [Cmd; 2] {
    let mut generation = Cmd::new();
    generation
        .arg("EVAL")
        .arg(include_str!("canary_generation.lua"))
        .arg(1)
        .arg(&keys.shared);
    generation
        .arg(record::token(Token::random()))
        .arg(record::expiry(UNRESOLVED_AT_MOST_ONCE))
        .arg(replaces.unwrap_or_default());
    [generation, increment(keys, minimum)]
}

/// The two commands that end a pipeline of claims: read the generation, increment the count.
pub(crate) fn after_claims(keys: &CanaryKeys, minimum: u64) -> [Cmd; 2] {
    let mut generation = Cmd::new();
    generation.arg("GET").arg(&keys.shared);
    [generation, increment(keys, minimum)]
}

fn increment(keys: &CanaryKeys, minimum: u64) -> Cmd {
    let mut count = Cmd::new();
    count
        .arg("EVAL")
        .arg(include_str!("canary_count.lua"))
        .arg(1)
        .arg(&keys.own)
        .arg(record::expiry(COUNT_TTL))
        .arg(minimum);
    count
}

/// Reads the replies to [`check`] or [`after_claims`].
pub(crate) fn read(generation: Value, count: &Value) -> Result<Canary, CanaryError> {
    let generation = match generation {
        Value::BulkString(generation) => Some(generation),
        Value::Nil => None,
        other => return Err(reply_error(&other)),
    };
    match count {
        Value::BulkString(count) => match String::from_utf8_lossy(count).parse() {
            Ok(count) => Ok(Canary { generation, count }),
            Err(_) => Err(reply_error(&Value::Nil)),
        },
        other => Err(reply_error(other)),
    }
}

fn reply_error(reply: &Value) -> CanaryError {
    let Value::ServerError(error) = reply else {
        return CanaryError::Failed(StoreFailure::unknown(format!(
            "unexpected reply from Redis to a canary command: {reply:?}"
        )));
    };
    let (code, detail) = (error.code(), error.details().unwrap_or_default());
    if is_not_served(code) || matches!(code, "READONLY" | "MASTERDOWN") {
        let failure =
            StoreFailure::not_applied(format!("Redis replied {code} {detail} to a canary command"));
        return CanaryError::Moved {
            migrating: migrating_slot(code, detail),
            failure,
        };
    }
    if code == "WRONGTYPE" {
        return CanaryError::Failed(StoreFailure::misconfigured(format!(
            "Redis replied {code} {detail}: another program wrote the key <prefix>!canary, or one whose name begins with it; \
             oncegate detects lost data with these keys; delete the other program's key, and set a separate key prefix with Redis::prefix"
        )));
    }
    CanaryError::Failed(crate::failure::from_server_error(code, detail))
}

impl From<CanaryError> for StoreFailure {
    fn from(error: CanaryError) -> Self {
        match error {
            CanaryError::Moved { failure, .. } | CanaryError::Failed(failure) => failure,
        }
    }
}
