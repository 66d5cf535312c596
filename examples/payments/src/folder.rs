//! Where a run has its files.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::cli::Guaranteed;
use crate::traffic::Outgoing;

/// The directory of one run: of what is sent, under one guarantee. Another run has another.
///
/// It goes in one step at the end of its run: half of it, a store that knows the payments without
/// the ledger that has them, would count them as lost.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

/// The store's file in it.
pub(crate) const STORE: &str = "payments.db";

/// Beside a folder that is being removed.
const GONE: &str = "gone";

impl Folder {
    /// The directory of this run, with what a run of the same left that was killed. It is made if
    /// it is missing.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn of_run(
        run_dir: &Path,
        guarantee: Guaranteed,
        seed: u64,
        sent: &[Outgoing],
    ) -> io::Result<Self> {
        let mut hasher = DefaultHasher::new(); // its keys are fixed: the same on every run
        for message in sent {
            (&message.id, &message.body).hash(&mut hasher);
        }
        let guarantee = guarantee
            .to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default();
        let folder = Self(run_dir.join(format!(
            "{guarantee}-seed-{seed}-{:08x}",
            hasher.finish() as u32
        )));
        let made = std::fs::create_dir_all(&folder.0);
        made.map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("--run-dir {}: {error}", run_dir.display()),
            )
        })?;
        let _ = std::fs::remove_dir_all(folder.beside(GONE)); // a kill came while it was removed; if it stays, it harms nobody
        Ok(folder)
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The provider's ledger.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.0.join("ledger.jsonl")
    }

    /// What the store remembers.
    pub(crate) fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// Puts it aside, so that the next run of the same begins anew; returns where.
    ///
    /// # Errors
    /// If it cannot be moved.
    pub(crate) fn keep(self) -> io::Result<PathBuf> {
        let free = (1_u32..)
            .map(|n| self.beside(&format!("kept-{n}")))
            .find(|path| !path.exists());
        let kept = free.expect("numbers do not end");
        std::fs::rename(&self.0, &kept)?;
        Ok(kept)
    }

    /// Removes it, and the run directory with the last of them.
    ///
    /// # Errors
    /// If it cannot be moved. What cannot be removed then stays until the next run of the same.
    pub(crate) fn remove(self) -> io::Result<()> {
        let gone = self.beside(GONE);
        std::fs::rename(&self.0, &gone)?;
        let _ = std::fs::remove_dir_all(gone);
        if let Some(run_dir) = self.0.parent() {
            let _ = std::fs::remove_dir(run_dir); // others may be in it
        }
        Ok(())
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.0.clone().into_os_string();
        name.push(format!(".{suffix}"));
        name.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic;

    fn folder(run_dir: &Path, guarantee: Guaranteed, seed: u64, count: usize) -> Folder {
        let sent = traffic::of(&traffic::payments(count, "pay", seed), seed);
        Folder::of_run(run_dir, guarantee, seed, &sent).expect("made")
    }

    #[test]
    fn each_run_has_a_folder_of_its_own_and_finds_it_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let run_dir = directory.path().join("runs");
        use Guaranteed::{AtMostOnce, Bare};
        let runs = [
            (AtMostOnce, 1, 10),
            (AtMostOnce, 2, 10),
            (AtMostOnce, 1, 11),
            (Bare, 1, 10),
        ];
        let paths: std::collections::HashSet<_> = runs
            .iter()
            .map(|run| folder(&run_dir, run.0, run.1, run.2).0)
            .collect();
        assert_eq!(paths.len(), runs.len());
        assert!(
            runs.iter()
                .all(|run| paths.contains(folder(&run_dir, run.0, run.1, run.2).path()))
        );
    }

    #[test]
    fn what_is_removed_or_kept_is_not_found_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let run_dir = directory.path().join("runs");
        let new = || folder(&run_dir, Guaranteed::AtMostOnce, 1, 10);
        std::fs::write(new().ledger(), "first").expect("written");
        assert!(new().ledger().exists());
        let kept = [new().keep().expect("moved"), new().keep().expect("moved")];
        assert!(kept[0] != kept[1] && kept[0].join("ledger.jsonl").exists());
        assert!(!new().ledger().exists());
        for path in kept {
            std::fs::remove_dir_all(path).expect("it is there");
        }
        new().remove().expect("moved");
        assert!(!run_dir.exists());
    }
}
