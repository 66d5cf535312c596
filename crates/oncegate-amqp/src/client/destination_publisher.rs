//! Publishes the copies for one queue with publisher confirms. Many copies may wait for their
//! confirms at the same time.

use std::collections::VecDeque;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Connection};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use crate::client::confirm_timeout::CONFIRM_TIMEOUT;
use crate::client::connector::{code, reply_code};
use crate::client::next_ready::next_ready;
use crate::client::publisher::PublisherContext;
use crate::client::refusing_channel;
use crate::protocol::confirm_window::{ConfirmWindow, FailedWindow, PublishFailure};
use crate::protocol::message_copy::MessageCopy;
use oncegate_core::internal::Backoff;

/// Maximum number of unconfirmed copies on a channel. Usually the prefetch limits them first: an original
/// is unacknowledged until its copy is confirmed.
const MAX_WINDOW: usize = 4_096;

/// Maximum number of [isolated](DestinationPublisher::isolate) copies of a queue. If every copy fails,
/// for example without the write permission, more isolated ones would only close more channels.
const MAX_ISOLATED: usize = 8;

/// The publisher of the copies for one queue, or of one isolated copy.
pub(crate) struct DestinationPublisher {
    context: Arc<PublisherContext>,
    /// New copies from the driver; `None` for the publisher of an isolated copy.
    copies: Option<UnboundedReceiver<MessageCopy>>,
    /// Copies to publish, in their order.
    waiting: VecDeque<Arc<MessageCopy>>,
    /// Maximum number of unconfirmed copies. 1 after a failure, to find out which copy fails and to
    /// publish no other copy twice; grows with each confirm.
    window_limit: usize,
    backoff: Backoff,
    /// When to publish again after a failure.
    publish_at: Instant,
    /// The publishers of isolated copies.
    isolated: FuturesUnordered<BoxFuture<'static, ()>>,
}

/// Nothing is left to publish: the publisher is closed, or its isolated copy is confirmed or
/// obsolete.
struct Finished;

/// Why nothing more is published on a channel.
enum ChannelEnd {
    /// It was closed while no copy was outstanding.
    ClosedWhileIdle,
    Failed(FailedWindow<Arc<MessageCopy>>),
}

impl DestinationPublisher {
    pub(crate) fn new(
        context: Arc<PublisherContext>,
        copies: UnboundedReceiver<MessageCopy>,
    ) -> Self {
        Self {
            context,
            copies: Some(copies),
            waiting: VecDeque::new(),
            window_limit: MAX_WINDOW,
            backoff: Backoff::default(),
            publish_at: Instant::now(),
            isolated: FuturesUnordered::new(),
        }
    }

    /// Publishes all copies until the publisher is closed.
    pub(crate) async fn run(mut self) {
        while let Ok(()) = self.publish_on_next_channel().await {}
    }

    /// Waits for a copy and for the backoff after a failure, then opens a channel and publishes
    /// copies until the channel ends.
    async fn publish_on_next_channel(&mut self) -> Result<(), Finished> {
        while self.waiting.is_empty() {
            if self.copies.is_none() {
                return Err(Finished);
            }
            self.receive().await?;
        }
        self.receive_during(tokio::time::sleep_until(self.publish_at))
            .await?;
        let context = Arc::clone(&self.context);
        let connection = self.receive_during(context.connection()).await?;
        let opened = self.receive_during(open_channel(&connection)).await?;
        let failed = match opened {
            Ok(channel) => match self.publish_on(&connection, &channel).await? {
                ChannelEnd::ClosedWhileIdle => return Ok(()),
                ChannelEnd::Failed(mut failed) => {
                    if let PublishFailure::ReturnedOrNacked(problem) = &mut failed.failure {
                        refusing_channel::redeclare_and_close(
                            &self.context.source,
                            &connection,
                            &channel,
                            problem,
                            &failed.unconfirmed,
                        )
                        .await;
                    }
                    failed
                }
            },
            Err(error) => ConfirmWindow::new().fail(|| error.to_string()),
        };
        self.retry_unconfirmed(failed);
        Ok(())
    }

    /// Publishes copies on the channel until it ends.
    async fn publish_on(
        &mut self,
        connection: &Connection,
        channel: &Channel,
    ) -> Result<ChannelEnd, Finished> {
        let frame_max = connection.configuration().frame_max();
        let mut window = ConfirmWindow::new();
        let mut confirms = FuturesUnordered::new();
        let mut progress_at = Instant::now();
        loop {
            while !window.has_failed()
                && window.len() < self.window_limit
                && let Some(mut copy) = self.next_copy()
            {
                if window.len() == 0 && !channel.status().connected() {
                    self.waiting.push_front(copy);
                    return Ok(ChannelEnd::ClosedWhileIdle);
                }
                if window.len() == 0 {
                    progress_at = Instant::now();
                }
                Arc::make_mut(&mut copy).drop_oversized_headers(frame_max);
                let sequence = window.publish(Arc::clone(&copy));
                let channel = channel.clone();
                confirms.push(async move { (sequence, publish(&channel, &copy).await) });
            }
            if self.copies.is_none() && window.len() == 0 {
                return Err(Finished);
            }
            if window.has_failed() && confirms.is_empty() {
                return Ok(ChannelEnd::Failed(window.fail(String::new)));
            }
            tokio::select! {
                biased;
                Some((sequence, confirm)) = confirms.next() => {
                    window.record(sequence, confirm);
                    // Record all confirms that have arrived, as `ConfirmWindow` requires.
                    while let Some((sequence, confirm)) = next_ready(&mut confirms) {
                        window.record(sequence, confirm);
                    }
                    progress_at = Instant::now();
                    self.confirm(window.take_confirmed());
                }
                received = self.receive() => received?,
                () = tokio::time::sleep_until(progress_at + CONFIRM_TIMEOUT), if window.len() > 0 => {
                    if !connection.status().blocked() {
                        return Ok(ChannelEnd::Failed(window.fail(confirm_timed_out)));
                    }
                    progress_at = Instant::now();
                }
            }
        }
    }

    /// Receives copies, and runs the publishers of isolated ones. Returns when a copy has arrived.
    async fn receive(&mut self) -> Result<(), Finished> {
        let Some(copies) = &mut self.copies else {
            return std::future::pending().await;
        };
        loop {
            tokio::select! {
                copy = copies.recv() => {
                    let mut next = Some(copy.ok_or(Finished)?);
                    while let Some(copy) = next {
                        // The copy comes from a new consuming channel: copies from the lost one are
                        // obsolete, and would use memory.
                        if self.waiting.back().is_some_and(|last| last.epoch != copy.epoch) {
                            self.waiting.retain(|waiting| !self.context.is_obsolete(waiting));
                        }
                        self.waiting.push_back(Arc::new(copy));
                        next = copies.try_recv().ok();
                    }
                    return Ok(());
                }
                Some(()) = self.isolated.next() => {}
            }
        }
    }

    /// Runs the future, and receives copies until it ends.
    async fn receive_during<T>(&mut self, future: impl Future<Output = T>) -> Result<T, Finished> {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                biased;
                output = &mut future => return Ok(output),
                received = self.receive() => received?,
            }
        }
    }

    /// The next copy that is not obsolete.
    fn next_copy(&mut self) -> Option<Arc<MessageCopy>> {
        loop {
            let copy = self.waiting.pop_front()?;
            if !self.context.is_obsolete(&copy) {
                return Some(copy);
            }
        }
    }

    fn confirm(&mut self, copies: Vec<Arc<MessageCopy>>) {
        if !copies.is_empty() {
            self.window_limit = (self.window_limit + copies.len()).min(MAX_WINDOW);
            self.backoff.reset();
            self.context.report_confirmed(copies);
        }
    }

    /// Moves the unconfirmed copies to the front of `waiting`, and sets the time of the next attempt.
    fn retry_unconfirmed(&mut self, failed: FailedWindow<Arc<MessageCopy>>) {
        let is_probably_caused_by_one_copy = failed.is_probably_caused_by_one_copy();
        self.confirm(failed.confirmed);
        let metrics = &self.context.source.metrics;
        metrics.copies_retried(failed.unconfirmed.len());
        let pause = self.backoff.advance_with_jitter();
        (self.publish_at, self.window_limit) = (Instant::now() + pause, 1);
        for copy in failed.unconfirmed.into_iter().rev() {
            if is_probably_caused_by_one_copy && self.copies.is_some() {
                self.isolate(copy);
            } else {
                self.waiting.push_front(copy);
            }
        }
        self.context.warn(&failed.failure.to_string(), pause);
    }

    /// Moves a copy that closes its channel to a publisher of its own, so that it does not close
    /// the channel of other copies again; or to the end of `waiting` if [`MAX_ISOLATED`] copies are
    /// isolated already.
    fn isolate(&mut self, copy: Arc<MessageCopy>) {
        if self.isolated.len() >= MAX_ISOLATED {
            return self.waiting.push_back(copy);
        }
        let mut backoff = Backoff::default();
        let publisher = Self {
            context: Arc::clone(&self.context),
            copies: None,
            waiting: VecDeque::from([copy]),
            window_limit: 1,
            publish_at: Instant::now() + backoff.advance_with_jitter(),
            backoff,
            isolated: FuturesUnordered::new(),
        };
        self.isolated.push(publisher.run_boxed());
    }

    /// [`run`](Self::run) as a boxed future: the future of a publisher contains the futures of its
    /// isolated copies, so without a box its type would be infinite.
    fn run_boxed(self) -> BoxFuture<'static, ()> {
        Box::pin(self.run())
    }
}

fn confirm_timed_out() -> String {
    format!("no publisher confirm within {CONFIRM_TIMEOUT:?}")
}

/// Opens a channel with publisher confirms.
async fn open_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    Ok(channel)
}

/// Publishes a copy and waits for its confirm.
async fn publish(channel: &Channel, copy: &MessageCopy) -> Result<(), PublishFailure> {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    fault_point(copy, "amqp.delay.before", "amqp.dead-letter.before");
    let publishing = channel.basic_publish(
        "".into(),
        copy.destination.clone(),
        options,
        &copy.body,
        copy.properties.clone(),
    );
    let confirm = match publishing.await {
        Ok(confirm) => confirm.await,
        Err(error) => Err(error),
    };
    let not_enqueued = |problem: &str| {
        Err(PublishFailure::ReturnedOrNacked(format!(
            "the copy for queue `{}` was not enqueued: {problem}",
            copy.destination
        )))
    };
    match confirm {
        Ok(Confirmation::Ack(None)) => {
            fault_point(copy, "amqp.delay.confirmed", "amqp.dead-letter.confirmed");
            Ok(())
        }
        Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => not_enqueued(
            &format!("{}; check that the queue exists", returned.reply_text),
        ),
        Ok(Confirmation::Nack(None)) => not_enqueued(
            "basic.nack; check the length limit of the queue (x-max-length, x-max-length-bytes) and that a majority of its nodes runs",
        ),
        Ok(Confirmation::NotRequested) => Err(PublishFailure::ChannelFailed(
            "publisher confirms are not enabled, which is a bug in oncegate; report this".into(),
        )),
        Err(error) if reply_code(&error) == Some(code::ACCESS_REFUSED) => {
            Err(PublishFailure::ChannelFailed(format!(
                "{error}; grant the user the write permission on the default exchange, amq.default"
            )))
        }
        Err(error) => Err(PublishFailure::ChannelFailed(error.to_string())),
    }
}

/// A fault point of the chaos harness, with one name for delayed copies and one for dead letters.
#[inline(always)]
fn fault_point(copy: &MessageCopy, delay: &str, dead_letter: &str) {
    #[cfg(oncegate_chaos)]
    oncegate_core::internal::fault::point(if copy.destination.as_str().contains(".delay.") {
        delay
    } else {
        dead_letter
    });
    #[cfg(not(oncegate_chaos))]
    let _ = (copy, delay, dead_letter);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::RabbitMq;

    fn publisher() -> DestinationPublisher {
        let source = Arc::new(RabbitMq::queue("orders").check().expect("settings"));
        let context = PublisherContext::for_tests(source, 1);
        DestinationPublisher::new(context, tokio::sync::mpsc::unbounded_channel().1)
    }

    fn copy(tag: u64) -> Arc<MessageCopy> {
        Arc::new(MessageCopy {
            epoch: 1,
            tag,
            destination: "orders.dead-letters".into(),
            properties: lapin::BasicProperties::default(),
            body: "".into(),
        })
    }

    /// A failure of these copies, which closed their channel.
    fn closed(tags: impl IntoIterator<Item = u64>) -> FailedWindow<Arc<MessageCopy>> {
        let mut window = ConfirmWindow::new();
        for tag in tags {
            window.publish(copy(tag));
        }
        window.fail(|| "closed".into())
    }

    fn waiting(publisher: &DestinationPublisher) -> Vec<u64> {
        publisher.waiting.iter().map(|copy| copy.tag).collect()
    }

    #[test]
    fn after_a_failure_copies_are_published_one_by_one_until_confirms_arrive() {
        let mut publisher = publisher();
        publisher.waiting = VecDeque::from([copy(3)]);
        for _ in 0..8 {
            publisher
                .waiting
                .drain(..2.min(publisher.waiting.len() - 1));
            publisher.retry_unconfirmed(closed([1, 2]));
        }
        assert_eq!(
            (waiting(&publisher), publisher.window_limit),
            (vec![1, 2, 3], 1)
        );
        assert!(publisher.publish_at > Instant::now() + Duration::from_secs(2));
        publisher.confirm(vec![copy(1)]);
        publisher.confirm(vec![copy(2), copy(3)]);
        assert_eq!(publisher.window_limit, 4);
        publisher.retry_unconfirmed(closed([4, 5]));
        assert!(
            publisher.publish_at < Instant::now() + Duration::from_secs(1),
            "a confirm resets the backoff"
        );
    }

    #[test]
    fn a_single_copy_that_closes_its_channel_is_isolated() {
        let mut publisher = publisher();
        publisher.retry_unconfirmed(closed([1, 2]));
        assert_eq!(
            (waiting(&publisher), publisher.isolated.len()),
            (vec![1, 2], 0),
            "either copy may have closed the channel"
        );
        publisher.waiting.clear();
        publisher.retry_unconfirmed(closed([1]));
        assert_eq!((waiting(&publisher), publisher.isolated.len()), (vec![], 1));
        let mut isolated = publisher;
        isolated.copies = None;
        isolated.retry_unconfirmed(closed([1]));
        assert_eq!((waiting(&isolated), isolated.isolated.len()), (vec![1], 1));
    }

    #[test]
    fn if_every_copy_closes_its_channel_few_are_isolated_and_none_is_dropped() {
        let mut publisher = publisher();
        publisher.waiting = (1..=500).map(copy).collect();
        for _ in 0..2_000 {
            let Some(first) = publisher.next_copy() else {
                break;
            };
            publisher.retry_unconfirmed(closed([first.tag]));
        }
        assert_eq!(
            (publisher.isolated.len(), publisher.waiting.len()),
            (MAX_ISOLATED, 500 - MAX_ISOLATED)
        );
    }

    #[test]
    fn obsolete_copies_are_not_published() {
        let mut publisher = publisher();
        let of_a_closed_channel = MessageCopy {
            epoch: 9,
            ..(*copy(2)).clone()
        };
        publisher.waiting = [of_a_closed_channel, (*copy(3)).clone()]
            .map(Arc::new)
            .into();
        assert_eq!(publisher.next_copy().map(|copy| copy.tag), Some(3));
        assert!(publisher.next_copy().is_none());
    }
}
