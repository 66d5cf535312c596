//! Checks that no dependency needs a newer Rust than the `rust-version` of the package that uses
//! it. Clippy's `incompatible_msrv` checks the uses of the standard library.

use std::collections::HashSet;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, NodeDep, PackageId};

#[test]
fn no_dependency_needs_a_newer_rust_than_its_user() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let metadata = MetadataCommand::new()
        .manifest_path(manifest)
        .exec()
        .expect("cargo metadata");
    let mut newer = Vec::new();
    for package in metadata.workspace_packages() {
        let stated = package.rust_version.as_ref().expect("a rust-version");
        for id in dependencies_of(&metadata, &package.id) {
            let needed = metadata[id].rust_version.as_ref();
            if needed.is_some_and(|it| (it.major, it.minor) > (stated.major, stated.minor)) {
                newer.push(format!("{} for {}", metadata[id].name, package.name));
            }
        }
    }
    assert_eq!(newer, Vec::<String>::new());
}

/// A package and its direct and indirect dependencies, without those that only tests need.
fn dependencies_of<'a>(metadata: &'a Metadata, package: &'a PackageId) -> HashSet<&'a PackageId> {
    let resolve = metadata
        .resolve
        .as_ref()
        .expect("dependencies are resolved");
    let (mut found, mut left) = (HashSet::new(), vec![package]);
    while let Some(id) = left.pop() {
        if found.insert(id) {
            let needed = resolve[id].deps.iter().filter(|it| !is_for_tests(it));
            left.extend(needed.map(|it| &it.pkg));
        }
    }
    found
}

fn is_for_tests(dependency: &NodeDep) -> bool {
    let mut kinds = dependency.dep_kinds.iter();
    kinds.all(|it| it.kind == DependencyKind::Development)
}
