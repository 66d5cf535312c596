//! Each target on the inputs that are kept, and on some that are made of them: the same ones each
//! time, and without libFuzzer.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use fastrand::Rng;
use oncegate_fuzzed::{TARGETS, Target};

/// How many inputs are made for each target.
const MADE: usize = 500;
/// How long one may become.
const LONGEST: usize = 4_096;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// What is kept for a target, in the order of its names.
fn kept(target: &str) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(here("inputs").join(target))
        .unwrap_or_else(|error| panic!("nothing is kept for {target}: {error}"))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|file| std::fs::read(file).expect("an input"))
        .collect()
}

/// One or two of them, cut, joined and spoilt in a few places.
fn made(kept: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
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
    input.truncate(LONGEST);
    input
}

fn tried(name: &str, target: Target, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(input))) {
        let shown: String = input.iter().map(|byte| format!("\\x{byte:02x}")).collect();
        eprintln!("{name} does not hold for \"{shown}\"");
        resume_unwind(panic);
    }
}

#[test]
fn what_is_kept_and_what_is_made_of_it_is_read_as_it_must() {
    for (name, target) in TARGETS {
        let kept = kept(name);
        assert!(kept.len() >= 5, "{} inputs are kept for {name}", kept.len());
        kept.iter().for_each(|input| tried(name, target, input));
        let mut random = Rng::with_seed(7);
        for _ in 0..MADE {
            tried(name, target, &made(&kept, &mut random));
        }
    }
}

#[test]
fn libfuzzer_is_handed_each_of_them_and_no_other() {
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
