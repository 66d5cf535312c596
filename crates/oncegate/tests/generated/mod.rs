//! Packages as users have them, outside of this workspace: a test generates them, and sees what
//! cargo says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The errors of each target that does not compile, in one text.
pub(crate) type Said = BTreeMap<String, String>;

/// A package: its lines below `[dependencies]`, and its sources, each a target of its own.
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

/// The name of the target that a source becomes.
pub(crate) fn target(source: &Path) -> String {
    source
        .file_stem()
        .and_then(|stem| stem.to_str())
        .expect("a name")
        .to_owned()
}

/// Checks each package on its own, without the network and with the versions of this workspace, and
/// says which targets have errors.
///
/// # Panics
/// If cargo does not come to the targets.
pub(crate) fn check(name: &str, packages: &[Package]) -> Vec<Said> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&directory); // of an earlier run
    let members: Vec<String> = (0..packages.len())
        .map(|number| format!("\"{name}-{number}\""))
        .collect();
    let profile = "[profile.dev]\ndebug = \"line-tables-only\"\n"; // as here, so that what is built already is used
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
        manifest += &format!("[dependencies]\n{}", on_this_machine(&package.dependencies));
        for source in &package.sources {
            // With tests in it, or a program: as a test both are seen.
            manifest += &format!(
                "[[test]]\nname = \"{}\"\npath = \"{}\"\n",
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

/// The lines with this checkout in place of the repository.
fn on_this_machine(dependencies: &str) -> String {
    let ours = |line: &str| {
        let name = line.split(' ').next().unwrap_or_default();
        let path = root().join("crates").join(name);
        line.replace(
            "git = \"https://github.com/oncegate/oncegate\"",
            &format!("path = \"{}\"", path.display()),
        ) + "\n"
    };
    dependencies
        .lines()
        .filter(|line| !line.starts_with('['))
        .map(ours)
        .collect()
}

fn check_one(directory: &Path, package: &str) -> Said {
    let this = std::env::current_exe().expect("this test has a path");
    let target = this
        .ancestors()
        .nth(3)
        .expect("it lies in target/<profile>/deps");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "check",
        "--offline",
        "--keep-going",
        "--tests",
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
    let mut said = Said::new();
    let mut came = false;
    for line in String::from_utf8_lossy(&checked.stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else {
            continue;
        };
        came |= message["reason"] == "build-finished";
        let is_its_own = message["package_id"]
            .as_str()
            .is_some_and(|id| id.contains(package));
        let (name, text) = (
            message["target"]["name"].as_str(),
            message["message"]["rendered"].as_str(),
        );
        if let (Some(name), Some(text)) = (name, text)
            && is_its_own
            && message["message"]["level"] == "error"
        {
            *said.entry(name.to_owned()).or_default() += text;
        }
    }
    assert!(came, "{}", String::from_utf8_lossy(&checked.stderr));
    assert!(
        checked.status.success() || !said.is_empty(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
    said
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("created");
    std::fs::write(path, text).expect("written");
}
