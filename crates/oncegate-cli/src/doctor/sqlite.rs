//! SQLite: checks that the file is usable and durable.

use std::path::Path;

use oncegate::{Persistence, Store};

use super::DoctorFindings;
use super::settings::volatile_store_severity;
use crate::config::Config;
use crate::marker_store;

pub(super) async fn check(config: &Config, file: &Path, findings: &mut DoctorFindings) {
    let at = format!("SQLite file {}", file.display());
    // Opening a missing file would create it; the first consumer does that.
    if !file.exists() {
        match file
            .parent()
            .filter(|directory| !directory.as_os_str().is_empty())
        {
            Some(directory) if !directory.is_dir() => {
                let what = format!("the directory {} does not exist", directory.display());
                findings.error(
                    "store-unusable",
                    at,
                    what,
                    "create it, or set store.url to another file",
                );
            }
            _ => {}
        }
        return;
    }
    match marker_store::sqlite(config, file).persistence().await {
        Ok(Persistence::Durable(_)) => {}
        Ok(Persistence::Volatile(why)) => {
            findings.add(
                volatile_store_severity(config),
                "store-forgets",
                at,
                why,
                "set store.url to a file on a local disk",
            );
        }
        Err(error) => findings.error(
            "store-unusable",
            at,
            error.to_string(),
            "fix what the error reports",
        ),
    }
}
