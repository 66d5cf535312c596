//! The table: what promises holds under so much trouble, and what promises nothing is seen to
//! break.

use oncegate_core::Outage;
use oncegate_core::driver::OnRelease;
use oncegate_core::marker::Guarantee::{AtMostOnce, Bare, EffectivelyOnce};

use crate::explore::Line;
use crate::properties::{AFTER_DONE, DOUBLED, LOST};
use crate::trial::Setup;
use crate::world::Budget;

/// How much trouble is allowed for at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HowFar {
    /// What fits into some minutes.
    Minutes,
    /// Everything once, together: some 33 million states, and as many as memory holds.
    Deep,
}

const NONE: Budget = Budget::NONE;

/// The lines, in the order in which they are printed.
pub fn lines(how_far: HowFar) -> Vec<Line> {
    let mut lines = of_bare();
    lines.extend(of_each_guarantee(how_far));
    lines.extend(of_both(how_far));
    lines.extend(of_people());
    lines.extend(of_losses());
    lines
}

const ONE_EACH: [Budget; 4] = [
    Budget { losses: 1, ..NONE },
    Budget { crashes: 1, ..NONE },
    Budget {
        copies: 1,
        failures: 1,
        ..NONE
    },
    Budget {
        copies: 1,
        unknowns: 1,
        ..NONE
    },
];

const TOGETHER: [Budget; 4] = [
    Budget {
        crashes: 1,
        losses: 1,
        expiries: 1,
        failures: 1,
        copies: 1,
        ..NONE
    },
    Budget {
        crashes: 1,
        losses: 1,
        expiries: 1,
        unknowns: 1,
        copies: 1,
        ..NONE
    },
    Budget {
        crashes: 1,
        losses: 1,
        expiries: 1,
        unknowns: 1,
        drains: 1,
        ..NONE
    },
    Budget {
        losses: 2,
        expiries: 2,
        copies: 1,
        ..NONE
    },
];

fn of_bare() -> Vec<Line> {
    let bare = |budget| Setup::of([Bare; 2], budget);
    let broken = ONE_EACH.into_iter().zip([LOST, LOST, LOST, DOUBLED]);
    [Line::holds(bare(NONE))]
        .into_iter()
        .chain(broken.map(|(budget, what)| Line::violates(bare(budget), what)))
        .collect()
}

fn of_each_guarantee(how_far: HowFar) -> Vec<Line> {
    let mut lines = Vec::new();
    for guarantee in [AtMostOnce, EffectivelyOnce] {
        let setup = |budget| Setup::of([guarantee; 2], budget);
        lines.extend(
            ONE_EACH
                .into_iter()
                .chain(TOGETHER)
                .map(|budget| Line::holds(setup(budget))),
        );
        lines.push(Line::holds(setup(Budget {
            crashes: 1,
            expiries: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            copies: 1,
            failures: 2,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            losses: 2,
            crashes: 1,
            expiries: 1,
            unknowns: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            expiries: 2,
            renewals: 2,
            copies: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            crashes: 1,
            expiries: 1,
            others: 1,
            failures: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            losses: 1,
            expiries: 1,
            yields: 1,
            drains: 1,
            copies: 1,
            ..NONE
        })));
        lines.push(Line::holds(setup(Budget {
            unknowns: 1,
            failures: 1,
            copies: 1,
            drains: 2,
            ..NONE
        })));
        let in_order = Budget {
            losses: 1,
            expiries: 1,
            failures: 1,
            unknowns: 1,
            copies: 1,
            ..NONE
        };
        lines.push(Line::holds(Setup {
            keeps: OnRelease::KeepPlace,
            ..setup(in_order)
        }));
        if how_far == HowFar::Deep {
            let all = Budget {
                crashes: 1,
                losses: 1,
                expiries: 1,
                failures: 1,
                unknowns: 1,
                copies: 1,
                drains: 1,
                ..NONE
            };
            lines.push(Line::holds(setup(all)));
        }
    }
    // Without the gate for a while, at least once; nothing is lost.
    let passing = Setup {
        outage: Outage::PassThrough,
        ..Setup::of(
            [EffectivelyOnce; 2],
            Budget {
                losses: 2,
                crashes: 1,
                copies: 1,
                failures: 1,
                ..NONE
            },
        )
    };
    lines.push(Line::holds(passing));
    lines
}

/// While consumers with the one guarantee replace consumers with the other: what both promise, and
/// what the stricter does.
fn of_both(how_far: HowFar) -> Vec<Line> {
    let chosen = TOGETHER
        .into_iter()
        .enumerate()
        .filter(|(place, _)| place % 2 == 0 || how_far == HowFar::Deep);
    let mut lines: Vec<Line> = chosen
        .map(|(_, budget)| Line::holds(Setup::of([AtMostOnce, EffectivelyOnce], budget)))
        .collect();
    lines.push(Line::holds(Setup::of(
        [AtMostOnce, EffectivelyOnce],
        Budget {
            unknowns: 1,
            failures: 1,
            copies: 1,
            expiries: 1,
            ..NONE
        },
    )));
    lines
}

/// A person forgets, sends back and resolves, at any moment.
fn of_people() -> Vec<Line> {
    let two = |guarantees, budget| {
        Line::holds(Setup {
            attempts: 2,
            ..Setup::of(guarantees, budget)
        })
    };
    let mut lines = Vec::new();
    // A letter whose marker was still in progress when it was set aside.
    let lapsed = Budget {
        people: 1,
        failures: 2,
        expiries: 2,
        losses: 2,
        ..NONE
    };
    for guarantees in [
        [AtMostOnce; 2],
        [EffectivelyOnce; 2],
        [AtMostOnce, EffectivelyOnce],
    ] {
        lines.push(two(
            guarantees,
            Budget {
                people: 2,
                failures: 3,
                copies: 1,
                ..NONE
            },
        ));
        lines.push(two(
            guarantees,
            Budget {
                people: 1,
                unknowns: 2,
                failures: 1,
                copies: 1,
                ..NONE
            },
        ));
        lines.push(two(
            guarantees,
            Budget {
                people: 1,
                crashes: 1,
                unknowns: 1,
                expiries: 1,
                losses: 1,
                ..NONE
            },
        ));
        lines.push(two(guarantees, lapsed));
        lines.push(two(
            guarantees,
            Budget {
                people: 1,
                drains: 2,
                yields: 1,
                failures: 2,
                copies: 1,
                ..NONE
            },
        ));
    }
    for guarantee in [AtMostOnce, EffectivelyOnce] {
        // Given up for crashes: one attempt, and one crash.
        let crashes = Budget {
            people: 1,
            expiries: 2,
            copies: 2,
            ..NONE
        };
        lines.push(Line::holds(Setup {
            attempts: 1,
            ..Setup::of([guarantee; 2], crashes)
        }));
        lines.push(two(
            [guarantee; 2],
            Budget {
                people: 1,
                others: 1,
                failures: 1,
                unknowns: 1,
                expiries: 1,
                ..NONE
            },
        ));
        lines.push(two(
            [guarantee; 2],
            Budget {
                people: 1,
                unknowns: 1,
                losses: 1,
                expiries: 1,
                copies: 1,
                ..NONE
            },
        ));
    }
    // Which of the two the person's tool promises matters here alone.
    lines.push(two([EffectivelyOnce, AtMostOnce], lapsed));
    lines.push(two(
        [EffectivelyOnce, AtMostOnce],
        Budget {
            people: 1,
            unknowns: 2,
            failures: 1,
            copies: 1,
            ..NONE
        },
    ));
    lines
}

/// What the store forgets.
fn of_losses() -> Vec<Line> {
    // Where no second delivery exists, what a handler says after the loss keeps the promise.
    let loss = Budget {
        lost_claims: 1,
        losses: 1,
        expiries: 1,
        renewals: 1,
        unknowns: 2,
        failures: 1,
        ..NONE
    };
    vec![
        Line::holds(Setup::of([AtMostOnce; 2], loss)),
        Line::holds(Setup::of([EffectivelyOnce; 2], loss)),
        // What no store-side design can give: an effect that is not idempotent does not survive a
        // marker that is forgotten.
        Line::violates(
            Setup::of(
                [AtMostOnce; 2],
                Budget {
                    forgotten: 1,
                    copies: 1,
                    ..NONE
                },
            ),
            DOUBLED,
        ),
        Line::violates(
            Setup::of(
                [EffectivelyOnce; 2],
                Budget {
                    forgotten: 1,
                    copies: 1,
                    ..NONE
                },
            ),
            AFTER_DONE,
        ),
    ]
}
