//! The book matches the program.

use serde_json::Value;

use crate::cli::TestCli;

const BOOK: &str = include_str!("../../../../docs/src/cli.md");

/// The page that lists the keys.
const CONFIGURATION: &str = include_str!("../../../../docs/src/configuration.md");

fn cli() -> TestCli {
    let cli = TestCli::at("redis://127.0.0.1:1");
    cli.write("oncegate.toml", "");
    cli
}

/// The first cells of the rows of a table, without backticks.
fn first_cells(page: &str, title: &str) -> Vec<String> {
    let section = page
        .split(&format!("\n## {title}\n"))
        .nth(1)
        .unwrap_or_else(|| panic!("no section {title}"));
    let rows = section
        .split("\n## ")
        .next()
        .unwrap_or_default()
        .lines()
        .filter(|line| line.starts_with("| `"));
    rows.filter_map(|row| row.split('`').nth(1))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_book_lists_every_setting() {
    let known = cli().json(&["config", "keys"]);
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let known: Vec<&Value> = known.as_array().expect("a list").iter().collect();
    assert_eq!(
        first_cells(CONFIGURATION, "All settings"),
        known.iter().map(|it| text(&it["key"])).collect::<Vec<_>>()
    );
    for it in known {
        let key = text(&it["key"]);
        // The page has this rule instead of the variables.
        let variable = key.to_uppercase().replace(['.', '-'], "_");
        assert_eq!(text(&it["variable"]), format!("ONCEGATE_{variable}"));
        let says = text(&it["description"]);
        assert!(
            CONFIGURATION.lines().any(|line| {
                line.starts_with(&format!("| `{key}` | "))
                    && line.ends_with(&format!(" | {says} |"))
            }),
            "docs/src/configuration.md lacks\n| `{key}` | … | {says} |"
        );
    }
}

#[test]
fn the_book_shows_the_example_configuration() {
    let file = include_str!("../../../../examples/payments/worker.toml");
    assert!(
        CONFIGURATION.contains(&format!("```text\n{file}```\n")),
        "copy worker.toml into docs/src/configuration.md again"
    );
    let cli = cli();
    cli.write("oncegate.toml", file);
    cli.run(&["config", "check", "--consumer"]).exits_with(0);
}

#[test]
fn the_book_lists_every_exit_code() {
    let help = cli().run(&["--help"]).exits_with(0).out;
    let codes = help.split("Exit codes:").nth(1).expect("the exit codes");
    let codes: Vec<&str> = codes
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    assert_eq!(codes.len(), 7, "{codes:?}");
    for line in codes {
        let (code, says) = line.split_once("  ").expect("a code and what it says");
        assert!(BOOK.contains(&format!("| {code} | {says} |")), "{line}");
    }
}
