//! End to end: real brokers, real stores, real crashes.
