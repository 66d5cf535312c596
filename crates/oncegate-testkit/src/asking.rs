//! Operations in few words, for the tests of a store.

use std::time::Duration;

use oncegate_core::marker::{Ask, Attempts, Guarantee, Operation, Terms, Token, Verdict};
use oncegate_core::{Key, MessageId, Store, StoreError};

/// A second.
pub const SECOND: Duration = Duration::from_secs(1);

/// What the first to claim an id is told.
pub const GRANTED: Verdict = Verdict::Granted(Attempts::new(1));

/// What the holder who completes is told.
pub const DONE: Verdict = Verdict::Done { marker_lost: false };

/// The key of an id.
///
/// # Panics
/// When the id is empty.
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

/// What this token asks of an id in this attempt.
///
/// # Panics
/// When the id is empty.
pub fn operation(id: &str, ask: Ask, token: u128, attempt: u32, terms: Terms) -> Operation {
    Operation {
        key: key(id),
        ask,
        token: Token(token),
        attempt,
        terms,
    }
}

/// The answers.
///
/// # Panics
/// When one of them is no verdict.
pub async fn verdicts(store: &dyn Store, operations: &[Operation]) -> Vec<Verdict> {
    store
        .apply(operations)
        .await
        .into_iter()
        .map(|answer| answer.expect("a verdict"))
        .collect()
}

/// The answer to one operation.
///
/// # Errors
/// The store's.
///
/// # Panics
/// When there is not one answer.
pub async fn ask(store: &dyn Store, operation: Operation) -> Result<Verdict, StoreError> {
    let mut answers = store.apply(&[operation]).await;
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}
