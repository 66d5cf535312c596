//! Copies of the source to which mutants are added.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::setup;

/// Copies the source to the directory `into`, and applies a patch that adds mutants: broken behaviour
/// that the tests must detect, which one environment variable selects. Both paths are relative to the
/// root of the workspace.
pub(crate) fn patched_source(patch: &str, into: &str) -> Result<PathBuf, Error> {
    let into = setup::root().join(into);
    let shown = "git ls-files";
    let cannot_run = |source| Error::CannotRun {
        program: shown.to_owned(),
        source,
    };
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(setup::root())
        .output()
        .map_err(cannot_run)?;
    if !listed.status.success() {
        return Err(Error::Failed(shown.to_owned()));
    }
    for file in String::from_utf8_lossy(&listed.stdout).split_terminator('\0') {
        let copy = into.join(file);
        copy_if_changed(&setup::root().join(file), &copy)
            .map_err(|source| Error::File { path: copy, source })?;
    }
    let mut apply = Command::new("git");
    apply
        .arg("apply")
        .arg(setup::root().join(patch))
        .current_dir(&into);
    // Inside the repository, git would skip files outside the current directory.
    if let Some(above) = into.parent() {
        apply.env("GIT_CEILING_DIRECTORIES", above);
    }
    setup::run_program(&mut apply)?;
    Ok(into)
}

/// Keeps the modification time of files that are equal, so that cargo does not build them again.
fn copy_if_changed(from: &Path, to: &Path) -> std::io::Result<()> {
    let Ok(content) = std::fs::read(from) else {
        return Ok(()); // deleted in the working tree
    };
    if std::fs::read(to).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(directory) = to.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(to, content)
}
