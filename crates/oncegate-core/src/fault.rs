//! Where the chaos harness ends this process, and which wrong version of oncegate it asks for. No
//! part of the interface: in any build but the harness's (`--cfg oncegate_chaos`) nothing of it is
//! there.

#[cfg(oncegate_chaos)]
use std::sync::LazyLock;
#[cfg(oncegate_chaos)]
use std::sync::atomic::{AtomicU32, Ordering};

use crate::marker::{Operation, Token};

/// Ends this process as a crash does, if this point is the one that `ONCEGATE_FAILPOINT` names, and
/// it was passed as often as that says: `claim.before:3` is the third time.
#[inline(always)]
pub fn point(name: &str) {
    #[cfg(oncegate_chaos)]
    if let Some(armed) = &*ARMED
        && armed.name == name
        && armed.passes.fetch_add(1, Ordering::SeqCst) + 1 == armed.at
    {
        // Who reads the log sees that it ended here and nowhere else. In one piece, since other
        // threads write there, too.
        let said = format!("\noncegate-failpoint {name}:{}\n", armed.at);
        let _ = std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes());
        std::process::abort();
    }
    #[cfg(not(oncegate_chaos))]
    let _ = name;
}

/// The points of operations that are about to be sent to the store: `claim.before` and its like.
#[inline(always)]
pub(crate) fn before(operations: &[Operation]) {
    of_each(
        operations,
        [
            "claim.before",
            "renew.before",
            "complete.before",
            "clear.before",
            "reject.before",
            "doubt.before",
            "resolve.before",
        ],
    );
}

/// The points of operations that were answered, before anyone has read the answer: `claim.after`
/// and its like.
#[inline(always)]
pub(crate) fn after(operations: &[Operation]) {
    of_each(
        operations,
        [
            "claim.after",
            "renew.after",
            "complete.after",
            "clear.after",
            "reject.after",
            "doubt.after",
            "resolve.after",
        ],
    );
}

#[inline(always)]
fn of_each(operations: &[Operation], names: [&str; 7]) {
    #[cfg(oncegate_chaos)]
    for operation in operations {
        use crate::marker::Ask;
        let name = match operation.ask {
            Ask::Claim => names[0],
            Ask::Renew => names[1],
            Ask::Complete => names[2],
            Ask::Clear(_) | Ask::Withdraw => names[3],
            Ask::Reject(_) => names[4],
            Ask::Doubt => names[5],
            Ask::Resolve(_) => names[6],
            Ask::SendBack { .. } | Ask::Forget { .. } => continue,
        };
        point(name);
    }
    #[cfg(not(oncegate_chaos))]
    let _ = (operations, names);
}

/// Whether this wrong version is the one that `ONCEGATE_MUTANT` names.
#[cfg(oncegate_chaos)]
pub fn wrong(name: &str) -> bool {
    static NAME: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("ONCEGATE_MUTANT").ok());
    NAME.as_deref() == Some(name)
}

/// The token of a repeated claim: a new one.
#[inline(always)]
pub(crate) fn token(earlier: Token, new: Token) -> Token {
    crate::wrong_version!("token-per-delivery", {
        if earlier != Token(0) {
            return earlier;
        }
    });
    #[cfg(not(oncegate_chaos))]
    let _ = earlier;
    new
}

/// What is done in a wrong version that the harness has to catch, and nowhere else.
#[doc(hidden)]
#[macro_export]
macro_rules! wrong_version {
    ($name:literal, $wrong:block) => {
        #[cfg(oncegate_chaos)]
        {
            if $crate::fault::wrong($name) $wrong
        }
    };
}

#[cfg(oncegate_chaos)]
struct Armed {
    name: String,
    at: u32,
    passes: AtomicU32,
}

#[cfg(oncegate_chaos)]
static ARMED: LazyLock<Option<Armed>> = LazyLock::new(|| {
    let set = std::env::var("ONCEGATE_FAILPOINT").ok()?;
    let (name, at) = set.rsplit_once(':').unwrap_or((&set, "1"));
    // The harness alone sets it, and sees that a process did not end where it should have.
    Some(Armed {
        name: name.to_owned(),
        at: at.parse().expect("a number of passes"),
        passes: AtomicU32::new(0),
    })
});
