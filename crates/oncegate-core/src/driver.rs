//! Carries out the decisions of the road for one delivery, free of I/O: which claim it makes, with
//! which token and attempt, and what its owner has to do next.
//!
//! The consumer, [`Gate`](crate::Gate) and the model checker drive this same code. They differ in
//! how they do what a [`DriverCommand`] says, never in which command follows.

use std::time::Duration;

use crate::lifecycle::{Action, Event, History, Policy, Settlement, Stage, transition};
use crate::marker::{Ask, Attempts, Token, Verdict};

/// One delivery: its stage, and the claim that it makes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LifecycleDriver {
    stage: Stage,
    /// The current claim; 0 before the first.
    pub token: Token,
    /// What was granted to this claim, or how far the attempts of what is rejected had come; number
    /// 0 until then.
    pub attempts: Attempts,
    keeps: OnRelease,
    stays: Stays,
}

/// Whether a delivery keeps its place when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnRelease {
    /// It goes back to its source.
    ReturnToSource,
    /// It waits where it is, so that nothing of its ordering key overtakes it.
    KeepPlace,
}

/// Whether a delivery may still start something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stays {
    Here,
    /// The consumer drains, or the delivery belongs to someone else soon.
    Leaves,
}

/// What the owner of a delivery does next.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum DriverCommand {
    /// Applies this to the store with the delivery's token and attempt, and reports
    /// [`Event::Answer`] or [`Event::Unavailable`]. A claim with a new token ends the lease of the
    /// claim before it.
    Apply(Ask),
    /// Reports [`Event::Slot`] when the handler may start, [`Event::LeaseOver`] if the lease may
    /// have ended by then, or [`Event::OtherRunsAlone`].
    AwaitRun,
    /// Starts the handler, and reports [`Event::Returned`], or [`Event::LeaseOver`] when it drops
    /// it.
    Run,
    /// Starts `reconcile`, and reports [`Event::Found`], or [`Event::LeaseOver`] when it drops it.
    Reconcile,
    /// Reports [`Event::Woke`] after about this long; [`Event::LeaseOver`] if the stage waits on a
    /// lease that has ended by then.
    Wake(Duration),
    /// Reports [`Event::Arrived`] when no other message runs alone.
    AwaitTurn,
    /// Holds the delivery, unclaimed, for about this long, then calls [`LifecycleDriver::restart`] and
    /// reports [`Event::Arrived`].
    Hold {
        /// How long.
        after: Duration,
        /// How many attempts have failed by now.
        failures: u32,
    },
    /// Hands this to the source.
    Settle(Settlement),
    /// Lets go of the delivery without settling it; it comes back after its lease.
    Abandon,
    /// Nothing: an answer is still to come.
    Nothing,
}

impl LifecycleDriver {
    /// A delivery that has just arrived.
    pub fn new(history: History, keeps: OnRelease) -> Self {
        Self {
            stage: Stage::New(history),
            token: Token(0),
            attempts: Attempts::new(0),
            keeps,
            stays: Stays::Here,
        }
    }

    /// Where the delivery stands.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether the delivery starts nothing any more.
    pub fn leaves(&self) -> bool {
        self.stays == Stays::Leaves
    }

    /// From here on the delivery starts nothing; report [`Event::Drain`] next.
    pub fn leave(&mut self) {
        self.stays = Stays::Leaves;
    }

    /// A delivery that was held comes back as if it had just arrived. Its next claim has a token of
    /// its own.
    pub fn restart(&mut self, history: History) {
        self.stage = Stage::New(history);
    }

    /// Something happened to the delivery: what its owner does next.
    ///
    /// `new_token` makes the token of a claim; it is given the token of the claim before, for
    /// wrappers that test what happens when a token is used again.
    pub fn handle(
        &mut self,
        event: Event,
        policy: &Policy,
        new_token: impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        self.handle_by(transition, event, policy, new_token)
    }

    /// The same by other rules than [`lifecycle::transition`](crate::lifecycle::transition): for a checker that has to
    /// see wrong rules fail.
    pub fn handle_by(
        &mut self,
        rules: impl Fn(Stage, Event, &Policy) -> (Stage, Action),
        event: Event,
        policy: &Policy,
        mut new_token: impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        if let Event::Answer(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) = event {
            self.attempts = attempts;
        }
        // It runs nothing, and its letter bears the fence all the same.
        if let Event::Answer(Verdict::Rejected { attempt }) = event {
            self.attempts = Attempts::all_forgiven(attempt);
        }
        let command = self.advance(&rules, event, policy, &mut new_token);
        // What leaves begins nothing: whatever would wait, queue or claim is asked to drain again.
        let begins = match command {
            DriverCommand::Apply(ask) => ask == Ask::Claim && self.attempts.number == 0,
            DriverCommand::AwaitRun | DriverCommand::Wake(_) | DriverCommand::AwaitTurn => true,
            _ => false,
        };
        if !begins || !self.leaves() {
            return command;
        }
        match self.advance(&rules, Event::Drain, policy, &mut new_token) {
            DriverCommand::Nothing => command,
            instead => instead,
        }
    }

    fn advance(
        &mut self,
        rules: &impl Fn(Stage, Event, &Policy) -> (Stage, Action),
        event: Event,
        policy: &Policy,
        new_token: &mut impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        let (stage, step) = rules(self.stage, event, policy);
        self.stage = stage;
        match step {
            Action::ClaimAnew => {
                (self.token, self.attempts) = (new_token(self.token), Attempts::new(0));
                DriverCommand::Apply(Ask::Claim)
            }
            Action::Ask(ask) => DriverCommand::Apply(ask),
            Action::Queue => DriverCommand::AwaitRun,
            Action::Run => DriverCommand::Run,
            Action::Reconcile => DriverCommand::Reconcile,
            Action::Wake(after) => DriverCommand::Wake(after),
            Action::AwaitTurn => DriverCommand::AwaitTurn,
            Action::Settle(Settlement::Release { after, failures })
                if self.keeps == OnRelease::KeepPlace && !self.leaves() =>
            {
                DriverCommand::Hold { after, failures }
            }
            Action::Settle(settlement) => DriverCommand::Settle(settlement),
            Action::Wait => DriverCommand::Nothing,
            Action::Abandon => DriverCommand::Abandon,
        }
    }
}
