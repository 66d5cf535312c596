//! Starts handlers, and keeps the deliveries that wait for a run.

use std::collections::VecDeque;
use std::sync::Arc;

use super::runs::{FinishedRun, FinishedRuns, RunKind, RunTicket, StartRun, StartedRun, starter};
use super::suspects::Suspects;
use crate::boot_time::BootTime;
use crate::context::Context;
use crate::decode::Decode;
use crate::handler::Handler;
use crate::run::Runner;
use crate::settings::Settings;
use crate::slots::Slot;

/// Starts runs of the handler, at most `max_runs` at a time, and those of [`Suspects`] in
/// isolation.
///
/// The engine ignores the result of a run if the `InFlightEntry::generation` of its delivery has
/// changed since.
pub(super) struct Executor {
    runs: Box<dyn StartRun>,
    max_runs: usize,
    pub(super) suspects: Suspects,
    /// Deliveries that wait until fewer than `max_runs` runs are active.
    awaiting_run: VecDeque<Slot>,
    /// How many runs were spawned since the loop last yielded to them.
    spawned: usize,
    finished: Arc<FinishedRuns>,
}

impl Executor {
    pub(super) fn new<H: Handler, D: Decode>(runner: Runner<H, D>, settings: &Settings) -> Self {
        let finished = Arc::<FinishedRuns>::default();
        Self {
            runs: starter(runner, settings.execution, finished.clone()),
            max_runs: settings.max_in_flight,
            suspects: Suspects::new(settings.max_in_flight),
            awaiting_run: VecDeque::new(),
            spawned: 0,
            finished,
        }
    }

    #[inline]
    pub(super) fn start(
        &mut self,
        kind: RunKind,
        cx: Context,
        now: BootTime,
        ticket: RunTicket,
    ) -> StartedRun {
        let started = self.runs.start(kind, cx, now, ticket);
        if let StartedRun::Task { .. } = started {
            self.spawned += 1;
        }
        started
    }

    /// Whether runs were spawned since the last call: the loop then yields to them, so that the
    /// operations of handlers that return at once share a batch.
    pub(super) fn take_spawned(&mut self) -> bool {
        std::mem::take(&mut self.spawned) > 0
    }

    /// Moves the results of spawned runs to `into`, which is empty.
    pub(super) fn take_finished(&self, into: &mut Vec<FinishedRun>) {
        self.finished.take(into);
    }

    /// Completes when a spawned run has ended.
    pub(super) fn finished(&self) -> impl Future<Output = ()> + use<> {
        let finished = self.finished.clone();
        async move { finished.wait().await }
    }

    /// Queues a delivery if `running`, the number of active runs, is `max_runs`. Returns whether it
    /// was queued.
    #[inline]
    pub(super) fn queue_if_full(&mut self, slot: Slot, running: usize) -> bool {
        // More than `max_runs` deliveries may be ready: while a delivery completes, another one
        // starts, and if the store then reports that its claim was lost, the first one claims and
        // runs again.
        let is_full = running >= self.max_runs;
        if is_full {
            self.awaiting_run.push_back(slot);
        }
        is_full
    }

    /// Whether a delivery may run now without overtaking another.
    #[inline]
    pub(super) fn may_run_at_once(&self, running: usize) -> bool {
        running < self.max_runs && self.nothing_to_start()
    }

    /// Whether no delivery waits for a run and no suspect is admitted.
    #[inline]
    pub(super) fn nothing_to_start(&self) -> bool {
        self.awaiting_run.is_empty() && !self.suspects.has_admitted()
    }

    /// The next delivery to run, if fewer than `max_runs` runs are active: a suspect if
    /// `suspects_may_run` returns true, otherwise the first of the queue. `is_ready` returns
    /// whether a delivery still waits for its run.
    pub(super) fn next_runnable(
        &mut self,
        running: usize,
        suspects_may_run: impl FnOnce() -> bool,
        is_ready: impl Fn(Slot) -> bool,
    ) -> Option<Slot> {
        if running >= self.max_runs {
            return None;
        }
        let suspect = || self.suspects.admitted().find(|slot| is_ready(*slot));
        if let Some(slot) = suspects_may_run().then(suspect).flatten() {
            return Some(slot);
        }
        while let Some(slot) = self.awaiting_run.pop_front() {
            if is_ready(slot) {
                return Some(slot);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::context::SharedDelivery;
    use crate::decode::RawBytes;
    use crate::handler::Failure;
    use crate::id::MessageId;
    use crate::lifecycle::{Event, Isolation, Outcome};
    use crate::marker::{Guarantee, Terms};
    use crate::message::Message;
    use crate::settings::Execution;
    use crate::slots::Slots;

    /// Sleeps as many seconds as its body has bytes.
    struct Sleeper;

    impl Handler for Sleeper {
        type Payload = serde::de::IgnoredAny;

        async fn handle(&self, _: serde::de::IgnoredAny, cx: &Context) -> Result<(), Failure> {
            let seconds = cx.message().body.len() as u64;
            if seconds > 0 {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
            }
            Ok(())
        }
    }

    fn executor(execution: Execution) -> Executor {
        let settings = Settings {
            execution,
            max_in_flight: 4,
            ..Settings::default()
        };
        let runner = Runner {
            handler: Sleeper,
            decode: RawBytes,
            timeout: Duration::from_secs(10),
            scope: Default::default(),
        };
        Executor::new(runner, &settings)
    }

    fn context(seconds: usize) -> Context {
        Context(Arc::new(SharedDelivery {
            id: MessageId::new("1"),
            message: Some(Message::new(vec![0; seconds])),
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: Duration::from_secs(1),
                window: Duration::from_secs(1),
                fingerprint: None,
            },
            failures: 0,
            attempt: 1,
            lease: None,
        }))
    }

    const DONE: Event = Event::Returned(Outcome::Done);

    #[tokio::test(start_paused = true)]
    async fn an_inline_run_that_is_ready_ends_at_once_and_a_pending_one_becomes_a_task() {
        let mut executor = executor(Execution::Inline);
        let slot = Slots::new(1).insert(());
        for generation in 0..3 {
            let (ticket, now) = (RunTicket { slot, generation }, BootTime::now());
            match executor.start(RunKind::Handle, context(0), now, ticket) {
                StartedRun::Finished(result) => assert_eq!(result.event, DONE),
                StartedRun::Task { .. } => panic!("it was spawned"),
            }
            let StartedRun::Task { task: _task, .. } =
                executor.start(RunKind::Handle, context(5), now, ticket)
            else {
                panic!("it ended at once");
            };
            assert!(executor.take_spawned() && !executor.take_spawned());
            executor.finished().await;
            let mut finished = Vec::new();
            executor.take_finished(&mut finished);
            let [run] = &finished[..] else {
                panic!("{} results", finished.len());
            };
            assert_eq!((run.ticket, run.result.event), (ticket, DONE));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_task_reports_that_its_outcome_is_unknown() {
        let mut executor = executor(Execution::Spawned);
        let slot = Slots::new(1).insert(());
        let (ticket, now) = (
            RunTicket {
                slot,
                generation: 7,
            },
            BootTime::now(),
        );
        let started = executor.start(RunKind::Handle, context(5), now, ticket);
        drop(started);
        executor.finished().await;
        let mut finished = Vec::new();
        executor.take_finished(&mut finished);
        assert!(matches!(
            finished[0].result.event,
            Event::Returned(Outcome::Unknown(_))
        ));
    }

    #[test]
    fn runs_are_limited_and_a_suspect_starts_before_those_that_wait() {
        let mut executor = executor(Execution::Inline);
        let mut slots = Slots::new(3);
        let [waits, settled, suspect] = [(); 3].map(|()| slots.insert(()));
        assert!(!executor.queue_if_full(waits, 3) && executor.nothing_to_start());
        assert!(executor.queue_if_full(settled, 4) && executor.queue_if_full(waits, 4));
        assert!(executor.suspects.admit(suspect, Isolation::Alone));
        let mut next = |running, suspects: bool| {
            executor.next_runnable(running, || suspects, |slot| slot != settled)
        };
        assert_eq!(next(4, true), None);
        assert_eq!(next(3, true), Some(suspect));
        assert_eq!(next(3, false), Some(waits));
        assert_eq!(next(3, false), None);
    }
}
