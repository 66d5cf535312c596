//! The results of completed runs: [`ResultStore`].
//!
//! A result is the value of a key of its own, `<prefix>!result:{<prefix><id>}`, which in a Cluster
//! has the slot of the marker. `apply.lua` writes both, with the same expiry, and reads a result only
//! beside the marker with which it was written: a marker with another expiry is that of another run.

use async_trait::async_trait;
use oncegate_core::marker::{
    Fingerprint, Guarantee, Operation, OperationKind, Terms, Token, UNRESOLVED_AT_MOST_ONCE,
    Verdict,
};
use oncegate_core::{Completion, Key, ResultStore, StoreError};
use redis::{Cmd, Pipeline, Value};

use crate::cluster::hash_tag;
use crate::failure::{self, StoreFailure};
use crate::reply;
use crate::router::{CommandRouter, CommandTarget};
use crate::script::{self, ScriptRef};
use crate::store::Redis;

/// How often a command is sent again because a Cluster node redirected it.
const MAX_REDIRECTIONS: u32 = 3;

#[async_trait]
impl ResultStore for Redis {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        if completion.terms.guarantee == Guarantee::Bare {
            let why = "Guarantee::Bare keeps no results; use another guarantee";
            return Err(StoreFailure::misconfigured(why).into());
        }
        let keys = ResultKeys::of(self.prefix_bytes(), &completion.key);
        let call =
            |script: ScriptRef| script::completion_with_result(script, &keys, completion, result);
        let (verdict, earlier) = self.call(&keys.marker, call).await?;
        Ok(Completion { verdict, earlier })
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        // Only the key and the fingerprint are used.
        let claim = Operation {
            key: key.clone(),
            kind: OperationKind::Claim,
            token: Token(0),
            attempt: 0,
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: UNRESOLVED_AT_MOST_ONCE,
                window: UNRESOLVED_AT_MOST_ONCE,
                fingerprint,
            },
        };
        let keys = ResultKeys::of(self.prefix_bytes(), key);
        let call = |script: ScriptRef| script::read_result(script, &keys, &claim);
        Ok(self.call(&keys.marker, call).await?.1)
    }
}

/// The keys of an id.
pub(crate) struct ResultKeys {
    pub(crate) marker: Vec<u8>,
    pub(crate) result: Vec<u8>,
}

impl ResultKeys {
    pub(crate) fn of(prefix: &[u8], key: &Key) -> Self {
        let marker = [prefix, key.as_bytes()].concat();
        let result = [prefix, b"!result:{", &marker, b"}"].concat();
        Self { marker, result }
    }
}

/// Whether a store keeps results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepsResults {
    Yes,
    /// In a Cluster, marker and result would not have the same slot.
    No,
}

impl KeepsResults {
    /// In a Cluster the prefix needs a hash tag, which both keys then have, or no brace, so that the
    /// marker's key is the hash tag of the result's.
    pub(crate) fn of(router: &CommandRouter, prefix: &[u8]) -> Self {
        let has_brace = || prefix.iter().any(|byte| matches!(byte, b'{' | b'}'));
        match router {
            CommandRouter::Cluster(_) if hash_tag(prefix).is_none() && has_brace() => Self::No,
            CommandRouter::Cluster(_) | CommandRouter::Single(_) => Self::Yes,
        }
    }
}

impl Redis {
    /// Calls the script for one id. Returns the verdict and a result.
    async fn call(
        &self,
        marker_key: &[u8],
        call: impl Fn(ScriptRef) -> Cmd,
    ) -> Result<(Verdict, Option<Vec<u8>>), StoreFailure> {
        let mut reply = self
            .send_to_owner(marker_key, call(ScriptRef::Digest))
            .await?;
        if matches!(&reply, Value::ServerError(error) if error.code() == "NOSCRIPT") {
            reply = self
                .send_to_owner(marker_key, call(ScriptRef::Source))
                .await?;
        }
        let answer = match reply {
            Value::Array(answer) => <[Value; 2]>::try_from(answer).map_err(Value::Array),
            other => Err(other),
        };
        match answer {
            Ok([verdict, result]) => Ok((self.verdict(&verdict)?, bytes(result)?)),
            Err(Value::ServerError(error)) => {
                Err(self.server_failure(error.code(), error.details().unwrap_or_default()))
            }
            Err(other) => Err(reply::unexpected(&other)),
        }
    }

    /// Reads a verdict, which may be `error …`.
    fn verdict(&self, value: &Value) -> Result<Verdict, StoreFailure> {
        match value {
            Value::BulkString(text) if text.starts_with(b"error ") => {
                let text = String::from_utf8_lossy(&text[b"error ".len()..]);
                let (code, detail) = text.split_once(' ').unwrap_or((&text, ""));
                Err(self.server_failure(code, detail))
            }
            value => reply::verdict(value),
        }
    }

    fn server_failure(&self, code: &str, detail: &str) -> StoreFailure {
        let moved =
            failure::is_not_served(code) && matches!(self.router(), CommandRouter::Cluster(_));
        if moved || matches!(code, "READONLY" | "MASTERDOWN") {
            self.router().invalidate();
        }
        if moved {
            return StoreFailure::not_applied(format!("Redis replied {code} {detail}"));
        }
        failure::from_server_error(code, detail)
    }

    /// Sends a command to the server of a key, and follows redirections. The reply may be
    /// [`Value::ServerError`].
    async fn send_to_owner(&self, key: &[u8], command: Cmd) -> Result<Value, StoreFailure> {
        let mut target = CommandTarget::Owner;
        for _ in 0..=MAX_REDIRECTIONS {
            let view = self.router().view().await?;
            let connections = view
                .connections(key, &target)
                .await
                .inspect_err(|_| self.router().invalidate())?;
            let mut pipeline = Pipeline::with_capacity(2);
            if matches!(target, CommandTarget::Ask(_)) {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(command.clone());
            let reply = connections
                .general
                .send(&pipeline)
                .await
                .inspect_err(|_| self.router().invalidate())?
                .pop();
            let reply = reply.unwrap_or(Value::Nil);
            let redirected = match (&reply, self.router()) {
                (Value::ServerError(error), CommandRouter::Cluster(_)) => {
                    reply::redirection(error.code(), error.details().unwrap_or_default())
                }
                _ => None,
            };
            match redirected {
                Some(redirected) => {
                    self.router().invalidate();
                    target = redirected;
                }
                None => return Ok(reply),
            }
        }
        Err(StoreFailure::not_applied(
            "too many Cluster redirections: the nodes do not agree on the owner of this key's slot",
        ))
    }
}

/// The value of a key, if it exists.
fn bytes(reply: Value) -> Result<Option<Vec<u8>>, StoreFailure> {
    match reply {
        Value::Nil | Value::Boolean(false) => Ok(None),
        Value::BulkString(value) => Ok(Some(value)),
        other => Err(reply::unexpected(&other)),
    }
}
