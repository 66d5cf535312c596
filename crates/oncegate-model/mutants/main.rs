//! Mutants: broken rules, each of which the model must detect.
//!
//! Usage: `oncegate-model-mutants [NAME]`, with a part of a mutant's name to run only some. The
//! exit status is 0 if each mutant violates the property that is named beside it.
#![forbid(unsafe_code)]

mod lifecycle;
mod marker;

use std::process::ExitCode;
use std::time::Instant;

use oncegate_core::Outage;
use oncegate_core::marker::Guarantee::{self, AtMostOnce, EffectivelyOnce};
use oncegate_model::state::Budget;
use oncegate_model::{EffectsIn, Line, RecoveryOrder, RetriesWait, Rules, Setup, explore, head};

/// One broken rule, and the property that it must violate.
struct Mutant {
    /// A sentence that says what the broken rule does.
    name: &'static str,
    rules: Rules,
    setup: Setup,
    /// The beginning of the property's name.
    property: &'static str,
}

const NONE: Budget = Budget::NONE;

fn mutants() -> Vec<Mutant> {
    let both = |guarantee: Guarantee, budget| Setup::of([guarantee; 2], budget);
    let mixed = |budget| Setup::of([AtMostOnce, EffectivelyOnce], budget);
    let with_operator = |guarantees, budget| Setup {
        attempts: 2,
        ..Setup::of(guarantees, budget)
    };
    let mut all = Vec::new();
    let mut add = |name, rules, setup, property| {
        all.push(Mutant {
            name,
            rules,
            setup,
            property,
        })
    };
    let correct = Rules::default();
    let apply = |apply| Rules { apply, ..correct };
    let transition = |transition| Rules {
        transition,
        ..correct
    };

    let common_faults = Budget {
        crashes: 1,
        lost_replies: 1,
        expiries: 1,
        failures: 1,
        redeliveries: 1,
        ..NONE
    };
    let unknown = Budget {
        crashes: 1,
        lost_replies: 1,
        expiries: 1,
        unknown_outcomes: 1,
        redeliveries: 1,
        ..NONE
    };
    let in_consumer = Setup {
        retries: RetriesWait::InConsumer,
        ..both(
            AtMostOnce,
            Budget {
                lost_replies: 1,
                expiries: 1,
                failures: 1,
                unknown_outcomes: 1,
                redeliveries: 1,
                ..NONE
            },
        )
    };
    let same_token = Rules {
        token: |earlier, new| if earlier.0 == 0 { new } else { earlier },
        ..correct
    };
    add(
        "one token for all claims of a delivery",
        same_token,
        in_consumer,
        "concurrent handlers",
    );
    let late = Budget {
        lost_replies: 2,
        crashes: 1,
        expiries: 1,
        unknown_outcomes: 1,
        ..NONE
    };
    add(
        "only the token is compared, not the attempt",
        apply(marker::compares_only_tokens),
        both(AtMostOnce, late),
        "unsafe start",
    );
    add(
        "clearing does not compare the holder",
        apply(marker::clears_without_comparing),
        both(AtMostOnce, common_faults),
        "concurrent handlers",
    );
    add(
        "resolving does not compare the holder",
        apply(marker::resolves_without_comparing),
        both(AtMostOnce, unknown),
        "unsafe start",
    );
    add(
        "a renewal does not compare the holder",
        apply(marker::renews_without_comparing),
        both(
            AtMostOnce,
            Budget {
                expiries: 2,
                renewals: 2,
                redeliveries: 1,
                ..NONE
            },
        ),
        "concurrent handlers",
    );
    add(
        "an expired claim is granted in at most once",
        apply(marker::grants_expired_claim),
        both(
            AtMostOnce,
            Budget {
                crashes: 1,
                expiries: 1,
                ..NONE
            },
        ),
        "unsafe start",
    );

    let lost = Budget {
        lost_claims: 1,
        lost_replies: 1,
        expiries: 1,
        renewals: 1,
        unknown_outcomes: 2,
        failures: 1,
        ..NONE
    };
    add(
        "no doubt is recorded on an absent marker",
        apply(marker::no_doubt_on_absent),
        both(AtMostOnce, lost),
        "unsafe start",
    );
    add(
        "no doubt is recorded on a cleared marker",
        apply(marker::no_doubt_on_cleared),
        both(AtMostOnce, lost),
        "unsafe start",
    );
    add(
        "no doubt is recorded after a lost lease",
        transition(lifecycle::no_doubt_on_a_lost_lease),
        both(AtMostOnce, lost),
        "unsafe start",
    );

    let redeliveries = Budget {
        redeliveries: 1,
        failures: 2,
        ..NONE
    };
    add(
        "a busy claim is accepted",
        transition(lifecycle::accepts_a_busy_claim),
        both(EffectivelyOnce, redeliveries),
        "lost",
    );
    let panics = Budget {
        redeliveries: 1,
        unknown_outcomes: 1,
        ..NONE
    };
    add(
        "an unknown outcome counts as a failure",
        transition(lifecycle::unknown_is_a_failure),
        both(AtMostOnce, panics),
        "unsafe start",
    );
    add(
        "the marker keeps its holder after reconcile did not find out the outcome",
        transition(lifecycle::keeps_the_holder_after_reconcile),
        both(AtMostOnce, panics),
        "stale reconciliation",
    );
    add(
        "a reconciled doubt counts as a failure",
        transition(lifecycle::reconciled_is_a_failure),
        both(AtMostOnce, unknown),
        "spent",
    );
    add(
        "DidNotHappen prevents only lower attempts",
        Rules {
            voids: |attempt| attempt - 1,
            ..correct
        },
        both(AtMostOnce, panics),
        "doubled",
    );

    let drain_faults = Budget {
        unknown_outcomes: 1,
        failures: 1,
        redeliveries: 1,
        drains: 2,
        ..NONE
    };
    add(
        "the drain timeout abandons running handlers",
        transition(lifecycle::abandons_at_the_drain_timeout),
        both(EffectivelyOnce, drain_faults),
        "orphaned claim",
    );
    add(
        "the drain timeout clears a run that may have had its effect",
        transition(lifecycle::clears_at_the_drain_timeout),
        both(AtMostOnce, drain_faults),
        "unsafe start",
    );
    add(
        "the drain timeout does not record the doubt of a reconcile",
        transition(lifecycle::releases_a_dropped_reconcile_without_doubt),
        both(AtMostOnce, drain_faults),
        "orphaned claim",
    );

    let other = Budget {
        crashes: 1,
        expiries: 1,
        other_bodies: 1,
        failures: 1,
        ..NONE
    };
    add(
        "another body waits for an expired holder",
        apply(marker::another_body_waits),
        both(AtMostOnce, other),
        "busy after",
    );

    let both_guarantees = Budget {
        unknown_outcomes: 1,
        failures: 1,
        redeliveries: 1,
        expiries: 1,
        ..NONE
    };
    add(
        "clearing records an unknown outcome as known",
        apply(marker::clears_unknown_as_known),
        mixed(both_guarantees),
        "unsafe start",
    );
    add(
        "a later failure makes the outcome known",
        apply(marker::fails_as_known),
        mixed(both_guarantees),
        "unsafe start",
    );
    add(
        "a takeover records the outcome of the crashed holder as known",
        apply(marker::takes_over_as_known),
        mixed(common_faults),
        "unsafe start",
    );
    add(
        "an id with an unknown outcome is granted in at most once",
        apply(marker::grants_unknown_outcome),
        mixed(both_guarantees),
        "unsafe start",
    );

    let redrive_faults = Budget {
        operator_actions: 2,
        failures: 3,
        redeliveries: 1,
        ..NONE
    };
    let unknown_and_redrive = Budget {
        operator_actions: 1,
        unknown_outcomes: 2,
        failures: 1,
        redeliveries: 1,
        ..NONE
    };
    add(
        "a rejection does not record the attempt",
        apply(marker::rejects_without_attempt),
        with_operator([AtMostOnce; 2], redrive_faults),
        "fence",
    );
    add(
        "forgetting deletes the marker",
        apply(marker::forget_deletes),
        with_operator([EffectivelyOnce; 2], redrive_faults),
        "fence",
    );
    add(
        "a redrive does not restore max_attempts",
        apply(marker::redrives_without_budget),
        with_operator([EffectivelyOnce; 2], unknown_and_redrive),
        "not run",
    );
    add(
        "a redrive does not compare the marker",
        apply(marker::redrives_without_comparing),
        with_operator([AtMostOnce; 2], unknown_and_redrive),
        "unsafe start",
    );
    add(
        "a redrive makes an unknown outcome known",
        apply(marker::redrives_as_known),
        with_operator([EffectivelyOnce, AtMostOnce], unknown_and_redrive),
        "unsafe start",
    );
    let withdrawals = Budget {
        operator_actions: 1,
        drains: 2,
        withdrawn_grants: 1,
        failures: 2,
        redeliveries: 1,
        ..NONE
    };
    add(
        "a withdrawn grant spends an attempt",
        apply(marker::withdrawals_spend_attempts),
        with_operator([EffectivelyOnce; 2], withdrawals),
        "spent",
    );
    add(
        "a crash spends an attempt",
        apply(marker::crashes_spend_attempts),
        both(EffectivelyOnce, common_faults),
        "spent",
    );
    let late_doubts = Budget {
        operator_actions: 1,
        unknown_outcomes: 1,
        lost_replies: 1,
        expiries: 1,
        redeliveries: 1,
        ..NONE
    };
    add(
        "a late doubt undoes the operator's resolution",
        apply(marker::records_doubt_of_freed_attempt),
        with_operator([AtMostOnce; 2], late_doubts),
        "not run",
    );
    let pass_through = Setup {
        outage: Outage::PassThrough,
        ..both(
            EffectivelyOnce,
            Budget {
                lost_replies: 2,
                crashes: 1,
                redeliveries: 1,
                failures: 1,
                ..NONE
            },
        )
    };
    add(
        "claims are sent before late completions",
        Rules {
            recovery_order: RecoveryOrder::Any,
            ..correct
        },
        pass_through,
        "before late completion",
    );
    let crashes = Setup {
        attempts: 1,
        ..both(
            EffectivelyOnce,
            Budget {
                operator_actions: 1,
                expiries: 2,
                redeliveries: 2,
                ..NONE
            },
        )
    };
    add(
        "a redrive keeps the crashes",
        apply(marker::redrives_with_crashes),
        crashes,
        "not run",
    );
    add(
        "a redrive replies Applied but writes nothing",
        apply(marker::redrives_without_write),
        with_operator([AtMostOnce; 2], redrive_faults),
        "not run",
    );
    add(
        "a doubt spends an attempt",
        apply(marker::doubts_spend_attempts),
        with_operator([AtMostOnce; 2], unknown_and_redrive),
        "spent",
    );
    let inbox = Setup {
        effects: EffectsIn::Inbox,
        ..both(
            EffectivelyOnce,
            Budget {
                lost_replies: 1,
                lost_markers: 1,
                ..NONE
            },
        )
    };
    add(
        "an unconfirmed commit is accepted",
        transition(lifecycle::accepts_an_unconfirmed_commit),
        inbox,
        "lost",
    );
    add(
        "an unconfirmed commit is in doubt",
        transition(lifecycle::doubts_an_unconfirmed_commit),
        inbox,
        "in doubt",
    );
    all
}

fn main() -> ExitCode {
    let named = std::env::args().nth(1);
    let started = Instant::now();
    let all = mutants();
    println!("{}", head());
    let (mut tried, mut undetected) = (0, Vec::new());
    for mutant in all.iter().filter(|mutant| {
        named
            .as_ref()
            .is_none_or(|name| mutant.name.contains(name.as_str()))
    }) {
        tried += 1;
        println!("{}:", mutant.name);
        if !explore(&Line::violates(mutant.setup, mutant.property), mutant.rules) {
            undetected.push(mutant.name);
        }
    }
    println!(
        "{} of {} mutants were detected, in {} s",
        tried - undetected.len(),
        tried,
        started.elapsed().as_secs()
    );
    for name in &undetected {
        println!("NOT detected: {name}");
    }
    if undetected.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use oncegate_model::Expected;
    use oncegate_model::lines::{Depth, lines};

    #[test]
    fn each_mutant_has_a_setup_under_which_the_correct_rules_hold() {
        let holding: Vec<String> = lines(Depth::Minutes)
            .iter()
            .filter(|line| line.expected == Expected::Holds)
            .map(|line| format!("{:?}", line.setup))
            .collect();
        for mutant in super::mutants() {
            assert!(
                holding.contains(&format!("{:?}", mutant.setup)),
                "{}: no line of the table has {:?}",
                mutant.name,
                mutant.setup
            );
        }
    }
}
