//! Runs a handler in memory, with duplicates, crashes and lost replies.

mod effects;
mod faults;
mod report;
mod store;
mod watched;

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Builder, Consumer, Decode, Error, Guarantee, Handler, IdSource, Json, MemoryBroker, Message,
};
use serde::Serialize;

use crate::LosesReplies;
pub use effects::Effects;
use faults::{Fault, Faults};
pub use report::{HandlerResult, Reconcile, Report, Run};
use store::KitStore;
use watched::WatchedHandler;

/// An in-memory consumer with your handler and the configured faults. It ends when every message is
/// settled.
///
/// ```no_run
/// # use oncegate_core::{Context, Failure, Handler};
/// # use oncegate_testkit::{Effects, Kit};
/// # struct Ship(Effects);
/// # impl Handler for Ship {
/// #     type Payload = String;
/// #     async fn handle(&self, _: String, _: &Context) -> Result<(), Failure> { Ok(()) }
/// # }
/// # async fn in_a_test(shipped: Effects) {
/// let run = Kit::new(Ship(shipped.clone())).messages([("order-1", "tea"), ("order-2", "milk")]);
/// let report = run.duplicates(2).crash_after_handler(1).lost_replies(1).run().await;
/// report.assert_none_lost(|id| shipped.count(id)).assert_none_twice(|id| shipped.count(id));
/// # }
/// ```
///
/// **Time.** Nothing waits for a lease: the lease of a crashed consumer has expired immediately,
/// and that of a live one does not expire. Pauses between attempts are 1 to 10 ms by default. In a
/// test with `#[tokio::test(start_paused = true)]`, waiting with `tokio::time` takes no real time,
/// also in the handler and for its timeout.
///
/// **Limits.** It runs one consumer at a time in one process, without brokers, networks and clock
/// errors. The store never loses data.
#[derive(Debug)]
#[must_use = "nothing runs until `run` is awaited"]
pub struct Kit<H, D = Json> {
    handler: H,
    consumer: Builder<(), (), (), D>,
    id: IdSource,
    messages: Vec<Message>,
    copies: u32,
    faults: Faults,
}

impl<H: Handler> Kit<H> {
    /// A kit without messages and faults. The consumer has its default settings, except that it
    /// pauses 1 to 10 ms between attempts and allows a volatile store.
    pub fn new(handler: H) -> Self {
        let consumer = Consumer::builder()
            .backoff(Duration::from_millis(1), Duration::from_millis(10))
            .allow_volatile_store();
        Self {
            handler,
            consumer,
            id: IdSource::message_id(),
            messages: Vec::new(),
            copies: 0,
            faults: Faults::default(),
        }
    }
}

impl<H: Handler, D: Decode + Clone> Kit<H, D> {
    /// Messages to deliver: the id, written to the property `message_id`, and the payload, written
    /// as a JSON body.
    ///
    /// # Panics
    /// If a payload cannot be serialized as JSON.
    pub fn messages<P: Serialize>(
        mut self,
        messages: impl IntoIterator<Item = (impl Into<String>, P)>,
    ) -> Self {
        for (id, payload) in messages {
            let id = id.into();
            let body = serde_json::to_vec(&payload).unwrap_or_else(|error| {
                panic!("cannot serialize the payload of {id:?} as JSON: {error}")
            });
            self.messages.push(Message::new(body).with_message_id(id));
        }
        self
    }

    /// A message to deliver unchanged: with headers or a key, malformed, or without an id.
    pub fn message(mut self, message: Message) -> Self {
        self.messages.push(message);
        self
    }

    /// The source of ids. Default: the property `message_id`, to which [`messages`](Self::messages)
    /// writes them.
    pub fn id(mut self, id: IdSource) -> Self {
        self.id = id;
        self
    }

    /// The guarantee. Default: effectively once.
    pub fn guarantee(self, guarantee: Guarantee) -> Self {
        self.settings(|consumer| consumer.guarantee(guarantee))
    }

    /// Any other setting of the consumer: attempts, retries, the order, the decoding of bodies. The
    /// kit sets source, store, handler and id.
    pub fn settings<D2: Decode>(
        self,
        set: impl FnOnce(Builder<(), (), (), D>) -> Builder<(), (), (), D2>,
    ) -> Kit<H, D2> {
        let Self {
            handler,
            consumer,
            id,
            messages,
            copies,
            faults,
        } = self;
        Kit {
            handler,
            consumer: set(consumer),
            id,
            messages,
            copies,
            faults,
        }
    }

    /// Delivers each message this many more times: the first copy directly after its message, whose
    /// handler may still run; each further copy after all earlier deliveries are settled.
    pub fn duplicates(mut self, copies: u32) -> Self {
        self.copies = copies;
        self
    }

    /// Crashes and restarts the consumer before each of the first `times` runs of a handler, after
    /// the claim was recorded.
    pub fn crash_before_handler(mut self, times: u32) -> Self {
        self.faults.plan(Fault::BeforeHandler, times);
        self
    }

    /// Crashes and restarts the consumer `times` times while a handler waits: the first time at the
    /// handler's first `.await` that is not ready, the second time at its second, and so on.
    pub fn crash_in_handler(mut self, times: u32) -> Self {
        self.faults.plan(Fault::InHandler, times);
        self
    }

    /// Crashes and restarts the consumer after each of the first `times` runs of a handler: the
    /// handler has returned, and its result is not recorded.
    pub fn crash_after_handler(mut self, times: u32) -> Self {
        self.faults.plan(Fault::AfterHandler, times);
        self
    }

    /// Loses the replies to the first `times` store requests that contain a claim, and to the first
    /// `times` that contain a completion. The store has executed these requests. Each lost reply
    /// costs 0.1 s, the pause of a consumer after a store failure; the pause doubles for consecutive
    /// ones, up to 1 s.
    pub fn lost_replies(mut self, times: u32) -> Self {
        self.faults.plan(Fault::ReplyToClaim, times);
        self.faults.plan(Fault::ReplyToCompletion, times);
        self
    }

    /// Delivers all messages and reports the results.
    ///
    /// # Panics
    /// If the consumer ends with an error, such as an invalid setting; and if a configured fault
    /// (except a lost reply to a completion) did not occur, because the test would then prove
    /// nothing.
    pub async fn run(self) -> Report {
        let broker = MemoryBroker::new("kit");
        let faults = Arc::new(self.faults);
        let handler = Arc::new(self.handler);
        let mut store = KitStore::new(broker.clone(), self.id.clone());
        for round in 0..=self.copies {
            if round == 1 {
                continue; // the first copies are published with the original messages
            }
            for message in &self.messages {
                broker.publish(message.clone());
                if round == 0 && self.copies > 0 {
                    broker.publish(message.clone());
                }
            }
            loop {
                let watched = WatchedHandler::new(handler.clone(), faults.clone());
                let reply_faults = faults.clone();
                let watched_broker = broker.clone();
                let consumer = self
                    .consumer
                    .clone()
                    .source(broker.source())
                    .id(self.id.clone())
                    .handler(watched);
                let consumer = consumer.store(LosesReplies::new(
                    Arc::new(store.clone()),
                    move |operations: &_| reply_faults.reply_fault(operations),
                ));
                let ended: Result<(), Error> = tokio::select! {
                    biased;
                    () = faults.crash_started() => {
                        faults.wait_for_handlers().await;
                        store = store.after_a_crash();
                        continue;
                    }
                    ended = consumer.run_until(async move { watched_broker.all_settled().await }) => ended,
                };
                ended.unwrap_or_else(|error| panic!("the consumer ended: {error}"));
                break;
            }
        }
        faults.assert_all_occurred();
        let ids = self
            .messages
            .iter()
            .filter_map(|message| self.id.read(message).ok())
            .map(|id| id.to_string())
            .collect();
        let (runs, reconciles) = faults.runs();
        Report::new(ids, runs, reconciles, &broker, &self.id)
    }
}
