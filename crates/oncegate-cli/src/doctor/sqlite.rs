//! SQLite: checks that the file is usable and durable.

use std::path::Path;

use oncegate::{Persistence, Sqlite, Store};

use super::DoctorFindings;
use super::settings::volatile_store_severity;
use crate::config::Config;
use crate::marker_store;

pub(super) async fn check(config: &Config, file: &Path, findings: &mut DoctorFindings) {
    let at = format!("SQLite file {}", file.display());
    let sqlite = marker_store::sqlite(config, file);
    // `doctor` changes nothing, and opening a missing file would create it.
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

fn add_volatile(config: &Config, at: &str, why: String, findings: &mut DoctorFindings) {
    findings.add(
        volatile_store_severity(config),
        "store-volatile",
        at,
        why,
        "set store.url to a file on a local disk",
    );
}
