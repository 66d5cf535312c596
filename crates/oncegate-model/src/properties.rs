//! What must never be seen.

use oncegate_core::marker::Guarantee;
use stateright::{Model, Property};

use crate::trial::Trial;
use crate::world::World;

pub(crate) const LOST: &str = "lost: no effect, no dead letter, nothing left to deliver";
pub(crate) const STUCK: &str = "stuck: a delivery waits for nothing";
pub(crate) const DOUBLED: &str = "doubled: two effects";
pub(crate) const GUESS: &str =
    "started on a guess: an earlier run had, or may still have, an effect";
pub(crate) const AFTER_DONE: &str = "started after it was done";
pub(crate) const BACKWARDS: &str =
    "fence: started with an attempt that was voided, or used before a person freed the id";
pub(crate) const BEFORE_LATE: &str =
    "before late: started before the completion of a copy that had passed without the gate";
pub(crate) const AT_ONCE: &str = "two handlers at once, each with its lease";
pub(crate) const WAITS: &str = "waits for nobody: told to wait for a lease that is over";
pub(crate) const DOUBT_KEPT: &str =
    "doubt kept: in the in-doubt queue, and its own doubt says that somebody reconciles";
pub(crate) const NOT_RUN: &str =
    "not run: what a person sent back was rejected, or is in doubt once more, without a run";
pub(crate) const SPENT: &str =
    "spent too soon: rejected for its attempts, which were never granted";
pub(crate) const LEFT_BEHIND: &str =
    "left behind: a claim that nobody holds, and nobody crashed: the next one counts a crash";

/// The properties of a trial.
pub(crate) fn of(trial: &Trial) -> Vec<Property<Trial>> {
    let mut properties = vec![
        Property::always(LOST, |_, world: &World| {
            let bodies = if world.seen.other_body { 2 } else { 1 };
            let has = |body: usize| {
                world.provider.effects[body] > 0
                    || world.letters.iter().any(|letter| letter.body == body)
            };
            !world.is_quiet() || (0..bodies).all(has)
        }),
        Property::always(STUCK, |trial: &Trial, world: &World| {
            let mut actions = Vec::new();
            trial.actions(world, &mut actions);
            world.is_quiet() || !actions.is_empty()
        }),
    ];
    let passes = trial.setup.outage == oncegate_core::Outage::PassThrough;
    if trial.all_promise(Guarantee::AtMostOnce) || trial.all_promise(Guarantee::Bare) {
        properties.push(Property::always(DOUBLED, |_, world: &World| {
            world.effects() < 2
        }));
    }
    if trial.promises(Guarantee::AtMostOnce) {
        properties.push(Property::always(GUESS, |_, world: &World| {
            !world.seen.start_on_a_guess
        }));
    }
    if !trial.promises(Guarantee::Bare) {
        properties.push(Property::always(BACKWARDS, |_, world: &World| {
            !world.seen.start_below_the_fence
        }));
        properties.push(Property::always(BEFORE_LATE, |_, world: &World| {
            !world.seen.start_before_late
        }));
        if !passes {
            properties.push(Property::always(AFTER_DONE, |_, world: &World| {
                !world.seen.start_after_done
            }));
            properties.push(Property::always(AT_ONCE, |_, world: &World| {
                !world.seen.two_at_once
            }));
        }
        properties.push(Property::always(WAITS, |_, world: &World| {
            !world.seen.waits_for_nobody
        }));
        properties.push(Property::always(DOUBT_KEPT, |_, world: &World| {
            !world.seen.doubt_kept
        }));
        properties.push(Property::always(NOT_RUN, |_, world: &World| {
            !world.seen.not_run
        }));
        properties.push(Property::always(SPENT, |_, world: &World| {
            !world.seen.spent_too_soon
        }));
    }
    if trial.counts_claims_left_behind() && !trial.promises(Guarantee::Bare) {
        properties.push(Property::always(LEFT_BEHIND, |_, world: &World| {
            world.seen.stopped_now || !world.is_left_behind()
        }));
    }
    properties.retain(|property| property.name.starts_with(trial.only));
    properties
}
