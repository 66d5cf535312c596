//! The seeds of random histories. They are printed, and can be set by an environment variable to
//! repeat a run.

use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// The environment variable for the first seed: set it to a printed seed to repeat that run.
const SEED: &str = "ONCEGATE_LAWS_SEED";
/// The environment variable for the number of random histories.
const HISTORIES: &str = "ONCEGATE_LAWS_HISTORIES";

/// The seeds of a run, one for each history. Prints the first seed, so that the output of a failed
/// law contains it.
pub(crate) fn seeds(histories: u64) -> impl Iterator<Item = u64> {
    let first = number(SEED).unwrap_or_else(|| fastrand::u64(..=u64::MAX >> 16));
    let histories = number(HISTORIES).unwrap_or(histories);
    println!(
        "{histories} histories from seed {first}: {SEED}={first} {HISTORIES}={histories} repeats them"
    );
    (0..histories).map(move |it| first.wrapping_add(it))
}

/// How much longer a law may take if the environment sets the number of histories: one second for
/// each.
pub(crate) fn extra_time() -> Duration {
    Duration::from_secs(number(HISTORIES).unwrap_or(0))
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| {
        text.parse()
            .expect("the environment variable is a whole number")
    })
}

/// The text that says how to repeat a history that violated a law.
pub(crate) fn repeat_hint(seed: u64) -> String {
    format!("seed {seed}; {SEED}={seed} {HISTORIES}=1 repeats it")
}

/// A proptest runner with this seed.
pub(crate) fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRunner::new_with_rng(
        Config::default(),
        TestRng::from_seed(RngAlgorithm::ChaCha, &bytes),
    )
}
