//! The code of a page compiles with only the dependencies that the page shows. One package is compiled
//! for each set of dependencies.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::generated::{Package, check, target};
use super::{COMPILED, blocks, files, has, pages_with_code, read, root};

/// Excerpts of the demo, which is a package of this workspace.
const OF_THE_DEMO: &str = "examples/payments/src/charge.rs";

/// Splits a page into its blocks of lines for `Cargo.toml`, each with the Rust blocks after it.
fn parts(markdown: &str) -> Vec<(String, Vec<String>)> {
    let (first, rest) = markdown
        .split_once("```toml\n")
        .map_or((markdown, None), |(first, rest)| (first, Some(rest)));
    let mut parts = vec![(String::new(), blocks(first, "```rust"))];
    for part in rest.into_iter().flat_map(|rest| rest.split("```toml\n")) {
        let (lines, text) = part.split_once("```\n").expect("a block ends");
        parts.push((lines.to_owned(), blocks(text, "```rust")));
    }
    parts
}

#[test]
fn the_code_of_each_page_compiles_with_the_dependencies_that_it_shows() {
    let compiled = || {
        COMPILED
            .iter()
            .flat_map(|directory| files(directory, "rs"))
            .map(|path| path.canonicalize().expect("the file exists"))
    };
    let of_the_demo = read(&root().join(OF_THE_DEMO));
    let mut packages: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for page in pages_with_code() {
        for (lines, code) in parts(&read(&page)) {
            for block in code.iter().filter(|block| !has(&of_the_demo, block)) {
                assert!(
                    lines.contains("oncegate"),
                    "{}: show the lines for Cargo.toml before this:\n{block}",
                    page.display()
                );
                let source = compiled()
                    .find(|path| has(&read(path), block))
                    .expect("`every_rust_block_is_part_of_a_compiled_file` passes");
                packages.entry(lines.clone()).or_default().insert(source);
            }
        }
    }
    let (lines, sources): (Vec<_>, Vec<_>) = packages.into_iter().unzip();
    let packages = lines.iter().zip(sources).map(|(lines, sources)| Package {
        dependencies: lines.clone(),
        sources: sources.into_iter().collect(),
    });
    let packages: Vec<Package> = packages.collect();
    assert!(
        (5..=10).contains(&packages.len()),
        "{} sets of dependencies; each takes time to compile",
        packages.len()
    );
    for (package, errors) in packages.iter().zip(check("book", &packages)) {
        let names: Vec<String> = package
            .sources
            .iter()
            .map(|source| target(source))
            .collect();
        assert!(
            errors.is_empty(),
            "with only these dependencies, {names:?} do not compile:\n{}\n{errors:#?}",
            package.dependencies
        );
    }
}
