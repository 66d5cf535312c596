//! The state of the explored system, and the budget of faults that may still occur in it.

use std::hash::{DefaultHasher, Hash, Hasher};

use oncegate_core::internal::driver::LifecycleDriver;
use oncegate_core::internal::lifecycle::Outcome;
use oncegate_core::marker::{
    Doubt, Effect, Finding, Guarantee, Marker, OperationKind, Token, Verdict,
};

/// How often each fault may still occur.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Budget {
    /// Consumers that crash.
    pub crashes: u8,
    /// Commands to the store without a reply, whether they are applied, applied late, or lost.
    pub lost_replies: u8,
    /// Leases that expire, or that their holder suspects to have expired.
    pub expiries: u8,
    /// Leases that are renewed.
    pub renewals: u8,
    /// Handlers that fail and report that nothing happened.
    pub failures: u8,
    /// Handlers that panic, do not end, or report an unknown outcome.
    pub unknown_outcomes: u8,
    /// Messages that are published twice, or redelivered while their first delivery is handled.
    pub redeliveries: u8,
    /// Messages with the same id and another body.
    pub other_bodies: u8,
    /// Consumers that drain because of a shutdown or a revocation.
    pub drains: u8,
    /// Grants that are withdrawn because other messages run in isolation. If this is not 0, a
    /// handler starts in a step after the one that grants its claim, so that the grant can be
    /// withdrawn in between.
    pub withdrawn_grants: u8,
    /// Markers that the store loses.
    pub lost_markers: u8,
    /// Claims that the store loses in a failover to a lagging replica; the earlier marker returns.
    pub lost_claims: u8,
    /// Commands of the operator on a dead letter, an in-doubt message or a completed id.
    pub operator_actions: u8,
}

impl Budget {
    /// No faults.
    pub const NONE: Self = Self {
        crashes: 0,
        lost_replies: 0,
        expiries: 0,
        renewals: 0,
        failures: 0,
        unknown_outcomes: 0,
        redeliveries: 0,
        other_bodies: 0,
        drains: 0,
        withdrawn_grants: 0,
        lost_markers: 0,
        lost_claims: 0,
        operator_actions: 0,
    };
}

/// The state of the whole system.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SystemState {
    pub(crate) marker: Marker,
    /// Whether the marker's lease has expired by the store's clock.
    pub(crate) lease_expired: bool,
    /// The messages that wait at the broker.
    pub(crate) queue: Vec<BrokerMessage>,
    pub(crate) consumers: [ModelConsumer; 2],
    /// Commands whose sender no longer waits for a reply; the store may still apply them.
    pub(crate) delayed_commands: Vec<SentCommand>,
    pub(crate) sink: Sink,
    /// At most one message for each body and destination, plus the one that the operator handles.
    pub(crate) dead_letters: Vec<ModelDeadLetter>,
    pub(crate) operator: Operator,
    /// Whether the consumers look up the records of an inbox when they claim.
    pub(crate) looks_up: bool,
    pub(crate) observations: Observations,
    pub(crate) remaining: Budget,
}

/// A message at the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BrokerMessage {
    /// Two messages with the same id may have different bodies, 0 and 1.
    pub(crate) body: usize,
    /// The number of failed attempts.
    pub(crate) failures: u32,
}

/// One consumer process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ModelConsumer {
    pub(crate) delivery: Option<ModelDelivery>,
    /// A pending completion of an id that was handled without the store: its token, and its attempt
    /// after the claim was granted.
    pub(crate) late_completion: Option<(Token, Option<u32>)>,
}

/// One delivery, in the state of its consumer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelDelivery {
    /// The message that the broker redelivers if the delivery is not settled.
    pub(crate) message: BrokerMessage,
    pub(crate) receipt: ModelReceipt,
    pub(crate) driver: LifecycleDriver,
    /// The command to the store that has no received reply.
    pub(crate) command: Option<CommandState>,
    pub(crate) lease: LeaseState,
    /// The request of the running handler; `None` if no handler runs.
    pub(crate) run: Option<EffectState>,
}

impl ModelDelivery {
    /// The attempt that the handler passes to the sink as a fencing token.
    pub(crate) fn attempt(&self) -> u32 {
        self.driver.attempts.number.max(1)
    }
}

/// Whether the broker still accepts a settlement of the delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelReceipt {
    /// The broker accepts it.
    Valid,
    /// The broker ignores it, because the message was redelivered.
    Stale,
}

/// A command to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandState {
    /// Sent, not yet applied.
    Sent(OperationKind),
    /// Applied, the reply not yet received. The lease state is that of a lease that the reply
    /// grants.
    Replied(OperationKind, Verdict, LeaseState),
}

/// A command with the state of its sender when it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SentCommand {
    pub(crate) kind: OperationKind,
    pub(crate) guarantee: Guarantee,
    pub(crate) body: usize,
    pub(crate) token: Token,
    pub(crate) attempt: u32,
}

/// The lease of a delivery, as its holder knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseState {
    /// No lease.
    None,
    /// The holder believes that it is valid.
    Valid,
    /// The holder knows or suspects that it has expired.
    Expired,
}

/// The request of a running handler to the sink, which causes the effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EffectState {
    /// In flight.
    Pending,
    /// The effect happened.
    Happened,
}

/// The external system in which effects happen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sink {
    /// The number of effects for each body, at most 2.
    pub(crate) effects: [u8; 2],
    /// Orphaned requests: those in flight whose handlers were dropped, each with attempt and body.
    pub(crate) orphans: Vec<(u32, usize)>,
    /// Requests with this attempt or a lower one are refused, because `reconcile` or the operator
    /// stated that nothing happened and nothing still can.
    pub(crate) voided: u32,
}

/// A dead letter or an in-doubt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelDeadLetter {
    pub(crate) body: usize,
    pub(crate) destination: ModelDestination,
    /// The attempt in the headers of the message.
    pub(crate) last_attempt: u32,
}

/// The queue that holds the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModelDestination {
    /// The dead letters.
    DeadLetters,
    /// The in-doubt queue.
    InDoubt,
}

/// The next step of the operator's command. Any other action may happen between two steps, and an
/// interrupted command is not continued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Operator {
    /// No command runs.
    #[default]
    Idle,
    /// Send this request, which names the marker that was read; then publish a copy or remove the
    /// dead letter.
    Decided(ModelDeadLetter, SentCommand, NextStep),
    /// Publish a copy.
    Publishing(ModelDeadLetter),
    /// Remove the dead letter.
    Removing(ModelDeadLetter),
}

impl Operator {
    /// The dead letter of the command.
    fn dead_letter(self) -> Option<ModelDeadLetter> {
        match self {
            Self::Idle => None,
            Self::Decided(dead_letter, ..)
            | Self::Publishing(dead_letter)
            | Self::Removing(dead_letter) => Some(dead_letter),
        }
    }
}

/// The step after the store has applied the operator's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextStep {
    /// Publish a copy.
    Publish,
    /// Remove the dead letter.
    Remove,
}

/// What the properties have to know about earlier states, and the violations that were observed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Observations {
    /// The id was completed.
    pub(crate) done: bool,
    /// A message with another body was published.
    pub(crate) other_body: bool,
    /// A consumer stopped without a reply from the store. Recorded if orphaned claims are checked.
    pub(crate) stopped_now: bool,
    pub(crate) attempts: AttemptCounts,
    pub(crate) freed: SinceFreed,
    pub(crate) violations: ModelViolations,
}

/// The attempts and grants of the id. Counted if the operator acts; the grants also if messages are
/// redelivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AttemptCounts {
    /// The highest attempt with which a handler was started.
    pub(crate) highest: u32,
    /// The number of grants.
    pub(crate) grants: u32,
    /// The number of grants that spend no attempt: withdrawn, or taken over after a crash.
    pub(crate) unspent_grants: u32,
}

impl AttemptCounts {
    /// The number of grants that spend an attempt.
    pub(crate) fn spent(self) -> u32 {
        self.grants - self.unspent_grants
    }
}

/// What happened when the operator last freed the id, and since then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SinceFreed {
    /// The operator redrove the id, and no handler was started since.
    pub(crate) awaits_run: bool,
    /// The marker of the freed id records no unknown effect, and no claim was granted since.
    pub(crate) without_effect: bool,
    /// The value of [`AttemptCounts::highest`] when the id was freed.
    pub(crate) highest_before: u32,
    /// The number of spent attempts when the id was freed.
    pub(crate) spent_before: u32,
    /// The number of crashed holders since then. Counted if the operator acts.
    pub(crate) crashes: u32,
}

/// Each violation that a state after the violating action no longer shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ModelViolations {
    /// A handler started although the id was completed.
    pub(crate) start_after_done: bool,
    /// In at most once a handler started although an earlier run had an effect or may still have
    /// one.
    pub(crate) start_with_possible_effect: bool,
    /// A handler started with a voided attempt, or with one that was used before the operator freed
    /// the id.
    pub(crate) start_below_fence: bool,
    /// A handler started before the store was asked to complete a copy handled without the store.
    pub(crate) start_before_late_completion: bool,
    /// Two handlers ran at the same time, each with a lease that it believed to be valid.
    pub(crate) concurrent_handlers: bool,
    /// A claim was answered with the remaining time of an expired lease.
    pub(crate) busy_after_expiry: bool,
    /// A message went to the in-doubt queue while its marker says that a consumer reconciles it.
    pub(crate) stale_reconciling_marker: bool,
    /// A message that the operator redrove was rejected or in doubt again without a run.
    pub(crate) redriven_not_run: bool,
    /// A message was rejected for `max_attempts` although fewer attempts had been granted, or a grant
    /// reported more spent attempts than had been granted.
    pub(crate) spent_too_soon: bool,
}

/// An action of a part of the system. The number is the index of the consumer, of the delayed
/// command, of the orphaned request or of the dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "`trace::lines` describes each of them")]
pub enum ModelAction {
    Deliver(usize, BrokerMessage),
    PublishAgain,
    PublishOtherBody,
    Redeliver(usize),
    Apply(usize),
    ApplyDelayed(usize),
    ReceiveReply(usize),
    LoseCommand(usize),
    DelayCommand(usize),
    LoseReply(usize),
    Wake(usize),
    EffectHappens(usize),
    OrphanEffectHappens(usize),
    LoseOrphan(usize),
    Return(usize, Outcome),
    ReconcileHappened(usize),
    ReconcileDidNotHappen(usize),
    ExpireLease,
    SuspectLease(usize),
    NoticeExpiry(usize),
    Renew(usize),
    DelayRenewal(usize),
    Crash(usize),
    Drain(usize),
    WithdrawGrant(usize),
    DrainOver(usize),
    StopNow(usize),
    CompleteLate(usize),
    LoseMarker,
    LoseClaim,
    OperatorDecides(usize),
    OperatorRequests,
    DelayOperatorRequest,
    OperatorPublishes,
    OperatorRemoves,
    OperatorStops,
    OperatorForgets,
}

impl SystemState {
    /// The initial state: one message in the queue.
    pub(crate) fn new(budget: Budget) -> Self {
        Self {
            marker: Marker::Absent,
            lease_expired: false,
            queue: vec![BrokerMessage {
                body: 0,
                failures: 0,
            }],
            consumers: Default::default(),
            delayed_commands: Vec::new(),
            sink: Sink::default(),
            dead_letters: Vec::new(),
            operator: Operator::Idle,
            looks_up: true,
            observations: Observations::default(),
            remaining: budget,
        }
    }

    /// Whether no message is queued and no delivery, request or command is in flight.
    pub(crate) fn is_finished(&self) -> bool {
        self.queue.is_empty()
            && self
                .consumers
                .iter()
                .all(|consumer| consumer.delivery.is_none() && consumer.late_completion.is_none())
            && self.sink.orphans.is_empty()
            && self.delayed_commands.is_empty()
            && self.operator == Operator::Idle
    }

    /// Whether the marker is claimed by a token that no consumer holds: the next claim after its
    /// lease expires counts a crash.
    pub(crate) fn has_orphaned_claim(&self) -> bool {
        let token = match self.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, Doubt::Reconciling) => hold.token,
            _ => return false,
        };
        let mut held = self
            .consumers
            .iter()
            .filter_map(|consumer| consumer.delivery.as_ref());
        !held.any(|delivery| delivery.driver.token == token)
    }

    /// Whether the sink accepts a request with this attempt.
    pub(crate) fn is_accepted(&self, attempt: u32) -> bool {
        attempt > self.sink.voided
    }

    /// The sink refuses requests with this attempt or a lower one, also those in flight.
    pub(crate) fn void_attempts(&mut self, highest: u32) {
        let voided = self.sink.voided.max(highest);
        self.sink.voided = voided;
        self.sink.orphans.retain(|(attempt, _)| *attempt > voided);
    }

    /// The number of effects of all bodies.
    pub(crate) fn effects(&self) -> u8 {
        self.sink.effects.iter().sum()
    }

    /// Counts an effect; more than 2 are not distinguished, so that the state space stays finite.
    pub(crate) fn count_effect(&mut self, body: usize) {
        self.sink.effects[body] = (self.sink.effects[body] + 1).min(2);
    }

    /// Adds a dead letter or an in-doubt message.
    pub(crate) fn add_dead_letter(&mut self, dead_letter: ModelDeadLetter) {
        let handled = self
            .operator
            .dead_letter()
            .and_then(|handled| self.dead_letters.iter().position(|other| *other == handled));
        let mut others = self
            .dead_letters
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| Some(*index) != handled)
            .map(|(_, other)| other);
        match others.find(|other| {
            (other.body, other.destination) == (dead_letter.body, dead_letter.destination)
        }) {
            Some(existing) => {
                existing.last_attempt = existing.last_attempt.max(dead_letter.last_attempt)
            }
            None => self.dead_letters.push(dead_letter),
        }
    }

    /// Orders the consumers, so that states that differ only in their order are equal.
    pub(crate) fn sort_consumers(&mut self) {
        let holder = token_of(&self.marker).unwrap_or(Token(0));
        let rank = |consumer: &ModelConsumer| {
            let mut hasher = DefaultHasher::new();
            let without_token = consumer.delivery.clone().map(|mut delivery| {
                let holds = delivery.driver.token == holder;
                delivery.driver.token = Token(0);
                (delivery, holds)
            });
            (without_token, consumer.late_completion.is_some()).hash(&mut hasher);
            (consumer.delivery.is_none(), hasher.finish())
        };
        if rank(&self.consumers[0]) > rank(&self.consumers[1]) {
            self.consumers.swap(0, 1);
        }
    }

    /// Makes equivalent states equal: renumbers tokens in the order of their appearance and sorts
    /// queues.
    pub(crate) fn normalize(&mut self) {
        self.queue.sort_unstable();
        self.sink.orphans.sort_unstable();
        self.dead_letters.sort_unstable();
        let mut names: Vec<u128> = Vec::with_capacity(4);
        let mut rename = |token: &mut Token| {
            if token.0 == 0 {
                return;
            }
            let index = names
                .iter()
                .position(|name| *name == token.0)
                .unwrap_or_else(|| {
                    names.push(token.0);
                    names.len() - 1
                });
            token.0 = index as u128 + 1;
        };
        rename_in_marker(&mut self.marker, &mut rename);
        for consumer in &mut self.consumers {
            if let Some(delivery) = &mut consumer.delivery {
                rename(&mut delivery.driver.token);
            }
            if let Some((token, _)) = &mut consumer.late_completion {
                rename(token);
            }
        }
        if let Operator::Decided(_, sent, _) = &mut self.operator {
            rename_in_sent(sent, &mut rename);
        }
        for sent in &mut self.delayed_commands {
            rename_in_sent(sent, &mut rename);
        }
        self.delayed_commands
            .sort_unstable_by_key(|sent| (sent.token.0, sent.attempt, kind_name(&sent.kind)));
    }

    /// A token that is not in use.
    pub(crate) fn new_token(&self) -> Token {
        let consumers = self.consumers.iter().flat_map(|consumer| {
            let delivery = consumer
                .delivery
                .as_ref()
                .map(|delivery| delivery.driver.token);
            [delivery, consumer.late_completion.map(|(token, _)| token)]
        });
        let sent = self.delayed_commands.iter().chain(match &self.operator {
            Operator::Decided(_, sent, _) => Some(sent),
            _ => None,
        });
        let sent = sent.flat_map(|sent| {
            [
                Some(sent.token),
                expected_marker(&sent.kind).and_then(|marker| token_of(&marker)),
            ]
        });
        let all = consumers
            .chain(sent)
            .chain([token_of(&self.marker)])
            .flatten();
        Token(all.map(|token| token.0).max().unwrap_or(0) + 1)
    }
}

fn token_of(marker: &Marker) -> Option<Token> {
    match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold.token),
        _ => None,
    }
}

/// The marker that an operator's request expects.
fn expected_marker(kind: &OperationKind) -> Option<Marker> {
    match kind {
        OperationKind::Redrive { seen, .. } | OperationKind::Forget { seen } => Some(*seen),
        _ => None,
    }
}

fn rename_in_marker(marker: &mut Marker, rename: &mut impl FnMut(&mut Token)) {
    if let Marker::InProgress(hold) | Marker::InDoubt(hold, _) = marker {
        rename(&mut hold.token);
    }
}

fn rename_in_sent(sent: &mut SentCommand, rename: &mut impl FnMut(&mut Token)) {
    rename(&mut sent.token);
    if let OperationKind::Redrive { seen, .. } | OperationKind::Forget { seen } = &mut sent.kind {
        rename_in_marker(seen, rename);
    }
}

/// The name of an operation, for traces.
pub(crate) fn kind_name(kind: &OperationKind) -> &'static str {
    match kind {
        OperationKind::Claim => "claim",
        OperationKind::Renew => "renewal",
        OperationKind::Complete => "completion",
        OperationKind::Clear(Effect::Nothing) => "clear",
        OperationKind::Clear(Effect::Unknown) => "clear, effect unknown",
        OperationKind::Withdraw => "withdrawal",
        OperationKind::Reject(_) => "rejection",
        OperationKind::Doubt => "doubt",
        OperationKind::Resolve(Finding::Happened) => "resolution: it happened",
        OperationKind::Resolve(Finding::DidNotHappen) => "resolution: it did not happen",
        OperationKind::Redrive {
            effect: Effect::Nothing,
            ..
        } => "redrive, nothing happened",
        OperationKind::Redrive {
            effect: Effect::Unknown,
            ..
        } => "redrive",
        OperationKind::Forget { .. } => "forget",
    }
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            crashes,
            lost_replies,
            expiries,
            renewals,
            failures,
            unknown_outcomes,
            redeliveries,
            other_bodies,
            drains,
            withdrawn_grants,
            lost_markers,
            lost_claims,
            operator_actions,
        } = *self;
        let parts = [
            (crashes, "crash", "crashes"),
            (lost_replies, "lost reply", "lost replies"),
            (expiries, "expiry", "expiries"),
            (renewals, "renewal", "renewals"),
            (failures, "failure", "failures"),
            (unknown_outcomes, "unknown outcome", "unknown outcomes"),
            (redeliveries, "redelivery", "redeliveries"),
            (other_bodies, "other body", "other bodies"),
            (drains, "drain", "drains"),
            (withdrawn_grants, "withdrawn grant", "withdrawn grants"),
            (lost_markers, "lost marker", "lost markers"),
            (lost_claims, "lost claim", "lost claims"),
            (operator_actions, "operator command", "operator commands"),
        ];
        let parts = parts.into_iter().filter(|(count, ..)| *count > 0);
        let named: Vec<String> = parts
            .map(|(count, one, many)| format!("{count} {}", if count == 1 { one } else { many }))
            .collect();
        f.pad(&if named.is_empty() {
            "none".into()
        } else {
            named.join(", ")
        })
    }
}
