//! The pages of settings and of errors list all settings and errors of the code.

use std::time::Duration;

use oncegate::defaults;

use super::{read, root, table};

/// A builder: its name on the page of settings, the file of its setters, and the keys of the
/// configuration file that may set them.
const BUILDERS: &[(&str, &str, &[&str])] = &[
    (
        "Consumer",
        "crates/oncegate-core/src/builder.rs",
        &["gate.", "store.scope", "store.volatile"],
    ),
    (
        "Gate",
        "crates/oncegate-core/src/gate/builder.rs",
        &["gate.", "store.scope", "store.volatile"],
    ),
    (
        "Kafka",
        "crates/oncegate-kafka/src/settings.rs",
        &["kafka."],
    ),
    (
        "RabbitMQ",
        "crates/oncegate-amqp/src/settings.rs",
        &["rabbitmq."],
    ),
    ("Redis", "crates/oncegate-redis/src/store.rs", &["store."]),
    ("SQLite", "crates/oncegate-sql/src/sqlite.rs", &["store."]),
];

/// The public functions of a file that take a builder and return one, with their documentation up to
/// its first heading.
fn setters(source: &str) -> Vec<(String, String)> {
    let mut setters = Vec::new();
    let mut documentation: Vec<&str> = Vec::new();
    let mut is_hidden = false;
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if let Some(text) = line.strip_prefix("    ///") {
            documentation.push(text.trim());
        } else if let Some(rest) = line.strip_prefix("    pub fn ") {
            let mut signature = rest.to_owned();
            while !signature.contains('{') {
                signature += lines.next().expect("the rest of a signature").trim();
            }
            let takes_builder = ["(self", "(mut self"]
                .iter()
                .any(|text| signature.contains(text));
            let returns_builder = ["-> Self", "-> Builder<", "-> GateBuilder<"]
                .iter()
                .any(|text| signature.contains(text));
            if takes_builder && returns_builder && !is_hidden {
                let name = signature.split(['(', '<']).next().unwrap_or_default();
                let text = documentation
                    .iter()
                    .take_while(|line| !line.starts_with("# ") && !line.starts_with("```"))
                    .filter(|line| !line.is_empty());
                setters.push((
                    name.to_owned(),
                    without_links(&text.copied().collect::<Vec<_>>().join(" ")),
                ));
            }
            documentation.clear();
            is_hidden = false;
        } else if line == "    #[doc(hidden)]" {
            is_hidden = true;
        } else if !line.starts_with("    #[") {
            documentation.clear();
            is_hidden = false;
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

/// The first sentence of a setter's documentation, and its default.
fn summary(documentation: &str) -> String {
    let mut sentences = documentation.split_inclusive(". ");
    let first = sentences.next().unwrap_or_default().trim();
    let default = sentences.find(|sentence| sentence.starts_with("Default: "));
    default.map_or_else(
        || first.to_owned(),
        |default| format!("{first} {}", default.trim()),
    )
}

/// The rows of the tables of keys: each key of the configuration file, and the setters that do the
/// same in code.
fn keys(page: &str) -> Vec<(&str, Vec<&str>)> {
    let (_, section) = page
        .split_once("\n## All settings\n")
        .expect("the section of all settings");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.split(" | ");
        let key = cells.next().unwrap_or_default();
        let code = cells.next().unwrap_or_default();
        let setters = code
            .split('`')
            .filter_map(|text| text.strip_prefix('.')?.strip_suffix("(…)"));
        let key = key.trim_start_matches("| `").trim_end_matches('`');
        (key, setters.collect())
    })
    .collect()
}

#[test]
fn the_book_lists_every_setting() {
    let page = read(&root().join("docs/src/configuration.md"));
    let keys = keys(&page);
    assert!(keys.len() > 60, "only {} keys were found", keys.len());
    let of_builders: Vec<_> = BUILDERS
        .iter()
        .map(|(name, file, keys)| (*name, *keys, setters(&read(&root().join(file)))))
        .collect();
    let consumer = &of_builders[0].2;
    let mut rows = Vec::new();
    for (builder, prefixes, setters) in &of_builders {
        for (setter, documentation) in setters {
            let has_key = keys.iter().any(|(key, setters)| {
                prefixes.iter().any(|prefix| key.starts_with(prefix))
                    && setters.contains(&setter.as_str())
            });
            let is_shared = *builder == "Gate" && consumer.iter().any(|(name, _)| name == setter);
            if is_shared {
                let name = format!("`{setter}`");
                assert!(
                    page.contains(&name),
                    "docs/src/configuration.md does not list {name} for the gate"
                );
            } else if !has_key {
                rows.push([
                    (*builder).to_owned(),
                    format!("`.{setter}(…)`"),
                    summary(documentation),
                ]);
            }
        }
    }
    let in_code = table(["of", "setting", "meaning"], rows);
    assert!(
        page.contains(&format!("\n{in_code}")) && page.trim_end().ends_with(in_code.trim_end()),
        "docs/src/configuration.md does not have this table at its end:\n{in_code}"
    );
    for (key, setters) in keys {
        for setter in setters {
            let exists = of_builders.iter().any(|(_, prefixes, known)| {
                prefixes.iter().any(|prefix| key.starts_with(prefix))
                    && known.iter().any(|(name, _)| name == setter)
            });
            assert!(
                exists,
                "docs/src/configuration.md: {key}: there is no .{setter}(…)"
            );
        }
    }
}

#[test]
fn documented_defaults_equal_those_of_the_code() {
    let documented = setters(&read(&root().join("crates/oncegate-core/src/builder.rs")));
    let text = |duration: Duration| match (duration.as_millis(), duration.as_secs()) {
        (ms, 0) => format!("{ms} ms"),
        (_, s) if s % 3600 == 0 => format!("{} h", s / 3600),
        (_, s) if s % 60 == 0 => format!("{} min", s / 60),
        (_, s) => format!("{s} s"),
    };
    let backoff = format!(
        "{} and {}",
        text(defaults::BACKOFF),
        text(defaults::LONGEST_BACKOFF)
    );
    for (setting, default) in [
        ("dedup_window", text(defaults::DEDUP_WINDOW)),
        ("lease", text(defaults::LEASE)),
        ("max_attempts", defaults::MAX_ATTEMPTS.to_string()),
        (
            "max_inline_retries",
            defaults::MAX_INLINE_RETRIES.to_string(),
        ),
        ("backoff", backoff),
        ("max_reconciles", defaults::MAX_RECONCILES.to_string()),
        ("handler_timeout", text(defaults::HANDLER_TIMEOUT)),
        ("max_in_flight", defaults::MAX_IN_FLIGHT.to_string()),
        (
            "max_in_flight_bytes",
            format!("{} MiB", defaults::MAX_IN_FLIGHT_BYTES >> 20),
        ),
        (
            "max_queued",
            format!(
                "{},{:03}",
                defaults::MAX_QUEUED / 1000,
                defaults::MAX_QUEUED % 1000
            ),
        ),
        (
            "max_queued_bytes",
            format!("{} MiB", defaults::MAX_QUEUED_BYTES >> 20),
        ),
        ("drain_timeout", text(defaults::DRAIN_TIMEOUT)),
    ] {
        let (_, documentation) = documented
            .iter()
            .find(|(name, _)| name == setting)
            .unwrap_or_else(|| panic!("no setting {setting}"));
        assert!(
            documentation.contains(&format!("Default: {default}.")),
            "{setting} is {default} by default, and its documentation is: {documentation}"
        );
    }
}

/// The names of the variants of an enum in a source file.
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
            .filter(|rest| rest.starts_with(char::is_uppercase))
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
fn setters_keys_and_variants_are_parsed() {
    let source = "impl X {\n    /// Sets it.\n    ///\n    /// See [`Y`](Self::y), a|b.\n    ///\n    /// # Errors\n    /// None.\n    #[must_use]\n    \
                  pub fn it<T>(\n        mut self,\n        it: T,\n    ) -> Self {\n    /// No.\n    pub fn new() -> Self {\n    /// No.\n    \
                  pub fn is(&self) -> bool {\n    /// No.\n    #[doc(hidden)]\n    pub fn seed(mut self) -> Self {\n";
    assert_eq!(
        setters(source),
        [("it".to_owned(), "Sets it. See `Y`, a\\|b.".to_owned())]
    );
    assert_eq!(
        summary("Sets it. See b. Default: 3. Or c."),
        "Sets it. Default: 3."
    );
    assert_eq!(summary("Sets it: 3 by default."), "Sets it: 3 by default.");
    assert_eq!(
        keys("\n## All settings\n| `a.b` | `.b(…)`, `C::d` | says |\n## E\n| `f` | `.g(…)` | |\n"),
        [("a.b", vec!["b"])]
    );
    assert_eq!(
        variants(
            "pub enum E {\n    /// A.\n    A,\n    B(u8),\n    C {\n        d: u8,\n    },\n}\n",
            "E"
        ),
        ["A", "B", "C"]
    );
}
