//! How a consumer is put together.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::consumer::Engine;
use crate::decode::{Decode, Json};
use crate::error::Error;
use crate::handler::Handler;
use crate::id::{IdSource, Scope};
use crate::lifecycle::Outage;
use crate::log_throttle::LogThrottle;
use crate::marker::Guarantee;
use crate::message::Message;
use crate::readiness::Readiness;
use crate::run::Runner;
use crate::runtime_estimator::lease_for;
use crate::settings::{Execution, Fingerprints, Settings, VolatileStore};
use crate::source::{Open, Order, Source, headers};
use crate::status::{ConsumerStatus, Ends};
use crate::store::{Persistence, Store, StoreError};

/// The running loop: take a slot, receive, pass the gate, settle, drain. Start with
/// [`Consumer::builder`].
#[derive(Debug)]
pub struct Consumer;

impl Consumer {
    /// A consumer with every setting at its default, to be given a source, a store, an id and a
    /// handler.
    pub fn builder() -> Builder<(), (), (), Json> {
        Builder {
            source: (),
            store: (),
            handler: (),
            decode: Json,
            settings: Settings::default(),
            scope: None,
        }
    }
}

/// A consumer that is being put together. It runs once it has a source, a store and a handler.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `run_until` is awaited"]
pub struct Builder<S, T, H, D> {
    source: S,
    store: T,
    handler: H,
    decode: D,
    settings: Settings,
    scope: Option<String>,
}

impl<S, T, H, D> Builder<S, T, H, D> {
    /// Where deliveries come from.
    pub fn source<S2: Open>(self, source: S2) -> Builder<S2, T, H, D> {
        let Self {
            store,
            handler,
            decode,
            settings,
            scope,
            ..
        } = self;
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// What remembers ids.
    pub fn store<T2: Store + 'static>(self, store: T2) -> Builder<S, T2, H, D> {
        let Self {
            source,
            handler,
            decode,
            settings,
            scope,
            ..
        } = self;
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// What handles messages.
    pub fn handler<H2: Handler>(self, handler: H2) -> Builder<S, T, H2, D> {
        let Self {
            source,
            store,
            decode,
            settings,
            scope,
            ..
        } = self;
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// How bodies become payloads. Default: JSON.
    pub fn decode<D2: Decode>(self, decode: D2) -> Builder<S, T, H, D2> {
        let Self {
            source,
            store,
            handler,
            settings,
            scope,
            ..
        } = self;
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// What is promised when nobody knows whether an effect happened. Default: effectively once.
    pub fn guarantee(mut self, guarantee: Guarantee) -> Self {
        self.settings.guarantee = guarantee;
        self
    }

    /// Where the idempotency key of a message is read from. There is no default: a wrong guess
    /// would skip messages.
    pub fn id(mut self, id: IdSource) -> Self {
        self.settings.id = Some(id);
        self
    }

    /// Separates this consumer from others on the same store: without a scope, two services that
    /// share a store skip each other's messages. 1 to 100 bytes of the alphabet of ids.
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// Whether the same id with another body is told apart. Default: by the body in at most once,
    /// not otherwise.
    pub fn fingerprints(mut self, fingerprints: Fingerprints) -> Self {
        self.settings.fingerprints = fingerprints;
        self
    }

    /// How long a done id is remembered, at least 1 s. Default: 24 h.
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.settings.window = window;
        self
    }

    /// How long a claim holds without renewal, at least 100 ms; it is renewed at a third of this.
    /// Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// The lease that the longest run asks for: twice as long, and a second. Handlers that run
    /// longer are renewed all the same; a longer lease only makes a crash cost more time, and a
    /// pause of the process less.
    pub fn lease_for(self, longest_run: Duration) -> Self {
        self.lease(lease_for(longest_run))
    }

    /// Chooses the lease by how long handlers run: twice what 99 in 100 need, and a second, within
    /// these bounds, each at least 100 ms. Until 512 runs are known, the longest.
    pub fn adaptive_lease(mut self, shortest: Duration, longest: Duration) -> Self {
        self.settings.lease = longest.max(shortest);
        self.settings.shortest_lease = Some(shortest);
        self
    }

    /// The window that redeliveries ask for: twice the time for which a message may come again,
    /// from its first delivery to its last copy, by the broker's retention and the producers'
    /// retries.
    pub fn dedup_window_for(self, redelivered_for: Duration) -> Self {
        self.dedup_window(redelivered_for.saturating_mul(2))
    }

    /// How many attempts a message gets before it is dead-lettered, at least 1. Default: 5.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.attempts = attempts;
        self
    }

    /// How many processes may end while they handle a message before it is dead-lettered as
    /// `crashes-spent`, or goes to the in-doubt queue in at most once; at least 2. Default: 10.
    /// They spend none of [`attempts`](Self::attempts): a process that is killed from outside takes
    /// innocent messages with it. From the second on the message runs alone: nothing else is
    /// claimed until it is over.
    pub fn max_crashes(mut self, crashes: u32) -> Self {
        self.settings.max_crashes = crashes;
        self
    }

    /// How often a handler is run again in place within one attempt. Default: 3.
    pub fn max_inline_retries(mut self, retries: u32) -> Self {
        self.settings.retries = retries;
        self
    }

    /// The first and the longest pause before a retry; pauses double, with jitter. Default: 100 ms
    /// and 10 s.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        self.settings.backoff = first;
        self.settings.longest_backoff = longest.max(first);
        self
    }

    /// How often `reconcile` is tried before a message goes to the in-doubt queue, at least 1.
    /// Default: 5. One that ends its process counts for [`max_crashes`](Self::max_crashes).
    pub fn max_reconciles(mut self, reconciles: u32) -> Self {
        self.settings.reconciles = reconciles;
        self
    }

    /// How long a handler may run; after that its outcome is unknown. Default: 5 min.
    pub fn handler_timeout(mut self, timeout: Duration) -> Self {
        self.settings.handler_timeout = timeout;
        self
    }

    /// How many deliveries are claimed or handled at once at the most, at least 1; as many again
    /// may be on their way out, with only their completion to be recorded. Default: 512.
    pub fn max_in_flight(mut self, count: usize) -> Self {
        self.settings.in_flight = count;
        self
    }

    /// How many bytes are in flight at the most; one larger delivery travels alone. Default: 64
    /// MiB.
    pub fn max_in_flight_bytes(mut self, bytes: usize) -> Self {
        self.settings.in_flight_bytes = bytes;
        self
    }

    /// How many deliveries wait at the most, in order, behind another of their key or partition, at
    /// least 1; they are not in flight. So is one that was released, until its delay is over. When
    /// so many wait, nothing is taken in, and other keys wait too. Default: 10,000.
    pub fn max_queued(mut self, count: usize) -> Self {
        self.settings.waiting = count;
        self
    }

    /// How many bytes wait there at the most, and one delivery more. Default: 64 MiB.
    pub fn max_queued_bytes(mut self, bytes: usize) -> Self {
        self.settings.waiting_bytes = bytes;
        self
    }

    /// How long handlers may run on once the consumer stops. Default: 30 s. One that still runs then
    /// is dropped: its outcome is unknown, which spends an attempt and counts no crash. The stop
    /// waits up to 2 s longer until the store has recorded that.
    pub fn drain_timeout(mut self, bound: Duration) -> Self {
        self.settings.drain = bound;
        self
    }

    /// How old a message may be and still be taken for new when its marker is absent. Default: half
    /// the window.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.settings.max_age = Some(age);
        self
    }

    /// What is handled one after the other. Default: by key on Kafka, unordered on RabbitMQ.
    pub fn order(mut self, order: Order) -> Self {
        self.settings.order = Some(order);
        self
    }

    /// Where handlers run. Default: each in a task of its own.
    pub fn execution(mut self, handlers: Execution) -> Self {
        self.settings.handlers = handlers;
        self
    }

    /// What to do while the store is away. Default: hold.
    pub fn outage(mut self, outage: Outage) -> Self {
        self.settings.outage = outage;
        self
    }

    /// Checks the settings as the consumer does before it starts. Connects to nothing.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] names the first setting that is wrong, and what to set instead.
    pub fn check(&self) -> Result<(), Error> {
        self.settings.check()?;
        if let Some(scope) = &self.scope {
            Scope::named(scope)?;
        }
        self.settings.id.as_ref().map_or(Ok(()), check_id)
    }

    /// How long a delivery may stay unsettled by these settings: it waits for another holder for
    /// two leases, and then its handler runs as often as it may in place, each time to its timeout,
    /// with the longest pauses between. What `reconcile` takes comes on top, and so does what waits
    /// in order behind others. A broker that bounds this, as RabbitMQ does by its consumer timeout,
    /// has to allow more.
    pub fn longest_open(&self) -> Duration {
        self.settings.longest_open()
    }

    /// Where to tell whether messages are taken: for a readiness probe.
    pub fn readiness(mut self, readiness: Readiness) -> Self {
        self.settings.readiness = readiness;
        self
    }

    /// Where to tell what is held, and what has been held longest: for a status page.
    pub fn status(mut self, status: ConsumerStatus) -> Self {
        self.settings.status = Some(status);
        self
    }

    /// Lets at most once run on a store that may forget what it said: you accept that a forgotten
    /// id is run again.
    pub fn allow_volatile_store(mut self) -> Self {
        self.settings.volatile_store = VolatileStore::Allowed;
        self
    }
}

impl<S, T, H, D> Builder<S, T, H, D> {
    /// Runs until `shutdown` is over, whatever it comes to, then drains and returns. A program
    /// hands over [`shutdown_signal()`](crate::shutdown_signal): SIGTERM or Ctrl-C.
    ///
    /// Dropping the future stops at once: handlers are dropped, what is not settled comes back.
    ///
    /// # Errors
    /// [`Error`] says what a person has to change: at start for a setting, later for what a broker
    /// or a store refuses. What can heal by itself is waited for, with a warning in the log.
    pub async fn run_until(self, shutdown: impl Future) -> Result<(), Error>
    where
        S: Open,
        T: Store + 'static,
        H: Handler,
        D: Decode,
    {
        let Self {
            source,
            store,
            handler,
            decode,
            mut settings,
            scope,
        } = self;
        settings.check()?;
        if let Some(id) = &settings.id {
            check_id(id)?;
        }
        if let Some(scope) = scope {
            settings.scope = Scope::named(&scope)?;
        }
        let Some(id) = settings.id.take() else {
            let problem = "none was given, and a wrong guess would skip messages".to_owned();
            return Err(Error::Misconfigured {
                setting: "id",
                problem,
                remedy: "name where the idempotency key is: IdSource::header(\"…\"), IdSource::message_id(), …",
            });
        };
        let mut shutdown = std::pin::pin!(async { drop(shutdown.await) });
        let store: Arc<dyn Store> = Arc::new(store);
        let _ends = Ends(settings.status.clone());
        if let Some(status) = &settings.status {
            status.begins(store.described());
        }
        let opened = async {
            preflight(&*store, &settings).await?;
            let source = source
                .for_in_flight(settings.in_flight)
                .for_window(settings.window);
            let source = source.for_longest_open(settings.longest_open());
            let source = if let Some(order) = settings.order {
                source.for_order(order)
            } else {
                source
            };
            Ok::<_, Error>(source.open().await?)
        };
        let source = tokio::select! {
            opened = opened => opened?,
            () = &mut shutdown => return Ok(()),
        };
        tracing::info!(guarantee = ?settings.guarantee, ?id, window = ?settings.window, lease = ?settings.lease, "consuming");
        let runner = Runner {
            handler,
            decode,
            timeout: settings.handler_timeout,
        };
        Engine::new(
            Box::new(source) as Box<dyn Source>,
            store,
            Arc::new(runner),
            id,
            settings,
        )?
        .run(shutdown)
        .await
    }
}

/// Asks the store whether it can keep the promise; waits for one that is not there yet.
pub(crate) async fn preflight(store: &dyn Store, settings: &Settings) -> Result<(), Error> {
    let mut tries = 0;
    let mut says = LogThrottle::every(Duration::from_secs(10));
    loop {
        let found = forgets(store, settings).await;
        if let Some(status) = &settings.status {
            let now = Instant::now();
            status.saw(|seen| match &found {
                Ok(_) => seen.answered(now),
                Err(error) => {
                    seen.failed(error, now);
                    seen.silent(now);
                }
            });
        }
        match found {
            Ok(Some(why)) => return Err(Error::ForgetfulStore(why)),
            Ok(None) => return Ok(()),
            Err(error @ StoreError::Misconfigured(_)) => return Err(error.into()),
            Err(error) => {
                if let Some(suppressed_lines) = says.due(Instant::now()) {
                    tracing::warn!(%error, suppressed_lines, "waiting for the store");
                }
                let pause = settings.policy().pause(tries);
                tokio::time::sleep(pause.clamp(Duration::from_millis(100), Duration::from_secs(2)))
                    .await;
                tries += 1;
            }
        }
    }
}

/// Why the store may forget what it said, where that is refused.
async fn forgets(store: &dyn Store, settings: &Settings) -> Result<Option<String>, StoreError> {
    store.preflight(settings.guarantee).await?;
    if settings.guarantee != Guarantee::AtMostOnce
        || settings.volatile_store == VolatileStore::Allowed
    {
        return Ok(None);
    }
    Ok(match store.persistence().await? {
        Persistence::Volatile(why) => Some(why),
        Persistence::Durable(_) => None,
    })
}

/// The age of a message by its own timestamp or by when its first copy was seen, whichever is
/// longer ago.
pub(crate) fn age(message: &Message, now: SystemTime) -> Option<Duration> {
    let first_seen = message
        .headers
        .last(headers::FIRST_SEEN)
        .and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
    let first_seen =
        first_seen.and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    message
        .sent_at
        .into_iter()
        .chain(first_seen)
        .filter_map(|at| now.duration_since(at).ok())
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Headers;

    #[test]
    fn a_message_is_as_old_as_its_first_copy() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let seen = |value: &[u8]| {
            let mut block = Vec::new();
            Headers::encode(&mut block, headers::FIRST_SEEN.as_bytes(), Some(value));
            Headers::from_block(block.into())
        };
        let now = SystemTime::now();
        let ms = |at: SystemTime| {
            at.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_millis()
                .to_string()
        };
        let day_ago = ms(now - hours(24));
        let aged = |headers, sent_at| {
            age(
                &Message {
                    headers,
                    sent_at,
                    ..Message::default()
                },
                now,
            )
        };
        let about = |age: Option<Duration>, expected| {
            age.is_some_and(|age| age >= expected && age < expected + hours(1))
        };

        assert_eq!(aged(Headers::default(), None), None);
        assert!(about(
            aged(Headers::default(), Some(now - hours(2))),
            hours(2)
        ));
        assert!(about(aged(seen(day_ago.as_bytes()), None), hours(24)));
        assert!(
            about(aged(seen(day_ago.as_bytes()), Some(now)), hours(24)),
            "a copy is published anew, with a new timestamp"
        );
        assert!(about(
            aged(seen(ms(now).as_bytes()), Some(now - hours(2))),
            hours(2)
        ));
        for nonsense in [
            &b"soon"[..],
            b"",
            b"-1",
            b"\xff",
            b"99999999999999999999",
            b"18446744073709551615",
        ] {
            assert_eq!(aged(seen(nonsense), None), None, "{nonsense:?}");
        }
    }
}

fn check_id(id: &IdSource) -> Result<(), Error> {
    id.check().map_err(|problem| Error::Misconfigured {
        setting: "id",
        problem,
        remedy: "write a JSON pointer (RFC 6901) such as `/payment/id`, with `~1` for `/` and `~0` for `~` in a name",
    })
}
