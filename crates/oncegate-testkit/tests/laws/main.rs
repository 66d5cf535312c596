//! Tests of the laws: the memory store, the memory broker and a user-defined store pass them, and each
//! store or source with a mistake fails at least one.

/// A test for each mistake: the listed laws fail with it and pass without it.
///
/// Each module defines its own `breaks!`: whether a law fails with a mistake.
macro_rules! mistakes {
    ($($name:ident: $mistake:ident breaks $($law:ident),+;)+) => {$(
        #[test]
        fn $name() {
            $(
                assert!(breaks!($mistake, $law), "{} does not detect {:?}", stringify!($law), Mistake::$mistake);
                assert!(!breaks!(None, $law), "{} fails without a mistake", stringify!($law));
            )+
        }
    )+};
}

mod caught;
mod caught_results;
mod caught_sources;
mod memory;
mod memory_broker;
mod own_store;
