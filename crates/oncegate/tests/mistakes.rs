//! What the compiler says of mistakes: each file of `mistakes` has the lines that a user is to
//! read, and one shows what is none. Only our own lines are compared, or a word of the compiler's,
//! so that a newer one may put the rest differently.

mod generated;

use std::path::PathBuf;

use generated::{Package, check, root, target};

#[test]
fn each_mistake_is_told_with_what_to_write() {
    let directory = root().join("crates/oncegate/tests/mistakes");
    let entries = std::fs::read_dir(directory).expect("the mistakes");
    let sources: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    let dependencies = "oncegate = { git = \"https://github.com/oncegate/oncegate\", default-features = false }\n\
                        serde = { version = \"1\", features = [\"derive\"] }\ntokio = { version = \"1\", features = [\"signal\"] }\n";
    let said = check(
        "mistakes",
        &[Package {
            dependencies: dependencies.to_owned(),
            sources: sources.clone(),
        }],
    )
    .remove(0);
    let (mut told, mut wrong) = (0, String::new());
    for source in &sources {
        let text = std::fs::read_to_string(source).expect("a source");
        let errors = said.get(&target(source)).map_or("", String::as_str);
        let says: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("// says: "))
            .collect();
        for line in &says {
            if !errors.contains(line) {
                wrong += &format!("{}: no {line:?} in\n{errors}\n", source.display());
            }
        }
        let compiles = text.lines().any(|line| line == "// compiles");
        assert_eq!(
            (compiles, says.is_empty()),
            (errors.is_empty(), compiles),
            "{}:\n{errors}",
            source.display()
        );
        told += usize::from(!compiles);
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(told >= 10, "only {told} mistakes");
}
