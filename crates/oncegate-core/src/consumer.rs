//! A consumer that is built and not yet run.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use tokio::sync::watch;

use crate::builder::Builder;
use crate::decode::Json;
use crate::error::Error;
use crate::readiness::Readiness;
use crate::status::ConsumerStatus;

/// A consumer: receives messages, claims their ids, runs the handler, records the outcome and
/// settles. Start with [`Consumer::builder`].
///
/// Several run side by side in one process; [`status`](Self::status),
/// [`readiness`](Self::readiness) and [`drain`](Self::drain) are for code that supervises them.
///
/// ```
/// # use oncegate_core::{Consumer, Context, Error, Failure, Handler, IdSource, MemoryBroker, MemoryStore};
/// # struct Shelf;
/// # impl Handler for Shelf {
/// #     type Payload = String;
/// #     async fn handle(&self, _: String, _: &Context) -> Result<(), Failure> {
/// #         Ok(())
/// #     }
/// # }
/// # async fn example(broker: &MemoryBroker) -> Result<(), Error> {
/// let consumer = Consumer::builder()
///     .source(broker.source())
///     .store(MemoryStore::new())
///     .id(IdSource::message_id())
///     .handler(Shelf)
///     .build()?;
/// let (status, drain) = (consumer.status(), consumer.drain());
/// let running = tokio::spawn(consumer.run_until(oncegate_core::shutdown_signal()));
/// println!("{} in flight", status.snapshot().in_flight);
/// drain.start();
/// running.await.expect("no panic")
/// # }
/// ```
#[must_use = "a consumer does nothing until `run_until` is awaited"]
pub struct Consumer {
    run: Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>,
    status: ConsumerStatus,
    readiness: Readiness,
    drain: DrainHandle,
}

impl Consumer {
    /// A builder with every setting at its default. A source, a store, an id and a handler are
    /// required.
    pub fn builder() -> Builder<(), (), (), Json> {
        Builder::new()
    }

    pub(crate) fn new(
        run: Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>,
        status: ConsumerStatus,
        readiness: Readiness,
        drain: DrainHandle,
    ) -> Self {
        Self {
            run,
            status,
            readiness,
            drain,
        }
    }

    /// Runs until `shutdown` completes, with any output, or until a [drain](Self::drain) is
    /// started, then drains and returns. Pass [`shutdown_signal()`](crate::shutdown_signal) to stop
    /// at SIGTERM or Ctrl-C.
    ///
    /// Dropping the future stops at once: handlers are dropped, and unsettled messages are
    /// redelivered.
    ///
    /// # Errors
    /// [`Error`] if an operator has to change something: a wrong setting, or a request that a
    /// broker or a store refuses. Temporary errors are logged and retried.
    pub async fn run_until(self, shutdown: impl Future) -> Result<(), Error> {
        let Self { mut run, drain, .. } = self;
        tokio::select! {
            biased;
            ended = &mut run => return ended,
            _ = shutdown => drain.start(),
        }
        run.await
    }

    /// The deliveries in flight, and the state of the store: for a status page.
    pub fn status(&self) -> ConsumerStatus {
        self.status.clone()
    }

    /// Whether the consumer receives messages: for a readiness probe.
    pub fn readiness(&self) -> Readiness {
        self.readiness.clone()
    }

    /// A handle that stops the consumer, for code that supervises several consumers.
    pub fn drain(&self) -> DrainHandle {
        self.drain.clone()
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("status", &self.status)
            .field("ready", &self.readiness.is_ready())
            .finish_non_exhaustive()
    }
}

/// Starts the drain of a [`Consumer`]. Clones stop the same consumer.
#[derive(Clone, Debug)]
pub struct DrainHandle(watch::Sender<bool>);

impl DrainHandle {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// Starts a drain: the consumer receives nothing more, its handlers have
    /// [`drain_timeout`](Builder::drain_timeout) to end, and
    /// [`run_until`](Consumer::run_until) returns. A consumer that has not started returns as soon as
    /// it runs. A second call, or a call after the consumer has ended, has no effect.
    pub fn start(&self) {
        self.0.send_replace(true);
    }

    /// Completes once a drain is started.
    pub(crate) async fn started(self) {
        // `self` is a sender of the channel, so the channel is not closed, and `wait_for` returns
        // no error.
        let _ = self.0.subscribe().wait_for(|started| *started).await;
    }
}
