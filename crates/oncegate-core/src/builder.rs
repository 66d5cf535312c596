//! The builder of a consumer.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::consumer::{Consumer, DrainHandle};
use crate::decode::{Decode, Json};
use crate::engine::Engine;
use crate::error::Error;
use crate::handler::Handler;
use crate::id::{IdSource, IntoIdSource, Scope};
use crate::inbox::{
    BatchTransactionalHandler, InBatches, InTransaction, Inbox, InboxStore, TransactionalHandler,
};
use crate::lifecycle::Outage;
use crate::marker::Guarantee;
use crate::outbox::Publisher;
use crate::preflight::preflight;
use crate::readiness::Readiness;
use crate::replies::{Replies, ReplySource, ReplyStore, Replying, ReplyingHandler};
use crate::run::Runner;
use crate::runtime_estimator::lease_for;
use crate::settings::{Execution, Fingerprints, InboxUse, ReplyUse, Settings, VolatileStore};
use crate::source::{Connect, ConnectOptions, Order, Recording, Source};
use crate::status::{ClearStatusOnDrop, ConsumerStatus};
use crate::store::Store;

/// Builds a consumer, from [`Consumer::builder`]. [`build`](Self::build) needs a source, a store,
/// an id and a handler.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it is built and run"]
pub struct Builder<S, T, H, D> {
    source: S,
    store: T,
    handler: H,
    decode: D,
    settings: Settings,
    scope: Option<String>,
}

impl Builder<(), (), (), Json> {
    pub(crate) fn new() -> Self {
        Self {
            source: (),
            store: (),
            handler: (),
            decode: Json,
            settings: Settings::default(),
            scope: None,
        }
    }
}

impl<S, T, H, D> Builder<S, T, H, D> {
    /// The source of messages: a Kafka topic, a RabbitMQ queue, or a queue in memory.
    pub fn source<S2: Connect>(self, source: S2) -> Builder<S2, T, H, D> {
        let Self {
            store,
            handler,
            decode,
            mut settings,
            scope,
            ..
        } = self;
        settings.replies = settings.replies.replaced();
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// The store, which keeps the marker of each id.
    pub fn store<T2: Store + 'static>(self, store: T2) -> Builder<S, T2, H, D> {
        let Self {
            source,
            handler,
            decode,
            mut settings,
            scope,
            ..
        } = self;
        settings.inbox = InboxUse::None;
        settings.replies = settings.replies.replaced();
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// The inbox, instead of a store: messages are handled in transactions of its database, which
    /// also record them. Call [`transactional_handler`](Builder::transactional_handler) or
    /// [`batch_transactional_handler`](Builder::batch_transactional_handler) next.
    ///
    /// Messages wait while its database is unavailable. The number of failures of a message is kept
    /// in the memory of this process, on RabbitMQ also in its copies in delay queues. Crashes are not
    /// counted.
    pub fn inbox<I: Inbox>(self, inbox: I) -> Builder<S, InboxStore<I>, H, D> {
        let mut builder = self.store(InboxStore::new(inbox));
        builder.settings.inbox = InboxUse::NoHandler;
        builder
    }

    /// The handler of messages. It is a type that implements [`Handler`], a function or closure in
    /// [`handler_fn`](crate::handler_fn), or a [`Router`](crate::Router).
    pub fn handler<H2: Handler>(self, handler: H2) -> Builder<S, T, H2, D> {
        let Self {
            source,
            store,
            decode,
            mut settings,
            scope,
            ..
        } = self;
        if settings.inbox != InboxUse::None {
            settings.inbox = InboxUse::NoHandler;
        }
        settings.replies = settings.replies.replaced();
        Builder {
            source,
            store,
            handler,
            decode,
            settings,
            scope,
        }
    }

    /// The decoder that turns a message body into the handler's payload. Default: JSON.
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

    /// The guarantee, which decides whether a handler runs again when it is unknown whether its
    /// effect happened. Default: effectively once.
    pub fn guarantee(mut self, guarantee: Guarantee) -> Self {
        self.settings.guarantee = guarantee;
        self
    }

    /// Where the idempotency key of a message is read from. There is no default: a wrong guess
    /// would skip messages.
    pub fn id(mut self, id: impl IntoIdSource) -> Self {
        self.settings.id = Some(id.into_id_source());
        self
    }

    /// The name of this consumer in its keys in the store: without a scope, two services that share
    /// a store skip each other's messages. 1 to 100 bytes of `[A-Za-z0-9._:@/+=-]`.
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// Whether a message is a conflict if the store has its id with a different body. Default:
    /// compares bodies in at most once, and nothing otherwise.
    pub fn fingerprints(mut self, fingerprints: Fingerprints) -> Self {
        self.settings.fingerprints = fingerprints;
        self
    }

    /// The dedup window: how long the id of a handled message is remembered, at least 1 s. Default:
    /// 24 h.
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.settings.dedup_window = window;
        self
    }

    /// How long a claim is valid without renewal, at least 100 ms; it is renewed after a third of
    /// that. Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// Sets the lease for handlers that run up to this long: twice as long, plus 1 s. A handler may
    /// run longer, because leases are renewed. A longer lease delays the redelivery after a crash,
    /// and tolerates a longer pause of the process.
    pub fn lease_for(self, longest_run: Duration) -> Self {
        self.lease(lease_for(longest_run))
    }

    /// Adapts the lease to the duration of handlers: twice the 99th percentile, plus 1 s, within
    /// these bounds, each at least 100 ms. Until 512 runs were measured, it is the longest.
    pub fn adaptive_lease(mut self, shortest: Duration, longest: Duration) -> Self {
        self.settings.lease = longest.max(shortest);
        self.settings.shortest_lease = Some(shortest);
        self
    }

    /// Sets the dedup window for messages that may be redelivered for this long: twice as long.
    /// That is the time from the first delivery to the last possible copy, which depends on the
    /// broker's retention and the producers' retries.
    pub fn dedup_window_for(self, redelivered_for: Duration) -> Self {
        self.dedup_window(redelivered_for.saturating_mul(2))
    }

    /// The maximum number of attempts before a message is dead-lettered, at least 1. Default: 5.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.max_attempts = attempts;
        self
    }

    /// The maximum number of processes that may crash while they handle a message before it is
    /// dead-lettered as `crashes-spent`, or goes to the in-doubt queue in at most once; at least 2.
    /// Default: 10.
    ///
    /// A crash does not count towards [`max_attempts`](Self::max_attempts), because a process may
    /// be killed for other reasons. After two crashes the message runs in isolation: in a group of
    /// such messages, or alone if the next crash would dead-letter it. No other message is claimed
    /// until the messages in isolation are finished.
    pub fn max_crashes(mut self, crashes: u32) -> Self {
        self.settings.max_crashes = crashes;
        self
    }

    /// The seed of the jitter of pauses, so that a test can repeat its schedule.
    #[doc(hidden)]
    pub fn jitter_seed(mut self, seed: u64) -> Self {
        self.settings.jitter_seed = Some(seed);
        self
    }

    /// The maximum number of retries within one attempt, without a redelivery. Default: 3.
    pub fn max_inline_retries(mut self, retries: u32) -> Self {
        self.settings.max_inline_retries = retries;
        self
    }

    /// The first and the longest pause before a retry; the longest must not be shorter. The pauses
    /// double, with jitter: from one attempt to the next, and between the inline retries of an attempt,
    /// which start at the first pause again. Default: 100 ms and 10 s.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        self.settings.backoff = first;
        self.settings.longest_backoff = longest;
        self
    }

    /// The maximum number of `reconcile` calls before a message goes to the in-doubt queue, at
    /// least 1. Default: 5. A call that crashes its process also counts towards
    /// [`max_crashes`](Self::max_crashes).
    pub fn max_reconciles(mut self, reconciles: u32) -> Self {
        self.settings.max_reconciles = reconciles;
        self
    }

    /// The timeout of a handler. At the timeout it is dropped, and its outcome is unknown. Default:
    /// 5 min.
    pub fn handler_timeout(mut self, timeout: Duration) -> Self {
        self.settings.handler_timeout = timeout;
        self
    }

    /// The maximum number of deliveries that are claimed or handled at once, at least 1. As many
    /// again may wait for the store to record their completion. Default: 512.
    pub fn max_in_flight(mut self, count: usize) -> Self {
        self.settings.max_in_flight = count;
        self
    }

    /// The maximum number of bytes in flight; a single delivery may be larger. Default: 64 MiB.
    pub fn max_in_flight_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_in_flight_bytes = bytes;
        self
    }

    /// The maximum number of queued deliveries, at least 1: those that wait for their next attempt,
    /// after a failure or for another holder of their id, or behind another of their key or
    /// partition. They are not in flight. At the limit nothing is received until one of them
    /// proceeds; a source with delay queues (RabbitMQ) delays deliveries without an ordering key
    /// there instead. Default: 10,000.
    pub fn max_queued(mut self, count: usize) -> Self {
        self.settings.max_queued = count;
        self
    }

    /// The maximum number of queued bytes; one delivery may exceed it. Default: 64 MiB.
    pub fn max_queued_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_queued_bytes = bytes;
        self
    }

    /// How long handlers may continue to run after the consumer begins to stop. Default: 30 s. A
    /// handler that still runs then is dropped: its outcome is unknown, which counts as an attempt
    /// and not as a crash. The consumer then waits up to 2 s more for the store to record these
    /// outcomes.
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.settings.drain_timeout = timeout;
        self
    }

    /// The maximum age of a message that counts as new when the store does not know its id. An
    /// older one is in doubt in at most once, otherwise it is handled. All older messages are counted
    /// as `too_old`. Default: half of the dedup window.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.settings.max_age = Some(age);
        self
    }

    /// Which messages are handled one after the other. Default: by key on Kafka, unordered on
    /// RabbitMQ.
    pub fn order(mut self, order: Order) -> Self {
        self.settings.order = Some(order);
        self
    }

    /// Where handlers run. Default: each in its own tokio task.
    pub fn execution(mut self, execution: Execution) -> Self {
        self.settings.execution = execution;
        self
    }

    /// What to do while the store is unavailable. Default: hold messages until it answers.
    pub fn outage(mut self, outage: Outage) -> Self {
        self.settings.outage = outage;
        self
    }

    /// Checks the settings as the consumer does before it starts. Connects to nothing. Only
    /// [`build`](Self::build) checks that there is an id, and that the source has what it is read
    /// from.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] or [`Error::Scope`] names the first wrong setting and its remedy.
    pub fn check(&self) -> Result<(), Error> {
        self.settings.check()?;
        if let Some(scope) = &self.scope {
            Scope::named(scope)?;
        }
        self.settings.id.as_ref().map_or(Ok(()), check_id)
    }

    /// How long a delivery may stay unsettled with these settings: two leases, while another holder
    /// has its id, then the first run and all inline retries, each up to the handler timeout, with
    /// the longest pauses between. `reconcile` and queueing behind an ordering key may add to that. A broker
    /// that limits this, as RabbitMQ does with `consumer_timeout`, has to allow more.
    pub fn max_unsettled_time(&self) -> Duration {
        self.settings.max_unsettled_time()
    }

    /// The readiness that the consumer updates, for a readiness probe.
    pub fn readiness(mut self, readiness: Readiness) -> Self {
        self.settings.readiness = readiness;
        self
    }

    /// The status that the consumer updates, for a status page: its deliveries in flight, the
    /// oldest of them, and its store.
    pub fn status(mut self, status: ConsumerStatus) -> Self {
        self.settings.status = Some(status);
        self
    }

    /// Allows at most once, or an inbox, on a store that may lose data in a crash. You accept that
    /// a message whose id is lost may run again.
    pub fn allow_volatile_store(mut self) -> Self {
        self.settings.volatile_store = VolatileStore::Allowed;
        self
    }
}

impl<S: Connect, T: Store + 'static, H, D> Builder<S, T, H, D> {
    /// The handler of messages whose senders expect a reply: see [`replies`](crate::replies). Call it
    /// after [`source`](Builder::source) and [`store`](Builder::store). The store must keep results
    /// ([`Store::results`]), and the guarantee must not be [`Guarantee::Bare`].
    ///
    /// A message is settled after its reply was sent, so up to 1,000 handled messages may be unsettled.
    /// Bodies are compared, unless [`fingerprints`](Self::fingerprints) says otherwise.
    pub fn replying_handler<H2: ReplyingHandler, P: Publisher>(
        self,
        handler: H2,
        replies: Replies<P>,
    ) -> Builder<ReplySource<S, P>, ReplyStore, Replying<H2>, D> {
        let Self {
            source,
            store,
            decode,
            mut settings,
            scope,
            ..
        } = self;
        let (pending, store) = (Arc::default(), Arc::new(store) as Arc<dyn Store>);
        settings.replies = ReplyUse::Replies;
        // Without it, another request that uses the id by mistake would get the reply.
        if let Fingerprints::ByGuarantee = settings.fingerprints {
            settings.fingerprints = Fingerprints::Body;
        }
        Builder {
            handler: Replying::new(handler, Arc::clone(&pending), &replies),
            store: ReplyStore {
                store: Arc::clone(&store),
                pending: Arc::clone(&pending),
            },
            source: ReplySource {
                source,
                replies,
                store,
                pending,
            },
            decode,
            settings,
            scope,
        }
    }
}

impl<S, I: Inbox, H, D> Builder<S, InboxStore<I>, H, D> {
    /// The handler of messages, in transactions of the inbox. Lowers
    /// [`max_in_flight`](Self::max_in_flight) to the number of transactions that the inbox can have.
    pub fn transactional_handler<H2: TransactionalHandler<I>>(
        self,
        handler: H2,
    ) -> Builder<S, InboxStore<I>, InTransaction<H2, I>, D> {
        let max_transactions = self.store.max_transactions();
        let handler = self.store.in_transaction(handler);
        let mut builder = self.handler(handler);
        let settings = &mut builder.settings;
        settings.inbox = InboxUse::Transactions { max_transactions };
        settings.max_in_flight = settings.max_in_flight.min(max_transactions);
        builder
    }

    /// The handler of batches of messages, each in one transaction of the inbox, with at most
    /// [`max_in_flight`](Self::max_in_flight) messages.
    pub fn batch_transactional_handler<H2: BatchTransactionalHandler<I>>(
        self,
        handler: H2,
    ) -> Builder<S, InboxStore<I>, InBatches<H2, I>, D> {
        let handler = self.store.in_batches(handler);
        let mut builder = self.handler(handler);
        builder.settings.inbox = InboxUse::Batches;
        builder
    }
}

impl<S, T, H, D> Builder<S, T, H, D> {
    /// Checks the settings as [`check`](Self::check) does, and that the source has what the id is
    /// read from (Kafka has no `message_id`, RabbitMQ no position); returns the consumer.
    /// [`Consumer::run_until`] connects.
    ///
    /// # Errors
    /// [`Error::Misconfigured`], [`Error::Scope`] or [`Error::Source`] names the first wrong setting
    /// and its remedy.
    pub fn build(self) -> Result<Consumer, Error>
    where
        S: Connect,
        T: Store + 'static,
        H: Handler,
        D: Decode,
    {
        self.check()?;
        self.handler
            .check_routes()
            .map_err(|problem| Error::Misconfigured {
                setting: "handler",
                problem,
                remedy: "name the header, and each route once",
            })?;
        let Self {
            source,
            store,
            handler,
            decode,
            mut settings,
            scope,
        } = self;
        if let Some(scope) = scope {
            settings.scope = Scope::named(&scope)?;
        }
        let Some(id) = settings.id.take() else {
            let problem = "it is not set, and a wrong default would skip messages".to_owned();
            return Err(Error::Misconfigured {
                setting: "id",
                problem,
                remedy: "set where the idempotency key is read from: IdSource::header(\"…\"), IdSource::message_id(), …",
            });
        };
        source.check_id(&id)?;
        let status = settings.status.get_or_insert_default().clone();
        let readiness = settings.readiness.clone();
        let drain = DrainHandle::new();
        let runner = Runner {
            handler,
            decode,
            timeout: settings.handler_timeout,
            scope: settings.scope.clone(),
        };
        let run = run(source, Arc::new(store), runner, id, settings, drain.clone());
        Ok(Consumer::new(Box::pin(run), status, readiness, drain))
    }

    /// [Builds](Self::build) the consumer and [runs](Consumer::run_until) it until `shutdown`
    /// completes, with any output.
    ///
    /// # Errors
    /// Those of [`build`](Self::build) and [`Consumer::run_until`].
    pub async fn run_until(self, shutdown: impl Future) -> Result<(), Error>
    where
        S: Connect,
        T: Store + 'static,
        H: Handler,
        D: Decode,
    {
        self.build()?.run_until(shutdown).await
    }
}

/// Checks the store, connects the source, and runs the engine until the handle starts a drain.
async fn run<S: Connect, H: Handler, D: Decode>(
    source: S,
    store: Arc<dyn Store>,
    runner: Runner<H, D>,
    id: IdSource,
    settings: Settings,
    drain: DrainHandle,
) -> Result<(), Error> {
    let mut shutdown = std::pin::pin!(drain.started());
    let _clear_on_drop = ClearStatusOnDrop(settings.status.clone());
    if let Some(status) = &settings.status {
        status.start(store.described());
    }
    let connected = async {
        preflight(&*store, &settings).await?;
        let options = ConnectOptions {
            max_in_flight: Some(settings.max_in_flight),
            dedup_window: Some(settings.dedup_window),
            order: settings.order,
            max_unsettled_time: Some(settings.max_unsettled_time()),
            id: Some(id.clone()),
            recording: Recording {
                scope: settings.scope.clone(),
                fingerprints: settings.fingerprints.clone(),
                guarantee: settings.guarantee,
            },
        };
        Ok::<_, Error>(source.connect(options).await?)
    };
    let source = tokio::select! {
        connected = connected => connected?,
        () = &mut shutdown => return Ok(()),
    };
    tracing::info!(guarantee = ?settings.guarantee, id_source = ?id, dedup_window = ?settings.dedup_window, lease = ?settings.lease, "consumer started");
    let source = Box::new(source) as Box<dyn Source>;
    Engine::new(source, store, runner, id, settings)?
        .run(shutdown)
        .await
}

fn check_id(id: &IdSource) -> Result<(), Error> {
    id.check().map_err(|problem| Error::Misconfigured {
        setting: "id",
        problem,
        remedy: "name the header, write a JSON pointer (RFC 6901) such as `/payment/id`, with `~1` for `/` and `~0` for `~` in a name, and list at least one source, a body hash or position only as the last one",
    })
}
