//! What of the RabbitMQ adapter's settings the mapping of its messages asks for.

use std::sync::Arc;
use std::time::Duration;

pub(crate) const DELAYS: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
];

pub(crate) struct Settings {
    pub(crate) name: Arc<str>,
    pub(crate) key_header: Option<String>,
    pub(crate) by_queue: bool,
}

impl Settings {
    pub(crate) fn delays_by_queue(&self) -> bool {
        self.by_queue
    }
}
