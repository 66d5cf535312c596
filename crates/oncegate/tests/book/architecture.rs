//! `ARCHITECTURE.md` names files that exist.

use std::path::Path;

use super::{read, root};

/// The paths in a cell of the table that do not exist. A path is relative to the checkout, or to the
/// directory of the path before it.
fn missing(cell: &str, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut directory = Path::new("").to_owned();
    let mut missing = Vec::new();
    for path in cell.split('`').skip(1).step_by(2).map(Path::new) {
        if exists(path) {
            let is_file = path.extension().is_some();
            directory = if is_file {
                path.parent().expect("a file has a directory").to_owned()
            } else {
                path.to_owned()
            };
        } else if !exists(&directory.join(path)) {
            missing.push(path.display().to_string());
        }
    }
    missing
}

#[test]
fn the_files_that_the_architecture_page_names_exist() {
    let page = read(&root().join("ARCHITECTURE.md"));
    let (_, table) = page
        .split_once("\n## Where to change what\n")
        .expect("the table of files");
    let table = table.split("\n## ").next().unwrap_or_default();
    let mut checked = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")).skip(2) {
        let cell = row.rsplit(" | ").next().expect("a row has two cells");
        let missing = missing(cell, |path| root().join(path).exists());
        assert_eq!(missing, Vec::<String>::new(), "in this row:\n{row}");
        checked += 1;
    }
    assert!(checked > 20, "only {checked} rows were found");
}

#[test]
fn a_path_that_does_not_exist_is_detected() {
    let exists = |path: &Path| {
        ["a/b.rs", "a/c.rs", "d"]
            .iter()
            .any(|existing| path == Path::new(existing))
    };
    assert_eq!(
        missing("`a/b.rs`, `c.rs`; `d`", exists),
        Vec::<String>::new()
    );
    assert_eq!(missing("`a/b.rs`, `e.rs`", exists), ["e.rs"]);
}
