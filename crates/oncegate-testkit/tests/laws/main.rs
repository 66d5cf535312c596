//! The laws of stores and sources: the stores and sources in memory and a store as a user writes it
//! pass them, and each wrong store or source fails at least one.

/// A test for each mistake: the listed laws fail with it and pass without it.
///
/// Each module defines its own `breaks!`: whether a law fails with a mistake.
macro_rules! mistakes {
    ($($name:ident: $mistake:ident breaks $($law:ident),+;)+) => {$(
        #[test]
        fn $name() {
            $(
                assert!(breaks!($mistake, $law), "{} does not notice {:?}", stringify!($law), Mistake::$mistake);
                assert!(!breaks!(None, $law), "{} is broken by the reference", stringify!($law));
            )+
        }
    )+};
}

mod caught;
mod caught_sources;
mod memory;
mod memory_broker;
mod own_store;
