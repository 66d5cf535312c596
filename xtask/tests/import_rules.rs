//! Who may import whom, kept over `cargo metadata`.
//!
//! Adapters and the testkit import the core; the facade the core and the adapters; examples and
//! tests the facade. Adapters never import each other, and the core imports neither a driver nor
//! another crate of the workspace.

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Each package of the workspace with those of the workspace that it may import. Anybody may use
/// the testkit in tests.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("oncegate-core", &[]),
    ("oncegate-redis", &["oncegate-core"]),
    ("oncegate-sql", &["oncegate-core"]),
    ("oncegate-postgres", &["oncegate-core"]),
    ("oncegate-kafka", &["oncegate-core"]),
    ("oncegate-amqp", &["oncegate-core"]),
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
    (
        "payments",
        &[
            "oncegate",
            "oncegate-admin",
            "oncegate-config",
            "oncegate-testkit",
        ],
    ),
    (
        "oncegate-tests",
        &[
            "oncegate",
            "oncegate-admin",
            "oncegate-postgres",
            "oncegate-testkit",
        ],
    ),
    ("oncegate-chaos", &["oncegate", "oncegate-testkit"]),
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

/// Why this import may not be, if it may not.
fn objection(import: &Import) -> Option<String> {
    let Import { by, of, kind } = import;
    if by == "oncegate-core" && DRIVERS.contains(&of.as_str()) {
        return Some(format!("{by} imports the driver {of}"));
    }
    let is_of_the_workspace = MAY_IMPORT.iter().any(|(name, _)| name == of);
    let is_for_development = *kind == DependencyKind::Development;
    let is_for_tests = is_for_development && of == "oncegate-testkit";
    // The facade does not have this adapter, so its example uses both.
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
        "the list of imports is not what it seems"
    );
    let objections: Vec<String> = imports.iter().filter_map(objection).collect();
    assert!(objections.is_empty(), "{}", objections.join("\n"));
}

#[test]
fn a_forbidden_import_is_found() {
    let objects = |by: &str, of: &str, kind| {
        objection(&Import {
            by: by.to_owned(),
            of: of.to_owned(),
            kind,
        })
        .is_some()
    };
    use DependencyKind::{Development, Normal};
    assert!(objects("oncegate-core", "redis", Development));
    assert!(objects("oncegate-core", "oncegate-redis", Normal));
    assert!(objects("oncegate-redis", "oncegate-kafka", Development));
    assert!(objects("oncegate-redis", "oncegate-testkit", Normal));
    assert!(objects("payments", "oncegate-core", Normal));
    assert!(objects("newcomer", "oncegate-core", Normal));
    assert!(!objects("oncegate-redis", "oncegate-testkit", Development));
    assert!(!objects("oncegate-redis", "redis", Normal));
}
