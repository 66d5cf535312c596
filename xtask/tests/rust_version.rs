//! `rust-version` in `Cargo.toml` is a promise that the dependencies keep, too. Clippy's
//! `incompatible_msrv` keeps it for the standard library.

use cargo_metadata::{MetadataCommand, semver::Version};

#[test]
fn no_dependency_needs_a_newer_rust_than_the_workspace_promises() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let metadata = MetadataCommand::new()
        .manifest_path(manifest)
        .exec()
        .expect("cargo metadata");
    let promised: &Version = metadata
        .workspace_packages()
        .into_iter()
        .find(|package| package.name.as_str() == "oncegate")
        .and_then(|package| package.rust_version.as_ref())
        .expect("the facade has a rust-version");
    let newer: Vec<String> = metadata
        .packages
        .iter()
        .filter(|package| {
            let needed = package.rust_version.as_ref();
            needed.is_some_and(|it| (it.major, it.minor) > (promised.major, promised.minor))
        })
        .map(|package| format!("{} {}", package.name, package.version))
        .collect();
    assert_eq!(
        newer,
        Vec::<String>::new(),
        "these need more than Rust {promised}"
    );
}
