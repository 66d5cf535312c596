//! The properties that no reachable state may violate.

use oncegate_core::marker::Guarantee;
use stateright::{Model, Property};

use crate::state::SystemState;
use crate::system::SystemModel;

pub(crate) const LOST: &str = "lost: no effect, no dead letter, and no message to deliver";
pub(crate) const STUCK: &str = "stuck: a delivery waits for an event that cannot occur";
pub(crate) const DOUBLED: &str = "doubled: two effects";
pub(crate) const UNSAFE_START: &str =
    "started with a possible effect: an earlier run had, or may still have, an effect";
pub(crate) const AFTER_DONE: &str = "started after it was done";
pub(crate) const FENCE_DECREASED: &str =
    "fence: started with an attempt that was voided, or used before an operator freed the id";
pub(crate) const BEFORE_LATE_COMPLETION: &str = "before late completion: started before the store was asked to complete a copy handled without the gate";
pub(crate) const CONCURRENT_HANDLERS: &str =
    "two handlers at once, each with a lease that it believes to be valid";
pub(crate) const BUSY_AFTER_EXPIRY: &str =
    "busy after expiry: a claim is answered with the remaining time of a lease that has ended";
pub(crate) const STALE_RECONCILIATION: &str = "stale reconciliation: in the in-doubt queue, but the marker says that a consumer reconciles it";
pub(crate) const NOT_RUN: &str =
    "not run: a message that an operator sent back is rejected or in doubt again without a run";
pub(crate) const SPENT_TOO_SOON: &str =
    "spent too soon: rejected for spent attempts that were never granted";
pub(crate) const ORPHANED_CLAIM: &str = "orphaned claim: a claim without a holder, although nothing crashed; the next claim counts a crash";

/// The properties of a model.
pub(crate) fn of(model: &SystemModel) -> Vec<Property<SystemModel>> {
    let mut properties = vec![
        Property::always(LOST, |_, state: &SystemState| {
            let bodies = if state.observations.other_body { 2 } else { 1 };
            let has = |body: usize| {
                state.provider.effects[body] > 0
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
    let passes_through = model.setup.outage == oncegate_core::Outage::PassThrough;
    if model.all_have_guarantee(Guarantee::AtMostOnce) || model.all_have_guarantee(Guarantee::Bare)
    {
        properties.push(Property::always(DOUBLED, |_, state: &SystemState| {
            state.effects() < 2
        }));
    }
    if model.has_guarantee(Guarantee::AtMostOnce) {
        properties.push(Property::always(UNSAFE_START, |_, state: &SystemState| {
            !state.observations.start_with_possible_effect
        }));
    }
    if !model.has_guarantee(Guarantee::Bare) {
        properties.push(Property::always(
            FENCE_DECREASED,
            |_, state: &SystemState| !state.observations.start_below_fence,
        ));
        properties.push(Property::always(
            BEFORE_LATE_COMPLETION,
            |_, state: &SystemState| !state.observations.start_before_late_completion,
        ));
        if !passes_through {
            properties.push(Property::always(AFTER_DONE, |_, state: &SystemState| {
                !state.observations.start_after_done
            }));
            properties.push(Property::always(
                CONCURRENT_HANDLERS,
                |_, state: &SystemState| !state.observations.concurrent_handlers,
            ));
        }
        properties.push(Property::always(
            BUSY_AFTER_EXPIRY,
            |_, state: &SystemState| !state.observations.busy_after_expiry,
        ));
        properties.push(Property::always(
            STALE_RECONCILIATION,
            |_, state: &SystemState| !state.observations.stale_reconciling_marker,
        ));
        properties.push(Property::always(NOT_RUN, |_, state: &SystemState| {
            !state.observations.sent_back_not_run
        }));
        properties.push(Property::always(
            SPENT_TOO_SOON,
            |_, state: &SystemState| !state.observations.spent_too_soon,
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
