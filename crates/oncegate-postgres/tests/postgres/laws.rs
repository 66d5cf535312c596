//! The laws of every store.

oncegate_testkit::store_laws!(crate::support::store);
