//! The part of the RabbitMQ adapter's settings that its conversion of messages needs.

use std::sync::Arc;
use std::time::Duration;

pub(crate) const DELAYS: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
];

pub(crate) struct QueueSettings {
    pub(crate) name: Arc<str>,
    pub(crate) key_header: Option<String>,
    pub(crate) by_queue: bool,
}

impl QueueSettings {
    pub(crate) fn uses_delay_queues(&self) -> bool {
        self.by_queue
    }
}
