//! Consumer processes on real brokers and a real Redis: whatever is done to them, each message has
//! its effect the number of times that was promised, or stands where a person finds it.
//!
//! Each scenario is one function, run on both brokers. The servers' addresses stand in the
//! environment (`ONCEGATE_KAFKA`, `ONCEGATE_RABBITMQ`, `ONCEGATE_REDIS`); `cargo xtask test` sees
//! to that.
#![forbid(unsafe_code)]

mod bad_input;
mod broker;
mod crashes;
mod duplicates;
mod failures;
mod frozen;
mod kafka;
mod outages;
mod process;
mod rabbitmq;
mod world;

/// Makes a test of each scenario for each broker.
macro_rules! on_both_brokers {
    ($($scenario:ident),+ $(,)?) => {
        mod on_kafka {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(crate::broker::Broker::Kafka).await;
            })+
        }

        mod on_rabbitmq {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(crate::broker::Broker::RabbitMq).await;
            })+
        }
    };
}
use on_both_brokers;
