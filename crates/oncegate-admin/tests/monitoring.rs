//! The alert rules and the dashboard of `monitoring/` match the metrics, the book and Prometheus.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use oncegate::metric::Kind;
use oncegate::outcome::OUTCOMES;
use serde_json::Value;

fn path(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn promtool(arguments: &[&str], file: &str) {
    let promtool = Command::new("promtool")
        .args(arguments)
        .arg(path(file))
        .output();
    let said = promtool
        .expect("promtool, of Debian's package prometheus: `cargo xtask setup` installs it");
    let text = [said.stdout, said.stderr]
        .map(|it| String::from_utf8_lossy(&it).into_owned())
        .concat();
    assert!(
        said.status.success() && text.contains("SUCCESS"),
        "promtool {arguments:?} {file}:\n{text}"
    );
}

/// The names of the rules, in order.
fn alerts() -> Vec<String> {
    let rules = read("monitoring/alerts.yml");
    let alerts: Vec<String> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .map(str::to_owned)
        .collect();
    assert!(alerts.len() > 15, "{alerts:?}");
    alerts
}

/// The queries of the panels, with their titles.
fn queries() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&read("monitoring/dashboard.json")).expect("JSON");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = |panel: &Value| panel["targets"].as_array().cloned().unwrap_or_default();
    panels
        .iter()
        .flat_map(|panel| {
            targets(panel)
                .into_iter()
                .map(|it| (text(&panel["title"]), text(&it["expr"])))
        })
        .collect()
}

/// The words of a text that can be names.
fn words(text: &str) -> BTreeSet<&str> {
    text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_')
        .collect()
}

/// Whether a series belongs to a metric.
fn is_of(series: &str, name: &str, kind: Kind) -> bool {
    match kind {
        Kind::Histogram => series
            .strip_prefix(name)
            .is_some_and(|suffix| ["_bucket", "_count", "_sum"].contains(&suffix)),
        Kind::Counter | Kind::Gauge => series == name,
    }
}

/// The values of the label `outcome` in a query.
fn outcomes(text: &str) -> Vec<&str> {
    let asked = text.split("outcome=").skip(1);
    let values = asked.map(|it| it.trim_start_matches('~').trim_start_matches('"'));
    values
        .flat_map(|it| it[..it.find('"').expect("a closing quote")].split('|'))
        .collect()
}

#[test]
fn promtool_accepts_the_rules_and_their_tests() {
    promtool(&["check", "rules"], "monitoring/alerts.yml");
    promtool(&["test", "rules"], "monitoring/alerts.test.yml");
}

#[test]
fn each_alert_is_tested_and_links_to_the_book() {
    let (rules, tests, book) = (
        read("monitoring/alerts.yml"),
        read("monitoring/alerts.test.yml"),
        read("docs/src/monitoring.md"),
    );
    for alert in alerts() {
        let place = format!("/monitoring.html#{}\n", alert.to_lowercase());
        assert_eq!(
            rules.matches(&place).count(),
            1,
            "{alert} has one runbook_url that ends with {place}"
        );
        assert!(
            book.lines().any(|line| line == format!("### {alert}")),
            "docs/src/monitoring.md has no heading {alert}"
        );
        for line in [
            format!("      - alertname: {alert}\n"),
            format!("      - {{alertname: {alert}, eval_time: "),
        ] {
            assert!(
                tests.contains(&line),
                "monitoring/alerts.test.yml has no case\n{line}"
            );
        }
    }
}

#[test]
fn the_documented_command_sets_the_address_in_every_rule() {
    let rules = read("monitoring/alerts.yml");
    let sed = rules
        .lines()
        .find_map(|line| line.trim_start_matches(['#', ' ']).strip_prefix("sed -i '"))
        .expect("the line");
    let script = sed
        .strip_suffix("' alerts.yml")
        .expect("a script, and the file");
    // As documented, without `-i`, which would change the file.
    let changed = Command::new("sed")
        .arg(script)
        .arg(path("monitoring/alerts.yml"))
        .output()
        .expect("sed");
    let changed = String::from_utf8(changed.stdout).expect("text");
    let (urls, alerts) = (
        changed
            .lines()
            .filter(|line| line.contains("runbook_url: ")),
        alerts().len(),
    );
    assert_eq!(
        urls.filter(
            |line| line.contains("runbook_url: https://docs.example.org/oncegate/monitoring.html#")
        )
        .count(),
        alerts
    );
    assert!(!changed.contains("runbook_url: http://oncegate-book.invalid"));
}

#[test]
fn rules_and_dashboard_use_existing_metrics_and_outcomes() {
    let mut asked = read("monitoring/alerts.yml");
    for (_, query) in queries() {
        asked.push_str(&query);
        asked.push('\n');
    }
    let series: Vec<&str> = words(&asked)
        .into_iter()
        .filter(|word| word.starts_with("oncegate_"))
        .collect();
    assert!(series.len() > 30, "{series:?}");
    for it in series {
        assert!(
            oncegate::metrics::all().any(|metric| is_of(it, metric.name, metric.kind)),
            "there is no {it}"
        );
    }
    let outcomes = outcomes(&asked);
    assert!(outcomes.len() > 15, "{outcomes:?}");
    for it in outcomes {
        assert!(
            OUTCOMES.iter().any(|(outcome, _)| *outcome == it),
            "no delivery has the outcome {it}"
        );
    }
}

#[test]
fn unknown_metrics_are_found() {
    assert!(is_of(
        "oncegate_claim_seconds_bucket",
        "oncegate_claim_seconds",
        Kind::Histogram
    ));
    assert!(!is_of(
        "oncegate_claim_seconds",
        "oncegate_claim_seconds",
        Kind::Histogram
    ));
    assert!(!is_of(
        "oncegate_awaiting_claim_total",
        "oncegate_awaiting_claim",
        Kind::Gauge
    ));
    assert_eq!(
        outcomes(r#"a{outcome="first"} b{x="y", outcome=~"busy|conflict"}"#),
        ["first", "busy", "conflict"]
    );
}

#[test]
fn the_dashboard_asks_four_questions() {
    let dashboard: Value = serde_json::from_str(&read("monitoring/dashboard.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let rows: Vec<&str> = panels
        .iter()
        .filter(|it| it["type"] == "row")
        .filter_map(|it| it["title"].as_str())
        .collect();
    assert_eq!(
        rows,
        [
            "Is anything lost?",
            "Is anything doubled?",
            "Is anything stuck?",
            "Is anything slow?"
        ]
    );
    for panel in panels.iter().filter(|it| it["type"] != "row") {
        let explained = panel["description"]
            .as_str()
            .is_some_and(|it| !it.is_empty());
        assert!(
            explained && panel["targets"].as_array().is_some_and(|it| !it.is_empty()),
            "{panel}"
        );
    }
    let ids: BTreeSet<i64> = panels.iter().filter_map(|it| it["id"].as_i64()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
}
