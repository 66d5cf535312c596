//! The program from outside. That this is a test has cargo build the program along with all others,
//! as `cargo xtask chaos` runs it.

use std::process::Command;

use oncegate_chaos::schedule::Kind;

fn said(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate-chaos"))
        .args(arguments)
        .output()
        .expect("it starts");
    (
        output.status.code(),
        [output.stdout, output.stderr]
            .map(|said| String::from_utf8_lossy(&said).into_owned())
            .concat(),
    )
}

#[test]
fn help_names_every_fault() {
    let (code, help) = said(&["--help"]);
    assert_eq!(code, Some(0));
    let words: Vec<&str> = help
        .split(|letter: char| !letter.is_alphanumeric() && letter != '-')
        .collect();
    let missing: Vec<&str> = Kind::all()
        .map(Kind::name)
        .filter(|name| !words.contains(name))
        .collect();
    assert!(missing.is_empty(), "{missing:?} in\n{help}");
}

#[test]
fn a_fault_that_nobody_knows_is_refused_before_anything_starts() {
    let (code, said) = said(&["kill-9"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains("no fault is called \"kill-9\"") && said.contains("kill-redis"),
        "{said}"
    );
    assert!(
        said.trim_end()
            .lines()
            .any(|line| line.starts_with("chaos: FAILED")),
        "{said}"
    );
}
