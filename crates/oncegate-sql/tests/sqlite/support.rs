//! Helpers of the tests.

use std::path::{Path, PathBuf};

use oncegate_core::StoreError;
use oncegate_core::marker::{Guarantee, Operation, OperationKind, Token};
use oncegate_sql::Sqlite;
pub(crate) use oncegate_testkit::operations::{
    DONE, GRANTED, SECOND, apply_one, key, operation, terms, verdicts,
};
use rusqlite::Connection;
use tempfile::TempDir;

/// A directory on the disk of the build: the system's temporary directory may be in memory.
pub(crate) struct Directory(TempDir);

impl Directory {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"))
    }

    /// A directory whose path is accessible to every user, unlike that of the build.
    pub(crate) fn for_anybody() -> Self {
        Self(tempfile::tempdir_in("/var/tmp").expect("a directory"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.path().join("markers.db")
    }

    /// A new handle on the file.
    pub(crate) fn store(&self) -> Sqlite {
        at(self.file())
    }

    /// A plain connection to the file.
    pub(crate) fn raw(&self) -> Connection {
        let raw = Connection::open(self.file()).expect("it opens");
        raw.busy_timeout(20 * SECOND).expect("a number");
        raw
    }
}

/// A store with a long timeout: the machine may be busy with other tests.
pub(crate) fn at(path: impl AsRef<Path>) -> Sqlite {
    Sqlite::file(path).timeout(30 * SECOND)
}

pub(crate) fn claim(id: &str, token: u128) -> Operation {
    operation(
        id,
        OperationKind::Claim,
        token,
        0,
        terms(Guarantee::AtMostOnce),
    )
}

pub(crate) fn complete(id: &str, token: u128) -> Operation {
    operation(
        id,
        OperationKind::Complete,
        token,
        1,
        terms(Guarantee::AtMostOnce),
    )
}

/// The message, which must be one line.
pub(crate) fn line(error: &StoreError) -> String {
    let line = error.to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

/// A small generator (SplitMix64): the same seed repeats the same numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Seeded by the system; prints the seed, which a failed test shows.
    pub(crate) fn seeded() -> Self {
        let seed = Token::random().0 as u64;
        println!("seed {seed}");
        Self(seed)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % bound as u64) as usize
    }
}
