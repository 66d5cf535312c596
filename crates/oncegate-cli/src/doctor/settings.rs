//! Settings held against each other.

use std::path::Path;
use std::time::Duration;

use oncegate::{Consumer, Guarantee};

use super::{Findings, Level};
use crate::config::Config;
use crate::failure::Failure;
use crate::say::span;

/// How bad a store is that forgets: at most once does not start on it, and effectively once handles
/// again what was forgotten.
pub(super) fn forgetting(config: &Config) -> Level {
    if config.guarantee() == Guarantee::AtMostOnce {
        Level::Error
    } else {
        Level::Warning
    }
}

pub(super) fn look(config: &Config, findings: &mut Findings) -> Result<(), Failure> {
    config.check()?;
    let (lease, window, max_age) = (config.lease(), config.window(), config.max_age());
    if lease >= window {
        findings.error(
            "lease-against-window",
            "gate.lease",
            format!(
                "the lease ({}) is not shorter than the window ({})",
                span(lease),
                span(window)
            ),
            "shorten gate.lease, or lengthen gate.dedup-window; a consumer refuses to start",
        );
    }
    if lease < Duration::from_millis(100) {
        findings.error(
            "lease-too-short",
            "gate.lease",
            format!("{} is too short to be renewed in time", span(lease)),
            "set at least 100ms; 30s is the default",
        );
    }
    if max_age > window {
        findings.error(
            "max-age-against-window",
            "gate.max-age",
            format!(
                "messages of an age of {} are taken for new, and ids are forgotten after {}",
                span(max_age),
                span(window)
            ),
            "set gate.max-age to at most gate.dedup-window, half of it by default",
        );
    }
    // As the consumer itself reckons at its start. What no consumer can be set up from, it says
    // itself.
    let open = config
        .consumer(Consumer::builder())
        .map_or(Duration::ZERO, |consumer| consumer.longest_open());
    let patience = config.consumer_timeout();
    if config.has("rabbitmq.url") && open > patience / 10 * 9 {
        findings.error(
            "runs-outlast-the-consumer-timeout",
            "gate.handler-timeout",
            format!(
                "a delivery may stay open for {}, with each run of its handler in place and a wait of two leases, and RabbitMQ closes the \
                 channel of one that stays open for {}: all that it holds comes back",
                span(open),
                span(patience)
            ),
            "shorten gate.handler-timeout or gate.lease, lower gate.max-inline-retries, or raise consumer_timeout in rabbitmq.conf and \
             rabbitmq.consumer-timeout here",
        );
    }
    if !config.has("store.scope") && !config.has("store.prefix") {
        findings.add(
            Level::Advice,
            "no-scope",
            "store.scope",
            "two services on one Redis without a scope or a prefix of their own skip each other's messages",
            "if another service may ever share this Redis, give each a scope: `.scope(\"ledger\")` in the consumer, store.scope here",
        );
    }
    if let Some(directory) = config
        .text("audit.file")
        .and_then(|file| Path::new(file).parent())
        && !directory.as_os_str().is_empty()
        && !directory.is_dir()
    {
        findings.error(
            "audit-has-no-place",
            "audit.file",
            format!(
                "the directory {} does not exist, so that nothing can be done that is audited",
                directory.display()
            ),
            "create it, or leave audit.file out: the audit then stands on the store",
        );
    }
    Ok(())
}
