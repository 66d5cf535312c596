//! The laws of stores and sources: kept by those in memory and by a store that a user wrote, and
//! broken by what breaks them.

/// A test for each mistake: each of the laws beside it is broken by it, and by nothing else.
///
/// `breaks!` is that of the module: whether a law is broken by a mistake.
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
