//! SQLite: checks that the file is usable and durable.

use std::path::Path;

use oncegate::{Persistence, Sqlite, Store};

use super::settings::volatile_store_severity;
use super::{DoctorFindings, Severity};
use crate::config::Config;
use crate::marker_store;

/// Less free space than this is reported: the write-ahead log may need 16 MB.
const LITTLE_SPACE: u64 = 64 << 20;

/// With less free space than this, the store records nothing or soon will not.
const NO_SPACE: u64 = 1 << 20;

pub(super) async fn check(config: &Config, file: &Path, findings: &mut DoctorFindings) {
    let at = format!("SQLite file {}", file.display());
    check_space(file, &at, findings);
    let sqlite = marker_store::sqlite(config, file);
    // Opening a missing file would create it, and `doctor` changes nothing.
    if !file.exists() {
        let directory = file
            .parent()
            .filter(|directory| !directory.as_os_str().is_empty());
        match directory {
            Some(directory) if !directory.is_dir() => {
                let what = format!("the directory {} does not exist", directory.display());
                findings.error(
                    "store-unusable",
                    at,
                    what,
                    "create it, or set store.url to another file",
                );
            }
            _ => {
                let directory = directory.unwrap_or(Path::new("."));
                if Sqlite::is_on_memory_file_system(directory) {
                    let why = format!(
                        "{} is on a file system in memory, which is empty after the machine restarts",
                        directory.display()
                    );
                    add_volatile(config, &at, why, findings);
                }
                let what = format!(
                    "no file yet at {}; a consumer that starts here remembers no id",
                    file.display()
                );
                findings.warning(
                    "store-file-missing",
                    at,
                    what,
                    "if a consumer has run before, correct store.url or mount the volume; otherwise the first consumer creates the file",
                );
            }
        }
        return;
    }
    match sqlite.persistence().await {
        Ok(Persistence::Durable(_)) => {}
        Ok(Persistence::Volatile(why)) => add_volatile(config, &at, why, findings),
        Ok(other) => add_volatile(config, &at, format!("{other:?}"), findings),
        Err(error) => findings.error(
            "store-unusable",
            at,
            error.to_string(),
            "fix the cause that the error names",
        ),
    }
}

fn check_space(file: &Path, at: &str, findings: &mut DoctorFindings) {
    let directory = file.parent().filter(|it| !it.as_os_str().is_empty());
    let Some(free) = Sqlite::free_space(directory.unwrap_or(Path::new("."))) else {
        return;
    };
    if let Some(level) = space_severity(free) {
        let what = format!(
            "{} KiB are free on its disk; on a full disk the consumer records nothing and waits",
            free >> 10
        );
        findings.add(
            level,
            "store-disk-full",
            at,
            what,
            "free space on it, or move the file",
        );
    }
}

/// How severe it is that so many bytes are free; `None` if they are enough.
fn space_severity(free: u64) -> Option<Severity> {
    match free {
        ..NO_SPACE => Some(Severity::Error),
        NO_SPACE..LITTLE_SPACE => Some(Severity::Warning),
        _ => None,
    }
}

fn add_volatile(config: &Config, at: &str, why: String, findings: &mut DoctorFindings) {
    findings.add(
        volatile_store_severity(config),
        "store-volatile",
        at,
        why,
        "set store.url to a file on a local disk",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_an_error_and_an_almost_full_one_a_warning() {
        let of = space_severity;
        assert_eq!(of(0), Some(Severity::Error));
        assert_eq!(of(10 << 20), Some(Severity::Warning));
        assert_eq!(of(LITTLE_SPACE), None);
        assert!(Sqlite::free_space(".").is_some());
    }
}
