//! What a person does about what was set aside, as the command line does it: a look at the marker,
//! an operation on the marker as it was seen, a copy, and the letter taken out, each a step after
//! which anything may happen.

use oncegate_core::lifecycle::Stage;
use oncegate_core::marker::{
    Ask, Doubt, Effect, Finding, Guarantee, Marker, Token, UNKNOWN_ATTEMPT, Verdict,
};

use crate::trial::Trial;
use crate::world::{Letter, Message, Person, Sent, Shelf, Then, World};

impl Trial {
    /// What a person decides about a letter, by what is seen; `None` if it is left where it is. To
    /// find out that something did not happen is to make sure that it cannot any more.
    pub(crate) fn decides(&self, world: &World, letter: Letter) -> Option<(Person, Option<u32>)> {
        // An operator's tool is configured as one of the consumers is.
        let guarantee = self.setup.guarantees[0];
        let seen = world.marker;
        let sent = |ask, attempt| Sent {
            ask,
            guarantee,
            body: letter.body,
            token: Token(0),
            attempt,
        };
        let send_back = |effect| {
            Person::Decided(
                letter,
                sent(Ask::SendBack { seen, effect }, letter.fence),
                Then::Publish,
            )
        };
        match (letter.shelf, seen) {
            (Shelf::DeadLetters, Marker::Done(_) | Marker::InDoubt(..)) => None,
            (Shelf::DeadLetters, Marker::InProgress(_)) if !world.over => None,
            // Whoever claims it finds it in doubt.
            (Shelf::DeadLetters, Marker::InProgress(hold))
                if [hold.guarantee, guarantee].contains(&Guarantee::AtMostOnce) =>
            {
                Some((Person::Publishes(letter), None))
            }
            (Shelf::DeadLetters, Marker::Absent) if letter.fence == 0 => {
                Some((Person::Publishes(letter), None))
            }
            (Shelf::DeadLetters, Marker::Absent) => Some((send_back(Effect::Nothing), None)),
            (Shelf::DeadLetters, _) => Some((send_back(Effect::Unknown), None)),

            (Shelf::InDoubt, Marker::InDoubt(_, Doubt::Reconciling)) if !world.over => None,
            (Shelf::InDoubt, Marker::InProgress(_) | Marker::Rejected { .. }) => None,
            (Shelf::InDoubt, Marker::Done(_)) => Some((Person::TakesOut(letter), None)),
            (Shelf::InDoubt, Marker::InDoubt(hold, _)) if world.effects() > 0 => {
                let resolve = Sent {
                    token: hold.token,
                    ..sent(Ask::Resolve(Finding::Happened), hold.attempts.number)
                };
                Some((Person::Decided(letter, resolve, Then::TakeOut), None))
            }
            (Shelf::InDoubt, _) if world.effects() > 0 => Some((
                Person::Decided(letter, sent(Ask::Complete, letter.fence), Then::TakeOut),
                None,
            )),
            (Shelf::InDoubt, Marker::InDoubt(hold, _)) => {
                Some((send_back(Effect::Nothing), Some(hold.attempts.number)))
            }
            (Shelf::InDoubt, Marker::Cleared { attempts, .. }) => {
                Some((send_back(Effect::Nothing), Some(attempts.number)))
            }
            (Shelf::InDoubt, Marker::Absent) => {
                Some((send_back(Effect::Nothing), Some(letter.fence)))
            }
        }
    }

    /// Whether a person may let what is done be handled again: nothing of it is under way any more.
    /// A completion that is asked for again would find what the person freed and make it done once
    /// more; the effect of a run that is not over would be a second. With two bodies it could not
    /// be told whose effects count no more.
    pub(crate) fn may_forget(&self, world: &World) -> bool {
        let completing = |stage| matches!(stage, Stage::Completing(_));
        matches!(world.marker, Marker::Done(_))
            && !world.seen.other_body
            && world.provider.orphans.is_empty()
            && !world
                .consumers
                .iter()
                .filter_map(|it| it.delivery.as_ref())
                .any(|it| it.run.is_some() || completing(it.dispatch.stage()))
            && !world.late.iter().any(|sent| sent.ask == Ask::Complete)
    }

    /// The store does what a person asks for, or finds that it is not what was seen any more.
    pub(crate) fn person_asks(&self, world: &mut World, letter: Letter, sent: Sent, then: Then) {
        let verdict = self.store(world, sent);
        world.person = match (verdict, then) {
            (Verdict::Kept | Verdict::Done { .. }, Then::Publish) => {
                world.freed();
                Person::Publishes(letter)
            }
            (Verdict::Kept | Verdict::Done { .. }, Then::TakeOut) => Person::TakesOut(letter),
            _ => Person::Idle,
        };
    }

    /// A person lets an id that is done be handled again, and its producer sends it once more.
    pub(crate) fn person_forgets(&self, world: &mut World) {
        let (seen, guarantee) = (world.marker, self.setup.guarantees[0]);
        // Above what the audit names of the time before.
        let attempt = world.seen.highest / UNKNOWN_ATTEMPT * UNKNOWN_ATTEMPT;
        let attempt = if attempt == 0 {
            0
        } else {
            attempt + UNKNOWN_ATTEMPT
        };
        let sent = Sent {
            ask: Ask::Forget { seen },
            guarantee,
            body: 0,
            token: Token(0),
            attempt,
        };
        if self.store(world, sent) == Verdict::Kept {
            world.freed();
            // What happened until then does not count against what is to happen now.
            (world.provider.effects, world.seen.done) = ([0, 0], false);
            world.queue.push(Message {
                body: 0,
                failures: 0,
            });
        }
    }
}

impl World {
    /// A person freed the id: every later attempt is above every earlier one, and the whole budget
    /// is left.
    pub(crate) fn freed(&mut self) {
        self.seen.floor = self.seen.highest;
        self.seen.known = matches!(
            self.marker,
            Marker::Cleared {
                effect: Effect::Nothing,
                ..
            }
        );
        self.seen.crashes = 0;
        (self.seen.forgiven, self.seen.owed) = (self.seen.grants - self.seen.spared, true);
    }

    /// A copy of a letter stands at the broker.
    pub(crate) fn publish(&mut self, letter: Letter) {
        self.queue.push(Message {
            body: letter.body,
            failures: 0,
        });
        self.person = Person::TakesOut(letter);
    }

    /// A letter is gone.
    pub(crate) fn take_out(&mut self, letter: Letter) {
        if let Some(place) = self.letters.iter().position(|it| *it == letter) {
            self.letters.remove(place);
        }
        self.person = Person::Idle;
    }
}
