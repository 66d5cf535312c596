//! The Kafka source of oncegate.
