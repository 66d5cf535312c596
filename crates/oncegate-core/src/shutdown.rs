//! Waits for the signals that stop a process.

use std::future::Future;

/// Completes at SIGTERM, which container runtimes and systemd send to stop a process, or at Ctrl-C
/// (SIGINT); on systems without these signals, at Ctrl-C. For
/// [`Builder::run_until`](crate::Builder::run_until), which then drains.
///
/// After the call, neither signal ends the process by itself, and a second signal has no effect. If
/// the process cannot watch a signal, it logs an error, and the signal keeps its default action.
///
/// # Panics
/// Outside of a tokio runtime with its I/O driver, as `tokio::signal` does. `#[tokio::main]` has
/// one.
#[cfg(unix)]
pub fn shutdown_signal() -> impl Future<Output = ()> + Send + 'static {
    use tokio::signal::unix::{Signal, SignalKind, signal};

    let watch = |kind, name: &str| {
        let watched = signal(kind);
        watched
            .inspect_err(|error| tracing::error!(signal = name, %error, "cannot watch a signal; it will end the process without a drain"))
            .ok()
    };
    let terminate = watch(SignalKind::terminate(), "SIGTERM");
    let interrupt = watch(SignalKind::interrupt(), "SIGINT");
    let received = async |signal: Option<Signal>| match signal {
        Some(mut signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    };
    async move {
        tokio::select! {
            () = received(terminate) => tracing::info!(signal = "SIGTERM", "signal received, the consumer drains"),
            () = received(interrupt) => tracing::info!(signal = "SIGINT", "signal received, the consumer drains"),
        }
    }
}

/// Completes at Ctrl-C. Pass the future to [`Builder::run_until`](crate::Builder::run_until), which
/// then drains.
#[cfg(not(unix))]
pub fn shutdown_signal() -> impl Future<Output = ()> + Send + 'static {
    async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::error!(%error, "cannot watch Ctrl-C; it will end the process without a drain");
            std::future::pending().await
        }
    }
}
