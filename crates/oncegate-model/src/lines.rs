//! The lines of the table in `docs/contributing/model.md`: each guarantee with the fault budgets
//! under which it holds, and the expected violations of `Guarantee::Bare` and of a store that loses
//! data.

use oncegate_core::Outage;
use oncegate_core::marker::Guarantee::{AtMostOnce, Bare, EffectivelyOnce};

use crate::explore::Line;
use crate::properties::{DOUBLED, LOST, START_AFTER_DONE};
use crate::state::Budget;
use crate::system::{EffectsIn, RetriesWait, Setup};

/// How large the fault budgets of the table are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Lines that together take two minutes.
    Minutes,
    /// Also the longest lines, and every fault once in the same line: 33 million states and more,
    /// limited by memory.
    Deep,
}

const NONE: Budget = Budget::NONE;

/// The lines, in the order of the output.
pub fn lines(depth: Depth) -> Vec<Line> {
    let mut lines = bare_lines();
    lines.extend(lines_of_each_guarantee(depth));
    lines.extend(mixed_lines(depth));
    lines.extend(operator_lines(depth));
    lines.extend(lossy_store_lines());
    lines.extend(inbox_lines());
    lines
}

/// The lines of the inbox, whose claims are only in the memory of the consumers. The marker represents
/// these claims, and may be lost at any time.
fn inbox_lines() -> impl Iterator<Item = Line> {
    let faults = [
        Budget {
            lost_replies: 1,
            lost_markers: 1,
            ..NONE
        },
        Budget {
            lost_replies: 2,
            failures: 1,
            redeliveries: 1,
            lost_markers: 2,
            ..NONE
        },
        Budget {
            crashes: 2,
            lost_replies: 1,
            redeliveries: 1,
            lost_markers: 2,
            ..NONE
        },
        Budget {
            crashes: 1,
            expiries: 1,
            unknown_outcomes: 1,
            lost_markers: 1,
            ..NONE
        },
        Budget {
            lost_replies: 1,
            unknown_outcomes: 1,
            drains: 1,
            ..NONE
        },
    ];
    faults.into_iter().map(|budget| {
        Line::holds(Setup {
            effects: EffectsIn::Inbox,
            ..Setup::of([EffectivelyOnce; 2], budget)
        })
    })
}

/// Budgets of one or two faults.
const FEW_FAULTS: [Budget; 4] = [
    Budget {
        lost_replies: 1,
        ..NONE
    },
    Budget { crashes: 1, ..NONE },
    Budget {
        redeliveries: 1,
        failures: 1,
        ..NONE
    },
    Budget {
        redeliveries: 1,
        unknown_outcomes: 1,
        ..NONE
    },
];

/// Budgets of several faults in the same run.
const COMBINED_FAULTS: [Budget; 4] = [
    Budget {
        crashes: 1,
        lost_replies: 1,
        expiries: 1,
        failures: 1,
        redeliveries: 1,
        ..NONE
    },
    Budget {
        crashes: 1,
        lost_replies: 1,
        expiries: 1,
        unknown_outcomes: 1,
        redeliveries: 1,
        ..NONE
    },
    Budget {
        crashes: 1,
        lost_replies: 1,
        expiries: 1,
        unknown_outcomes: 1,
        drains: 1,
        ..NONE
    },
    Budget {
        lost_replies: 2,
        expiries: 2,
        redeliveries: 1,
        ..NONE
    },
];

fn bare_lines() -> Vec<Line> {
    let bare = |budget| Setup::of([Bare; 2], budget);
    let violated = FEW_FAULTS.into_iter().zip([LOST, LOST, LOST, DOUBLED]);
    [Line::holds(bare(NONE))]
        .into_iter()
        .chain(violated.map(|(budget, property)| Line::violates(bare(budget), property)))
        .collect()
}

fn lines_of_each_guarantee(depth: Depth) -> Vec<Line> {
    let mut lines = Vec::new();
    for guarantee in [AtMostOnce, EffectivelyOnce] {
        let setup = |budget| Setup::of([guarantee; 2], budget);
        lines.extend(FEW_FAULTS.map(|budget| Line::holds(setup(budget))));
        let short = if guarantee == AtMostOnce && depth == Depth::Minutes {
            3
        } else {
            COMBINED_FAULTS.len()
        };
        let combined = COMBINED_FAULTS.into_iter().take(short);
        lines.extend(combined.map(|budget| Line::holds(setup(budget))));
        lines.push(Line::holds(setup(Budget {
            crashes: 1,
            expiries: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            redeliveries: 1,
            failures: 2,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            lost_replies: 2,
            crashes: 1,
            expiries: 1,
            unknown_outcomes: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            expiries: 2,
            renewals: 2,
            redeliveries: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            crashes: 1,
            expiries: 1,
            other_bodies: 1,
            failures: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            lost_replies: 1,
            expiries: 1,
            withdrawn_grants: 1,
            drains: 1,
            redeliveries: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            unknown_outcomes: 1,
            failures: 1,
            redeliveries: 1,
            drains: 2,
            ..NONE
        })));
        let in_consumer = Budget {
            lost_replies: 1,
            expiries: 1,
            failures: 1,
            unknown_outcomes: 1,
            redeliveries: 1,
            ..NONE
        };
        lines.push(Line::holds(Setup {
            retries: RetriesWait::InConsumer,
            ..setup(in_consumer)
        }));
        if depth == Depth::Deep {
            let all_faults = Budget {
                crashes: 1,
                lost_replies: 1,
                expiries: 1,
                failures: 1,
                unknown_outcomes: 1,
                redeliveries: 1,
                drains: 1,
                ..NONE
            };
            lines.push(Line::holds(setup(all_faults)));
        }
    }
    // With pass-through during an outage of the store an effect may be repeated, but none is lost.
    let pass_through = Setup {
        outage: Outage::PassThrough,
        ..Setup::of(
            [EffectivelyOnce; 2],
            Budget {
                lost_replies: 2,
                crashes: 1,
                redeliveries: 1,
                failures: 1,
                ..NONE
            },
        )
    };
    lines.push(Line::holds(pass_through));
    lines
}

/// The lines of a rolling upgrade from one guarantee to the other: the two consumers have different
/// guarantees.
fn mixed_lines(depth: Depth) -> Vec<Line> {
    let chosen = COMBINED_FAULTS
        .into_iter()
        .enumerate()
        .filter(|(index, _)| index % 2 == 0 || depth == Depth::Deep);
    let mut lines: Vec<Line> = chosen
        .map(|(_, budget)| Line::holds(Setup::of([AtMostOnce, EffectivelyOnce], budget)))
        .collect();
    lines.push(Line::holds(Setup::of(
        [AtMostOnce, EffectivelyOnce],
        Budget {
            unknown_outcomes: 1,
            failures: 1,
            redeliveries: 1,
            expiries: 1,
            ..NONE
        },
    )));
    lines
}

/// The lines in which the operator redrives dead letters, resolves in-doubt messages and frees
/// completed ids.
fn operator_lines(depth: Depth) -> Vec<Line> {
    let two_attempts = |guarantees, budget| {
        Line::holds(Setup {
            attempts: 2,
            ..Setup::of(guarantees, budget)
        })
    };
    let mut lines = Vec::new();
    // With this budget a message may be rejected while its marker is still in progress.
    let expired_at_rejection = Budget {
        operator_actions: 1,
        failures: 2,
        expiries: 2,
        lost_replies: 2,
        ..NONE
    };
    for guarantees in [
        [AtMostOnce; 2],
        [EffectivelyOnce; 2],
        [AtMostOnce, EffectivelyOnce],
    ] {
        lines.push(two_attempts(
            guarantees,
            Budget {
                operator_actions: 2,
                failures: 3,
                redeliveries: 1,
                ..NONE
            },
        ));
        lines.push(two_attempts(
            guarantees,
            Budget {
                operator_actions: 1,
                unknown_outcomes: 2,
                failures: 1,
                redeliveries: 1,
                ..NONE
            },
        ));
        lines.push(two_attempts(
            guarantees,
            Budget {
                operator_actions: 1,
                crashes: 1,
                unknown_outcomes: 1,
                expiries: 1,
                lost_replies: 1,
                ..NONE
            },
        ));
        if guarantees[0] == guarantees[1] || depth == Depth::Deep {
            lines.push(two_attempts(guarantees, expired_at_rejection));
        }
        lines.push(two_attempts(
            guarantees,
            Budget {
                operator_actions: 1,
                drains: 2,
                withdrawn_grants: 1,
                failures: 2,
                redeliveries: 1,
                ..NONE
            },
        ));
    }
    for guarantee in [AtMostOnce, EffectivelyOnce] {
        // With one attempt and one crash allowed, messages are rejected because of crashes.
        let crashes = Budget {
            operator_actions: 1,
            expiries: 2,
            redeliveries: 2,
            ..NONE
        };
        lines.push(Line::holds(Setup {
            attempts: 1,
            ..Setup::of([guarantee; 2], crashes)
        }));
        lines.push(two_attempts(
            [guarantee; 2],
            Budget {
                operator_actions: 1,
                other_bodies: 1,
                failures: 1,
                unknown_outcomes: 1,
                expiries: 1,
                ..NONE
            },
        ));
        lines.push(two_attempts(
            [guarantee; 2],
            Budget {
                operator_actions: 1,
                unknown_outcomes: 1,
                lost_replies: 1,
                expiries: 1,
                redeliveries: 1,
                ..NONE
            },
        ));
    }
    // Only in these lines does the guarantee of the operator's tool make a difference.
    lines.push(two_attempts(
        [EffectivelyOnce, AtMostOnce],
        expired_at_rejection,
    ));
    lines.push(two_attempts(
        [EffectivelyOnce, AtMostOnce],
        Budget {
            operator_actions: 1,
            unknown_outcomes: 2,
            failures: 1,
            redeliveries: 1,
            ..NONE
        },
    ));
    lines
}

/// The lines of a store that loses a marker or a claim.
fn lossy_store_lines() -> Vec<Line> {
    // Without a second delivery, the commands that the consumer of the running handler sends after
    // the loss are enough to keep the guarantee.
    let loss = Budget {
        lost_claims: 1,
        lost_replies: 1,
        expiries: 1,
        renewals: 1,
        unknown_outcomes: 2,
        failures: 1,
        ..NONE
    };
    vec![
        Line::holds(Setup::of([AtMostOnce; 2], loss)),
        Line::holds(Setup::of([EffectivelyOnce; 2], loss)),
        // No store can prevent these two violations: after the marker is lost, the effect is
        // repeated unless the sink refuses the second request.
        Line::violates(
            Setup::of(
                [AtMostOnce; 2],
                Budget {
                    lost_markers: 1,
                    redeliveries: 1,
                    ..NONE
                },
            ),
            DOUBLED,
        ),
        Line::violates(
            Setup::of(
                [EffectivelyOnce; 2],
                Budget {
                    lost_markers: 1,
                    redeliveries: 1,
                    ..NONE
                },
            ),
            START_AFTER_DONE,
        ),
    ]
}
