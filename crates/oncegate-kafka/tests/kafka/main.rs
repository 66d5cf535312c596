//! The Kafka source on a real broker, whose address is in `ONCEGATE_KAFKA`.

mod dead_letters;
mod fixture;
mod group;
mod laws;
mod log;
mod messages;
mod mirror;
mod opening;
mod order;
mod outage;
mod outbox;
mod positions;
mod replies;
mod seeking;
mod settling;
mod transactions;
mod watch;
