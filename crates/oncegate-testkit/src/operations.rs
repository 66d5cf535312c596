//! Short forms of store operations and verdicts for tests.

use std::time::Duration;

use oncegate_core::marker::{Attempts, Guarantee, Operation, OperationKind, Terms, Token, Verdict};
use oncegate_core::{Key, MessageId, Store, StoreError};

/// One second.
pub const SECOND: Duration = Duration::from_secs(1);

/// The verdict of the first claim of an id.
pub const GRANTED: Verdict = Verdict::Granted(Attempts::new(1));

/// The verdict of a completion by the holder.
pub const DONE: Verdict = Verdict::Done { marker_lost: false };

/// The key of an id.
///
/// # Panics
/// If the id is empty.
pub fn key(id: &str) -> Key {
    Key::new(&MessageId::new(id).expect("the id is not empty"))
}

/// A lease of 30 s, a window of ten minutes, and no fingerprint.
pub fn terms(guarantee: Guarantee) -> Terms {
    Terms {
        guarantee,
        lease: 30 * SECOND,
        window: 600 * SECOND,
        fingerprint: None,
    }
}

/// An operation on an id with this token and attempt.
///
/// # Panics
/// If the id is empty.
pub fn operation(
    id: &str,
    kind: OperationKind,
    token: u128,
    attempt: u32,
    terms: Terms,
) -> Operation {
    Operation {
        key: key(id),
        kind,
        token: Token(token),
        attempt,
        terms,
    }
}

/// The verdicts of one batch.
///
/// # Panics
/// If the store fails.
pub async fn verdicts(store: &dyn Store, operations: &[Operation]) -> Vec<Verdict> {
    store
        .apply(operations)
        .await
        .into_iter()
        .map(|answer| answer.expect("the store applies the operation"))
        .collect()
}

/// The verdict of one operation.
///
/// # Errors
/// The error of the store.
///
/// # Panics
/// If the store does not return exactly one result.
pub async fn apply_one(store: &dyn Store, operation: Operation) -> Result<Verdict, StoreError> {
    let mut answers = store.apply(&[operation]).await;
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}
