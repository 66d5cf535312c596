//! The book names what the program knows, and nothing else.

use serde_json::Value;

use crate::desk::Desk;

const BOOK: &str = include_str!("../../../../docs/src/cli.md");

fn desk() -> Desk {
    let desk = Desk::at("redis://127.0.0.1:1");
    desk.write("oncegate.toml", "");
    desk
}

/// The first cells of the rows of a table, without their backticks.
fn first_cells(title: &str) -> Vec<String> {
    let section = BOOK.split(&format!("\n## {title}\n")).nth(1).unwrap_or_else(|| panic!("no section {title}"));
    let rows = section.split("\n## ").next().unwrap_or_default().lines().filter(|line| line.starts_with("| `"));
    rows.filter_map(|row| row.split('`').nth(1)).map(str::to_owned).collect()
}

#[test]
fn every_setting_stands_in_the_book() {
    let known = desk().json(&["config", "keys"]);
    let known: Vec<String> = known.as_array().expect("a list").iter().map(|it| it["key"].as_str().expect("a key").to_owned()).collect();
    assert_eq!(first_cells("Settings"), known);
}

#[test]
fn every_finding_stands_in_the_book() {
    let known = desk().json(&["doctor", "--list"]);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let known: Vec<(String, String)> = known.as_array().expect("a list").iter().map(|it| (text(&it[0]), text(&it[1]))).collect();
    assert_eq!(first_cells("Findings"), known.iter().map(|(code, _)| code.clone()).collect::<Vec<_>>());
    for (code, says) in known {
        assert!(BOOK.contains(&format!("| `{code}` | {says} |")), "{code}: {says}");
    }
}

#[test]
fn every_exit_code_stands_in_the_book() {
    let help = desk().run(&["--help"]).ended(0).out;
    let codes = help.split("Exit codes:").nth(1).expect("the exit codes");
    let codes: Vec<&str> = codes.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(codes.len(), 5, "{codes:?}");
    for line in codes {
        let (code, says) = line.split_once("  ").expect("a code and what it says");
        assert!(BOOK.contains(&format!("| {code} | {says} |")), "{line}");
    }
}
