//! The Redis store against real servers. Needs `ONCEGATE_REDIS` and `redis-server`.

mod bad_table;
mod batches;
mod browse;
mod certificates;
mod faults;
mod forms;
mod laws;
mod losses;
mod outages;
mod replicas;
mod script;
mod sentinels;
mod settings;
mod support;
mod wire;
