//! The tables of `docs/evidence/reliability.md` equal the sums of the reports beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use oncegate_chaos::check::TestedGuarantee;
use oncegate_chaos::matrix::columns;
use oncegate_chaos::matrix::step::STEPS;
use oncegate_chaos::matrix::table::{Cell, Matrix};
use oncegate_chaos::mutants::MutantResults;
use oncegate_chaos::report::{Report, RunVerdict};
use oncegate_chaos::schedule::FaultKind;

/// The kind of aborts that messages cause; the harness does not inject it.
const ABORT: &str = "abort";

fn evidence() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/evidence")
}

fn page() -> String {
    std::fs::read_to_string(evidence().join("reliability.md")).expect("the page")
}

/// The files of a folder beside the page.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the reports")
        .map(|entry| entry.expect("an entry that can be read").path())
        .collect();
    files.sort();
    files
}

/// The folders of reports; each folder is summed up.
fn groups() -> Vec<PathBuf> {
    files(&evidence().join("reliability"))
        .into_iter()
        .filter(|path| path.is_dir())
        .collect()
}

/// The reports of a folder, each of one run, by their seeds.
fn reports(folder: &Path) -> Vec<Report> {
    let read = |path: PathBuf| -> Report {
        let text =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let mut reports: Vec<Report> = files(folder).into_iter().map(read).collect();
    assert!(
        reports.iter().all(|report| report.runs.len() == 1),
        "one report for each run"
    );
    reports.sort_by_key(|report| report.runs[0].seed);
    reports
}

fn sum(reports: &[Report]) -> Report {
    let (first, rest) = reports.split_first().expect("a report");
    let mut sum = first.clone();
    rest.iter()
        .for_each(|report| sum.add(report.clone()).expect("none of bare"));
    sum
}

/// With commas between thousands.
fn number(number: u64) -> String {
    let digits = number.to_string();
    let from_the_end = digits.len();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (from_the_end - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn row(broker: &str, guarantee: Option<TestedGuarantee>, runs: &str, reports: &[Report]) -> String {
    let sum = sum(reports);
    let counts = &sum.counts;
    let passed = reports
        .iter()
        .filter(|report| report.verdict() == RunVerdict::Passed)
        .count();
    let faults: u64 = counts
        .faults
        .iter()
        .filter(|(kind, _)| *kind != ABORT)
        .map(|(_, times)| times)
        .sum();
    let of = |wanted: TestedGuarantee| {
        reports
            .iter()
            .filter(move |report| report.runs[0].rules.guarantee == wanted)
    };
    let doubled: u64 = of(TestedGuarantee::AtMostOnce)
        .map(|report| report.counts.duplicated)
        .sum();
    let repeated: u64 = of(TestedGuarantee::EffectivelyOnce)
        .map(|report| report.counts.raw_effects - report.counts.unique_effects)
        .sum();
    let explained: u64 = of(TestedGuarantee::EffectivelyOnce)
        .flat_map(|report| report.counts.explained.values())
        .sum();
    let (guarantee, doubled, repeated) = match guarantee {
        Some(TestedGuarantee::AtMostOnce) => ("at most once", number(doubled), "–".to_owned()),
        Some(TestedGuarantee::EffectivelyOnce) => (
            "effectively once",
            "–".to_owned(),
            format!("{} of {}", number(explained), number(repeated)),
        ),
        _ => (
            "",
            number(doubled),
            format!("{} of {}", number(explained), number(repeated)),
        ),
    };
    format!(
        "| {broker} | {guarantee} | {runs} | {passed} of {} | {} | {} | {} | {} | {doubled} | {repeated} |\n",
        reports.len(),
        number(counts.acknowledged),
        number(faults),
        number(counts.overlapping),
        number(counts.lost)
    )
}

/// The table of the counts of all runs of a group.
fn totals(reports: &[Report]) -> String {
    let mut table =
        "| broker | guarantee | seeds | passed | messages | faults | overlapping | lost | doubled, at most once | repeated effects, explained |\n\
                     | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
            .to_owned();
    for (broker, shown) in [("kafka", "Kafka"), ("rabbitmq", "RabbitMQ")] {
        for guarantee in [
            TestedGuarantee::AtMostOnce,
            TestedGuarantee::EffectivelyOnce,
        ] {
            let matches = |report: &&Report| {
                report.runs[0].broker == broker && report.runs[0].rules.guarantee == guarantee
            };
            let reports: Vec<Report> = reports.iter().filter(matches).cloned().collect();
            if reports.is_empty() {
                continue;
            }
            let seeds: Vec<String> = reports
                .iter()
                .map(|report| report.runs[0].seed.to_string())
                .collect();
            table += &row(shown, Some(guarantee), &seeds.join(", "), &reports);
        }
    }
    table + &row("total", None, &format!("{} runs", reports.len()), reports)
}

/// The table of recovery times by fault.
fn recovery(reports: &[Report]) -> String {
    let mut table = "| fault | injected | first effect: measured | longest, s | rate: measured | longest, s | bound, s |\n\
                     | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        .to_owned();
    let counts = sum(reports).counts;
    let seconds = |ms: Option<u64>| {
        ms.map_or_else(
            || "–".to_owned(),
            |ms| format!("{:.1}", ms as f64 / 1_000.0),
        )
    };
    let is_pair = |what: &str| what.contains(" + ");
    for kind in FaultKind::all() {
        let is_kind = |what: &&String| !is_pair(what) && FaultKind::of(what) == Some(kind);
        let injected: u64 = counts
            .faults
            .iter()
            .filter(|(what, _)| is_kind(what))
            .map(|(_, times)| times)
            .sum();
        if injected == 0 {
            continue;
        }
        let measured: u64 = counts
            .first_effects
            .iter()
            .filter(|(what, _)| is_kind(what))
            .map(|(_, times)| times)
            .sum();
        let first = counts
            .first_effect_ms
            .iter()
            .filter(|(what, _)| is_kind(what))
            .map(|(_, ms)| *ms)
            .max();
        let rates: u64 = counts
            .rate_recoveries
            .iter()
            .filter(|(what, _)| is_kind(what))
            .map(|(_, times)| times)
            .sum();
        let rate = counts
            .rate_recovery_ms
            .iter()
            .filter(|(what, _)| is_kind(what))
            .map(|(_, ms)| *ms)
            .max();
        let bound = kind.recovery_bound().as_secs();
        table += &format!(
            "| `{kind}` | {injected} | {measured} | {} | {rates} | {} | {bound} |\n",
            seconds(first),
            seconds(rate)
        );
    }
    let pairs: u64 = counts
        .rate_recoveries
        .iter()
        .filter(|(what, _)| is_pair(what))
        .map(|(_, times)| times)
        .sum();
    if pairs > 0 {
        let longest = counts
            .rate_recovery_ms
            .iter()
            .filter(|(what, _)| is_pair(what))
            .map(|(_, ms)| *ms)
            .max();
        table += &format!(
            "| two faults | – | – | – | {pairs} | {} | the sum of both |\n",
            seconds(longest)
        );
    }
    table
}

#[test]
fn the_tables_equal_the_sums_of_the_reports() {
    let page = page();
    let groups = groups();
    assert!(groups.len() >= 2, "{groups:?}");
    for folder in groups {
        let reports = reports(&folder);
        for table in [totals(&reports), recovery(&reports)] {
            assert!(
                page.contains(&table),
                "docs/evidence/reliability.md does not have this table of {}:\n{table}",
                folder.display()
            );
        }
    }
}

/// The figures of a row of the book's summary, without its name.
fn summary(reports: &[Report]) -> String {
    let row = row("", None, "", reports);
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    let [
        _,
        _,
        _,
        _,
        passed,
        messages,
        faults,
        _,
        lost,
        doubled,
        repeated,
        ..,
    ] = cells[..]
    else {
        panic!("unexpected columns: {row}");
    };
    format!("| {passed} | {messages} | {faults} | {lost} | {doubled} | {repeated} |\n")
}

#[test]
fn the_book_summarises_every_group_of_reports() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/reliability.md");
    let page = std::fs::read_to_string(path).expect("the page");
    for folder in groups() {
        let figures = summary(&reports(&folder));
        assert!(
            page.contains(&figures),
            "docs/src/reliability.md has no row that ends like this, for {}:\n{figures}",
            folder.display()
        );
    }
    let mut matrix = Matrix::default();
    read_all("matrix")
        .into_iter()
        .for_each(|run| matrix.add(run));
    let sum = |of: fn(&Cell) -> u64| number(matrix.cells.iter().map(of).sum());
    let (aborts, messages) = (sum(|it| it.runs), sum(|it| it.confirmed));
    for figures in [
        format!("{aborts} aborts and {messages} messages"),
        format!("{} effects were repeated", sum(|it| it.explained)),
    ] {
        assert!(
            page.contains(&figures),
            "docs/src/reliability.md does not say: {figures}"
        );
    }
}

#[test]
fn the_page_names_each_folder_of_reports_and_its_commits() {
    let page = page();
    for folder in groups() {
        let name = folder
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        assert!(
            page.contains(&format!("reliability/{name}/")),
            "the page does not name the folder {name}"
        );
        let commits: BTreeSet<String> = reports(&folder)
            .iter()
            .map(|report| report.runs[0].versions["commit"].chars().take(7).collect())
            .collect();
        for commit in commits {
            assert!(
                page.contains(&commit),
                "docs/evidence/reliability.md does not name the commit {commit} of {name}"
            );
        }
    }
}

/// The files beside the page whose names start with `prefix`, each of one run.
fn read_all<T: serde::de::DeserializeOwned>(prefix: &str) -> Vec<T> {
    let is_one = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    };
    let read = |path: PathBuf| {
        let text =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    files(&evidence().join("reliability"))
        .into_iter()
        .filter(is_one)
        .map(read)
        .collect()
}

/// Whether the page names the tested commit.
fn names_the_commit(versions: &BTreeMap<String, String>) -> bool {
    page().contains(versions["commit"].get(..7).expect("a hash"))
}

#[test]
fn the_page_has_the_results_of_each_matrix() {
    let runs: Vec<Matrix> = read_all("matrix");
    assert!(!runs.is_empty());
    for matrix in runs {
        let verdict = matrix.verdict();
        assert!(matrix.passed(), "{verdict}");
        assert!(
            page().contains(&verdict),
            "docs/evidence/reliability.md does not say: {verdict}"
        );
        assert!(
            names_the_commit(&matrix.versions),
            "docs/evidence/reliability.md does not name the commit {}",
            matrix.versions["commit"]
        );
    }
}

#[test]
fn every_step_was_reached_in_each_combination() {
    let mut all = Matrix::default();
    read_all("matrix").into_iter().for_each(|run| all.add(run));
    for step in &STEPS {
        for combination in columns().into_iter().filter(|combination| {
            combination.guarantee != TestedGuarantee::Bare && step.absent(*combination).is_none()
        }) {
            let reached = all.cells.iter().any(|cell| {
                cell.step == step.name
                    && cell.combination == combination
                    && cell.runs >= combination.runs()
            });
            assert!(
                reached,
                "in no matrix file a process was aborted at {}, {combination:?}",
                step.name
            );
        }
    }
}

#[test]
fn the_page_has_the_results_of_the_mutants() {
    let [caught]: [MutantResults; 1] = read_all("mutants").try_into().expect("one file");
    let (page, verdict) = (page(), caught.verdict());
    assert!(caught.passed(), "{verdict}");
    assert!(
        page.contains(&verdict),
        "docs/evidence/reliability.md does not say: {verdict}"
    );
    assert!(
        names_the_commit(&caught.versions),
        "docs/evidence/reliability.md does not name the commit {}",
        caught.versions["commit"]
    );
    let table = caught.to_markdown();
    let rows: Vec<&str> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    assert_eq!(rows.len(), 15);
    for row in rows {
        assert!(
            page.contains(row),
            "docs/evidence/reliability.md does not have: {row}"
        );
    }
}

#[test]
fn numbers_have_commas() {
    assert_eq!(
        [0, 999, 1_000, 4_500_673].map(number),
        ["0", "999", "1,000", "4,500,673"]
    );
}
