//! End-to-end tests: consumer processes with real brokers and Redis. Despite faults, each message
//! has its effect as often as the guarantee allows, or is in the dead letters or the in-doubt
//! queue.
//!
//! Each scenario is one function, run on both brokers. `cargo xtask test` sets the addresses of the
//! servers in the environment (`ONCEGATE_KAFKA`, `ONCEGATE_RABBITMQ`, `ONCEGATE_REDIS`).
#![forbid(unsafe_code)]

mod bad_input;
mod broker;
mod chain;
mod crashes;
mod duplicates;
mod failures;
mod frozen;
mod http;
mod kafka;
mod outages;
mod process;
mod rabbitmq;
mod samples;
mod world;

/// Creates a test of each scenario for each broker.
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
