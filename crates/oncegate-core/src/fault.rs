//! Fault injection for the chaos tests: points at which this process is aborted. Not part of the
//! interface: empty in every build without `--cfg oncegate_chaos`.

#[cfg(oncegate_chaos)]
use std::sync::LazyLock;
#[cfg(oncegate_chaos)]
use std::sync::atomic::{AtomicU32, Ordering};

use crate::marker::Operation;

/// Aborts this process if `ONCEGATE_FAILPOINT` names this point and it is reached for the given
/// time: `claim.before:3` means the third time.
#[inline(always)]
pub fn point(name: &str) {
    #[cfg(oncegate_chaos)]
    if let Some(armed) = &*ARMED
        && armed.name == name
        && armed.passes.fetch_add(1, Ordering::SeqCst) + 1 == armed.at
    {
        // The log shows that the process was aborted here. One write, because other threads write
        // to it, too.
        let line = format!("\noncegate-failpoint {name}:{}\n", armed.at);
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        std::process::abort();
    }
    #[cfg(not(oncegate_chaos))]
    let _ = name;
}

/// The points before operations are sent to the store: `claim.before` and the like.
#[inline(always)]
pub(crate) fn before(operations: &[Operation]) {
    point_of_each(
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

/// The points after operations were answered and before the answers are processed: `claim.after`
/// and the like.
#[inline(always)]
pub(crate) fn after(operations: &[Operation]) {
    point_of_each(
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
fn point_of_each(operations: &[Operation], names: [&str; 7]) {
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
            Ask::Redrive { .. } | Ask::Forget { .. } => continue,
        };
        point(name);
    }
    #[cfg(not(oncegate_chaos))]
    let _ = (operations, names);
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
    // Only the test harness sets it; it detects a process that was not aborted at its point.
    Some(Armed {
        name: name.to_owned(),
        at: at.parse().expect("the part after the colon is a number"),
        passes: AtomicU32::new(0),
    })
});
