//! The canary: keys on each server that tell whether the server still has what it was told.
//!
//! One is shared: it has a birth that no other has, which ends when the keys are gone. Each process
//! has a count besides, counted up with each look and, as the last write, with each pipeline of
//! claims at most once. What a crash or a failover loses is the end of what was written; so a
//! process whose count is all there has all of its claims there. One whose count is behind ends the
//! birth, for the others to see. It does not count up before it has read that it is behind.

use std::time::Duration;

use oncegate_core::marker::{Token, UNRESOLVED_AT_MOST_ONCE};
use redis::{Cmd, Value};

use crate::failure::{Failure, is_elsewhere, moving};
use crate::record;

/// How long the count of a process stands that asks no more.
const COUNT_EXPIRES: Duration = Duration::from_secs(24 * 3600);

/// For so long after it was counted up a count cannot have expired, unless the clock of Redis
/// jumped.
pub(crate) const COUNT_STANDS: Duration = Duration::from_secs(12 * 3600);

/// The keys on one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) shared: Vec<u8>,
    pub(crate) own: Vec<u8>,
}

/// What they hold: the birth, if there is one, and the count of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Canary {
    pub(crate) birth: Option<Vec<u8>>,
    pub(crate) count: u64,
}

/// Why neither is known.
pub(crate) enum NoCanary {
    /// It is to be asked of another server: a slot is moving, or was moved, to another node of the
    /// Cluster, or the primary is none any more.
    Elsewhere {
        /// The slot that is still on its way.
        moving: Option<u16>,
        failure: Failure,
    },
    Failed(Failure),
}

/// The name of the shared key; in a Cluster a number is added.
pub(crate) fn shared(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"!canary"].concat()
}

/// The name of the key of one process.
pub(crate) fn own(prefix: &[u8], process: Token) -> Vec<u8> {
    [prefix, b"!canary:", record::token(process).as_bytes(), b":"].concat()
}

/// The two commands of a look: a birth for who has none, or still has the one that is to end; and
/// the count, which is to be `least` before it is counted up.
pub(crate) fn look(keys: &Keys, ends: Option<&[u8]>, least: u64) -> [Cmd; 2] {
    let mut birth = Cmd::new();
    birth
        .arg("EVAL")
        .arg(include_str!("canary_birth.lua"))
        .arg(1)
        .arg(&keys.shared);
    birth
        .arg(record::token(Token::random()))
        .arg(record::expiry(UNRESOLVED_AT_MOST_ONCE))
        .arg(ends.unwrap_or_default());
    [birth, count_up(keys, least)]
}

/// The two commands that follow claims.
pub(crate) fn follow(keys: &Keys, least: u64) -> [Cmd; 2] {
    let mut birth = Cmd::new();
    birth.arg("GET").arg(&keys.shared);
    [birth, count_up(keys, least)]
}

fn count_up(keys: &Keys, least: u64) -> Cmd {
    let mut count = Cmd::new();
    count
        .arg("EVAL")
        .arg(include_str!("canary_count.lua"))
        .arg(1)
        .arg(&keys.own)
        .arg(record::expiry(COUNT_EXPIRES))
        .arg(least);
    count
}

/// Reads the replies to either.
pub(crate) fn read(birth: Value, count: &Value) -> Result<Canary, NoCanary> {
    let birth = match birth {
        Value::BulkString(birth) => Some(birth),
        Value::Nil => None,
        other => return Err(refused(&other)),
    };
    match count {
        Value::BulkString(count) => match String::from_utf8_lossy(count).parse() {
            Ok(count) => Ok(Canary { birth, count }),
            Err(_) => Err(refused(&Value::Nil)),
        },
        other => Err(refused(other)),
    }
}

fn refused(reply: &Value) -> NoCanary {
    let Value::ServerError(error) = reply else {
        return NoCanary::Failed(Failure::unknown(format!(
            "Redis gave an answer of the wrong kind to the canary: {reply:?}"
        )));
    };
    let (code, detail) = (error.code(), error.details().unwrap_or_default());
    if is_elsewhere(code) || matches!(code, "READONLY" | "MASTERDOWN") {
        let failure = Failure::not_applied(format!("Redis says {code} {detail} of the canary"));
        return NoCanary::Elsewhere {
            moving: moving(code, detail),
            failure,
        };
    }
    NoCanary::Failed(Failure::said_by_server(code, detail))
}

impl From<NoCanary> for Failure {
    fn from(why: NoCanary) -> Self {
        match why {
            NoCanary::Elsewhere { failure, .. } | NoCanary::Failed(failure) => failure,
        }
    }
}
