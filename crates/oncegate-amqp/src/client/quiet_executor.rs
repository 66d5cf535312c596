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
    /// Keeps the thread without a subscriber until it ends.
    static SILENCED: RefCell<Option<DefaultGuard>> = const { RefCell::new(None) };
}

/// Tokio's executor, whose tasks log nothing unless the target `lapin` is enabled at the level DEBUG.
#[derive(Clone, Debug)]
pub(crate) struct QuietExecutor {
    executor: Tokio,
    is_quiet: bool,
}

impl QuietExecutor {
    /// An executor on the current tokio runtime. Whether it logs is decided here, for all its tasks.
    pub(crate) fn current() -> Self {
        Self {
            executor: Tokio::current(),
            is_quiet: is_quiet(),
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
        if self.is_quiet {
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
pub(crate) fn silence_this_thread() {
    if is_quiet() {
        SILENCED.with_borrow_mut(|guard| {
            guard.get_or_insert_with(|| dispatcher::set_default(&Dispatch::none()));
        });
    }
}

fn is_quiet() -> bool {
    !tracing::enabled!(target: "lapin", tracing::Level::DEBUG)
}
