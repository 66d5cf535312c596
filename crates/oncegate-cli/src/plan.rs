//! `oncegate plan`: what a load needs of Redis.

use clap::Args;
#[cfg(feature = "redis")]
use oncegate::{Load, Markers, plan};

use crate::Context;
use crate::config::Span;
use crate::failure::Failure;
use crate::say::span;

#[derive(Args)]
pub(crate) struct PlanArguments {
    /// New ids a second, on the average of a window; `gate.rate` where this is not said.
    #[arg(long)]
    rate: Option<u64>,
    /// How long a done id is remembered; `gate.dedup-window` where this is not said.
    #[arg(long, value_name = "TIME")]
    window: Option<Span>,
    /// Bytes of an id; a UUID has 36.
    #[arg(long, default_value_t = 36)]
    id_bytes: u64,
    /// Consumer processes.
    #[arg(long, default_value_t = 1)]
    processes: u64,
    /// Primaries over which the keys are spread.
    #[arg(long, default_value_t = 1)]
    primaries: u64,
    /// Whether markers hold a fingerprint of the body: by default in at most once, as with
    /// consumers.
    #[arg(long, value_name = "yes|no")]
    fingerprints: Option<YesNo>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum YesNo {
    Yes,
    No,
}

#[cfg(feature = "redis")]
pub(crate) fn run(context: &Context, arguments: &PlanArguments) -> Result<(), Failure> {
    let config = &context.config;
    let rate = arguments
        .rate
        .or(config.number("gate.rate"))
        .ok_or_else(|| Failure::usage("say --rate, or set gate.rate: new ids a second"))?;
    let window = arguments.window.map_or(config.window(), |it| it.0);
    let with_fingerprints = match arguments.fingerprints {
        Some(said) => said == YesNo::Yes,
        None => config.guarantee() == oncegate::Guarantee::AtMostOnce,
    };
    let before = config.prefix().len()
        + config
            .text("store.scope")
            .map_or(0, |scope| scope.len() + 1);
    let load = Load {
        messages_per_second: rate,
        window,
        key_bytes: before as u64 + arguments.id_bytes,
        markers: if with_fingerprints {
            Markers::WithFingerprint
        } else {
            Markers::Plain
        },
        processes: arguments.processes,
        in_flight: config.in_flight(),
        durability: config.durability(),
        primaries: arguments.primaries,
    };
    let needs = plan(&load);
    let machines = serde_json::json!({
        "rate": rate, "window_ms": crate::say::ms(window), "fingerprints": with_fingerprints, "markers": needs.markers,
        "memory_bytes": needs.memory, "maxmemory_bytes": needs.maxmemory, "servers": needs.servers,
        "connections_to_each_primary": needs.connections,
    });
    let people = format!(
        "{rate} new ids a second, remembered for {}: {} markers\n\
         memory       {} on each server\n\
         maxmemory    {}, a quarter more; the machine needs up to as much again while the append-only file is rewritten\n\
         servers      {}\n\
         connections  {} to each primary",
        span(window),
        needs.markers,
        bytes(needs.memory),
        bytes(needs.maxmemory),
        needs.servers,
        needs.connections
    );
    context.format.print(&machines, people)
}

/// A size in the largest unit of a thousand.
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
