//! The program from outside. That this is a test has cargo build the program along with all others,
//! as `cargo xtask chaos` runs it.

use std::process::Command;

use oncegate_chaos::schedule::FaultKind;

fn text(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate-chaos"))
        .args(arguments)
        .output()
        .expect("it starts");
    (
        output.status.code(),
        [output.stdout, output.stderr]
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat(),
    )
}

#[test]
fn help_names_every_fault() {
    let (code, help) = text(&["--help"]);
    assert_eq!(code, Some(0));
    let words: Vec<&str> = help
        .split(|letter: char| !letter.is_alphanumeric() && letter != '-')
        .collect();
    let missing: Vec<&str> = FaultKind::all()
        .map(FaultKind::name)
        .filter(|name| !words.contains(name))
        .collect();
    assert!(missing.is_empty(), "{missing:?} in\n{help}");
}

#[test]
fn an_unknown_fault_is_refused_before_a_server_starts() {
    let (code, text) = text(&["kill-9"]);
    assert_eq!(code, Some(1));
    assert!(
        text.contains("no fault is called \"kill-9\"") && text.contains("kill-redis"),
        "{text}"
    );
    assert!(
        text.trim_end()
            .lines()
            .any(|line| line.starts_with("chaos: FAILED")),
        "{text}"
    );
}
