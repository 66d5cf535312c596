//! Runs whose result is stored, so that a caller who asks again gets the answer of the first run.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::run::GuardedRun;
use super::{GateError, GateRequest, RunOutcome};
use crate::decode::{Decode, Json};
use crate::handler::Failure;
use crate::marker::Guarantee;
use crate::message::Message;
use crate::store::{BoxError, StoreError};

/// The result of [`Gate::run_stored`](super::Gate::run_stored).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored<T> {
    /// The work ran now and returned this. It is stored, unless an operator or a run with another body
    /// completed the id meanwhile.
    Executed(T),
    /// The work ran before, within the dedup window, and returned this.
    Replayed(T),
    /// The work ran before, and its result is not available. It does not run again.
    Missing(MissingResult),
    /// Another run of this id is in progress, and may still fail. Only with
    /// [`WhenHeld::Skip`](super::WhenHeld::Skip).
    HeldElsewhere,
}

/// Why the work is done and its result is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingResult {
    /// No result is stored: it could not be stored ([`UnstorableResult::CompleteWithout`]), it has
    /// just expired, or the work was completed without one: by [`Gate::run`](super::Gate::run), a
    /// consumer or an operator.
    NotStored,
    /// The stored result cannot be decoded into this type. The text says why, and does not quote
    /// it.
    Undecodable(String),
}

/// What [`Gate::run_stored`](super::Gate::run_stored) does if the work succeeded and its result
/// cannot be stored: it is larger than the limit, or cannot be serialized or encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnstorableResult {
    /// Return [`GateError::UnstorableResult`], and record an unknown outcome: in effectively once
    /// the next call runs the work again, in at most once an operator has to resolve the id.
    #[default]
    Refuse,
    /// Record that the work is done, without the result. Later calls return [`Stored::Missing`].
    CompleteWithout,
}

/// Encodes results before they are stored, for example to compress or encrypt them.
pub trait ResultCodec: Send + Sync + 'static {
    /// Encodes the JSON of a result.
    ///
    /// # Errors
    /// The result cannot be stored: see [`UnstorableResult`]. The text must not quote the result.
    fn encode(&self, json: Vec<u8>) -> Result<Vec<u8>, BoxError>;

    /// Decodes what [`encode`](Self::encode) returned, perhaps in another release of the program.
    ///
    /// # Errors
    /// The call returns [`MissingResult::Undecodable`] with this text, which must not quote the
    /// result.
    fn decode(&self, stored: Vec<u8>) -> Result<Vec<u8>, BoxError>;
}

/// How the gate stores results.
#[derive(Clone)]
pub(super) struct ResultSettings {
    pub(super) codec: Option<Arc<dyn ResultCodec>>,
    pub(super) limit: usize,
    pub(super) unstorable: UnstorableResult,
}

/// The default limit of an encoded result, in bytes.
const LIMIT: usize = 64 * 1024;

impl Default for ResultSettings {
    fn default() -> Self {
        Self {
            codec: None,
            limit: LIMIT,
            unstorable: UnstorableResult::default(),
        }
    }
}

impl ResultSettings {
    /// Encodes a result. The error says why it cannot be stored.
    pub(super) fn encode<T: Serialize>(&self, result: &T) -> Result<Vec<u8>, String> {
        // The error of a serializer may quote the result.
        let json =
            serde_json::to_vec(result).map_err(|_| "it cannot be serialized as JSON".to_owned())?;
        let encoded = match &self.codec {
            Some(codec) => codec
                .encode(json)
                .map_err(|error| format!("the codec failed: {error}"))?,
            None => json,
        };
        if encoded.len() > self.limit {
            return Err(format!(
                "it has {} bytes, and the limit is {}; raise it with `max_result_bytes`, or return less",
                encoded.len(),
                self.limit
            ));
        }
        Ok(encoded)
    }

    fn decode<T: DeserializeOwned>(&self, stored: Vec<u8>) -> Result<T, MissingResult> {
        let json = match &self.codec {
            Some(codec) => codec.decode(stored),
            None => Ok(stored),
        };
        json.and_then(|json| Json.decode(&Message::new(json)))
            .map_err(|error| MissingResult::Undecodable(error.to_string()))
    }
}

impl fmt::Debug for ResultSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResultSettings")
            .field("has_codec", &self.codec.is_some())
            .field("limit", &self.limit)
            .field("unstorable", &self.unstorable)
            .finish()
    }
}

impl GateRequest<'_> {
    /// As [`Gate::run_stored`](super::Gate::run_stored).
    ///
    /// # Errors
    /// As [`Gate::run_stored`](super::Gate::run_stored); with a [`body`](Self::body) also
    /// [`GateError::OtherBody`].
    pub async fn run_stored<T, W>(self, work: impl FnMut() -> W) -> Result<Stored<T>, GateError>
    where
        T: Serialize + DeserializeOwned,
        W: Future<Output = Result<T, Failure>>,
    {
        let gate = &self.gate.0;
        let results = gate.store.results().ok_or_else(|| {
            misconfigured("it keeps no results; use Redis (in a Cluster with a prefix without `{` and `}`, or with a hash tag), PostgreSQL, SQLite or the memory store")
        })?;
        if gate.settings.guarantee == Guarantee::Bare {
            return Err(misconfigured(
                "Guarantee::Bare records an id before its work has a result; use another guarantee",
            ));
        }
        let mut run = GuardedRun::new(&self)?.storing(ResultSettings::encode::<T>);
        let replay = match run.run(work).await? {
            RunOutcome::HeldElsewhere => return Ok(Stored::HeldElsewhere),
            RunOutcome::Executed(result) => match run.take_earlier_result() {
                Some(earlier) => earlier,
                None => return Ok(Stored::Executed(result)),
            },
            RunOutcome::AlreadyDone => match run.read_result(results).await? {
                Some(stored) => stored,
                None => return Ok(Stored::Missing(MissingResult::NotStored)),
            },
        };
        Ok(match gate.results.decode(replay) {
            Ok(result) => Stored::Replayed(result),
            Err(missing) => Stored::Missing(missing),
        })
    }
}

fn misconfigured(why: &str) -> GateError {
    GateError::Store(StoreError::Misconfigured(why.into()))
}
