//! Mutants: broken rules, each of which the model must detect.
//!
//! `oncegate-model-mutants [NAME]`: exit status 0 if each mutant violates the property that is
//! named beside it.
#![forbid(unsafe_code)]

mod lifecycle;
mod marker;

use std::process::ExitCode;
use std::time::Instant;

use oncegate_core::Outage;
use oncegate_core::driver::OnRelease;
use oncegate_core::marker::Guarantee::{self, AtMostOnce, EffectivelyOnce};
use oncegate_model::state::Budget;
use oncegate_model::{Line, RecoveryOrder, Rules, Setup, explore, head};

/// One broken rule, and the property that it must violate.
struct Mutant {
    name: &'static str,
    rules: Rules,
    setup: Setup,
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
    let next = |next| Rules { next, ..correct };

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
    let in_order = Setup {
        on_release: OnRelease::KeepPlace,
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
        in_order,
        "two handlers",
    );
    let late = Budget {
        lost_replies: 2,
        crashes: 1,
        expiries: 1,
        unknown_outcomes: 1,
        ..NONE
    };
    add(
        "the attempt is not compared with the token",
        apply(marker::compares_tokens_alone),
        both(AtMostOnce, late),
        "started with",
    );
    add(
        "clearing compares nothing",
        apply(marker::clear_compares_nothing),
        both(AtMostOnce, common_faults),
        "two handlers",
    );
    add(
        "resolving compares nothing",
        apply(marker::resolve_compares_nothing),
        both(AtMostOnce, unknown),
        "started with",
    );
    add(
        "a renewal does not compare the holder",
        apply(marker::renewal_compares_nothing),
        both(
            AtMostOnce,
            Budget {
                expiries: 2,
                renewals: 2,
                redeliveries: 1,
                ..NONE
            },
        ),
        "two handlers",
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
        "started with",
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
        "started with",
    );
    add(
        "no doubt is recorded on a cleared marker",
        apply(marker::no_doubt_on_cleared),
        both(AtMostOnce, lost),
        "started with",
    );
    add(
        "no doubt is recorded after a lost lease",
        next(lifecycle::no_doubt_on_a_lost_lease),
        both(AtMostOnce, lost),
        "started with",
    );

    let copies = Budget {
        redeliveries: 1,
        failures: 2,
        ..NONE
    };
    add(
        "a busy claim is accepted",
        next(lifecycle::accepts_a_busy_claim),
        both(EffectivelyOnce, copies),
        "lost",
    );
    let panics = Budget {
        redeliveries: 1,
        unknown_outcomes: 1,
        ..NONE
    };
    add(
        "an unknown outcome counts as a failure",
        next(lifecycle::unknown_is_a_failure),
        both(AtMostOnce, panics),
        "started with",
    );
    add(
        "a doubt is not released after reconcile",
        next(lifecycle::does_not_release_doubt),
        both(AtMostOnce, panics),
        "stale reconciliation",
    );
    add(
        "a reconciled doubt counts as a failure",
        next(lifecycle::reconciled_is_a_failure),
        both(AtMostOnce, unknown),
        "spent",
    );
    add(
        "DidNotHappen covers only lower attempts",
        Rules {
            voids: |attempt| attempt - 1,
            ..correct
        },
        both(AtMostOnce, panics),
        "doubled",
    );

    let outlasts_the_drain = Budget {
        unknown_outcomes: 1,
        failures: 1,
        redeliveries: 1,
        drains: 2,
        ..NONE
    };
    add(
        "the end of the drain abandons running handlers",
        next(lifecycle::abandons_at_the_end_of_the_drain),
        both(EffectivelyOnce, outlasts_the_drain),
        "orphaned claim",
    );
    add(
        "the end of the drain clears a run that may have had its effect",
        next(lifecycle::clears_at_the_end_of_the_drain),
        both(AtMostOnce, outlasts_the_drain),
        "started with",
    );
    add(
        "the end of the drain keeps the doubt of a reconcile",
        next(lifecycle::keeps_the_doubt_of_a_dropped_reconcile),
        both(AtMostOnce, outlasts_the_drain),
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
        "clearing forgets that the outcome is unknown",
        apply(marker::clear_forgets_unknown),
        mixed(both_guarantees),
        "started with",
    );
    add(
        "a later failure makes the outcome known",
        apply(marker::failure_clears_unknown),
        mixed(both_guarantees),
        "started with",
    );
    add(
        "a takeover forgets the unknown outcome of the holder",
        apply(marker::takeover_clears_unknown),
        mixed(common_faults),
        "started with",
    );
    add(
        "at most once is granted an unknown outcome",
        apply(marker::grants_unknown_outcome),
        mixed(both_guarantees),
        "started with",
    );

    let fails = Budget {
        operator_actions: 2,
        failures: 3,
        redeliveries: 1,
        ..NONE
    };
    let spends = Budget {
        operator_actions: 1,
        unknown_outcomes: 2,
        failures: 1,
        redeliveries: 1,
        ..NONE
    };
    add(
        "a rejection forgets the attempt",
        apply(marker::rejects_without_attempt),
        with_operator([AtMostOnce; 2], fails),
        "fence",
    );
    add(
        "forgetting deletes the marker",
        apply(marker::forget_deletes),
        with_operator([EffectivelyOnce; 2], fails),
        "fence",
    );
    add(
        "sending back does not restore the budget",
        apply(marker::sends_back_without_budget),
        with_operator([EffectivelyOnce; 2], spends),
        "not run",
    );
    add(
        "sending back compares nothing",
        apply(marker::sends_back_compares_nothing),
        with_operator([AtMostOnce; 2], spends),
        "started with",
    );
    add(
        "sending back clears an unknown outcome",
        apply(marker::sends_back_clears_unknown),
        with_operator([EffectivelyOnce, AtMostOnce], spends),
        "started with",
    );
    let leaves = Budget {
        operator_actions: 1,
        drains: 2,
        withdrawn_grants: 1,
        failures: 2,
        redeliveries: 1,
        ..NONE
    };
    add(
        "a grant that is withdrawn spends the budget",
        apply(marker::withdrawals_spend),
        with_operator([EffectivelyOnce; 2], leaves),
        "spent",
    );
    add(
        "a crash spends the budget",
        apply(marker::crashes_spend),
        both(EffectivelyOnce, common_faults),
        "spent",
    );
    let doubts_late = Budget {
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
        with_operator([AtMostOnce; 2], doubts_late),
        "not run",
    );
    let passing = Setup {
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
        passing,
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
        "sending back keeps the crashes",
        apply(marker::sends_back_with_crashes),
        crashes,
        "not run",
    );
    add(
        "sending back is answered but not written",
        apply(marker::sends_back_without_write),
        with_operator([AtMostOnce; 2], fails),
        "not run",
    );
    add(
        "a doubt spends the budget",
        apply(marker::doubts_spend),
        with_operator([AtMostOnce; 2], spends),
        "spent",
    );
    all
}

fn main() -> ExitCode {
    let named = std::env::args().nth(1);
    let started = Instant::now();
    let all = mutants();
    println!("{}", head());
    let (mut tried, mut survivors) = (0, Vec::new());
    for mutant in all.iter().filter(|it| {
        named
            .as_ref()
            .is_none_or(|name| it.name.contains(name.as_str()))
    }) {
        tried += 1;
        println!("{}:", mutant.name);
        if !explore(&Line::violates(mutant.setup, mutant.property), mutant.rules) {
            survivors.push(mutant.name);
        }
    }
    println!(
        "{} of {} mutants were detected, in {} s",
        tried - survivors.len(),
        tried,
        started.elapsed().as_secs()
    );
    for name in &survivors {
        println!("NOT detected: {name}");
    }
    if survivors.is_empty() {
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
