//! Explores every order of events of one partition with a short log: fetches, settlements, commits that
//! the broker applies late, a truncated log, a recreated topic, rebalances and crashes.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use stateright::{Checker, Model, Property};

use super::*;

static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);

/// How often each fault may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Faults {
    truncations: u8,
    recreations: u8,
    rebalances: u8,
    crashes: u8,
    failed_commits: u8,
    releases: u8,
}

/// A commit request that the broker has not applied yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct CommitRequest {
    epoch: u64,
    offset: i64,
    topic: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct QueuedMessage {
    epoch: u64,
    offset: i64,
    message: u8,
}

/// The broker, librdkafka, and a member of the group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    broker: PartitionAtBroker,
    client: PartitionInClient,
    partition: Option<Partition>,
    last_epoch: u64,
    queued: Vec<QueuedMessage>,
    handed_out: Vec<QueuedMessage>,
    handled: BTreeSet<u8>,
    /// The log was truncated below the partition's position, and no record has shown that yet.
    is_truncation_unnoticed: bool,
    /// Offsets above the end of a truncated log were, or may be, committed. They are corrected once
    /// nothing is in flight.
    is_commit_above_log: bool,
    faults: Faults,
}

/// The log at the broker, and the commits of the group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PartitionAtBroker {
    /// The messages by offset; `None` is a transaction marker.
    log: Vec<Option<u8>>,
    /// The topic's id, which a recreation changes.
    topic: u8,
    next_message: u8,
    /// The committed offset, and the topic in its metadata.
    committed: (i64, u8),
    requests: Vec<CommitRequest>,
    /// The offsets of applied requests, in the order of the replies.
    replies: Vec<i64>,
}

/// What librdkafka keeps of the partition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct PartitionInClient {
    /// The offset that it fetches next.
    fetch_position: i64,
    /// The position that it reports; it does not decrease when the log is truncated.
    reported_position: Option<i64>,
    /// The reported position is from before the last assignment or seek.
    is_position_stale: bool,
    /// The offset that it commits later, and the topic in its metadata.
    stored: Option<(i64, u8)>,
    /// The offset that it takes for the committed one.
    last_confirmed: i64,
    /// The source has to tell the partition that the position is wrong.
    is_position_wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Fetch,
    ReportPosition,
    ClearPosition,
    ReportWrongPosition,
    Seek,
    HandOut,
    Settle(usize),
    Release(usize),
    CommitDue,
    CommitStored,
    ApplyCommit(usize),
    ConfirmCommit,
    FailCommit(usize),
    LoseReply,
    Truncate(usize),
    Recreate,
    NoticeRecreation,
    Revoke,
    EndAssignment,
    Crash,
    Assign,
}

fn identity(topic: u8) -> TopicIdentity {
    TopicIdentity {
        topic_id: Arc::from(topic.to_string()),
        cluster_id: None,
    }
}

impl World {
    fn new(log: &[Option<u8>], faults: Faults) -> Self {
        let mut world = Self {
            broker: PartitionAtBroker {
                log: log.to_vec(),
                topic: 0,
                next_message: 10,
                committed: (0, 0),
                requests: Vec::new(),
                replies: Vec::new(),
            },
            client: PartitionInClient::default(),
            partition: None,
            last_epoch: 0,
            queued: Vec::new(),
            handed_out: Vec::new(),
            handled: BTreeSet::new(),
            is_truncation_unnoticed: false,
            is_commit_above_log: false,
            faults,
        };
        world.assign();
        world
    }

    fn end(&self) -> i64 {
        self.broker.log.len() as i64
    }

    fn assign(&mut self) {
        self.last_epoch += 1;
        let committed = CommittedOffset {
            offset: self.broker.committed.0,
            identity: Some(identity(self.broker.committed.1)),
        };
        let current = identity(self.broker.topic);
        // Without cluster ids a recreated topic looks like a mirrored one, so they are the same here.
        let start = if committed.identity.as_ref() == Some(&current) {
            StartPosition::from_committed(&committed, Some(&current))
        } else {
            StartPosition::Recreated
        };
        self.client.fetch_position = start.offset().unwrap_or(LOG_START);
        self.client.is_position_stale = self.client.reported_position.is_some();
        self.client.stored = None;
        self.client.last_confirmed = self.broker.committed.0;
        self.client.is_position_wrong = false;
        let log = LogIdentity {
            identity: Some(current),
            position_ids: PositionIds::Unique,
        };
        self.partition = Some(Partition::new(self.last_epoch, start, log));
    }

    fn end_assignment(&mut self) {
        self.partition = None;
        self.queued.clear();
        self.client.stored = None;
        self.client.is_position_wrong = false;
        self.is_truncation_unnoticed = false;
        self.is_commit_above_log = false;
        // The coordinator refuses requests of a member that has left.
        self.broker.requests.clear();
        self.broker.replies.clear();
    }

    fn state(&self) -> Option<AssignmentState> {
        self.partition.as_ref().map(Partition::state)
    }

    fn apply(&mut self, event: PartitionEvent) -> PartitionAction {
        let Some(partition) = &mut self.partition else {
            return PartitionAction::Nothing;
        };
        let before = partition.epoch();
        let action = partition.apply(event);
        self.last_epoch = self.last_epoch.max(partition.epoch());
        match &action {
            PartitionAction::DropQueued => self.queued.retain(|it| it.epoch != before),
            PartitionAction::Restart { ended, .. } => {
                self.queued.retain(|it| it.epoch != *ended);
                self.is_truncation_unnoticed = false;
            }
            _ => {}
        }
        action
    }

    fn fetch(&mut self) {
        let from = self.client.fetch_position as usize;
        let next = (from..self.broker.log.len()).find(|offset| self.broker.log[*offset].is_some());
        let position = next.map_or(self.end(), |offset| offset as i64 + 1);
        self.client.fetch_position = position;
        self.client.reported_position = self.client.reported_position.max(Some(position));
        let Some((offset, message)) = next.and_then(|it| Some((it as i64, self.broker.log[it]?)))
        else {
            return;
        };
        let next_epoch = self.last_epoch + 1;
        let epoch = match self.apply(PartitionEvent::Fetched { offset, next_epoch }) {
            PartitionAction::Enqueue { .. } => self.partition.as_ref().map(Partition::epoch),
            PartitionAction::Restart {
                cause: RestartCause::Truncated { .. },
                ..
            } => {
                self.client.is_position_wrong = true;
                Some(next_epoch)
            }
            _ => None,
        };
        self.queued.extend(epoch.map(|epoch| QueuedMessage {
            epoch,
            offset,
            message,
        }));
    }

    fn seek(&mut self, target: i64) {
        self.client.fetch_position = target;
        self.client.is_position_stale = self.client.reported_position.is_some();
        self.apply(PartitionEvent::Sought);
    }

    fn send_stored(&mut self) {
        let epoch = self.partition.as_ref().map(Partition::epoch);
        if let (Some((offset, topic)), Some(epoch)) = (self.client.stored, epoch) {
            self.broker.requests.push(CommitRequest {
                epoch,
                offset,
                topic,
            });
        }
    }

    /// The offset that librdkafka will commit by itself.
    fn pending_stored(&self) -> Option<i64> {
        let (offset, _) = self.client.stored?;
        let requests = self.broker.requests.iter().map(|it| it.offset);
        let is_sent = requests
            .chain(self.broker.replies.iter().copied())
            .any(|it| it == offset);
        (offset > self.client.last_confirmed && !is_sent).then_some(offset)
    }

    /// Whether every message below the committed offset is handled.
    fn is_commit_safe(&self) -> bool {
        let (offset, topic) = self.broker.committed;
        let skipped = self.broker.log.iter().take(offset as usize).flatten();
        topic != self.broker.topic || skipped.into_iter().all(|it| self.handled.contains(it))
    }

    /// Whether librdkafka, the broker and the partition have nothing to do before another message is
    /// settled.
    fn is_quiet(&self) -> bool {
        let Some(partition) = &self.partition else {
            return false;
        };
        self.broker.requests.is_empty()
            && self.broker.replies.is_empty()
            && !self.client.is_position_wrong
            && self.pending_stored().is_none()
            && partition.state() == AssignmentState::Active
            && !self.is_recreation_unnoticed()
            && self.client.fetch_position >= self.end()
            && partition.clone().apply(PartitionEvent::CommitDue(*NOW)) == PartitionAction::Nothing
    }

    fn is_recreation_unnoticed(&self) -> bool {
        let partition = self.partition.as_ref();
        partition.is_some_and(|it| it.is_outdated(Some(&identity(self.broker.topic))))
    }
}

struct PartitionInterleavings(World);

impl Model for PartitionInterleavings {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![self.0.clone()]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        let faults = world.faults;
        let mut offer = |is_possible: bool, step| steps.extend(is_possible.then_some(step));
        let is_active = world.state() == Some(AssignmentState::Active);
        let is_read = matches!(
            world.state(),
            Some(AssignmentState::Active | AssignmentState::Seeking)
        );
        let is_assigned = world.partition.is_some();
        let pending_seek = world.partition.as_ref().and_then(Partition::pending_seek);
        offer(world.client.is_position_stale, Step::ClearPosition);
        offer(
            is_read && !world.client.is_position_stale && world.client.fetch_position < world.end(),
            Step::Fetch,
        );
        offer(is_active, Step::ReportPosition);
        offer(
            is_active && world.client.is_position_wrong,
            Step::ReportWrongPosition,
        );
        offer(pending_seek.is_some(), Step::Seek);
        offer(!world.queued.is_empty(), Step::HandOut);
        for index in 0..world.handed_out.len() {
            offer(true, Step::Settle(index));
            offer(faults.releases > 0, Step::Release(index));
        }
        offer(is_assigned, Step::CommitDue);
        offer(world.pending_stored().is_some(), Step::CommitStored);
        for (index, request) in world.broker.requests.iter().enumerate() {
            // A retried request may be applied after those of a later assignment, but librdkafka repeats
            // those of one assignment in order.
            let mut before = world.broker.requests[..index].iter();
            let is_next = before.all(|it| it.epoch != request.epoch);
            offer(is_next, Step::ApplyCommit(index));
            offer(faults.failed_commits > 0, Step::FailCommit(index));
        }
        offer(!world.broker.replies.is_empty(), Step::ConfirmCommit);
        offer(
            !world.broker.replies.is_empty() && faults.failed_commits > 0,
            Step::LoseReply,
        );
        // A seek has no leader epoch, so librdkafka would not find a truncation just before it.
        let is_found = !world.client.is_position_wrong && pending_seek.is_none();
        if faults.truncations > 0 && is_assigned && is_found && !world.is_recreation_unnoticed() {
            (0..world.broker.log.len()).for_each(|length| offer(true, Step::Truncate(length)));
        }
        offer(faults.recreations > 0, Step::Recreate);
        offer(
            world.is_recreation_unnoticed() && world.state() != Some(AssignmentState::Revoking),
            Step::NoticeRecreation,
        );
        // A committed offset above the end of a truncated log skips messages: the next member cannot
        // know that. Only this one can correct it.
        let may_end = !world.is_commit_above_log || world.is_quiet();
        offer(faults.rebalances > 0 && is_read && may_end, Step::Revoke);
        offer(
            world.state() == Some(AssignmentState::Revoking)
                && world.broker.requests.is_empty()
                && world.broker.replies.is_empty(),
            Step::EndAssignment,
        );
        offer(faults.crashes > 0 && is_assigned && may_end, Step::Crash);
        offer(!is_assigned, Step::Assign);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut world = world.clone();
        match step {
            Step::Fetch => world.fetch(),
            Step::ReportPosition => {
                world.apply(PartitionEvent::PositionReported(
                    world.client.reported_position,
                ));
            }
            Step::ClearPosition => {
                world.client.is_position_stale = false;
                world.client.reported_position = None;
            }
            Step::ReportWrongPosition => {
                world.client.is_position_wrong = false;
                if let PartitionAction::Seek(target) =
                    world.apply(PartitionEvent::PositionWrong { fallback: None })
                {
                    world.seek(target);
                }
            }
            Step::Seek => {
                let target = world.partition.as_ref().and_then(Partition::pending_seek);
                world.seek(target?);
            }
            Step::HandOut => {
                let message = world.queued.remove(0);
                world.apply(PartitionEvent::HandedOut);
                world.handed_out.push(message);
                // Their order makes no difference.
                world.handed_out.sort_unstable();
            }
            Step::Settle(index) => {
                let QueuedMessage {
                    epoch,
                    offset,
                    message,
                } = world.handed_out.remove(index);
                world.handled.insert(message);
                if world.partition.as_ref().map(Partition::epoch) == Some(epoch) {
                    world.apply(PartitionEvent::Settled(offset));
                }
            }
            Step::Release(index) => {
                world.faults.releases -= 1;
                let message = world.handed_out.remove(index);
                let is_assigned =
                    world.partition.as_ref().map(Partition::epoch) == Some(message.epoch);
                if is_assigned
                    && world.apply(PartitionEvent::Released) == PartitionAction::Redeliver
                {
                    world.queued.push(message);
                }
            }
            Step::CommitDue => {
                if let PartitionAction::Commit { offset, mode } =
                    world.apply(PartitionEvent::CommitDue(*NOW))
                {
                    let partition = world.partition.as_ref()?;
                    let topic = partition.log().identity.as_ref()?.topic_id.parse().ok()?;
                    world.client.stored = Some((offset, topic));
                    if mode == OffsetCommitMode::Immediate {
                        world.send_stored();
                    }
                }
            }
            Step::CommitStored => world.send_stored(),
            Step::ApplyCommit(index) => {
                let request = world.broker.requests.remove(index);
                world.broker.committed = (request.offset, request.topic);
                world.broker.replies.push(request.offset);
            }
            Step::ConfirmCommit => {
                let offset = world.broker.replies.remove(0);
                world.client.last_confirmed = offset;
                world.apply(PartitionEvent::CommitConfirmed(offset));
            }
            Step::FailCommit(index) => {
                world.faults.failed_commits -= 1;
                world.broker.requests.remove(index);
                world.apply(PartitionEvent::CommitFailed { retry_at: *NOW });
            }
            Step::LoseReply => {
                world.faults.failed_commits -= 1;
                world.broker.replies.remove(0);
                world.apply(PartitionEvent::CommitFailed { retry_at: *NOW });
            }
            Step::Truncate(length) => {
                world.faults.truncations -= 1;
                world.broker.log.truncate(length);
                world.broker.log.push(Some(world.broker.next_message));
                world.broker.next_message += 1;
                // librdkafka finds the end of the log by the leader epoch.
                world.client.fetch_position = world.client.fetch_position.min(length as i64);
                let position = world.partition.as_ref().and_then(Partition::position);
                world.is_truncation_unnoticed |= position > Some(length as i64);
                world.is_commit_above_log |=
                    world.is_truncation_unnoticed || world.broker.committed.0 > length as i64;
            }
            Step::Recreate => {
                world.faults.recreations -= 1;
                world.broker.topic += 1;
                world.broker.log = vec![
                    Some(world.broker.next_message),
                    Some(world.broker.next_message + 1),
                ];
                world.broker.next_message += 2;
            }
            Step::NoticeRecreation => {
                let event = PartitionEvent::TopicRecreated {
                    identity: Some(identity(world.broker.topic)),
                    next_epoch: world.last_epoch + 1,
                };
                world.apply(event);
            }
            Step::Revoke => {
                world.faults.rebalances -= 1;
                world.apply(PartitionEvent::Revoked);
            }
            Step::EndAssignment => world.end_assignment(),
            Step::Crash => {
                world.faults.crashes -= 1;
                world.end_assignment();
                world.handed_out.clear();
            }
            Step::Assign => world.assign(),
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no unhandled message is skipped", |_, world: &World| {
                world.is_commit_above_log || world.is_commit_safe()
            }),
            Property::always("what may be committed is committed", |_, world: &World| {
                let committable = world.partition.as_ref().and_then(Partition::committable);
                !world.is_quiet()
                    || (world.is_commit_safe()
                        && world.broker.committed.0 <= world.end()
                        && committable.is_none_or(|it| world.broker.committed.0 == it))
            }),
            Property::always("every message is handed out", |_, world: &World| {
                let is_done =
                    world.is_quiet() && world.queued.is_empty() && world.handed_out.is_empty();
                let messages = world.broker.log.iter().flatten();
                !is_done || messages.into_iter().all(|it| world.handled.contains(it))
            }),
            Property::sometimes("all messages are committed", |_, world: &World| {
                world.is_quiet() && world.broker.committed.0 == world.end()
            }),
        ]
    }
}

/// Explores all interleavings with these faults.
fn explore(log: &[Option<u8>], faults: Faults) {
    let checker = PartitionInterleavings(World::new(log, faults))
        .checker()
        .threads(2)
        .spawn_bfs()
        .join();
    println!("{faults:?}: {} states", checker.unique_state_count());
    checker.assert_properties();
}

#[test]
fn rebalances_crashes_and_failed_commits_skip_no_message() {
    let with_marker = [Some(0), None, Some(1)];
    for faults in [
        Faults {
            rebalances: 1,
            crashes: 1,
            ..Faults::default()
        },
        Faults {
            rebalances: 1,
            failed_commits: 1,
            ..Faults::default()
        },
        Faults {
            crashes: 1,
            failed_commits: 1,
            releases: 1,
            ..Faults::default()
        },
    ] {
        explore(&with_marker, faults);
    }
}

#[test]
fn a_truncated_log_skips_no_message() {
    let once = Faults {
        truncations: 1,
        ..Faults::default()
    };
    explore(&[Some(0), Some(1)], Faults { crashes: 1, ..once });
    explore(
        &[Some(0), Some(1)],
        Faults {
            failed_commits: 1,
            ..once
        },
    );
    explore(
        &[Some(0)],
        Faults {
            truncations: 2,
            ..once
        },
    );
}

#[test]
fn a_recreated_topic_skips_no_message() {
    let once = Faults {
        recreations: 1,
        ..Faults::default()
    };
    explore(&[Some(0)], Faults { crashes: 1, ..once });
    explore(
        &[Some(0)],
        Faults {
            rebalances: 1,
            ..once
        },
    );
}
