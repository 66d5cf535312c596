//! The thread that works on the file: it takes all that waits, and answers it after one commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use oncegate_core::marker::{Marker, Operation, Verdict};
use oncegate_core::{Key, Persistence, fault};
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::browse::{self, Page, Standing};
use super::clock::{Clock, Now};
use super::failure::{Failure, Stage};
use super::file::{Identity, OpenFile, Place};
use super::rows::Rows;
use super::sweep::Sweep;
use super::windows;

/// How many operations share a transaction at the most, but for those of one request, which are
/// never parted.
const TOGETHER: usize = 4096;

/// How often expired rows are looked for while nothing else happens, and the clock is watched.
const IDLE: Duration = Duration::from_secs(1);

/// How many rows are looked at then.
const IDLE_ROWS: u32 = 500;

/// What is answered to one request.
type Answers = Vec<Result<Verdict, Failure>>;

/// What the thread is asked.
#[derive(Debug)]
pub(crate) enum Request {
    /// Apply these.
    Apply(Vec<Operation>, oneshot::Sender<Answers>),
    /// What stands under this key?
    Look(Key, oneshot::Sender<Result<Marker, Failure>>),
    /// The same, and for how long?
    LookClosely(Key, oneshot::Sender<Result<Standing, Failure>>),
    /// What stands behind this key, so many rows of it?
    Page(String, usize, oneshot::Sender<Result<Page, Failure>>),
    /// Does the file survive?
    Memory(oneshot::Sender<Result<Persistence, Failure>>),
    /// Panic.
    #[cfg(test)]
    Panic,
}

impl Request {
    /// Whether nobody waits for the answer any more. Then it is not begun: its outcome is unknown
    /// either way.
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Apply(_, reply) => reply.is_closed(),
            Self::Look(_, reply) => reply.is_closed(),
            Self::LookClosely(_, reply) => reply.is_closed(),
            Self::Page(.., reply) => reply.is_closed(),
            Self::Memory(reply) => reply.is_closed(),
            #[cfg(test)]
            Self::Panic => false,
        }
    }
}

/// Starts the thread. It ends when the sender is dropped. What panics costs the answers of that
/// moment alone: which file it was and how the clock jumped have to be known for as long as the
/// store is used.
///
/// # Errors
/// If the system starts no more threads.
pub(crate) fn start(place: Place) -> std::io::Result<Sender<Request>> {
    let (sender, requests) = channel();
    let mut desk = Desk::new(place);
    let work = move || {
        while catch_unwind(AssertUnwindSafe(|| desk.run(&requests))).is_err() {
            desk.let_go();
        }
    };
    std::thread::Builder::new()
        .name("oncegate-sqlite".into())
        .spawn(work)?;
    Ok(sender)
}

struct Desk {
    place: Place,
    /// Opened when it is needed, and anew after trouble.
    file: Option<OpenFile>,
    /// Which file it was at first.
    identity: Option<Identity>,
    clock: Clock,
    sweep: Sweep,
}

impl Desk {
    fn new(place: Place) -> Self {
        Self {
            place,
            file: None,
            identity: None,
            clock: Clock::new(),
            sweep: Sweep::default(),
        }
    }

    fn run(&mut self, requests: &Receiver<Request>) {
        loop {
            match requests.recv_timeout(IDLE) {
                Ok(request) => self.serve(request, requests),
                Err(RecvTimeoutError::Timeout) => self.idle(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Answers a request, and with it all that wait behind it.
    fn serve(&mut self, first: Request, requests: &Receiver<Request>) {
        let (mut batch, mut count) = (Vec::new(), 0);
        let mut next = Some(first);
        while let Some(request) = next.take() {
            match request {
                abandoned if abandoned.is_abandoned() => {}
                Request::Apply(operations, reply) => {
                    count += operations.len();
                    batch.push((operations, reply));
                }
                // Nobody is there to read what cannot be sent, here as below.
                Request::Look(key, reply) => drop(reply.send(self.look(&key))),
                Request::LookClosely(key, reply) => drop(
                    reply.send(
                        self.browse(|file, now| browse::one(file, now, &key))
                            .and_then(|found| found),
                    ),
                ),
                Request::Page(after, limit, reply) => drop(
                    reply.send(self.browse(|file, now| browse::page(file, now, &after, limit))),
                ),
                Request::Memory(reply) => drop(reply.send(self.memory())),
                #[cfg(test)]
                Request::Panic => panic!("as it was asked"),
            }
            if count < TOGETHER {
                next = requests.try_recv().ok();
            }
        }
        if batch.is_empty() {
            return;
        }
        match self.apply(
            batch.iter().map(|(operations, _)| operations.as_slice()),
            count,
        ) {
            Ok(answers) => {
                for ((_, reply), answers) in batch.into_iter().zip(answers) {
                    let _ = reply.send(answers);
                }
            }
            Err(failure) => {
                tracing::debug!(?failure, count, "no transaction");
                self.let_go();
                for (operations, reply) in batch {
                    let _ = reply.send(operations.iter().map(|_| Err(failure.clone())).collect());
                }
            }
        }
    }

    /// Applies these in one transaction, which is committed when this returns.
    fn apply<'a>(
        &mut self,
        requests: impl Iterator<Item = &'a [Operation]>,
        count: usize,
    ) -> Result<Vec<Answers>, Failure> {
        let (file, place, clock, sweep) = self.open()?;
        let working = place.failure(Stage::Working);
        // One that is dropped is rolled back.
        let transaction = file.begin().map_err(&working)?;
        file.check(place)?;
        // Read while nobody else writes: so no row was written later than now, unless the clock
        // went back.
        let longest = windows::longest(&transaction).map_err(&working)?;
        if let Some(longest) = longest {
            clock.let_go(longest);
        }
        let now = clock.now();
        let mut rows = Rows::new(&transaction, now).map_err(&working)?;
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
        drop(rows);
        windows::note(&transaction, window, longest).map_err(&working)?;
        let rows_beside = u32::try_from(count).unwrap_or(u32::MAX);
        let stretch = sweep
            .look(&transaction, rows_beside, now)
            .map_err(&working)?;
        sweep.clear(&transaction, &stretch, now).map_err(&working)?;
        fault::point("sqlite.commit.before");
        transaction
            .commit()
            .map_err(place.failure(Stage::Committing))?;
        fault::point("sqlite.commit.after");
        sweep.pass(stretch);
        Ok(answers)
    }

    fn look(&mut self, key: &Key) -> Result<Marker, Failure> {
        let (file, place, clock, _) = self.open()?;
        let working = place.failure(Stage::Working);
        file.check(place)?;
        let mut rows = Rows::new(&file.connection, clock.now()).map_err(&working)?;
        rows.look(key).map_err(&working)?
    }

    /// Reads as an operator does.
    fn browse<T>(
        &mut self,
        read: impl FnOnce(&Connection, Now) -> rusqlite::Result<T>,
    ) -> Result<T, Failure> {
        let (file, place, clock, _) = self.open()?;
        file.check(place)?;
        read(&file.connection, clock.now()).map_err(place.failure(Stage::Working))
    }

    fn memory(&mut self) -> Result<Persistence, Failure> {
        let (file, place, ..) = self.open()?;
        file.check(place)?;
        file.memory(place).map_err(place.failure(Stage::Working))
    }

    /// Looks for what has expired, and at the clock: a jump is not to be taken for the time that
    /// passed since.
    fn idle(&mut self) {
        let now = self.clock.now();
        let Some(file) = &self.file else { return };
        if let Err(failure) = clear_a_stretch(file, &self.place, &mut self.sweep, now) {
            // It can wait, and whoever asks next is told if it is more than that.
            tracing::debug!(?failure, "expired markers are left for the next time");
        }
    }

    /// Closes the file after trouble: what a failed transaction leaves behind is not worth knowing.
    /// But not a file whose log was replaced: opened anew it would go by another log, and grant
    /// again what stands in this one.
    fn let_go(&mut self) {
        self.file.take_if(|file| file.stands(&self.place));
    }

    /// The open file, and what is needed beside it.
    fn open(&mut self) -> Result<(&OpenFile, &Place, &mut Clock, &mut Sweep), Failure> {
        let file = match self.file.take() {
            Some(file) => file,
            None => OpenFile::open(&self.place, self.identity)?,
        };
        self.identity = Some(file.identity);
        Ok((
            self.file.insert(file),
            &self.place,
            &mut self.clock,
            &mut self.sweep,
        ))
    }
}

/// Writes only if something has expired, and the file still is ours to write to.
fn clear_a_stretch(
    file: &OpenFile,
    place: &Place,
    sweep: &mut Sweep,
    now: Now,
) -> Result<(), Failure> {
    let working = place.failure(Stage::Working);
    let stretch = sweep
        .look(&file.connection, IDLE_ROWS, now)
        .map_err(&working)?;
    if stretch.expired > 0 {
        let transaction = file.begin().map_err(&working)?;
        file.check(place)?;
        sweep.clear(&transaction, &stretch, now).map_err(&working)?;
        transaction
            .commit()
            .map_err(place.failure(Stage::Committing))?;
    }
    sweep.pass(stretch);
    Ok(())
}

#[cfg(test)]
mod tests {
    use oncegate_core::MessageId;
    use oncegate_core::marker::{Ask, Attempts, Guarantee, Terms, Token};

    use super::*;

    #[test]
    fn what_nobody_waits_for_any_more_is_not_begun_and_all_else_shares_a_commit() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = Place {
            path: directory.path().join("markers.db"),
            synchronous: Default::default(),
            patience: IDLE,
        };
        let key = |id: &str| Key::new(&MessageId::new(id).expect("an id"));
        let terms = Terms {
            guarantee: Guarantee::AtMostOnce,
            lease: IDLE,
            window: IDLE,
            fingerprint: None,
        };
        let (sender, requests) = channel();
        let hand_in = |id| {
            let (reply, answer) = oneshot::channel();
            let claim = Operation {
                key: key(id),
                ask: Ask::Claim,
                token: Token(1),
                attempt: 0,
                terms,
            };
            sender
                .send(Request::Apply(vec![claim], reply))
                .expect("it waits");
            answer
        };
        let answers = [hand_in("a"), hand_in("b")];
        drop(hand_in("dropped"));
        let (reply, looked) = oneshot::channel();
        sender
            .send(Request::Look(key("dropped"), reply))
            .expect("it waits");
        drop(sender);

        Desk::new(place).run(&requests);
        for answer in answers {
            assert!(matches!(
                answer.blocking_recv().expect("answered")[..],
                [Ok(Verdict::Granted(Attempts { number: 1, .. }))]
            ));
        }
        assert_eq!(
            looked.blocking_recv().expect("answered").expect("a marker"),
            Marker::Absent
        );
        let file =
            rusqlite::Connection::open(directory.path().join("markers.db")).expect("it opens");
        let keys: u32 = file
            .query_row("SELECT count(*) FROM markers", [], |row| row.get(0))
            .expect("a number");
        assert_eq!(keys, 2);
    }

    #[test]
    fn an_idle_desk_clears_out_nothing_of_a_newer_release() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("markers.db");
        let mut desk = Desk::new(Place {
            path: path.clone(),
            synchronous: Default::default(),
            patience: IDLE,
        });
        desk.open().expect("a new file");
        let other = rusqlite::Connection::open(path).expect("it opens");
        other
            .execute(
                "INSERT INTO markers (key, expires, state) VALUES ('old', 1, 0)",
                [],
            )
            .expect("written");
        for (version, left) in [(2, 1), (1, 0)] {
            other
                .pragma_update(None, "user_version", version)
                .expect("written");
            desk.idle();
            let rows: u32 = other
                .query_row("SELECT count(*) FROM markers", [], |row| row.get(0))
                .expect("a number");
            assert_eq!(rows, left, "of version {version}");
        }
    }

    /// What two processes share, of which the one whose clock jumped has the shorter window, or
    /// none yet.
    #[test]
    fn a_jump_counts_for_the_longest_window_in_the_file_whoever_noticed_it() {
        const HOUR: Duration = Duration::from_secs(3600);
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("markers.db");
        let place = Place {
            path: path.clone(),
            synchronous: Default::default(),
            patience: IDLE,
        };
        let key = |id: &str| Key::new(&MessageId::new(id).expect("an id"));
        let asks = |id: &str, ask, token, window| {
            let terms = Terms {
                guarantee: Guarantee::AtMostOnce,
                lease: IDLE,
                window,
                fingerprint: None,
            };
            Operation {
                key: key(id),
                ask,
                token: Token(token),
                attempt: 1,
                terms,
            }
        };
        let apply = |desk: &mut Desk, operations: &[Operation]| -> Vec<Verdict> {
            let answers = desk
                .apply([operations].into_iter(), operations.len())
                .expect("a commit");
            answers[0]
                .iter()
                .map(|answer| answer.clone().expect("a verdict"))
                .collect()
        };
        let other = || rusqlite::Connection::open(&path).expect("it opens");
        // The windows of who wrote, and which of the rows outlive the other's transaction.
        let unresolved = |id| format!("{id}-unresolved");
        for (id, window, outlive) in [("short", IDLE, 1), ("long", HOUR, 4)] {
            let mut writer = Desk::new(place.clone());
            let done = ["a", "b", "c"].map(|it| format!("{id}-{it}"));
            let mut made: Vec<Operation> = done
                .iter()
                .map(|id| asks(id, Ask::Complete, 1, window))
                .collect();
            made.push(asks(&unresolved(id), Ask::Claim, 1, window));
            apply(&mut writer, &made);
            drop(writer);
            // A jump of an hour made all of them older than they are.
            let mine = format!("{id}-%");
            let jumped = || Desk {
                clock: Clock::jumped(HOUR, 10 * IDLE),
                ..Desk::new(place.clone())
            };
            let rows = other()
                .execute(
                    "UPDATE markers SET expires = (unixepoch() - 60) * 1000 WHERE key LIKE ?1",
                    [&mine],
                )
                .expect("written");
            assert_eq!(rows, 4);
            let left = || -> u32 {
                let count = "SELECT count(*) FROM markers WHERE key LIKE ?1";
                other()
                    .query_row(count, [&mine], |row| row.get(0))
                    .expect("a number")
            };

            let mut idle = jumped();
            idle.open().expect("it is there");
            idle.idle();
            assert_eq!(
                (idle.look(&key(&done[0])).expect("a marker"), left()),
                (Marker::Done(None), 4),
                "{id}: who only looks"
            );

            // More operations than there are rows: all of them are looked at.
            let mut brief = jumped();
            let others: Vec<Operation> = (0..20)
                .map(|it| asks(&format!("{id}{it}"), Ask::Claim, 2, IDLE))
                .collect();
            apply(&mut brief, &others);
            assert_eq!(left(), outlive, "{id}");
            let again = apply(&mut brief, &[asks(&done[0], Ask::Claim, 2, IDLE)]);
            assert_eq!(
                again,
                [if outlive == 4 {
                    Verdict::Duplicate
                } else {
                    Verdict::Granted(Attempts::new(1))
                }],
                "{id}"
            );
            let looked = brief.look(&key(&unresolved(id))).expect("a marker");
            assert!(
                matches!(looked, Marker::InProgress(hold) if hold.token == Token(1)),
                "{id}: {looked:?}"
            );
        }
    }

    #[test]
    fn who_panics_still_knows_which_file_it_was() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("markers.db");
        let sender = start(Place {
            path: path.clone(),
            synchronous: Default::default(),
            patience: IDLE,
        })
        .expect("a thread");
        let memory = || {
            let (reply, answer) = oneshot::channel();
            sender.send(Request::Memory(reply)).expect("it waits");
            answer.blocking_recv().expect("answered")
        };
        memory().expect("a new file");
        sender.send(Request::Panic).expect("it waits");
        memory().expect("it goes on");
        std::fs::rename(&path, directory.path().join("away.db")).expect("moved");
        sender.send(Request::Panic).expect("it waits");
        memory().expect_err("it is gone");
        assert!(!path.exists(), "a new file was made");
    }
}
