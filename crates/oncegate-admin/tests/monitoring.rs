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
    let output = promtool
        .expect("promtool, of Debian's package prometheus: `cargo xtask setup` installs it");
    let text = [output.stdout, output.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat();
    assert!(
        output.status.success() && text.contains("SUCCESS"),
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
                .map(|target| (text(&panel["title"]), text(&target["expr"])))
        })
        .collect()
}

/// The words of a text that may be names of metrics.
fn words(text: &str) -> BTreeSet<&str> {
    text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_')
        .collect()
}

/// Whether a series belongs to a metric.
fn is_of(series: &str, name: &str, kind: Kind) -> bool {
    match kind {
        Kind::Histogram => series
            .strip_prefix(name)
            .is_some_and(|suffix| ["_bucket", "_count", "_sum"].contains(&suffix)),
        _ => series == name,
    }
}

/// The values of the label `outcome` in a query.
fn outcomes(text: &str) -> Vec<&str> {
    let matchers = text.split("outcome=").skip(1);
    let values = matchers.map(|matcher| matcher.trim_start_matches('~').trim_start_matches('"'));
    values
        .flat_map(|value| value[..value.find('"').expect("a closing quote")].split('|'))
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
        let anchor = format!("/monitoring.html#{}\n", alert.to_lowercase());
        assert_eq!(
            rules.matches(&anchor).count(),
            1,
            "{alert} has one runbook_url that ends with {anchor}"
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
    let mut queried = read("monitoring/alerts.yml");
    for (_, query) in queries() {
        queried.push_str(&query);
        queried.push('\n');
    }
    let series: Vec<&str> = words(&queried)
        .into_iter()
        .filter(|word| word.starts_with("oncegate_"))
        .collect();
    assert!(series.len() > 30, "{series:?}");
    for name in series {
        assert!(
            oncegate::metrics::all().any(|metric| is_of(name, metric.name, metric.kind)),
            "there is no metric {name}"
        );
    }
    let outcomes = outcomes(&queried);
    assert!(outcomes.len() > 15, "{outcomes:?}");
    for name in outcomes {
        assert!(
            OUTCOMES.iter().any(|(outcome, _)| *outcome == name),
            "no delivery has the outcome {name}"
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
fn the_dashboard_has_four_rows_and_describes_each_panel() {
    let dashboard: Value = serde_json::from_str(&read("monitoring/dashboard.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let rows: Vec<&str> = panels
        .iter()
        .filter(|panel| panel["type"] == "row")
        .filter_map(|panel| panel["title"].as_str())
        .collect();
    assert_eq!(
        rows,
        [
            "Lost messages",
            "Duplicate effects",
            "Stalled consumers",
            "Latency and retries"
        ]
    );
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let is_described = panel["description"]
            .as_str()
            .is_some_and(|text| !text.is_empty());
        assert!(
            is_described
                && panel["targets"]
                    .as_array()
                    .is_some_and(|targets| !targets.is_empty()),
            "{panel}"
        );
    }
    let ids: BTreeSet<i64> = panels
        .iter()
        .filter_map(|panel| panel["id"].as_i64())
        .collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
}
