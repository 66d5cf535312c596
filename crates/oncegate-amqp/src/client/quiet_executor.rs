//! Runs the tasks and the connection thread of lapin without a `tracing` subscriber.
//!
//! # Workaround
//! - *Symptom:* lapin logs errors that it also returns, in several lines without a remedy: a refused
//!   login, a lost connection, a closed channel. oncegate reports each in one line. lapin's lines
//!   are kept if the subscriber enables the target `lapin` at the level DEBUG. *Version:* lapin 4.12.3.
//! - *Upstream:* `docs/upstream/lapin-error-log.md`.
//! - *Test:* `tests/startup_log.rs`.
//! - *May be removed* when lapin does not log errors that it returns.

use std::cell::RefCell;

use async_rs::Tokio;
use async_rs::traits::Executor;
use async_rs::util::Task;
use tracing::dispatcher::{self, DefaultGuard, Dispatch};
use tracing::instrument::WithSubscriber;

thread_local! {
    /// The guard of the empty subscriber that [`drop_logs_of_this_thread`] sets; dropped at the end of
    /// the thread.
    static EMPTY_SUBSCRIBER: RefCell<Option<DefaultGuard>> = const { RefCell::new(None) };
}

/// Tokio's executor, whose tasks log nothing unless the target `lapin` is enabled at the level DEBUG.
#[derive(Clone, Debug)]
pub(crate) struct QuietExecutor {
    executor: Tokio,
    drops_logs: bool,
}

impl QuietExecutor {
    /// An executor on the current tokio runtime. Whether it logs is decided here, for all its tasks.
    pub(crate) fn current() -> Self {
        Self {
            executor: Tokio::current(),
            drops_logs: drops_logs(),
        }
    }
}

impl Executor for QuietExecutor {
    type Task<T: Send + 'static> = <Tokio as Executor>::Task<T>;

    fn block_on<T, F: Future<Output = T>>(&self, future: F) -> T {
        self.executor.block_on(future)
    }

    fn spawn<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        future: F,
    ) -> Task<Self::Task<T>> {
        if self.drops_logs {
            self.executor
                .spawn(future.with_subscriber(Dispatch::none()))
        } else {
            self.executor.spawn(future)
        }
    }

    fn spawn_blocking<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(
        &self,
        function: F,
    ) -> Task<Self::Task<T>> {
        self.executor.spawn_blocking(function)
    }
}

/// Removes the subscriber of the current thread until it ends, unless the target `lapin` is enabled at
/// the level DEBUG. To be called only on lapin's connection thread.
pub(crate) fn drop_logs_of_this_thread() {
    if drops_logs() {
        EMPTY_SUBSCRIBER.with_borrow_mut(|guard| {
            guard.get_or_insert_with(|| dispatcher::set_default(&Dispatch::none()));
        });
    }
}

/// Whether the subscriber of the current thread disables the target `lapin` at the level DEBUG.
fn drops_logs() -> bool {
    !tracing::enabled!(target: "lapin", tracing::Level::DEBUG)
}
