//! The laws of a contract, which every implementation keeps: oncegate's own, and yours.
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
//! The laws use the contract alone: a store needs nothing that is there for tests. What a key holds
//! is found out by asking, since each marker has questions that no other answers alike.
//!
//! [`source_laws!`](crate::source_laws) does the same for the laws in [`source`]. It needs a
//! [`source::TestQueue`]: a queue or topic of the law's own, and a way to publish to it and to look
//! at what was rejected.

mod ask;
mod belief;
mod random;
mod rows;
pub mod source;
pub mod store;

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::Store;
use tokio::runtime::{Builder, Runtime};

use self::source::TestQueue;

/// How long one law may take. None waits for more than a few seconds; a store that waits for ever
/// breaks its contract.
const LONGEST: Duration = Duration::from_secs(120);

/// Makes a `#[test]` of each law of a [`Store`], named like the law.
///
/// It takes what makes a store: an async function or closure without arguments. It is called once
/// for each law, and the store that it gives has to be empty: a prefix, a table or a file of its
/// own. What the store lives on (a server, a directory) has to outlive the law: let the store own
/// it, or keep it in a `static`.
///
/// The tests stand where the macro stands; several stores in one file each take a module.
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
        &[$((stringify!($law), |runtime, store| runtime.block_on(within_bounds($crate::laws::store::$law(store)))),)*]
    };
}

/// Makes a `#[test]` of each law of a [`Source`](oncegate_core::Source), named like the law.
///
/// It takes what makes a [`TestQueue`](crate::laws::source::TestQueue): an async function or
/// closure without arguments, called once for each law.
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

/// Holds one law against a fresh queue. Panics, with what was seen, if its source breaks it.
pub fn run_source<Q: TestQueue>(make: impl AsyncFn() -> Q, law: impl AsyncFn(Q)) {
    runtime().block_on(async { within_bounds(law(make().await)).await });
}

/// Holds one law against a fresh store. Panics, with what was seen, if the store breaks it.
pub fn run<S: Store + 'static>(make: impl AsyncFn() -> S, law: impl AsyncFn(Arc<dyn Store>)) {
    runtime().block_on(async {
        let store: Arc<dyn Store> = Arc::new(make().await);
        within_bounds(law(store)).await;
    });
}

type Law = fn(&Runtime, Arc<dyn Store>);

const STORE_LAWS: &[(&str, Law)] = crate::__each_store_law!(__store_law_list, Law);

/// Holds every law of a store, several at a time, each against a store of its own; for servers that
/// are too dear for one a law, and have to be stopped afterwards. Panics with the names of the laws
/// that the store breaks.
pub fn all<S: Store + 'static>(make: impl AsyncFn() -> S + Sync) {
    /// As many laws at a time: most of what they do is waiting.
    const AT_ONCE: usize = 6;
    let left = std::sync::Mutex::new(STORE_LAWS.iter());
    let broken = std::sync::Mutex::new(Vec::new());
    let next = || {
        left.lock()
            .expect("nothing panics while it is locked")
            .next()
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((name, law)) = next() {
                    let kept = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        let runtime = runtime();
                        let store: Arc<dyn Store> = Arc::new(runtime.block_on(make()));
                        law(&runtime, store);
                    }));
                    if kept.is_err() {
                        broken
                            .lock()
                            .expect("nothing panics while it is locked")
                            .push(*name);
                    }
                }
            });
        }
    });
    let broken = broken
        .into_inner()
        .expect("nothing panics while it is locked");
    assert!(
        broken.is_empty(),
        "{} of {} laws are broken: {}",
        broken.len(),
        STORE_LAWS.len(),
        broken.join(", ")
    );
}

fn runtime() -> Runtime {
    // Without threads there is nothing to test with.
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

async fn within_bounds(law: impl Future<Output = ()>) {
    if tokio::time::timeout(LONGEST + random::longer(), law)
        .await
        .is_err()
    {
        panic!("the law did not end in {LONGEST:?}: nothing may wait for ever");
    }
}
