//! The properties that no reachable state may violate.

use oncegate_core::marker::Guarantee;
use stateright::{Model, Property};

use crate::state::{ModelDestination, SystemState};
use crate::system::{EffectsIn, SystemModel};

pub(crate) const LOST: &str =
    "lost: the message had no effect, and there is neither a dead letter nor a message to deliver";
pub(crate) const STUCK: &str = "stuck: a delivery waits for an event that cannot occur";
pub(crate) const DOUBLED: &str = "doubled: the effect happened twice";
pub(crate) const IN_DOUBT: &str = "in doubt: a message of an inbox is in the in-doubt queue";
pub(crate) const UNSAFE_START: &str =
    "unsafe start: a handler starts although an earlier run had an effect, or may still have one";
pub(crate) const START_AFTER_DONE: &str =
    "start after done: a handler starts although the id was recorded as done";
pub(crate) const FENCE_DECREASED: &str = "fence: a handler starts with an attempt that the sink refuses, or that was used before an operator freed the id";
pub(crate) const BEFORE_LATE_COMPLETION: &str = "before late completion: a handler starts before the store was asked to complete a copy handled without the store";
pub(crate) const CONCURRENT_HANDLERS: &str = "concurrent handlers: two handlers run, each with a lease that its consumer believes to be valid";
pub(crate) const BUSY_AFTER_EXPIRY: &str =
    "busy after expiry: a claim is answered with the remaining time of a lease that has ended";
pub(crate) const STALE_RECONCILIATION: &str = "stale reconciliation: a message is in the in-doubt queue, but its marker says that a consumer reconciles it";
pub(crate) const NOT_RUN: &str =
    "not run: a message that an operator redrove is rejected or in doubt again without a run";
pub(crate) const SPENT_TOO_SOON: &str = "spent too soon: a message is rejected for `max_attempts` although fewer attempts were granted, or a grant reports more spent attempts than were granted";
pub(crate) const ORPHANED_CLAIM: &str = "orphaned claim: no consumer holds the claim of the marker, although nothing crashed, so the next claim counts a crash";

/// The properties that apply to the guarantees of the consumers and to the faults that may occur
/// ([`Budget`](crate::state::Budget)).
pub(crate) fn of(model: &SystemModel) -> Vec<Property<SystemModel>> {
    let mut properties = vec![
        Property::always(LOST, |_, state: &SystemState| {
            let bodies = if state.observations.other_body { 2 } else { 1 };
            let has = |body: usize| {
                state.sink.effects[body] > 0
                    || state
                        .dead_letters
                        .iter()
                        .any(|dead_letter| dead_letter.body == body)
            };
            !state.is_finished() || (0..bodies).all(has)
        }),
        Property::always(STUCK, |model: &SystemModel, state: &SystemState| {
            let mut actions = Vec::new();
            model.actions(state, &mut actions);
            state.is_finished() || !actions.is_empty()
        }),
    ];
    let doubled: Property<SystemModel> =
        Property::always(DOUBLED, |_, state: &SystemState| state.effects() < 2);
    if model.setup.effects == EffectsIn::Inbox {
        properties.push(doubled);
        properties.push(Property::always(IN_DOUBT, |_, state: &SystemState| {
            let in_doubt = ModelDestination::InDoubt;
            let mut rejected = state.dead_letters.iter();
            !rejected.any(|dead_letter| dead_letter.destination == in_doubt)
        }));
        properties.retain(|property| property.name.starts_with(model.only));
        return properties;
    }
    let passes_through = model.setup.outage == oncegate_core::Outage::PassThrough;
    if model.all_have_guarantee(Guarantee::AtMostOnce) || model.all_have_guarantee(Guarantee::Bare)
    {
        properties.push(doubled);
    }
    if model.has_guarantee(Guarantee::AtMostOnce) {
        properties.push(Property::always(UNSAFE_START, |_, state: &SystemState| {
            !state.observations.violations.start_with_possible_effect
        }));
    }
    if !model.has_guarantee(Guarantee::Bare) {
        properties.push(Property::always(
            FENCE_DECREASED,
            |_, state: &SystemState| !state.observations.violations.start_below_fence,
        ));
        properties.push(Property::always(
            BEFORE_LATE_COMPLETION,
            |_, state: &SystemState| !state.observations.violations.start_before_late_completion,
        ));
        if !passes_through {
            properties.push(Property::always(
                START_AFTER_DONE,
                |_, state: &SystemState| !state.observations.violations.start_after_done,
            ));
            properties.push(Property::always(
                CONCURRENT_HANDLERS,
                |_, state: &SystemState| !state.observations.violations.concurrent_handlers,
            ));
        }
        properties.push(Property::always(
            BUSY_AFTER_EXPIRY,
            |_, state: &SystemState| !state.observations.violations.busy_after_expiry,
        ));
        properties.push(Property::always(
            STALE_RECONCILIATION,
            |_, state: &SystemState| !state.observations.violations.stale_reconciling_marker,
        ));
        properties.push(Property::always(NOT_RUN, |_, state: &SystemState| {
            !state.observations.violations.redriven_not_run
        }));
        properties.push(Property::always(
            SPENT_TOO_SOON,
            |_, state: &SystemState| !state.observations.violations.spent_too_soon,
        ));
    }
    if model.checks_orphaned_claims() && !model.has_guarantee(Guarantee::Bare) {
        properties.push(Property::always(
            ORPHANED_CLAIM,
            |_, state: &SystemState| state.observations.stopped_now || !state.has_orphaned_claim(),
        ));
    }
    properties.retain(|property| property.name.starts_with(model.only));
    properties
}
