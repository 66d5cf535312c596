//! Checks settings against each other.

use std::path::Path;
use std::time::Duration;

use oncegate::{Consumer, Guarantee};

use super::{DoctorFindings, Severity};
use crate::config::Config;
use crate::error::CliError;
use crate::output::duration_text;

/// The severity of a volatile store: at most once does not start on it, and effectively once
/// handles lost ids again.
pub(super) fn volatile_store_severity(config: &Config) -> Severity {
    if config.guarantee() == Guarantee::AtMostOnce {
        Severity::Error
    } else {
        Severity::Warning
    }
}

/// Adds findings about settings that contradict each other or are missing.
///
/// # Errors
/// A setting is invalid.
pub(super) fn check(config: &Config, findings: &mut DoctorFindings) -> Result<(), CliError> {
    config.check()?;
    let (lease, window, max_age) = (config.lease(), config.dedup_window(), config.max_age());
    if lease >= window {
        findings.error(
            "lease-not-shorter-than-window",
            "gate.lease",
            format!(
                "the lease ({}) is not shorter than the window ({})",
                duration_text(lease),
                duration_text(window)
            ),
            "shorten gate.lease or lengthen gate.dedup-window; the consumer does not start otherwise",
        );
    }
    if lease < Duration::from_millis(100) {
        findings.error(
            "lease-too-short",
            "gate.lease",
            format!(
                "{} is too short to be renewed in time",
                duration_text(lease)
            ),
            "set at least 100ms; 30s is the default",
        );
    }
    if max_age > window {
        findings.error(
            "max-age-exceeds-window",
            "gate.max-age",
            format!(
                "messages up to an age of {} count as new, and markers of handled ids expire after {}",
                duration_text(max_age),
                duration_text(window)
            ),
            "set gate.max-age to at most gate.dedup-window, half of it by default",
        );
    }
    // The consumer computes the same value when it starts, and then reports the errors that are
    // ignored here.
    let longest_unacknowledged = config
        .consumer(Consumer::builder())
        .map_or(Duration::ZERO, |consumer| consumer.max_unsettled_time());
    let consumer_timeout = config.consumer_timeout();
    if config.has("rabbitmq.url") && longest_unacknowledged > consumer_timeout / 10 * 9 {
        findings.error(
            "consumer-timeout-too-short",
            "gate.handler-timeout",
            format!(
                "a delivery may stay unacknowledged for {}, with every inline retry and a wait of two leases, and RabbitMQ closes the \
                 channel after {}: all its unacknowledged deliveries are requeued",
                duration_text(longest_unacknowledged),
                duration_text(consumer_timeout)
            ),
            "shorten gate.handler-timeout or gate.lease, lower gate.max-inline-retries, or raise consumer_timeout in rabbitmq.conf and \
             rabbitmq.consumer-timeout here",
        );
    }
    if !config.has("store.scope") && !config.has("store.prefix") {
        findings.add(
            Severity::Advice,
            "scope-not-configured",
            "store.scope",
            "two services on one store without a scope, or on Redis a prefix, of their own skip each other's messages",
            "if another service may share this store, give each a scope: `.scope(\"ledger\")` in the consumer, store.scope here",
        );
    }
    if let Some(directory) = config
        .text("audit.file")
        .and_then(|file| Path::new(file).parent())
        && !directory.as_os_str().is_empty()
        && !directory.is_dir()
    {
        findings.error(
            "audit-directory-missing",
            "audit.file",
            format!(
                "the directory {} does not exist, so audited commands fail",
                directory.display()
            ),
            "create it, or remove audit.file to keep the audit in the store",
        );
    }
    Ok(())
}
