//! `oncegate plan`: estimates the memory, servers and connections that Redis needs for a load.

use clap::Args;
#[cfg(feature = "redis")]
use oncegate::redis::{Load, Markers, plan};

use crate::CliContext;
use crate::config::TimeArg;
use crate::error::CliError;
use crate::output::duration_text;

/// The longest id that is not hashed, in bytes.
const MAX_ID_BYTES: u64 = 200;

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// New ids per second, averaged over the deduplication window; by default `gate.rate`
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    rate: Option<u64>,
    /// How long done ids are remembered; by default `gate.dedup-window`
    #[arg(long, value_name = "TIME")]
    window: Option<TimeArg>,
    /// Bytes of an id; a UUID has 36. Ids longer than 200 bytes are hashed
    #[arg(long, default_value_t = 36, value_parser = clap::value_parser!(u64).range(1..=MAX_ID_BYTES))]
    id_bytes: u64,
    /// Consumer processes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    processes: u64,
    /// Primaries that share the keys
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    primaries: u64,
    /// Whether markers contain a fingerprint of the body; by default only with at most once, as in
    /// consumers
    #[arg(long, value_name = "yes|no")]
    fingerprints: Option<YesNo>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum YesNo {
    Yes,
    No,
}

#[cfg(feature = "redis")]
pub(crate) fn run(context: &CliContext, arguments: &PlanArgs) -> Result<(), CliError> {
    let config = &context.config;
    let rate = arguments
        .rate
        .or(config.number("gate.rate"))
        .ok_or_else(|| CliError::usage("pass --rate or set gate.rate: new ids per second"))?;
    let window = arguments.window.map_or(config.dedup_window(), |it| it.0);
    let with_fingerprints = match arguments.fingerprints {
        Some(choice) => choice == YesNo::Yes,
        None => config.guarantee() == oncegate::Guarantee::AtMostOnce,
    };
    let prefix_bytes = config.prefix().len()
        + config
            .text("store.scope")
            .map_or(0, |scope| scope.len() + 1);
    let load = Load::new(rate, window)
        .with_key_bytes(prefix_bytes as u64 + arguments.id_bytes)
        .with_markers(if with_fingerprints {
            Markers::WithFingerprint
        } else {
            Markers::Plain
        })
        .with_processes(arguments.processes, config.max_in_flight())
        .with_durability(config.durability())
        .with_primaries(arguments.primaries);
    let estimate = plan(&load);
    // The calculation saturates at `u64::MAX` instead of overflowing.
    let all_memory = estimate.memory.saturating_mul(arguments.primaries);
    if [
        estimate.markers,
        all_memory,
        estimate.servers,
        estimate.connections,
    ]
    .contains(&u64::MAX)
    {
        return Err(CliError::usage(
            "the load is too large to estimate: reduce --rate, --window, --processes or --primaries",
        ));
    }
    let json = serde_json::json!({
        "rate": rate, "window_ms": crate::output::ms(window), "fingerprints": with_fingerprints, "markers": estimate.markers,
        "memory_bytes": estimate.memory, "maxmemory_bytes": estimate.maxmemory, "servers": estimate.servers,
        "connections_to_each_primary": estimate.connections,
    });
    let text = format!(
        "{rate} new ids per second, remembered for {}: {} markers\n\
         memory       {} on each server\n\
         maxmemory    {}, a quarter more; the machine needs up to as much again while the append-only file is rewritten\n\
         servers      {}\n\
         connections  {} to each primary",
        duration_text(window),
        estimate.markers,
        bytes(estimate.memory),
        bytes(estimate.maxmemory),
        estimate.servers,
        estimate.connections
    );
    context.format.print(&json, text)
}

/// A size in the largest decimal unit that it reaches, with one digit after the point.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = [
        (1_000_000_000_000, "TB"),
        (1_000_000_000, "GB"),
        (1_000_000, "MB"),
        (1_000, "kB"),
    ];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{}.{} {name}", bytes / unit, bytes % unit / (unit / 10)),
        None => format!("{bytes} bytes"),
    }
}
