//! Fault injection for the chaos tests: points at which this process is aborted. Not part of the
//! public interface: empty in every build without `--cfg oncegate_chaos`.

#[cfg(oncegate_chaos)]
use std::sync::LazyLock;
#[cfg(oncegate_chaos)]
use std::sync::atomic::{AtomicU32, Ordering};

use crate::marker::Operation;

/// Aborts this process if `ONCEGATE_FAILPOINT` names this point and this is the given visit to it:
/// `claim.before:3` means the third visit.
#[inline(always)]
pub fn point(name: &str) {
    #[cfg(oncegate_chaos)]
    if let Some(failpoint) = &*FAILPOINT
        && failpoint.name == name
        && failpoint.visits.fetch_add(1, Ordering::SeqCst) + 1 == failpoint.abort_at
    {
        // From this line the harness learns that the process was aborted here. It is written with
        // one call, because other threads write to stderr, too.
        let line = format!("\noncegate-failpoint {name}:{}\n", failpoint.abort_at);
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        std::process::abort();
    }
    #[cfg(not(oncegate_chaos))]
    let _ = name;
}

/// Awaits a future, and visits this point if its first poll does not complete it. If the point is
/// armed, it is visited 5 ms later, so that the threads of a client can send what was passed to them.
#[inline(always)]
pub async fn when_pending<T>(name: &str, future: impl Future<Output = T>) -> T {
    #[cfg(oncegate_chaos)]
    {
        use std::task::{self, Poll};
        let mut future = std::pin::pin!(future);
        let poll = |cx: &mut task::Context<'_>| Poll::Ready(future.as_mut().poll(cx));
        if let Poll::Ready(output) = std::future::poll_fn(poll).await {
            return output;
        }
        if FAILPOINT.as_ref().is_some_and(|it| it.name == name) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        point(name);
        future.await
    }
    #[cfg(not(oncegate_chaos))]
    {
        let _ = name;
        future.await
    }
}

/// Visits the points before operations are sent to the store: `claim.before`, `renew.before` and so
/// on.
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

/// Visits the points after operations were answered and before the answers are processed:
/// `claim.after`, `renew.after` and so on.
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

/// Visits the point of each operation. `names` are in the order of the kinds of operations below.
#[inline(always)]
fn point_of_each(operations: &[Operation], names: [&str; 7]) {
    #[cfg(oncegate_chaos)]
    for operation in operations {
        use crate::marker::OperationKind;
        let name = match operation.kind {
            OperationKind::Claim => names[0],
            OperationKind::Renew => names[1],
            OperationKind::Complete => names[2],
            OperationKind::Clear(_) | OperationKind::Withdraw => names[3],
            OperationKind::Reject(_) => names[4],
            OperationKind::Doubt => names[5],
            OperationKind::Resolve(_) => names[6],
            OperationKind::Redrive { .. } | OperationKind::Forget { .. } => continue,
        };
        point(name);
    }
    #[cfg(not(oncegate_chaos))]
    let _ = (operations, names);
}

#[cfg(oncegate_chaos)]
struct Failpoint {
    name: String,
    /// The number of the visit at which the process aborts, from 1.
    abort_at: u32,
    visits: AtomicU32,
}

#[cfg(oncegate_chaos)]
static FAILPOINT: LazyLock<Option<Failpoint>> = LazyLock::new(|| {
    let set = std::env::var("ONCEGATE_FAILPOINT").ok()?;
    let (name, abort_at) = set.rsplit_once(':').unwrap_or((&set, "1"));
    Some(Failpoint {
        name: name.to_owned(),
        // Only the chaos tests set the variable, and they fail if the process ends elsewhere.
        abort_at: abort_at
            .parse()
            .expect("the part after the colon is a number"),
        visits: AtomicU32::new(0),
    })
});
