//! Runs a handler of yours in memory, with duplicates, crashes and lost replies.

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
pub use report::{Ended, Reconcile, Report, Run};
use store::Remembered;
use watched::Watched;

/// A consumer in memory, with your handler and the faults that you name. It ends when every message
/// is settled.
///
/// ```no_run
/// # use oncegate_core::{Context, Failure, Handler, async_trait};
/// # use oncegate_testkit::{Effects, Kit};
/// # struct Ship(Effects);
/// # #[async_trait]
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
/// **Time.** Nothing here waits for a lease: that of a consumer which crashed is over at once, and
/// that of one which lives is not. Pauses between attempts are 1 to 10 ms, unless you set others.
/// What the handler itself waits for with `tokio::time` costs nothing in a test with
/// `#[tokio::test(start_paused = true)]`, and its timeout comes as fast.
///
/// **What it cannot show.** One consumer at a time, one process: nothing of brokers, networks and
/// clocks. What is recorded is never forgotten.
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
    /// With every setting at its default, but for short pauses, and without a fault.
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
    /// Messages to deliver: the id, which stands in the property `message_id`, and the payload,
    /// which becomes a body of JSON.
    ///
    /// # Panics
    /// If a payload cannot be written as JSON.
    pub fn messages<P: Serialize>(
        mut self,
        messages: impl IntoIterator<Item = (impl Into<String>, P)>,
    ) -> Self {
        for (id, payload) in messages {
            let id = id.into();
            let body = serde_json::to_vec(&payload)
                .unwrap_or_else(|error| panic!("the payload of {id:?} is no JSON: {error}"));
            self.messages.push(Message::new(body).with_message_id(id));
        }
        self
    }

    /// A message to deliver as it is: with headers or a key, unreadable, or without an id.
    pub fn message(mut self, message: Message) -> Self {
        self.messages.push(message);
        self
    }

    /// Where ids are read from. Default: the property `message_id`, where
    /// [`messages`](Self::messages) writes them.
    pub fn id(mut self, id: IdSource) -> Self {
        self.id = id;
        self
    }

    /// What is promised. Default: effectively once.
    pub fn guarantee(self, guarantee: Guarantee) -> Self {
        self.settings(|consumer| consumer.guarantee(guarantee))
    }

    /// Any other setting of the consumer: attempts, retries, the order, how bodies are decoded.
    /// Source, store, handler and id are the kit's.
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

    /// Delivers each message so many times more. The first copy comes right behind its message,
    /// while that one may still be handled; the others when everything before them is settled.
    pub fn duplicates(mut self, copies: u32) -> Self {
        self.copies = copies;
        self
    }

    /// Ends the consumer, and starts another, each of the first so many times that a handler is
    /// about to start: its claim is recorded, and nothing happened.
    pub fn crash_before_handler(mut self, times: u32) -> Self {
        self.faults.plan(Fault::Before, times);
        self
    }

    /// Ends the consumer, and starts another, so many times while a handler waits at an `.await`:
    /// the first time at the first that is not ready, the second time at the second, and so on.
    pub fn crash_in_handler(mut self, times: u32) -> Self {
        self.faults.plan(Fault::Inside, times);
        self
    }

    /// Ends the consumer, and starts another, each of the first so many times that a handler has
    /// returned: whatever it did stands, and nobody has written that down.
    pub fn crash_after_handler(mut self, times: u32) -> Self {
        self.faults.plan(Fault::After, times);
        self
    }

    /// Loses the replies to the first so many requests that hold a claim, and to the first so many
    /// that hold a completion. The store has carried them out. Each costs 0.1 s, for which a
    /// consumer leaves a silent store alone.
    pub fn lost_replies(mut self, times: u32) -> Self {
        self.faults.plan(Fault::ReplyToClaim, times);
        self.faults.plan(Fault::ReplyToCompletion, times);
        self
    }

    /// Delivers everything, and says what became of it.
    ///
    /// # Panics
    /// If the consumer ends with an error, such as a wrong setting; and if a fault that was asked
    /// for never came to pass, since a test that passes without it shows nothing.
    pub async fn run(self) -> Report {
        let broker = MemoryBroker::new("kit");
        let faults = Arc::new(self.faults);
        let handler = Arc::new(self.handler);
        let mut store = Remembered::new(broker.clone(), self.id.clone());
        for wave in 0..=self.copies {
            if wave == 1 {
                continue; // came with the messages themselves
            }
            for message in &self.messages {
                broker.publish(message.clone());
                if wave == 0 && self.copies > 0 {
                    broker.publish(message.clone());
                }
            }
            loop {
                let watched = Watched::new(handler.clone(), faults.clone());
                let loses = faults.clone();
                let all = broker.clone();
                let consumer = self
                    .consumer
                    .clone()
                    .source(broker.source())
                    .id(self.id.clone())
                    .handler(watched);
                let consumer = consumer.store(LosesReplies::new(
                    Arc::new(store.clone()),
                    move |asked: &_| loses.reply(asked),
                ));
                let ended: Result<(), Error> = tokio::select! {
                    biased;
                    () = faults.crash() => {
                        faults.buried().await;
                        store = store.after_a_crash();
                        continue;
                    }
                    ended = consumer.run_until(async move { all.drained().await }) => ended,
                };
                ended.unwrap_or_else(|error| panic!("the consumer ended: {error}"));
                break;
            }
        }
        faults.assert_all_came_to_pass();
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
