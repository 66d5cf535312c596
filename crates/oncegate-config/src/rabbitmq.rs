//! Builds a RabbitMQ source from `[rabbitmq]`.

use oncegate::{QueueKind, RabbitMq, Rejects, Topology};

use crate::config::Config;
use crate::error::Error;

impl Config {
    /// Builds the RabbitMQ source from `[rabbitmq]`. Connects to nothing.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] if `rabbitmq.queue` is missing; otherwise as for [`Config::check`].
    pub fn rabbitmq(&self) -> Result<RabbitMq, Error> {
        self.check()?;
        let queue = self.text("rabbitmq.queue").ok_or_else(|| {
            Error::misconfigured("no queue: set rabbitmq.queue, or ONCEGATE_RABBITMQ_QUEUE")
        })?;
        let mut rabbitmq = RabbitMq::queue(queue);
        macro_rules! set {
            ($($setter:ident: $value:expr,)*) => {
                $(if let Some(value) = $value {
                    rabbitmq = rabbitmq.$setter(value);
                })*
            };
        }
        set! {
            url: self.text("rabbitmq.url"),
            ca_certificate: self.text("rabbitmq.ca-certificate"),
            dead_letters: self.text("rabbitmq.dead-letters"),
            in_doubt: self.text("rabbitmq.in-doubt"),
            // `check` has rejected larger numbers.
            prefetch: self.number("rabbitmq.prefetch").map(|count| u32::try_from(count).unwrap_or(u32::MAX)),
            key_header: self.text("rabbitmq.key-header"),
            body_limit: self.number("rabbitmq.body-limit").map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            consumer_timeout: self.time("rabbitmq.consumer-timeout"),
            topology: self.text("rabbitmq.topology").map(|topology| match topology {
                "check" => Topology::Check,
                "trust" => Topology::Trust,
                _ => Topology::Declare,
            }),
            queue_kind: self.text("rabbitmq.queue-kind").map(|kind| if kind == "classic" { QueueKind::Classic } else { QueueKind::Quorum }),
            rejects: self.text("rabbitmq.rejects").map(|rejects| if rejects == "by-queue" { Rejects::ByQueue } else { Rejects::Published }),
        }
        if let (Some(certificate), Some(key)) = (
            self.text("rabbitmq.client-certificate"),
            self.text("rabbitmq.client-key"),
        ) {
            rabbitmq = rabbitmq.client_certificate(certificate, key);
        }
        Ok(
            if self.text("rabbitmq.consumers") == Some("single-active") {
                rabbitmq.single_active_consumer()
            } else {
                rabbitmq
            },
        )
    }
}
