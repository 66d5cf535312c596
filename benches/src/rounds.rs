//! Alternates the sides of a comparison, so that other load affects all of them.

use std::time::Instant;

use crate::BenchResult;
use crate::side::Measurement;

/// One side of a table.
pub struct Side<'a> {
    name: String,
    run: Box<dyn FnMut() -> BenchResult<RoundResult> + 'a>,
}

/// The result of one run of a side.
#[derive(Clone, Debug)]
pub struct RoundResult {
    /// Messages or commands per second.
    pub rate: f64,
    /// The measurements, if the side is a process of this program.
    pub took: Option<Measurement>,
}

impl<'a> Side<'a> {
    /// A side of this name, which handles messages.
    pub fn new(
        name: impl Into<String>,
        mut run: impl FnMut() -> BenchResult<Measurement> + 'a,
    ) -> Self {
        let run = move || {
            run().map(|took| RoundResult {
                rate: took.rate(),
                took: Some(took),
            })
        };
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }

    /// A side that only has a rate.
    pub fn rate(name: impl Into<String>, mut run: impl FnMut() -> BenchResult<f64> + 'a) -> Self {
        Self {
            name: name.into(),
            run: Box::new(move || run().map(|rate| RoundResult { rate, took: None })),
        }
    }
}

/// The results of a side, one for each round.
#[derive(Clone, Debug)]
pub struct SideRounds {
    /// The side.
    pub name: String,
    /// One a round.
    pub rounds: Vec<RoundResult>,
}

/// Runs all sides in each round, in alternating order, so that none always follows the same side.
///
/// # Errors
/// The error of the first side that fails, or of `go_on`, which is called before each.
pub fn alternate(
    title: &str,
    rounds: usize,
    go_on: impl Fn() -> BenchResult<()>,
    mut sides: Vec<Side<'_>>,
) -> BenchResult<Vec<SideRounds>> {
    let mut rows: Vec<SideRounds> = sides
        .iter()
        .map(|side| SideRounds {
            name: side.name.clone(),
            rounds: Vec::new(),
        })
        .collect();
    for round in 0..rounds {
        let begun = Instant::now();
        let forwards: Vec<usize> = (0..sides.len()).collect();
        let order: Vec<usize> = if round % 2 == 0 {
            forwards
        } else {
            forwards.into_iter().rev().collect()
        };
        for which in order {
            go_on()?;
            let once = (sides[which].run)()
                .map_err(|error| format!("{title}, {}: {error}", sides[which].name))?;
            rows[which].rounds.push(once);
        }
        eprintln!(
            "bench: {title}: round {} of {rounds}, {:.0} s",
            round + 1,
            begun.elapsed().as_secs_f64()
        );
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn sides_take_turns_forwards_and_backwards() {
        let turns = RefCell::new(Vec::new());
        let side = |name: &'static str, rate: f64| {
            let turns = &turns;
            Side::rate(name, move || {
                turns.borrow_mut().push(name);
                Ok(rate)
            })
        };

        let rows = alternate(
            "a table",
            3,
            || Ok(()),
            vec![side("bare", 2.0), side("gated", 1.0)],
        )
        .unwrap();

        assert_eq!(
            *turns.borrow(),
            ["bare", "gated", "gated", "bare", "bare", "gated"]
        );
        assert_eq!(
            rows[1]
                .rounds
                .iter()
                .map(|once| once.rate)
                .collect::<Vec<_>>(),
            [1.0; 3]
        );
    }

    #[test]
    fn a_side_that_fails_is_named() {
        let failing = Side::rate("gated", || Err("no broker".into()));
        let error = alternate("a table", 1, || Ok(()), vec![failing]).unwrap_err();
        assert_eq!(error.to_string(), "a table, gated: no broker");
    }

    #[test]
    fn no_round_starts_after_a_stop() {
        let never = Side::rate("gated", || panic!("it was stopped before"));
        let error = alternate("a table", 1, || Err("stopped".into()), vec![never]).unwrap_err();
        assert_eq!(error.to_string(), "stopped");
    }
}
