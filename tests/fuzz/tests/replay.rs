//! Runs each target on its stored inputs and on variations of them, the same ones each time,
//! without libFuzzer.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use fastrand::Rng;
use oncegate_fuzzed::{TARGETS, Target};

/// The number of variations for each target.
const VARIATIONS: usize = 500;
/// The maximum length of a variation, in bytes.
const MAX_LENGTH: usize = 4_096;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The stored inputs of a target, sorted by file name.
fn kept(target: &str) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(here("inputs").join(target))
        .unwrap_or_else(|error| panic!("{target} has no stored inputs: {error}"))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|file| std::fs::read(file).expect("an input"))
        .collect()
}

/// A variation: one or two stored inputs, cut, joined and changed in a few places.
fn variation(kept: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut input = kept[random.usize(..kept.len())].clone();
    if random.u8(..4) == 0 {
        input.truncate(random.usize(..=input.len()));
        input.extend_from_slice(&kept[random.usize(..kept.len())]);
    }
    for _ in 0..random.usize(..6) {
        let at = random.usize(..=input.len());
        match random.u8(..4) {
            0 => input.insert(at, random.u8(..)),
            1 if at < input.len() => drop(input.remove(at)),
            2 if at < input.len() => input[at] ^= 1 << random.u8(..8),
            _ if at < input.len() => {
                input[at] = *random
                    .choice(&[0, 1, 0x7f, 0x80, 0xfe, 0xff])
                    .expect("there are some")
            }
            _ => input.push(random.u8(..)),
        }
    }
    input.truncate(MAX_LENGTH);
    input
}

fn run_target(name: &str, target: Target, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(input))) {
        let shown: String = input.iter().map(|byte| format!("\\x{byte:02x}")).collect();
        eprintln!("{name} does not hold for \"{shown}\"");
        resume_unwind(panic);
    }
}

#[test]
fn each_target_accepts_stored_inputs_and_variations() {
    for (name, target) in TARGETS {
        let kept = kept(name);
        assert!(kept.len() >= 5, "{} inputs are kept for {name}", kept.len());
        kept.iter()
            .for_each(|input| run_target(name, target, input));
        let mut random = Rng::with_seed(7);
        for _ in 0..VARIATIONS {
            run_target(name, target, &variation(&kept, &mut random));
        }
    }
}

#[test]
fn libfuzzer_runs_exactly_these_targets() {
    let manifest = std::fs::read_to_string(here("../../fuzz/Cargo.toml")).expect("its manifest");
    let files = std::fs::read_dir(here("../../fuzz/targets"))
        .expect("its targets")
        .count();
    assert_eq!(
        (files, manifest.matches("[[bin]]").count()),
        (TARGETS.len(), TARGETS.len())
    );
    for (name, _) in TARGETS {
        assert!(
            manifest.contains(&format!(
                "name = \"{name}\"\npath = \"targets/{name}.rs\"\n"
            )),
            "{name} is not in fuzz/Cargo.toml"
        );
        let target = std::fs::read_to_string(here("../../fuzz/targets").join(format!("{name}.rs")))
            .expect("a target");
        let calls = format!(
            "\n#![no_main]\n\nlibfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::{name}(data));\n"
        );
        assert!(
            target.ends_with(&calls)
                && target
                    .lines()
                    .filter(|line| !line.starts_with("//!"))
                    .count()
                    == 3,
            "{target}"
        );
    }
}
