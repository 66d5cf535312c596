//! SQLite: can the file be used, and does it survive?

use std::path::Path;

use oncegate::{Persistence, Store};

use super::Findings;
use super::settings::forgetting;
use crate::config::Config;
use crate::markers;

pub(super) async fn look(config: &Config, file: &Path, findings: &mut Findings) {
    let at = format!("SQLite file {}", file.display());
    // To look into a file makes it, which is for the first consumer to do.
    if !file.exists() {
        match file
            .parent()
            .filter(|directory| !directory.as_os_str().is_empty())
        {
            Some(directory) if !directory.is_dir() => {
                let what = format!("there is no directory {}", directory.display());
                findings.error(
                    "store-unusable",
                    at,
                    what,
                    "create it, or name another file in store.url",
                );
            }
            _ => {}
        }
        return;
    }
    match markers::sqlite(config, file).persistence().await {
        Ok(Persistence::Durable(_)) => {}
        Ok(Persistence::Volatile(why)) => {
            findings.add(
                forgetting(config),
                "store-forgets",
                at,
                why,
                "name a file on a local disk in store.url",
            );
        }
        Err(error) => findings.error(
            "store-unusable",
            at,
            error.to_string(),
            "change what it says",
        ),
    }
}
