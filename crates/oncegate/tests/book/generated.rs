//! Generates packages outside of this workspace, as users have them, and runs `cargo check` on them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The errors of each target that does not compile, as one text.
pub(crate) type ErrorsByTarget = BTreeMap<String, String>;

/// A package: the lines below `[dependencies]`, and its source files, each a test target of its own. If
/// the lines have a part `[dev-dependencies]`, the source file is a library, so that it must compile
/// without them, too.
pub(crate) struct Package {
    pub(crate) dependencies: String,
    pub(crate) sources: Vec<PathBuf>,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the repository")
}

/// The header of the dependencies that only tests have.
const DEV_DEPENDENCIES: &str = "[dev-dependencies]";

/// The name of the target of a source file.
pub(crate) fn target(source: &Path) -> String {
    source
        .file_stem()
        .and_then(|stem| stem.to_str())
        .expect("a name")
        .to_owned()
}

/// Checks each package on its own, without the network and with the versions of this workspace.
/// Returns the errors of each.
///
/// # Panics
/// If cargo fails before it compiles the targets.
pub(crate) fn check(name: &str, packages: &[Package]) -> Vec<ErrorsByTarget> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&directory); // of an earlier run
    let members: Vec<String> = (0..packages.len())
        .map(|number| format!("\"{name}-{number}\""))
        .collect();
    let profile = "[profile.dev]\ndebug = \"line-tables-only\"\n"; // as in this workspace, so that compiled dependencies are reused
    write(
        &directory.join("Cargo.toml"),
        &format!(
            "[workspace]\nresolver = \"3\"\nmembers = [{}]\n{profile}",
            members.join(", ")
        ),
    );
    std::fs::copy(root().join("Cargo.lock"), directory.join("Cargo.lock")).expect("copied");
    for (number, package) in packages.iter().enumerate() {
        let mut manifest = format!(
            "[package]\nname = \"{name}-{number}\"\nedition = \"2024\"\nautobins = false\n"
        );
        manifest += &format!(
            "[dependencies]\n{}",
            with_local_paths(&package.dependencies)
        );
        for source in &package.sources {
            // A test target includes both tests and a `main`.
            let kind = if package.dependencies.contains(DEV_DEPENDENCIES) {
                "[lib]"
            } else {
                "[[test]]"
            };
            manifest += &format!(
                "{kind}\nname = \"{}\"\npath = \"{}\"\n",
                target(source),
                source.display()
            );
        }
        write(
            &directory.join(format!("{name}-{number}/Cargo.toml")),
            &manifest,
        );
    }
    (0..packages.len())
        .map(|number| check_one(&directory, &format!("{name}-{number}")))
        .collect()
}

/// The dependencies, with paths of this checkout in place of the Git repository.
fn with_local_paths(dependencies: &str) -> String {
    let with_local_path = |line: &str| {
        let name = line.split(' ').next().unwrap_or_default();
        let path = root().join("crates").join(name);
        line.replace(
            "git = \"https://github.com/oncegate/oncegate\"",
            &format!("path = \"{}\"", path.display()),
        ) + "\n"
    };
    dependencies
        .lines()
        .filter(|line| !line.starts_with('[') || *line == DEV_DEPENDENCIES)
        .map(with_local_path)
        .collect()
}

fn check_one(directory: &Path, package: &str) -> ErrorsByTarget {
    let this = std::env::current_exe().expect("this test has a path");
    let target = this
        .ancestors()
        .nth(3)
        .expect("this test is in target/<profile>/deps");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "check",
        "--offline",
        "--keep-going",
        "--all-targets",
        "--message-format=json",
        "-p",
        package,
    ]);
    let checked = cargo
        .arg("--target-dir")
        .arg(target)
        .current_dir(directory)
        .output()
        .expect("cargo runs");
    let mut errors = ErrorsByTarget::new();
    let mut finished = false;
    for line in String::from_utf8_lossy(&checked.stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else {
            continue;
        };
        finished |= message["reason"] == "build-finished";
        let is_of_package = message["package_id"]
            .as_str()
            .is_some_and(|id| id.contains(package));
        let (name, text) = (
            message["target"]["name"].as_str(),
            message["message"]["rendered"].as_str(),
        );
        if let (Some(name), Some(text)) = (name, text)
            && is_of_package
            && message["message"]["level"] == "error"
        {
            *errors.entry(name.to_owned()).or_default() += text;
        }
    }
    assert!(finished, "{}", String::from_utf8_lossy(&checked.stderr));
    assert!(
        checked.status.success() || !errors.is_empty(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
    errors
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("created");
    std::fs::write(path, text).expect("written");
}
