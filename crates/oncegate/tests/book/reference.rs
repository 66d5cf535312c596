//! The pages of settings and of errors name what the code has.

use std::time::Duration;

use oncegate::defaults;

use super::{read, root, table};

/// Each part of `docs/src/settings.md`, and the file whose setters it lists.
const SETTERS: &[(&str, &str)] = &[
    ("The consumer", "crates/oncegate-core/src/builder.rs"),
    ("The gate", "crates/oncegate-core/src/gate.rs"),
    ("Kafka", "crates/oncegate-kafka/src/kafka.rs"),
    ("RabbitMQ", "crates/oncegate-amqp/src/settings.rs"),
    ("Redis", "crates/oncegate-redis/src/store.rs"),
    ("SQLite", "crates/oncegate-sql/src/sqlite.rs"),
];

/// The public functions of a file that take a builder and give one, with their documentation up to
/// its first heading.
fn setters(source: &str) -> Vec<(String, String)> {
    let mut setters = Vec::new();
    let mut says: Vec<&str> = Vec::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if let Some(text) = line.strip_prefix("    ///") {
            says.push(text.trim());
        } else if let Some(rest) = line.strip_prefix("    pub fn ") {
            let mut signature = rest.to_owned();
            while !signature.contains('{') {
                signature += lines.next().expect("the rest of a signature").trim();
            }
            let takes_one = ["(self", "(mut self"]
                .iter()
                .any(|it| signature.contains(it));
            let gives_one = ["-> Self", "-> Builder<", "-> GateBuilder<"]
                .iter()
                .any(|it| signature.contains(it));
            if takes_one && gives_one {
                let name = signature.split(['(', '<']).next().unwrap_or_default();
                let text = says
                    .iter()
                    .take_while(|it| !it.starts_with("# ") && !it.starts_with("```"))
                    .filter(|it| !it.is_empty());
                setters.push((
                    name.to_owned(),
                    without_links(&text.copied().collect::<Vec<_>>().join(" ")),
                ));
            }
            says.clear();
        } else if !line.starts_with("    #[") {
            says.clear();
        }
    }
    setters
}

/// Documentation as a cell of a table: rustdoc's links to code are code.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("[`") {
        let (code, after) = after.split_once("`]").expect("a link to code ends");
        plain += &format!("{before}`{code}`");
        rest = match after.strip_prefix('(') {
            Some(target) => target.split_once(')').map_or("", |(_, after)| after),
            None => after,
        };
    }
    (plain + rest).replace('|', "\\|")
}

#[test]
fn the_book_lists_every_setting() {
    let page = read(&root().join("docs/src/settings.md"));
    for (part, file) in SETTERS {
        let rows = setters(&read(&root().join(file)))
            .into_iter()
            .map(|(name, says)| [format!("`.{name}(…)`"), says]);
        let table = table(["setting", "what it says"], rows);
        let (_, here) = page
            .split_once(&format!("\n## {part}\n"))
            .unwrap_or_else(|| panic!("docs/src/settings.md has no part {part}"));
        let here = here.split("\n## ").next().unwrap_or_default();
        assert!(
            here.contains(&table),
            "docs/src/settings.md, {part}, does not have this table:\n{table}"
        );
    }
}

#[test]
fn the_defaults_that_are_documented_are_those_of_the_code() {
    let documented = setters(&read(&root().join("crates/oncegate-core/src/builder.rs")));
    let lasts = |it: Duration| match (it.as_millis(), it.as_secs()) {
        (ms, 0) => format!("{ms} ms"),
        (_, s) if s % 3600 == 0 => format!("{} h", s / 3600),
        (_, s) if s % 60 == 0 => format!("{} min", s / 60),
        (_, s) => format!("{s} s"),
    };
    let backoff = format!(
        "{} and {}",
        lasts(defaults::BACKOFF),
        lasts(defaults::LONGEST_BACKOFF)
    );
    for (setting, default) in [
        ("dedup_window", lasts(defaults::WINDOW)),
        ("lease", lasts(defaults::LEASE)),
        ("max_attempts", defaults::ATTEMPTS.to_string()),
        ("max_inline_retries", defaults::RETRIES.to_string()),
        ("backoff", backoff),
        ("max_reconciles", defaults::RECONCILES.to_string()),
        ("handler_timeout", lasts(defaults::HANDLER_TIMEOUT)),
        ("max_in_flight", defaults::IN_FLIGHT.to_string()),
        (
            "max_in_flight_bytes",
            format!("{} MiB", defaults::IN_FLIGHT_BYTES >> 20),
        ),
        (
            "max_queued",
            format!(
                "{},{:03}",
                defaults::WAITING / 1000,
                defaults::WAITING % 1000
            ),
        ),
        (
            "max_queued_bytes",
            format!("{} MiB", defaults::WAITING_BYTES >> 20),
        ),
        ("drain_timeout", lasts(defaults::DRAIN)),
    ] {
        let (_, says) = documented
            .iter()
            .find(|(name, _)| name == setting)
            .unwrap_or_else(|| panic!("no setting {setting}"));
        assert!(
            says.contains(&format!("Default: {default}.")),
            "{setting} is {default} by default, and its documentation says: {says}"
        );
    }
}

/// The variants of an enum, as its file has them.
fn variants(source: &str, name: &str) -> Vec<String> {
    let head = format!("pub enum {name} {{\n");
    let (_, body) = source
        .split_once(&head)
        .unwrap_or_else(|| panic!("no enum {name}"));
    let (body, _) = body
        .split_once("\n}\n")
        .unwrap_or_else(|| panic!("{name} does not end"));
    let lines = body.lines().filter_map(|line| {
        line.strip_prefix("    ")
            .filter(|it| it.starts_with(char::is_uppercase))
    });
    lines
        .map(|line| {
            line.split([' ', '(', ',', '{'])
                .next()
                .unwrap_or_default()
                .to_owned()
        })
        .collect()
}

#[test]
fn the_book_lists_every_error_and_every_reason() {
    let page = read(&root().join("docs/src/errors.md"));
    let core = |file: &str| read(&root().join("crates/oncegate-core/src").join(file));
    let mut checked = 0;
    for (file, name) in [
        ("error.rs", "Error"),
        ("store.rs", "StoreError"),
        ("source.rs", "SourceError"),
        ("gate.rs", "GateError"),
        ("handler.rs", "Failure"),
    ] {
        for variant in variants(&core(file), name) {
            assert!(
                page.contains(&format!("| `{name}::{variant}` |")),
                "docs/src/errors.md has no row of {name}::{variant}"
            );
            checked += 1;
        }
    }
    for reason in oncegate::lifecycle::Reason::ALL {
        assert!(
            page.contains(&format!("| `{}` |", reason.as_str())),
            "docs/src/errors.md has no row of the reason {}",
            reason.as_str()
        );
        checked += 1;
    }
    assert!(checked >= 30, "only {checked} errors were found");
}

#[test]
fn setters_and_variants_are_found() {
    let source = "impl X {\n    /// Sets it.\n    ///\n    /// See [`Y`](Self::y), a|b.\n    ///\n    /// # Errors\n    /// None.\n    #[must_use]\n    \
                  pub fn it<T>(\n        mut self,\n        it: T,\n    ) -> Self {\n    /// No.\n    pub fn new() -> Self {\n    /// No.\n    \
                  pub fn is(&self) -> bool {\n";
    assert_eq!(
        setters(source),
        [("it".to_owned(), "Sets it. See `Y`, a\\|b.".to_owned())]
    );
    assert_eq!(
        variants(
            "pub enum E {\n    /// A.\n    A,\n    B(u8),\n    C {\n        d: u8,\n    },\n}\n",
            "E"
        ),
        ["A", "B", "C"]
    );
}
