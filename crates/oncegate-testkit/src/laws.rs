//! Conformance tests (*laws*) of stores and sources. Each implementation must pass them, including
//! your own.
//!
//! [`store_laws!`](crate::store_laws) makes a test of each law in [`store`]:
//!
//! ```
//! # mod laws {
//! use oncegate_core::MemoryStore;
//!
//! oncegate_testkit::store_laws!(async || MemoryStore::new());
//! # }
//! ```
//!
//! The laws use only the trait [`Store`]: a store needs no functions for tests. A law finds out the
//! marker of a key by sending operations whose verdicts identify the marker.
//!
//! [`source_laws!`](crate::source_laws) does the same for the laws in [`source`]. It needs a
//! [`source::TestQueue`]: a queue or topic for each law, with functions to publish to it and to
//! read rejected messages.

mod aging;
mod fixtures;
mod killed;
mod possible_markers;
mod random;
mod rows;
pub mod source;
pub mod store;

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::Store;
use tokio::runtime::{Builder, Runtime};

pub use aging::{AgingStore, agrees_with_marker_apply};
pub use killed::linearizable_while_killed;

use self::source::TestQueue;

/// The time limit of one law; a law that passes takes at most a few seconds.
const LAW_TIMEOUT: Duration = Duration::from_secs(120);

/// Makes a `#[test]` of each law of a [`Store`], with the name of the law.
///
/// The argument is an async function or closure without arguments that makes a store. It is called
/// once for each law and must return an empty store: with a prefix, a table or a file of its own.
/// The server or directory of the store must outlive the law: let the store own it, or keep it in a
/// `static`.
///
/// The tests are in the module of the macro call; use one module for each store.
/// [`laws::all`](crate::laws::all) runs the laws in one test.
#[macro_export]
macro_rules! store_laws {
    ($make:expr) => {
        $crate::__each_store_law!(__store_law_tests, $make);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __store_law_tests {
    ($make:expr; $($law:ident)*) => {
        $(
            #[test]
            fn $law() {
                $crate::laws::run($make, $crate::laws::store::$law);
            }
        )*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __store_law_list {
    ($kind:ident; $($law:ident)*) => {
        &[$((stringify!($law), |runtime, store| runtime.block_on(with_timeout($crate::laws::store::$law(store)))),)*]
    };
}

/// Makes a `#[test]` of each law of a [`Source`](oncegate_core::Source), with the name of the law.
///
/// The argument is an async function or closure without arguments that makes a
/// [`TestQueue`](crate::laws::source::TestQueue). It is called once for each law.
#[macro_export]
macro_rules! source_laws {
    ($make:expr) => {
        $crate::__each_source_law!(__source_law_tests, $make);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __source_law_tests {
    ($make:expr; $($law:ident)*) => {
        $(
            #[test]
            fn $law() {
                $crate::laws::run_source($make, $crate::laws::source::$law);
            }
        )*
    };
}

/// Runs one law on a new queue. Panics with the observations if its source violates the law.
pub fn run_source<Q: TestQueue>(make: impl AsyncFn() -> Q, law: impl AsyncFn(Q)) {
    runtime().block_on(async { with_timeout(law(make().await)).await });
}

/// Runs one law on a new store. Panics with the observations if the store violates the law.
pub fn run<S: Store + 'static>(make: impl AsyncFn() -> S, law: impl AsyncFn(Arc<dyn Store>)) {
    runtime().block_on(async {
        let store: Arc<dyn Store> = Arc::new(make().await);
        with_timeout(law(store)).await;
    });
}

type Law = fn(&Runtime, Arc<dyn Store>);

const STORE_LAWS: &[(&str, Law)] = crate::__each_store_law!(__store_law_list, Law);

/// Runs all laws of a store, several at a time, each with a store of its own. Use it for servers
/// that are too expensive to start for each law and must be stopped afterwards. Panics with the
/// names of the violated laws.
pub fn all<S: Store + 'static>(make: impl AsyncFn() -> S + Sync) {
    /// The number of concurrent laws; they mostly wait.
    const CONCURRENT_LAWS: usize = 6;
    let remaining = std::sync::Mutex::new(STORE_LAWS.iter());
    let violated = std::sync::Mutex::new(Vec::new());
    let next = || {
        remaining
            .lock()
            .expect("no thread panics while it holds the lock")
            .next()
    };
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_LAWS {
            scope.spawn(|| {
                while let Some((name, law)) = next() {
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        let runtime = runtime();
                        let store: Arc<dyn Store> = Arc::new(runtime.block_on(make()));
                        law(&runtime, store);
                    }));
                    if result.is_err() {
                        violated
                            .lock()
                            .expect("no thread panics while it holds the lock")
                            .push(*name);
                    }
                }
            });
        }
    });
    let violated = violated
        .into_inner()
        .expect("no thread panics while it holds the lock");
    assert!(
        violated.is_empty(),
        "{} of {} laws are violated: {}",
        violated.len(),
        STORE_LAWS.len(),
        violated.join(", ")
    );
}

fn runtime() -> Runtime {
    // Starting threads fails only if the operating system has none left.
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("the runtime starts")
}

async fn with_timeout(law: impl Future<Output = ()>) {
    let limit = LAW_TIMEOUT + random::extra_time();
    if tokio::time::timeout(limit, law).await.is_err() {
        panic!("the law did not end within {limit:?}");
    }
}
