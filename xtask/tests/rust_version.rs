//! `rust-version` in a manifest is a promise that the dependencies keep, too. Clippy's
//! `incompatible_msrv` keeps it for the standard library.

use std::collections::HashSet;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, NodeDep, PackageId};

#[test]
fn no_dependency_needs_a_newer_rust_than_its_package_promises() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let metadata = MetadataCommand::new()
        .manifest_path(manifest)
        .exec()
        .expect("cargo metadata");
    let mut newer = Vec::new();
    for package in metadata.workspace_packages() {
        let promised = package.rust_version.as_ref().expect("a rust-version");
        for id in needed_by(&metadata, &package.id) {
            let needed = metadata[id].rust_version.as_ref();
            if needed.is_some_and(|it| (it.major, it.minor) > (promised.major, promised.minor)) {
                newer.push(format!("{} for {}", metadata[id].name, package.name));
            }
        }
    }
    assert_eq!(newer, Vec::<String>::new());
}

/// A package and all that it depends on, except for its tests.
fn needed_by<'a>(metadata: &'a Metadata, package: &'a PackageId) -> HashSet<&'a PackageId> {
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
