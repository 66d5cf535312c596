//! The results of completed runs: [`ResultStore`].
//!
//! A result is the value of a key of its own, `<prefix>!result:{<prefix><id>}`, which in a Cluster
//! has the slot of the marker. `apply.lua` writes both, with the same expiry.

use async_trait::async_trait;
use oncegate_core::marker::{Guarantee, Marker, Operation};
use oncegate_core::{Completion, Key, ResultStore, StoreError};
use redis::{Cmd, Pipeline, Value};

use crate::cluster::hash_tag;
use crate::failure::{StoreFailure, unreadable};
use crate::record;
use crate::reply;
use crate::router::CommandTarget;
use crate::script::{self, ScriptRef};
use crate::store::Redis;

/// How often commands are sent again because a Cluster node redirected them.
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
        let keys = ResultKeys::of(self, &completion.key);
        let call =
            |script| script::result_call(script, &keys.marker, &keys.result, completion, result);
        let mut replies = self.send_to_slot(&keys, &[call(ScriptRef::Digest)]).await?;
        if let Some(Value::ServerError(error)) = replies.first()
            && error.code() == "NOSCRIPT"
        {
            replies = self.send_to_slot(&keys, &[call(ScriptRef::Source)]).await?;
        }
        match reply::success(replies.pop())? {
            Value::Array(answer) => match <[Value; 2]>::try_from(answer) {
                Ok([verdict, earlier]) => Ok(Completion {
                    verdict: reply::answer(&verdict)?,
                    earlier: bytes(earlier)?,
                }),
                Err(answer) => Err(reply::unexpected(&Value::Array(answer)).into()),
            },
            other => Err(reply::unexpected(&other).into()),
        }
    }

    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        let keys = ResultKeys::of(self, key);
        let (marker, result) = self.read_with_marker(&keys).await?;
        Ok(result.filter(|_| matches!(marker, Marker::Done(_))))
    }
}

/// The keys of an id. In a Cluster they have the same slot.
struct ResultKeys {
    marker: Vec<u8>,
    result: Vec<u8>,
}

impl ResultKeys {
    fn of(store: &Redis, key: &Key) -> Self {
        let marker = [store.prefix_bytes(), key.as_bytes()].concat();
        let result = [store.prefix_bytes(), b"!result:{", &marker, b"}"].concat();
        Self { marker, result }
    }
}

/// Whether in a Cluster a marker and its result have the same slot: the prefix has a hash tag, which
/// both then have, or no brace, so that the marker's key is the hash tag of the result's.
pub(crate) fn have_one_slot(prefix: &[u8]) -> bool {
    hash_tag(prefix).is_some() || !prefix.iter().any(|byte| matches!(byte, b'{' | b'}'))
}

impl Redis {
    /// Deletes the result of an id before its done marker is forgotten, if it still has the marker that
    /// the operator read.
    pub(crate) async fn delete_result(&self, key: &Key, seen: Marker) -> Result<(), StoreFailure> {
        let keys = ResultKeys::of(self, key);
        let (marker, result) = self.read_with_marker(&keys).await?;
        if marker == seen && result.is_some() {
            let delete = redis::cmd("DEL").arg(&keys.result).to_owned();
            reply::success(self.send_to_slot(&keys, &[delete]).await?.pop())?;
        }
        Ok(())
    }

    async fn read_with_marker(
        &self,
        keys: &ResultKeys,
    ) -> Result<(Marker, Option<Vec<u8>>), StoreFailure> {
        let get = |key: &[u8]| redis::cmd("GET").arg(key).to_owned();
        let mut replies = self
            .send_to_slot(keys, &[get(&keys.marker), get(&keys.result)])
            .await?
            .into_iter();
        let marker = match bytes(reply::success(replies.next())?)? {
            Some(raw) => record::decode(&raw).map_err(unreadable)?,
            None => Marker::Absent,
        };
        Ok((marker, bytes(reply::success(replies.next())?)?))
    }

    /// Sends commands for the slot of these keys to its server, and follows redirections. A reply may
    /// be [`Value::ServerError`].
    async fn send_to_slot(
        &self,
        keys: &ResultKeys,
        commands: &[Cmd],
    ) -> Result<Vec<Value>, StoreFailure> {
        let mut target = CommandTarget::Owner;
        for _ in 0..=MAX_REDIRECTIONS {
            let view = self.router().view().await?;
            let connections = view
                .connections(&keys.marker, &target)
                .await
                .inspect_err(|_| self.router().invalidate())?;
            let asking = matches!(target, CommandTarget::Ask(_));
            let mut pipeline = Pipeline::with_capacity(2 * commands.len());
            for command in commands {
                if asking {
                    pipeline.cmd("ASKING");
                }
                pipeline.add_command(command.clone());
            }
            let replies = connections
                .general
                .send(&pipeline)
                .await
                .inspect_err(|_| self.router().invalidate())?;
            let each = if asking { 2 } else { 1 };
            let replies: Vec<Value> = replies.into_iter().skip(each - 1).step_by(each).collect();
            match replies.iter().find_map(redirection) {
                Some(redirected) => {
                    self.router().invalidate();
                    target = redirected;
                }
                None => return Ok(replies),
            }
        }
        Err(StoreFailure::not_applied(
            "too many Cluster redirections: the nodes do not agree on the owner of this key's slot",
        ))
    }
}

fn redirection(reply: &Value) -> Option<CommandTarget> {
    match reply {
        Value::ServerError(error) => {
            reply::redirection(error.code(), error.details().unwrap_or_default())
        }
        _ => None,
    }
}

/// The value of a key, if it exists.
fn bytes(reply: Value) -> Result<Option<Vec<u8>>, StoreFailure> {
    match reply {
        Value::Nil => Ok(None),
        Value::BulkString(value) => Ok(Some(value)),
        other => Err(reply::unexpected(&other)),
    }
}
