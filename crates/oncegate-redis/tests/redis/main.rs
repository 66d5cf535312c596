//! The Redis store against real servers. Needs `ONCEGATE_REDIS` and `redis-server`.

mod batches;
mod differential;
mod forms;
mod outages;
mod settings;
mod support;
mod wire;
