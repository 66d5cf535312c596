//! Wrong rules, each of which the model has to find: a checker that cannot fail proves nothing.
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
use oncegate_model::world::Budget;
use oncegate_model::{First, Line, Rules, Setup, explore, head};

/// One wrong rule, and where it shows.
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
    let people = |guarantees, budget| Setup {
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
    let right = Rules::default();
    let apply = |apply| Rules { apply, ..right };
    let next = |next| Rules { next, ..right };

    let trouble = Budget {
        crashes: 1,
        losses: 1,
        expiries: 1,
        failures: 1,
        copies: 1,
        ..NONE
    };
    let unknown = Budget {
        crashes: 1,
        losses: 1,
        expiries: 1,
        unknowns: 1,
        copies: 1,
        ..NONE
    };
    let in_order = Setup {
        keeps: OnRelease::KeepPlace,
        ..both(
            AtMostOnce,
            Budget {
                losses: 1,
                expiries: 1,
                failures: 1,
                unknowns: 1,
                copies: 1,
                ..NONE
            },
        )
    };
    let same_token = Rules {
        token: |earlier, new| if earlier.0 == 0 { new } else { earlier },
        ..right
    };
    add(
        "one token for all claims of a delivery",
        same_token,
        in_order,
        "two handlers",
    );
    let late = Budget {
        losses: 2,
        crashes: 1,
        expiries: 1,
        unknowns: 1,
        ..NONE
    };
    add(
        "the attempt is not compared with the token",
        apply(marker::compares_tokens_alone),
        both(AtMostOnce, late),
        "started on",
    );
    add(
        "clearing compares nothing",
        apply(marker::clear_compares_nothing),
        both(AtMostOnce, trouble),
        "two handlers",
    );
    add(
        "resolving compares nothing",
        apply(marker::resolve_compares_nothing),
        both(AtMostOnce, unknown),
        "started on",
    );
    add(
        "whoever asks renews",
        apply(marker::renews_for_whoever),
        both(
            AtMostOnce,
            Budget {
                expiries: 2,
                renewals: 2,
                copies: 1,
                ..NONE
            },
        ),
        "two handlers",
    );
    add(
        "a lapsed claim is granted at most once",
        apply(marker::grants_what_lapsed),
        both(
            AtMostOnce,
            Budget {
                crashes: 1,
                expiries: 1,
                ..NONE
            },
        ),
        "started on",
    );

    let lost = Budget {
        lost_claims: 1,
        losses: 1,
        expiries: 1,
        renewals: 1,
        unknowns: 2,
        failures: 1,
        ..NONE
    };
    add(
        "an absent marker is not doubted",
        apply(marker::no_doubt_on_absent),
        both(AtMostOnce, lost),
        "started on",
    );
    add(
        "a cleared marker is not doubted",
        apply(marker::no_doubt_on_cleared),
        both(AtMostOnce, lost),
        "started on",
    );
    add(
        "a lost lease is not doubted",
        next(lifecycle::no_doubt_on_a_lost_lease),
        both(AtMostOnce, lost),
        "started on",
    );

    let copies = Budget {
        copies: 1,
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
        copies: 1,
        unknowns: 1,
        ..NONE
    };
    add(
        "an unknown outcome counts as a failure",
        next(lifecycle::unknown_is_a_failure),
        both(AtMostOnce, panics),
        "started on",
    );
    add(
        "a doubt is not given back",
        next(lifecycle::keeps_its_doubt),
        both(AtMostOnce, panics),
        "doubt kept",
    );
    add(
        "a doubt that was reconciled counts as a failure",
        next(lifecycle::reconciled_is_a_failure),
        both(AtMostOnce, unknown),
        "spent",
    );
    add(
        "nothing happened: below this attempt alone",
        Rules {
            voids: |attempt| attempt - 1,
            ..right
        },
        both(AtMostOnce, panics),
        "doubled",
    );

    let outlasts_the_drain = Budget {
        unknowns: 1,
        failures: 1,
        copies: 1,
        drains: 2,
        ..NONE
    };
    add(
        "the end of the drain abandons what runs",
        next(lifecycle::abandons_at_the_end_of_the_drain),
        both(EffectivelyOnce, outlasts_the_drain),
        "left behind",
    );
    add(
        "the end of the drain clears what may have happened",
        next(lifecycle::clears_at_the_end_of_the_drain),
        both(AtMostOnce, outlasts_the_drain),
        "started on",
    );
    add(
        "the end of the drain keeps the doubt of a reconcile",
        next(lifecycle::keeps_the_doubt_of_a_dropped_reconcile),
        both(AtMostOnce, outlasts_the_drain),
        "left behind",
    );

    let other = Budget {
        crashes: 1,
        expiries: 1,
        others: 1,
        failures: 1,
        ..NONE
    };
    add(
        "another body waits for a holder that is gone",
        apply(marker::another_body_waits),
        both(AtMostOnce, other),
        "waits",
    );

    let both_guarantees = Budget {
        unknowns: 1,
        failures: 1,
        copies: 1,
        expiries: 1,
        ..NONE
    };
    add(
        "clearing forgets that the outcome is unknown",
        apply(marker::clear_forgets_unknown),
        mixed(both_guarantees),
        "started on",
    );
    add(
        "a later failure makes the outcome known",
        apply(marker::unknown_does_not_last),
        mixed(both_guarantees),
        "started on",
    );
    add(
        "a takeover forgets what the holder may have done",
        apply(marker::takeover_forgets),
        mixed(trouble),
        "started on",
    );
    add(
        "at most once is granted what is unknown",
        apply(marker::grants_what_is_unknown),
        mixed(both_guarantees),
        "started on",
    );

    let fails = Budget {
        people: 2,
        failures: 3,
        copies: 1,
        ..NONE
    };
    let spends = Budget {
        people: 1,
        unknowns: 2,
        failures: 1,
        copies: 1,
        ..NONE
    };
    add(
        "a rejection forgets the attempt",
        apply(marker::rejects_without_attempt),
        people([AtMostOnce; 2], fails),
        "fence",
    );
    add(
        "forgetting deletes the marker",
        apply(marker::forget_deletes),
        people([EffectivelyOnce; 2], fails),
        "fence",
    );
    add(
        "sending back gives no budget back",
        apply(marker::sends_back_without_budget),
        people([EffectivelyOnce; 2], spends),
        "not run",
    );
    add(
        "sending back compares nothing",
        apply(marker::sends_back_whatever_is_there),
        people([AtMostOnce; 2], spends),
        "started on",
    );
    add(
        "sending back makes what is unknown known",
        apply(marker::sends_back_as_known),
        people([EffectivelyOnce, AtMostOnce], spends),
        "started on",
    );
    let leaves = Budget {
        people: 1,
        drains: 2,
        yields: 1,
        failures: 2,
        copies: 1,
        ..NONE
    };
    add(
        "a grant that is withdrawn spends the budget",
        apply(marker::withdrawals_spend),
        people([EffectivelyOnce; 2], leaves),
        "spent",
    );
    add(
        "a crash spends the budget",
        apply(marker::crashes_spend),
        both(EffectivelyOnce, trouble),
        "spent",
    );
    let doubts_late = Budget {
        people: 1,
        unknowns: 1,
        losses: 1,
        expiries: 1,
        copies: 1,
        ..NONE
    };
    add(
        "a late doubt undoes what a person found out",
        apply(marker::doubts_what_was_freed),
        people([AtMostOnce; 2], doubts_late),
        "not run",
    );
    let passing = Setup {
        outage: Outage::PassThrough,
        ..both(
            EffectivelyOnce,
            Budget {
                losses: 2,
                crashes: 1,
                copies: 1,
                failures: 1,
                ..NONE
            },
        )
    };
    add(
        "claims go before late completions",
        Rules {
            first: First::Any,
            ..right
        },
        passing,
        "before late",
    );
    let crashes = Setup {
        attempts: 1,
        ..both(
            EffectivelyOnce,
            Budget {
                people: 1,
                expiries: 2,
                copies: 2,
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
        "sending back is answered and not done",
        apply(marker::sends_back_in_word_alone),
        people([AtMostOnce; 2], fails),
        "not run",
    );
    add(
        "a doubt spends the budget",
        apply(marker::doubts_spend),
        people([AtMostOnce; 2], spends),
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
        "{} of {} mutants were found, in {} s",
        tried - survivors.len(),
        tried,
        started.elapsed().as_secs()
    );
    for name in &survivors {
        println!("NOT found: {name}");
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
    use oncegate_model::lines::{HowFar, lines};

    #[test]
    fn each_mutant_is_found_under_trouble_under_which_the_right_rules_hold() {
        let holding: Vec<String> = lines(HowFar::Minutes)
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
