//! Where the servers are.

use std::path::Path;

use clap::Args;

use super::Error;

/// What `cargo xtask services up` writes, from the root of the workspace.
const SERVICES: &str = "target/services.env";

/// Where the servers are: by flag, by environment, or as `cargo xtask services up` has written it
/// down.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Servers {
    /// Kafka's brokers, as host:port.
    #[arg(long, env = "ONCEGATE_KAFKA", hide_env_values = true)]
    kafka: Option<String>,
    /// RabbitMQ, as amqp://user:password@host:port/vhost.
    #[arg(long, env = "ONCEGATE_RABBITMQ", hide_env_values = true)]
    rabbitmq: Option<String>,
    /// Redis, as redis://host:port.
    #[arg(long, env = "ONCEGATE_REDIS", hide_env_values = true)]
    redis: Option<String>,
}

impl Servers {
    #[cfg(feature = "kafka")]
    pub(crate) fn kafka(&self) -> Result<String, Error> {
        find(&self.kafka, "--kafka", "ONCEGATE_KAFKA")
    }

    #[cfg(feature = "rabbitmq")]
    pub(crate) fn rabbitmq(&self) -> Result<String, Error> {
        find(&self.rabbitmq, "--rabbitmq", "ONCEGATE_RABBITMQ")
    }

    pub(crate) fn redis(&self) -> Result<String, Error> {
        find(&self.redis, "--redis", "ONCEGATE_REDIS")
    }

    /// The same for a process that is started: in its environment, where other users of the machine
    /// do not read them.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (&'static str, String)> {
        [
            ("ONCEGATE_KAFKA", &self.kafka),
            ("ONCEGATE_RABBITMQ", &self.rabbitmq),
            ("ONCEGATE_REDIS", &self.redis),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.clone().or_else(|| written_down(name))?)))
    }
}

fn find(given: &Option<String>, flag: &str, variable: &str) -> Result<String, Error> {
    given.clone().filter(|address| !address.trim().is_empty()).or_else(|| written_down(variable)).ok_or_else(|| {
        format!("{flag}: not given, and neither {variable} nor {SERVICES} says where; run `cargo xtask services up`, or give {flag}").into()
    })
}

fn written_down(variable: &str) -> Option<String> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(SERVICES);
    let text = std::fs::read_to_string(SERVICES)
        .or_else(|_| std::fs::read_to_string(workspace))
        .ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix(variable)?.strip_prefix('='))
        .map(|value| value.trim().to_owned())
}
