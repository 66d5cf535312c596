//! Polls a stream without waiting.
//!
//! # Workaround
//! - *Symptom:* a `FuturesUnordered` returns `Pending` although one of its futures is ready, if two
//!   others were woken while they were polled. *Version:* futures-util 0.3.
//! - *Upstream:* nothing to report: it yields on purpose, and wakes the task.
//! - *Test:* `a_confirm_behind_futures_that_are_being_woken_is_ready`, below.
//! - *May be removed:* never.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::{Stream, StreamExt};

/// The next item if one is ready, without waiting. Polls again if the stream was woken: a
/// `FuturesUnordered` does not poll all futures if two of them are woken while they are polled, as
/// futures that are still publishing do.
pub(crate) fn next_ready<S: Stream + Unpin>(items: &mut S) -> Option<S::Item> {
    let flag = Arc::new(WakeFlag::default());
    let waker = Waker::from(Arc::clone(&flag));
    loop {
        match items.poll_next_unpin(&mut Context::from_waker(&waker)) {
            Poll::Ready(item) => return item,
            Poll::Pending if flag.0.swap(false, Ordering::AcqRel) => {}
            Poll::Pending => return None,
        }
    }
}

/// Whether its waker was called.
#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::stream::FuturesUnordered;

    use super::*;

    /// Two futures that wake themselves while they are polled precede a ready confirm.
    #[test]
    fn a_confirm_behind_futures_that_are_being_woken_is_ready() {
        let publishing = || tokio::task::yield_now().map(|()| "published").boxed();
        let confirm = std::future::ready("confirm").boxed();
        let mut confirms = FuturesUnordered::from_iter([publishing(), publishing(), confirm]);
        assert_eq!(next_ready(&mut confirms), Some("confirm"));
    }
}
