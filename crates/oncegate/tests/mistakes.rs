//! The compiler's errors for usual mistakes. Each file of `mistakes` contains the texts that its error
//! must include (lines `// error: …`); the file `compiles.rs` has correct code. Only texts of this crate are
//! compared, and few words of the compiler, so that another version of it may word the rest
//! differently.

mod generated;

use std::path::PathBuf;

use generated::{Package, check, root, target};

#[test]
fn the_compiler_error_of_each_mistake_names_its_remedy() {
    let directory = root().join("crates/oncegate/tests/mistakes");
    let entries = std::fs::read_dir(directory).expect("the mistakes");
    let sources: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    let dependencies = "oncegate = { git = \"https://github.com/oncegate/oncegate\", default-features = false }\n\
                        serde = { version = \"1\", features = [\"derive\"] }\ntokio = { version = \"1\", features = [\"signal\"] }\n";
    let errors_by_target = check(
        "mistakes",
        &[Package {
            dependencies: dependencies.to_owned(),
            sources: sources.clone(),
        }],
    )
    .remove(0);
    let (mut mistakes, mut missing) = (0, String::new());
    for source in &sources {
        let text = std::fs::read_to_string(source).expect("a source");
        let errors = errors_by_target
            .get(&target(source))
            .map_or("", String::as_str);
        let expected: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("// error: "))
            .collect();
        for line in &expected {
            if !errors.contains(line) {
                missing += &format!("{}: no {line:?} in\n{errors}\n", source.display());
            }
        }
        let compiles = text.lines().any(|line| line == "// compiles");
        assert_eq!(
            (compiles, expected.is_empty()),
            (errors.is_empty(), compiles),
            "{}:\n{errors}",
            source.display()
        );
        mistakes += usize::from(!compiles);
    }
    assert!(missing.is_empty(), "{missing}");
    assert!(mistakes >= 10, "only {mistakes} mistakes");
}
