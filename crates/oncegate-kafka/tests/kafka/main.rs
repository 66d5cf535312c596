//! The Kafka source on a real broker: `ONCEGATE_KAFKA` says where.

mod group;
mod messages;
mod opening;
mod outage;
mod settling;
mod stage;
