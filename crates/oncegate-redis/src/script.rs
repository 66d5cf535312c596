//! Calls of `apply.lua`, which implements [`marker::apply`] on the server for many keys at once.

use std::sync::LazyLock;

use oncegate_core::marker::{
    self, Effect, Finding, Operation, OperationKind, Terms, UNRESOLVED_AT_MOST_ONCE,
};
use redis::{Cmd, Script};

use crate::record;

static APPLY: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("apply.lua")));

/// How a call refers to the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScriptRef {
    /// `EVALSHA` with its SHA-1 digest; fails if the script is not in the server's cache.
    Digest,
    /// `EVAL` with its source, which adds it to the server's cache.
    Source,
}

/// Whether two operations can share a call: the same [`OperationKind`] on the same terms, apart
/// from the fingerprint. For operations of an operator the new marker must be the same, too.
pub(crate) fn can_share_call(one: &Operation, other: &Operation) -> bool {
    let shared = |terms: &Terms| (terms.guarantee, terms.lease, terms.window);
    one.kind == other.kind
        && shared(&one.terms) == shared(&other.terms)
        && marker::freed(one) == marker::freed(other)
}

/// One call for operations that [can share it](can_share_call); at least one.
pub(crate) fn call<'a>(
    script: ScriptRef,
    prefix: &[u8],
    first: &Operation,
    operations: impl ExactSizeIterator<Item = &'a Operation> + Clone,
) -> Cmd {
    let count = operations.len();
    // Arguments and bytes to reserve; each operation has a key and a record.
    let mut call = start_call(script, 11 + 2 * count, 256 + 200 * count);
    call.arg(count);
    let mut key = prefix.to_vec();
    for operation in operations.clone() {
        key.truncate(prefix.len());
        key.extend_from_slice(operation.key.as_bytes());
        call.arg(&key[..]);
    }
    add_shared_arguments(&mut call, kind_name(&first.kind), first);
    for operation in operations {
        call.arg(record::first_claim(operation, operation.attempt));
    }
    call
}

/// A completion that stores a result.
pub(crate) fn result_call(
    script: ScriptRef,
    marker_key: &[u8],
    result_key: &[u8],
    completion: &Operation,
    result: &[u8],
) -> Cmd {
    let mut call = start_call(script, 15, 512 + result.len());
    call.arg(2).arg(marker_key).arg(result_key);
    add_shared_arguments(&mut call, "complete with result", completion);
    call.arg(record::first_claim(completion, completion.attempt))
        .arg(result);
    call
}

/// The arguments that all keys of a call share.
fn add_shared_arguments(call: &mut Cmd, kind_name: &str, first: &Operation) {
    let terms = &first.terms;
    let (seen, freed) = match &first.kind {
        OperationKind::Redrive { seen, .. } | OperationKind::Forget { seen } => {
            (record::encode(seen), marker::freed(first))
        }
        _ => (String::new(), None),
    };
    call.arg(kind_name)
        .arg(record::guarantee_code(terms.guarantee).to_string())
        .arg(record::milliseconds(terms.lease))
        .arg(record::expiry(terms.window))
        .arg(record::expiry(terms.horizon()))
        .arg(record::expiry(UNRESOLVED_AT_MOST_ONCE))
        .arg(seen)
        .arg(freed.map_or_else(String::new, |freed| record::encode(&freed)));
}

/// A call without keys, to test whether the server accepts it; with the source it loads the script.
pub(crate) fn empty_call(script: ScriptRef) -> Cmd {
    let mut call = start_call(script, 3, 64);
    call.arg(0);
    call
}

fn start_call(script: ScriptRef, arguments: usize, bytes: usize) -> Cmd {
    let mut call = Cmd::with_capacity(arguments, bytes);
    match script {
        ScriptRef::Digest => call.arg("EVALSHA").arg(APPLY.get_hash()),
        ScriptRef::Source => call.arg("EVAL").arg(include_str!("apply.lua")),
    };
    call
}

/// The name of an operation in the script.
fn kind_name(kind: &OperationKind) -> &'static str {
    match kind {
        OperationKind::Claim => "claim",
        OperationKind::Renew => "renew",
        OperationKind::Complete => "complete",
        OperationKind::Clear(Effect::Nothing) => "clear nothing",
        OperationKind::Clear(Effect::Unknown) => "clear unknown",
        OperationKind::Withdraw => "withdraw",
        OperationKind::Reject(Effect::Nothing) => "reject nothing",
        OperationKind::Reject(Effect::Unknown) => "reject unknown",
        OperationKind::Doubt => "doubt",
        OperationKind::Resolve(Finding::Happened) => "happened",
        OperationKind::Resolve(Finding::DidNotHappen) => "did not happen",
        OperationKind::Redrive { .. } | OperationKind::Forget { .. } => "free",
    }
}
