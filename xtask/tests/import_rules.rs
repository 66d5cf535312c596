//! Checks with `cargo metadata` that each crate of the workspace imports only the crates that it
//! may.
//!
//! Adapters and the testkit import the core; the facade imports the core and the adapters; examples
//! and tests import the facade. Adapters never import each other, and the core imports neither a
//! driver nor another crate of the workspace.

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Each package of the workspace with the packages of the workspace that it may import. Besides
/// these, every package may use the testkit in tests.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("oncegate-core", &[]),
    ("oncegate-redis", &["oncegate-core"]),
    ("oncegate-sql", &["oncegate-core"]),
    ("oncegate-postgres", &["oncegate-core"]),
    ("oncegate-kafka", &["oncegate-core"]),
    ("oncegate-amqp", &["oncegate-core"]),
    ("oncegate-http", &["oncegate-core"]),
    ("oncegate-model", &["oncegate-core"]),
    ("oncegate-testkit", &["oncegate-core"]),
    (
        "oncegate",
        &[
            "oncegate-core",
            "oncegate-redis",
            "oncegate-sql",
            "oncegate-kafka",
            "oncegate-amqp",
        ],
    ),
    ("oncegate-admin", &["oncegate"]),
    (
        "oncegate-config",
        &["oncegate", "oncegate-admin", "oncegate-postgres"],
    ),
    (
        "oncegate-cli",
        &["oncegate", "oncegate-config", "oncegate-postgres"],
    ),
    ("idempotent-api", &["oncegate", "oncegate-http"]),
    (
        "payments",
        &[
            "oncegate",
            "oncegate-admin",
            "oncegate-config",
            "oncegate-postgres",
            "oncegate-testkit",
        ],
    ),
    (
        "oncegate-tests",
        &[
            "oncegate",
            "oncegate-admin",
            "oncegate-http",
            "oncegate-postgres",
            "oncegate-testkit",
        ],
    ),
    (
        "oncegate-chaos",
        &["oncegate", "oncegate-postgres", "oncegate-testkit"],
    ),
    (
        "oncegate-fuzzed",
        &["oncegate-amqp", "oncegate-core", "oncegate-redis"],
    ),
    ("oncegate-bench", &["oncegate", "oncegate-testkit"]),
    ("oncegate-bench-instructions", &["oncegate-core"]),
    ("xtask", &["oncegate-testkit"]),
];

/// The clients of brokers and stores, which only adapters import.
const DRIVERS: &[&str] = &["rdkafka", "lapin", "redis", "rusqlite", "sqlx"];

struct Import {
    by: String,
    of: String,
    kind: DependencyKind,
}

/// Why this import is forbidden; `None` if it is allowed.
fn violation(import: &Import) -> Option<String> {
    let Import { by, of, kind } = import;
    if by == "oncegate-core" && DRIVERS.contains(&of.as_str()) {
        return Some(format!("{by} imports the driver {of}"));
    }
    let is_of_the_workspace = MAY_IMPORT.iter().any(|(name, _)| name == of);
    let is_for_development = *kind == DependencyKind::Development;
    let is_for_tests = is_for_development && of == "oncegate-testkit";
    // The facade does not re-export `oncegate-postgres`, so the example of that crate imports both.
    let is_for_an_example = is_for_development && by == "oncegate-postgres" && of == "oncegate";
    if !is_of_the_workspace || is_for_tests || is_for_an_example {
        return None;
    }
    match MAY_IMPORT.iter().find(|(name, _)| name == by) {
        None => Some(format!("{by} has no line in MAY_IMPORT")),
        Some((_, allowed)) if allowed.contains(&of.as_str()) => None,
        Some((_, allowed)) => Some(format!(
            "{by} imports {of}; of the workspace it may import {allowed:?}"
        )),
    }
}

#[test]
fn each_crate_imports_only_allowed_crates() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let metadata = MetadataCommand::new()
        .manifest_path(manifest)
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let imports: Vec<Import> = metadata
        .packages
        .iter()
        .flat_map(|package| {
            package.dependencies.iter().map(|dependency| Import {
                by: package.name.to_string(),
                of: dependency.name.clone(),
                kind: dependency.kind,
            })
        })
        .collect();
    for package in &metadata.packages {
        assert!(
            MAY_IMPORT
                .iter()
                .any(|(name, _)| *name == package.name.as_str()),
            "{} needs a line in MAY_IMPORT",
            package.name
        );
    }
    assert!(
        imports.iter().any(|import| import.of == "oncegate-testkit"),
        "the list of imports is incomplete"
    );
    let violations: Vec<String> = imports.iter().filter_map(violation).collect();
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn a_forbidden_import_is_found() {
    let is_forbidden = |by: &str, of: &str, kind| {
        violation(&Import {
            by: by.to_owned(),
            of: of.to_owned(),
            kind,
        })
        .is_some()
    };
    use DependencyKind::{Development, Normal};
    assert!(is_forbidden("oncegate-core", "redis", Development));
    assert!(is_forbidden("oncegate-core", "oncegate-redis", Normal));
    assert!(is_forbidden(
        "oncegate-redis",
        "oncegate-kafka",
        Development
    ));
    assert!(is_forbidden("oncegate-redis", "oncegate-testkit", Normal));
    assert!(is_forbidden("payments", "oncegate-core", Normal));
    assert!(is_forbidden("newcomer", "oncegate-core", Normal));
    assert!(!is_forbidden(
        "oncegate-redis",
        "oncegate-testkit",
        Development
    ));
    assert!(!is_forbidden("oncegate-redis", "redis", Normal));
}
