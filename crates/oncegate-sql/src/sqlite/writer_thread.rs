//! The thread that reads and writes the file. It applies all waiting requests in one transaction
//! and answers them after the commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use oncegate_core::inbox::BatchTransaction;
use oncegate_core::internal::fault;
use oncegate_core::marker::{Fingerprint, Operation, Verdict};
use oncegate_core::{Completion, Key, Persistence};
use rusqlite::{Connection, Transaction};
use tokio::sync::oneshot;

use super::browse::{self, MarkerAndTimeLeft, MarkerPage};
use super::clock::{ClockReading, WallClock};
use super::failure::{FailureStage, StoreFailure};
use super::file::{FileConfig, FileIdentity, OpenDatabase};
use super::inbox_transaction::{BeginRequest, ConnectionReuse, InboxTransaction};
use super::marker_table::MarkerTable;
use super::recent::RecentMarkers;
use super::sweep::ExpirySweep;
use super::windows;

/// The maximum number of operations in one transaction. The operations of one request are never
/// split, even above this limit.
const MAX_OPERATIONS: usize = 4096;

/// How often an idle thread deletes expired rows and checks the clock.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// How many rows an idle thread scans each time.
const IDLE_ROWS: u32 = 500;

/// The answers to one [`WriterRequest::Apply`].
type ApplyAnswers = Vec<Result<Verdict, StoreFailure>>;

/// The answer to one [`WriterRequest::Complete`].
type CompletionAnswer = Result<Completion, StoreFailure>;

/// A request to the thread.
#[derive(Debug)]
pub(crate) enum WriterRequest {
    /// Applies operations.
    Apply(Vec<Operation>, oneshot::Sender<ApplyAnswers>),
    /// Applies a completion and stores its result.
    Complete(Box<Operation>, Vec<u8>, oneshot::Sender<CompletionAnswer>),
    /// Returns the verdicts of claims, without changes.
    LookUp(
        Vec<Operation>,
        oneshot::Sender<Result<ApplyAnswers, StoreFailure>>,
    ),
    /// Begins a transaction of an inbox, and executes it until it has ended.
    Begin(BeginRequest),
    /// Reads the marker of a key and its expiry.
    ReadMarker(
        Key,
        oneshot::Sender<Result<MarkerAndTimeLeft, StoreFailure>>,
    ),
    /// Reads the result of a done id.
    ReadResult(
        Box<(Key, Option<Fingerprint>)>,
        oneshot::Sender<Result<Option<Vec<u8>>, StoreFailure>>,
    ),
    /// Reads at most this many rows after a key.
    ReadPage(
        String,
        usize,
        oneshot::Sender<Result<MarkerPage, StoreFailure>>,
    ),
    /// Reads whether data survives a crash and a power cut.
    Persistence(oneshot::Sender<Result<Persistence, StoreFailure>>),
}

impl WriterRequest {
    /// Whether the caller has stopped waiting. Such a request is skipped: its outcome is unknown
    /// either way.
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Apply(_, reply) => reply.is_closed(),
            Self::Complete(.., reply) => reply.is_closed(),
            Self::LookUp(_, reply) => reply.is_closed(),
            Self::Begin(request) => request.reply.is_closed(),
            Self::ReadMarker(_, reply) => reply.is_closed(),
            Self::ReadResult(_, reply) => reply.is_closed(),
            Self::ReadPage(.., reply) => reply.is_closed(),
            Self::Persistence(reply) => reply.is_closed(),
        }
    }
}

/// Starts the thread, which ends when the sender is dropped. After a panic it continues with the
/// next request.
///
/// # Errors
/// If the system cannot start a thread.
pub(crate) fn start(config: FileConfig) -> std::io::Result<Sender<WriterRequest>> {
    let (sender, requests) = channel();
    let mut writer = WriterThread::new(config);
    std::thread::Builder::new()
        .name("oncegate-sqlite".into())
        .spawn(move || repeat_after_panic(&mut writer, |writer| writer.run(&requests)))?;
    Ok(sender)
}

/// Repeats the work until it ends without a panic. Only the answers of the requests in progress are
/// lost, while the identity of the file and the jumps of the clock are kept.
fn repeat_after_panic(writer: &mut WriterThread, mut work: impl FnMut(&mut WriterThread)) {
    while catch_unwind(AssertUnwindSafe(|| work(writer))).is_err() {
        writer.close_after_failure();
    }
}

/// The state of the thread.
pub(crate) struct WriterThread {
    config: FileConfig,
    /// Opened on first use, and again after a failure.
    file: Option<OpenDatabase>,
    /// The identity of the file that was opened first; no other file is opened.
    identity: Option<FileIdentity>,
    clock: WallClock,
    recent: RecentMarkers,
    sweep: ExpirySweep,
}

impl WriterThread {
    pub(crate) fn new(config: FileConfig) -> Self {
        Self {
            recent: RecentMarkers::new(config.merge),
            config,
            file: None,
            identity: None,
            clock: WallClock::new(),
            sweep: ExpirySweep::default(),
        }
    }

    /// Serves requests until the sender is dropped.
    fn run(&mut self, requests: &Receiver<WriterRequest>) {
        loop {
            match requests.recv_timeout(IDLE_INTERVAL) {
                Ok(request) => self.serve(request, requests),
                Err(RecvTimeoutError::Timeout) => self.idle(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Serves a request and those that are queued after it, up to [`MAX_OPERATIONS`]: reads at
    /// once, and all operations in one transaction.
    fn serve(&mut self, first: WriterRequest, requests: &Receiver<WriterRequest>) {
        let (mut batch, mut completions, mut count) = (Vec::new(), Vec::new(), 0);
        let mut next = Some(first);
        while let Some(request) = next.take() {
            match request {
                abandoned if abandoned.is_abandoned() => {}
                WriterRequest::Apply(operations, reply) => {
                    count += operations.len();
                    batch.push((operations, reply));
                }
                WriterRequest::Complete(completion, result, reply) => {
                    count += 1;
                    completions.push((completion, result, reply));
                }
                // Sending fails if the caller has stopped waiting, here and below.
                WriterRequest::LookUp(claims, reply) => drop(reply.send(self.look_up(&claims))),
                WriterRequest::Begin(request) => {
                    if self.execute_transaction(request) == ConnectionReuse::Refused {
                        self.close_after_failure();
                    }
                }
                WriterRequest::ReadMarker(key, reply) => drop(reply.send(self.read_marker(&key))),
                WriterRequest::ReadResult(read, reply) => {
                    let (key, fingerprint) = *read;
                    drop(reply.send(self.read_result(&key, fingerprint)));
                }
                WriterRequest::ReadPage(after, limit, reply) => {
                    drop(reply.send(self.page(&after, limit)))
                }
                WriterRequest::Persistence(reply) => drop(reply.send(self.persistence())),
            }
            if count < MAX_OPERATIONS {
                next = requests.try_recv().ok();
            }
        }
        if count == 0 {
            return;
        }
        match self.apply(
            batch.iter().map(|(operations, _)| operations.as_slice()),
            completions
                .iter()
                .map(|(completion, result, _)| (&**completion, result.as_slice())),
            count,
        ) {
            Ok((answers, completed)) => {
                for ((_, reply), answers) in batch.into_iter().zip(answers) {
                    let _ = reply.send(answers);
                }
                for ((.., reply), answer) in completions.into_iter().zip(completed) {
                    let _ = reply.send(answer);
                }
            }
            Err(failure) => {
                tracing::debug!(
                    ?failure,
                    count,
                    "SQLite transaction failed, its operations are answered with the failure"
                );
                self.close_after_failure();
                for (operations, reply) in batch {
                    let _ = reply.send(operations.iter().map(|_| Err(failure.clone())).collect());
                }
                for (.., reply) in completions {
                    let _ = reply.send(Err(failure.clone()));
                }
            }
        }
    }

    /// Applies the operations of all requests, and completions with their results, in one
    /// transaction and commits it. `count` is the number of both.
    ///
    /// # Errors
    /// Nothing was applied, or after a failed commit the outcome is unknown.
    pub(crate) fn apply<'a>(
        &mut self,
        requests: impl Iterator<Item = &'a [Operation]>,
        completions: impl Iterator<Item = (&'a Operation, &'a [u8])>,
        count: usize,
    ) -> Result<(Vec<ApplyAnswers>, Vec<CompletionAnswer>), StoreFailure> {
        let mut writer = self.open()?;
        // Each error below drops the transaction, which rolls it back.
        let BegunTransaction {
            transaction,
            now,
            longest_window: longest,
        } = writer.begin()?;
        let OpenWriter {
            config,
            recent,
            sweep,
            ..
        } = writer;
        let working = config.failure(FailureStage::Working);
        let mut rows = MarkerTable::new(&transaction, recent, now).map_err(&working)?;
        let mut answers = Vec::new();
        let mut window = Duration::ZERO;
        for operations in requests {
            let mut answered = Vec::with_capacity(operations.len());
            for operation in operations {
                window = window.max(operation.terms.window);
                answered.push(rows.apply(operation).map_err(&working)?);
            }
            answers.push(answered);
        }
        let mut completed = Vec::new();
        for (completion, result) in completions {
            window = window.max(completion.terms.window);
            completed.push(rows.complete(completion, result).map_err(&working)?);
        }
        drop(rows);
        windows::record(&transaction, window, longest).map_err(&working)?;
        let rows_to_scan = u32::try_from(count).unwrap_or(u32::MAX);
        if recent.must_merge() {
            recent.merge(&transaction, rows_to_scan).map_err(&working)?;
        }
        recent
            .delete_merged(&transaction, rows_to_scan)
            .map_err(&working)?;
        recent.save(&transaction).map_err(&working)?;
        let range = sweep
            .scan(&transaction, rows_to_scan, now)
            .map_err(&working)?;
        sweep
            .delete_expired(&transaction, &range, now)
            .map_err(&working)?;
        fault::point("sqlite.commit.before");
        transaction
            .commit()
            .map_err(config.failure(FailureStage::Committing))?;
        fault::point("sqlite.commit.after");
        sweep.advance(range);
        Ok((answers, completed))
    }

    fn look_up(&mut self, claims: &[Operation]) -> Result<ApplyAnswers, StoreFailure> {
        self.read(|file, recent, now| {
            let mut rows = MarkerTable::new(file, recent, now)?;
            claims.iter().map(|claim| rows.look_up(claim)).collect()
        })
    }

    /// Begins a transaction of an inbox, and executes it until it has ended.
    fn execute_transaction(&mut self, request: BeginRequest) -> ConnectionReuse {
        let BeginRequest {
            claims,
            longest_run,
            reply,
        } = request;
        let begin = |writer| InboxTransaction::begin(writer, &claims, longest_run);
        let (state, begun) = match self.open().and_then(begin) {
            Ok((transaction, recorded)) if recorded.contains(&None) => {
                return transaction.execute(recorded, reply);
            }
            Ok((transaction, recorded)) => {
                let begun = BatchTransaction {
                    transaction: None,
                    recorded,
                };
                (transaction.roll_back(), Ok(begun))
            }
            Err(failure) => (ConnectionReuse::Refused, Err(failure)),
        };
        let _ = reply.send(begun); // fails if the caller has stopped waiting
        state
    }

    pub(crate) fn read_marker(&mut self, key: &Key) -> Result<MarkerAndTimeLeft, StoreFailure> {
        self.read(|file, recent, now| browse::marker_with_expiry(file, recent, now, key))?
    }

    fn read_result(
        &mut self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreFailure> {
        self.read(|file, recent, now| MarkerTable::new(file, recent, now)?.result(key, fingerprint))
    }

    /// At most `limit` rows after a key.
    pub(crate) fn page(&mut self, after: &str, limit: usize) -> Result<MarkerPage, StoreFailure> {
        self.read(|file, recent, now| browse::read_page(file, recent, now, after, limit))
    }

    /// Reads markers in a transaction.
    fn read<T>(
        &mut self,
        read: impl FnOnce(&Connection, &mut RecentMarkers, ClockReading) -> rusqlite::Result<T>,
    ) -> Result<T, StoreFailure> {
        let OpenWriter {
            file,
            config,
            clock,
            recent,
            ..
        } = self.open()?;
        file.check(config)?;
        // All queries read the same state of the file.
        let read_all = || {
            let transaction = file.connection.unchecked_transaction()?;
            recent.synchronize(&transaction)?;
            read(&transaction, recent, clock.now())
        };
        let result = read_all().map_err(config.failure(FailureStage::Working));
        if result.is_err() {
            self.recent.reset();
        }
        result
    }

    fn persistence(&mut self) -> Result<Persistence, StoreFailure> {
        let OpenWriter { file, config, .. } = self.open()?;
        file.check(config)?;
        file.persistence(config)
            .map_err(config.failure(FailureStage::Working))
    }

    /// Merges recent markers, deletes expired rows and reads the clock. Frequent readings detect a
    /// jump early, and do not mistake a gradual correction of the clock for one.
    pub(crate) fn idle(&mut self) {
        let now = self.clock.now();
        if self.file.is_none() {
            return;
        }
        if let Err(failure) = self.merge_and_delete_expired(now) {
            // No caller waits for this. If the cause lasts, the next request fails with it, too.
            tracing::debug!(?failure, "cannot merge or delete markers; retrying later");
            self.recent.reset();
        }
    }

    /// Merges the next recent markers, and deletes the expired rows of the next range, if there are
    /// any.
    fn merge_and_delete_expired(&mut self, now: ClockReading) -> Result<(), StoreFailure> {
        let OpenWriter {
            file,
            config,
            recent,
            sweep,
            ..
        } = self.open()?;
        let working = config.failure(FailureStage::Working);
        let range = sweep
            .scan(&file.connection, IDLE_ROWS, now)
            .map_err(&working)?;
        if range.expired > 0 || !recent.is_empty() {
            // Requests must not wait for this.
            let Some(transaction) = file.begin_unless_locked(config).map_err(&working)? else {
                return Ok(());
            };
            file.check(config)?;
            recent.synchronize(&transaction).map_err(&working)?;
            recent.merge(&transaction, IDLE_ROWS).map_err(&working)?;
            recent
                .delete_merged(&transaction, 2 * IDLE_ROWS)
                .map_err(&working)?;
            recent.save(&transaction).map_err(&working)?;
            sweep
                .delete_expired(&transaction, &range, now)
                .map_err(&working)?;
            transaction
                .commit()
                .map_err(config.failure(FailureStage::Committing))?;
        }
        sweep.advance(range);
        Ok(())
    }

    /// Closes the database after a failure; the next request opens it again. Keeps it open if the
    /// file or its WAL was replaced: with the new WAL, ids whose markers are in the old one would
    /// be granted a second time.
    pub(crate) fn close_after_failure(&mut self) {
        self.recent.reset();
        self.file.take_if(|file| file.is_current(&self.config));
    }

    /// Opens the database unless it is open, and returns it with the other fields.
    fn open(&mut self) -> Result<OpenWriter<'_>, StoreFailure> {
        let file = match self.file.take() {
            Some(file) => file,
            None => OpenDatabase::open(&self.config, self.identity)?,
        };
        self.identity = Some(file.identity);
        Ok(OpenWriter {
            file: self.file.insert(file),
            config: &self.config,
            clock: &mut self.clock,
            recent: &mut self.recent,
            sweep: &mut self.sweep,
        })
    }
}

/// The fields of a [`WriterThread`] whose database is open.
pub(crate) struct OpenWriter<'writer> {
    pub(crate) file: &'writer OpenDatabase,
    pub(crate) config: &'writer FileConfig,
    clock: &'writer mut WallClock,
    pub(crate) recent: &'writer mut RecentMarkers,
    pub(crate) sweep: &'writer mut ExpirySweep,
}

/// A transaction that has the write lock.
pub(crate) struct BegunTransaction<'writer> {
    pub(crate) transaction: Transaction<'writer>,
    pub(crate) now: ClockReading,
    /// In milliseconds; `None` before the first write to the file.
    pub(crate) longest_window: Option<i64>,
}

impl<'writer> OpenWriter<'writer> {
    /// Begins a transaction, checks the file, and reads the clock and what other processes have
    /// written.
    ///
    /// # Errors
    /// Nothing was changed.
    pub(crate) fn begin(&mut self) -> Result<BegunTransaction<'writer>, StoreFailure> {
        let working = self.config.failure(FailureStage::Working);
        let transaction = self.file.begin().map_err(&working)?;
        self.file.check(self.config)?;
        // The clock is read while the write lock is held, so that no row was written later, unless
        // the clock jumped back.
        let longest_window = windows::longest(&transaction).map_err(&working)?;
        if let Some(longest) = longest_window {
            self.clock.drop_jumps_before(longest);
        }
        let now = self.clock.now();
        self.recent.synchronize(&transaction).map_err(&working)?;
        Ok(BegunTransaction {
            transaction,
            now,
            longest_window,
        })
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::MessageId;
    use oncegate_core::marker::{Attempts, Guarantee, Marker, OperationKind, Terms, Token};

    use super::super::recent::MergeLimits;
    use super::*;

    #[test]
    fn abandoned_requests_are_skipped_and_the_others_share_a_commit() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let config = FileConfig {
            path: directory.path().join("markers.db"),
            synchronous: Default::default(),
            busy_timeout: IDLE_INTERVAL,
            merge: MergeLimits::default(),
            shares_database: false,
        };
        let key = |id: &str| Key::new(&MessageId::new(id).expect("an id"));
        let terms = Terms {
            guarantee: Guarantee::AtMostOnce,
            lease: IDLE_INTERVAL,
            window: IDLE_INTERVAL,
            fingerprint: None,
        };
        let (sender, requests) = channel();
        let submit = |id| {
            let (reply, answer) = oneshot::channel();
            let claim = Operation {
                key: key(id),
                kind: OperationKind::Claim,
                token: Token(1),
                attempt: 0,
                terms,
            };
            sender
                .send(WriterRequest::Apply(vec![claim], reply))
                .expect("the receiver exists");
            answer
        };
        let answers = [submit("a"), submit("b")];
        drop(submit("dropped"));
        let (reply, answer) = oneshot::channel();
        sender
            .send(WriterRequest::ReadMarker(key("dropped"), reply))
            .expect("the receiver exists");
        drop(sender);

        WriterThread::new(config).run(&requests);
        for answer in answers {
            assert!(matches!(
                answer.blocking_recv().expect("the thread answers")[..],
                [Ok(Verdict::Granted(Attempts { number: 1, .. }))]
            ));
        }
        assert_eq!(
            answer
                .blocking_recv()
                .expect("the thread answers")
                .expect("a marker"),
            (Marker::Absent, None)
        );
        let file = rusqlite::Connection::open(directory.path().join("markers.db"))
            .expect("the database opens");
        let keys: u32 = file
            .query_row("SELECT count(*) FROM oncegate_markers", [], |row| {
                row.get(0)
            })
            .expect("the query returns a count");
        assert_eq!(keys, 2);
    }

    fn completion(id: &str, window: Duration) -> Operation {
        let terms = Terms {
            guarantee: Guarantee::EffectivelyOnce,
            lease: IDLE_INTERVAL,
            window,
            fingerprint: None,
        };
        Operation {
            key: Key::new(&MessageId::new(id).expect("an id")),
            kind: OperationKind::Complete,
            token: Token(1),
            attempt: 1,
            terms,
        }
    }

    /// The number of commits in a write-ahead log: the second number of a frame's header is not 0 in
    /// the last frame of each.
    fn commits(wal: &std::path::Path) -> usize {
        const HEADER: usize = 32;
        const FRAME: usize = 24 + 4096;
        let log = std::fs::read(wal).expect("the log exists");
        let is_last = |frame: &&[u8]| frame[4..8] != [0; 4];
        log[HEADER..].chunks_exact(FRAME).filter(is_last).count()
    }

    #[test]
    fn completions_with_results_share_the_commit_of_other_operations() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("markers.db");
        let mut writer = WriterThread::new(FileConfig {
            path: path.clone(),
            synchronous: Default::default(),
            busy_timeout: IDLE_INTERVAL,
            merge: MergeLimits::default(),
            shares_database: false,
        });
        writer.open().expect("a new database opens");
        let wal = path.with_extension("db-wal");
        let before = commits(&wal);

        let (sender, requests) = channel();
        let complete = |id| {
            let (reply, answer) = oneshot::channel();
            let request = WriterRequest::Complete(
                Box::new(completion(id, IDLE_INTERVAL)),
                b"7".into(),
                reply,
            );
            sender.send(request).expect("the receiver exists");
            answer
        };
        let answers = [complete("a"), complete("b")];
        let (reply, applied) = oneshot::channel();
        let plain = vec![completion("c", IDLE_INTERVAL)];
        sender
            .send(WriterRequest::Apply(plain, reply))
            .expect("the receiver exists");
        drop(complete("dropped"));
        drop(sender);
        writer.run(&requests);

        for answer in answers {
            let completion = answer.blocking_recv().expect("the thread answers");
            assert_eq!(completion.expect("a verdict").earlier, None);
        }
        applied.blocking_recv().expect("the thread answers");
        assert_eq!(commits(&wal), before + 1);
        for (id, expected) in [("a", Some(b"7".to_vec())), ("c", None), ("dropped", None)] {
            let key = completion(id, IDLE_INTERVAL).key;
            assert_eq!(writer.read_result(&key, None).expect("an answer"), expected);
        }
    }

    #[test]
    fn after_a_jump_of_the_clock_a_result_expires_with_its_marker() {
        const HOUR: Duration = Duration::from_secs(3600);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let config = FileConfig {
            path: directory.path().join("markers.db"),
            synchronous: Default::default(),
            busy_timeout: IDLE_INTERVAL,
            merge: MergeLimits::default(),
            shares_database: false,
        };
        let completion = completion("a", HOUR);
        let complete = |writer: &mut WriterThread, result: &[u8]| {
            let one = [(&completion, result)].into_iter();
            let (_, mut answers) = writer.apply(std::iter::empty(), one, 1).expect("commits");
            answers.remove(0).expect("a verdict").earlier
        };
        let read = |writer: &mut WriterThread| {
            let result = writer.read_result(&completion.key, None);
            result.expect("the file is readable")
        };
        let mut writer = WriterThread::new(config.clone());
        complete(&mut writer, b"first");
        // As if the window had ended a minute ago.
        let other = rusqlite::Connection::open(&config.path).expect("the database opens");
        for table in ["oncegate_merged_markers", "oncegate_results"] {
            let expire = format!("UPDATE {table} SET expires = (unixepoch() - 60) * 1000");
            other.execute(&expire, []).expect("the statement succeeds");
        }
        let mut jumped = WriterThread {
            clock: WallClock::jumped(HOUR, IDLE_INTERVAL),
            ..WriterThread::new(config)
        };
        let first = Some(b"first".to_vec());
        assert_eq!(complete(&mut jumped, b"second"), first);
        jumped.idle();
        assert_eq!(read(&mut jumped), first);
        assert_eq!(read(&mut writer), None);
        assert_eq!(complete(&mut writer, b"second"), None);
        assert_eq!(read(&mut jumped), Some(b"second".to_vec()));
    }

    #[test]
    fn an_idle_thread_deletes_nothing_from_a_newer_schema() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("markers.db");
        let mut writer = WriterThread::new(FileConfig {
            path: path.clone(),
            synchronous: Default::default(),
            busy_timeout: IDLE_INTERVAL,
            merge: MergeLimits::default(),
            shares_database: false,
        });
        writer.open().expect("a new database opens");
        let other = rusqlite::Connection::open(path).expect("the database opens");
        other
            .execute(
                "INSERT INTO oncegate_merged_markers (key, expires, state) VALUES ('old', 1, 0)",
                [],
            )
            .expect("the statement succeeds");
        for (version, left) in [(4, 1), (3, 0)] {
            other
                .execute("UPDATE oncegate_schema SET version = ?1", [version])
                .expect("the statement succeeds");
            writer.idle();
            let rows: u32 = other
                .query_row("SELECT count(*) FROM oncegate_markers", [], |row| {
                    row.get(0)
                })
                .expect("the query returns a count");
            assert_eq!(rows, left, "of version {version}");
        }
    }

    /// Two processes share a file, and the one whose clock jumped has the shorter window, or has
    /// not written yet.
    #[test]
    fn a_jump_is_kept_for_the_longest_window_in_the_file() {
        const HOUR: Duration = Duration::from_secs(3600);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("markers.db");
        let config = FileConfig {
            path: path.clone(),
            synchronous: Default::default(),
            busy_timeout: IDLE_INTERVAL,
            merge: MergeLimits::default(),
            shares_database: false,
        };
        let key = |id: &str| Key::new(&MessageId::new(id).expect("an id"));
        let operation_on = |id: &str, kind, token, window| {
            let terms = Terms {
                guarantee: Guarantee::AtMostOnce,
                lease: IDLE_INTERVAL,
                window,
                fingerprint: None,
            };
            Operation {
                key: key(id),
                kind,
                token: Token(token),
                attempt: 1,
                terms,
            }
        };
        let apply = |writer: &mut WriterThread, operations: &[Operation]| -> Vec<Verdict> {
            let answers = writer
                .apply(
                    [operations].into_iter(),
                    std::iter::empty(),
                    operations.len(),
                )
                .expect("the transaction commits");
            answers.0[0]
                .iter()
                .map(|answer| answer.clone().expect("a verdict"))
                .collect()
        };
        let other = || rusqlite::Connection::open(&path).expect("the database opens");
        // The window of the writer, and how many of its rows remain after the transaction of the
        // process whose clock jumped.
        let unresolved = |id| format!("{id}-unresolved");
        for (id, window, kept_rows) in [("short", IDLE_INTERVAL, 1), ("long", HOUR, 4)] {
            let mut writer = WriterThread::new(config.clone());
            let done = ["a", "b", "c"].map(|it| format!("{id}-{it}"));
            let mut operations: Vec<Operation> = done
                .iter()
                .map(|id| operation_on(id, OperationKind::Complete, 1, window))
                .collect();
            operations.push(operation_on(
                &unresolved(id),
                OperationKind::Claim,
                1,
                window,
            ));
            apply(&mut writer, &operations);
            drop(writer);
            // After a jump of an hour all of its rows appear expired.
            let own_keys = format!("{id}-%");
            let jumped = || WriterThread {
                clock: WallClock::jumped(HOUR, 10 * IDLE_INTERVAL),
                ..WriterThread::new(config.clone())
            };
            let rows = other()
                .execute(
                    "UPDATE oncegate_merged_markers SET expires = (unixepoch() - 60) * 1000 WHERE key LIKE ?1",
                    [&own_keys],
                )
                .expect("the statement succeeds");
            assert_eq!(rows, 4);
            let left = || -> u32 {
                let count = "SELECT count(*) FROM oncegate_markers WHERE key LIKE ?1";
                other()
                    .query_row(count, [&own_keys], |row| row.get(0))
                    .expect("the query returns a count")
            };

            let mut idle = jumped();
            idle.open().expect("the file exists");
            idle.idle();
            assert_eq!(
                (
                    idle.read_marker(&key(&done[0])).expect("a marker").0,
                    left()
                ),
                (Marker::Done(None), 4),
                "{id}: a reader"
            );

            // More operations than rows, so that all rows are scanned.
            let mut brief = jumped();
            let others: Vec<Operation> = (0..20)
                .map(|it| {
                    operation_on(&format!("{id}{it}"), OperationKind::Claim, 2, IDLE_INTERVAL)
                })
                .collect();
            apply(&mut brief, &others);
            assert_eq!(left(), kept_rows, "{id}");
            let second_claim = apply(
                &mut brief,
                &[operation_on(
                    &done[0],
                    OperationKind::Claim,
                    2,
                    IDLE_INTERVAL,
                )],
            );
            assert_eq!(
                second_claim,
                [if kept_rows == 4 {
                    Verdict::Duplicate
                } else {
                    Verdict::Granted(Attempts::new(1))
                }],
                "{id}"
            );
            let (marker, _) = brief.read_marker(&key(&unresolved(id))).expect("a marker");
            assert!(
                matches!(marker, Marker::InProgress(hold) if hold.token == Token(1)),
                "{id}: {marker:?}"
            );
        }
    }

    #[test]
    fn a_panic_keeps_the_identity_of_the_file() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("markers.db");
        let mut writer = WriterThread::new(FileConfig {
            path: path.clone(),
            synchronous: Default::default(),
            busy_timeout: IDLE_INTERVAL,
            merge: MergeLimits::default(),
            shares_database: false,
        });
        let mut answers = Vec::new();
        repeat_after_panic(&mut writer, |writer| {
            answers.push(writer.persistence());
            match answers.len() {
                1 => panic!("with an open file"),
                2 => {
                    std::fs::rename(&path, directory.path().join("moved.db"))
                        .expect("the file is renamed");
                    panic!("after the file was moved");
                }
                _ => {}
            }
        });
        assert!(
            matches!(answers[..], [Ok(_), Ok(_), Err(_)]),
            "the file opens, opens again, and was moved: {answers:?}"
        );
        assert!(!path.exists(), "a new file was created");
    }
}
