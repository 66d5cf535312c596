//! The Redis store against real servers. Needs `ONCEGATE_REDIS` and `redis-server`.

mod bad_table;
mod batches;
mod browse;
mod certificates;
mod data_loss;
mod faults;
mod laws;
mod outages;
mod replicas;
mod results;
mod script;
mod sentinel_and_cluster;
mod sentinels;
mod settings;
mod support;
mod wire;
