//! `apply.lua`: the whole table on the server, for many keys in one call.

use std::sync::LazyLock;

use oncegate_core::marker::{
    self, Ask, Effect, Finding, Operation, Terms, UNRESOLVED_AT_MOST_ONCE,
};
use redis::{Cmd, Script};

use crate::record;

static APPLY: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("apply.lua")));

/// How the script is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// Its hash, which the server may have forgotten.
    Hash,
    /// Its text, which the server then knows.
    Text,
}

/// Whether two operations can travel in one call: they ask the same on the same terms, apart from
/// the fingerprint. What a person frees goes by the attempt, too.
pub(crate) fn together(one: &Operation, other: &Operation) -> bool {
    let shared = |terms: &Terms| (terms.guarantee, terms.lease, terms.window);
    one.ask == other.ask
        && shared(&one.terms) == shared(&other.terms)
        && marker::freed(one) == marker::freed(other)
}

/// One call for operations that go [`together`]. There is at least one.
pub(crate) fn call<'a>(
    by: By,
    prefix: &[u8],
    first: &Operation,
    operations: impl ExactSizeIterator<Item = &'a Operation> + Clone,
) -> Cmd {
    let count = operations.len();
    let mut call = Cmd::with_capacity(11 + 2 * count, 256 + 200 * count);
    match by {
        By::Hash => call.arg("EVALSHA").arg(APPLY.get_hash()),
        By::Text => call.arg("EVAL").arg(include_str!("apply.lua")),
    };
    call.arg(count);
    let mut key = prefix.to_vec();
    for operation in operations.clone() {
        key.truncate(prefix.len());
        key.extend_from_slice(operation.key.as_bytes());
        call.arg(&key[..]);
    }
    let terms = &first.terms;
    let (seen, freed) = match &first.ask {
        Ask::SendBack { seen, .. } | Ask::Forget { seen } => {
            (record::encode(seen), marker::freed(first))
        }
        _ => (String::new(), None),
    };
    call.arg(name(&first.ask))
        .arg(record::letter(terms.guarantee).to_string())
        .arg(record::milliseconds(terms.lease))
        .arg(record::expiry(terms.window))
        .arg(record::expiry(terms.horizon()))
        .arg(record::expiry(UNRESOLVED_AT_MOST_ONCE))
        .arg(seen)
        .arg(freed.map_or_else(String::new, |freed| record::encode(&freed)));
    for operation in operations {
        call.arg(record::granted(operation, operation.attempt));
    }
    call
}

/// A call that does nothing: whether the server takes it, and with the text, so that it knows the
/// script.
pub(crate) fn nothing(by: By) -> Cmd {
    let mut call = named(by);
    call.arg(0);
    call
}

fn named(by: By) -> Cmd {
    let mut call = Cmd::new();
    match by {
        By::Hash => call.arg("EVALSHA").arg(APPLY.get_hash()),
        By::Text => call.arg("EVAL").arg(include_str!("apply.lua")),
    };
    call
}

/// What the script calls an ask.
fn name(ask: &Ask) -> &'static str {
    match ask {
        Ask::Claim => "claim",
        Ask::Renew => "renew",
        Ask::Complete => "complete",
        Ask::Clear(Effect::Nothing) => "clear nothing",
        Ask::Clear(Effect::Unknown) => "clear unknown",
        Ask::Withdraw => "withdraw",
        Ask::Reject(Effect::Nothing) => "reject nothing",
        Ask::Reject(Effect::Unknown) => "reject unknown",
        Ask::Doubt => "doubt",
        Ask::Resolve(Finding::Happened) => "happened",
        Ask::Resolve(Finding::DidNotHappen) => "did not happen",
        Ask::SendBack { .. } | Ask::Forget { .. } => "free",
    }
}
