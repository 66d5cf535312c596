//! The sink: a process that counts effects, and its client.
//!
//! A killed consumer can neither lose an effect that the sink has applied nor forge one. All
//! effects, with a mark of the first of each id, are in one append-only ledger file.
//!
//! A request is one line: `A <id> <attempt> <consumer>` applies an effect, `F …` asks whether there
//! was one. A reply is one byte. Requests that arrive together are executed, recorded and answered
//! together.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use oncegate::internal::Lock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

use crate::ledger::{Log, Lookup, Unique, What};

/// The ledger file of the sink.
pub const FILE: &str = "sink.jsonl";

const APPLIED: u8 = b'1';
const REFUSED: u8 = b'0';

/// Accepts connections until the process ends. Calls `listening` with its address.
///
/// # Errors
/// The operating system's.
pub fn serve(folder: &Path, listening: impl FnOnce(SocketAddr)) -> io::Result<()> {
    let table = Arc::new(Lock::new(Table::over(Log::open(
        &folder.join(FILE),
        "sink",
    )?)));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listening(listener.local_addr()?);
    for connection in listener.incoming() {
        let (connection, table) = (connection?, Arc::clone(&table));
        // The thread ends when the consumer closes its connection or is killed.
        std::thread::spawn(move || drop(answer(connection, &table)));
    }
    Ok(())
}

fn answer(mut connection: TcpStream, table: &Lock<Table>) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let (mut arrived, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while let read @ 1.. = connection.read(&mut buffer)? {
        arrived.extend_from_slice(&buffer[..read]);
        let Some(end) = arrived.iter().rposition(|byte| *byte == b'\n') else {
            continue;
        };
        let requests = String::from_utf8_lossy(&arrived[..end]).into_owned();
        arrived.drain(..=end);
        let answers = table.lock().take(&requests);
        connection.write_all(&answers)?;
    }
    Ok(())
}

/// The state of the sink.
#[derive(Debug)]
struct Table {
    log: Log,
    unique: HashSet<String>,
    /// Attempts up to this are void.
    void: HashMap<String, u32>,
}

impl Table {
    fn over(log: Log) -> Self {
        Self {
            log,
            unique: HashSet::new(),
            void: HashMap::new(),
        }
    }

    /// Executes the requests in order, records them, and returns the replies. Refuses invalid
    /// requests.
    fn take(&mut self, requests: &str) -> Vec<u8> {
        let mut records = Vec::new();
        let answers =
            requests
                .lines()
                .map(|request| match request.split(' ').collect::<Vec<_>>()[..] {
                    ["A", id, attempt, consumer] => attempt.parse().map_or(REFUSED, |attempt| {
                        self.apply(id, attempt, consumer, &mut records)
                    }),
                    ["F", id, attempt, consumer] => attempt.parse().map_or(REFUSED, |attempt| {
                        self.find(id, attempt, consumer, &mut records)
                    }),
                    _ => REFUSED,
                });
        let answers = answers.collect();
        self.log.write_all(records);
        answers
    }

    fn apply(&mut self, id: &str, attempt: u32, consumer: &str, records: &mut Vec<What>) -> u8 {
        let (id, consumer) = (id.to_owned(), consumer.to_owned());
        if self.void.get(&id).is_some_and(|void| attempt <= *void) {
            records.push(What::Refused {
                id,
                consumer,
                attempt,
            });
            return REFUSED;
        }
        let unique = if self.unique.insert(id.clone()) {
            Unique::First
        } else {
            Unique::Repeated
        };
        records.push(What::Effect {
            id,
            consumer,
            attempt,
            unique,
        });
        APPLIED
    }

    /// Whether the effect happened. If not, voids this attempt and earlier ones.
    fn find(&mut self, id: &str, attempt: u32, consumer: &str, records: &mut Vec<What>) -> u8 {
        let happened = self.unique.contains(id);
        if !happened {
            let void = self.void.entry(id.to_owned()).or_default();
            *void = attempt.max(*void);
        }
        let found = if happened {
            Lookup::Happened
        } else {
            Lookup::Voided
        };
        records.push(What::Reconciled {
            id: id.to_owned(),
            consumer: consumer.to_owned(),
            attempt,
            found,
        });
        if happened { APPLIED } else { REFUSED }
    }
}

/// A consumer's connection to the sink. Sends concurrent requests in one write.
#[derive(Clone, Debug)]
pub struct Sink {
    requests: mpsc::UnboundedSender<(String, oneshot::Sender<u8>)>,
    consumer: String,
}

/// The sink did not reply: the result of the request is unknown.
#[derive(Debug, thiserror::Error)]
#[error("the sink did not answer")]
pub struct NoAnswer;

/// The sink refused an effect, because its attempt is void.
#[derive(Debug, thiserror::Error)]
#[error("the sink refused it: this attempt is void")]
pub struct Void;

impl Sink {
    /// Connects.
    ///
    /// # Errors
    /// The error of the operating system.
    pub async fn connect(address: SocketAddr, consumer: &str) -> io::Result<Self> {
        let connection = tokio::net::TcpStream::connect(address).await?;
        connection.set_nodelay(true)?;
        let (mut from, mut to) = connection.into_split();
        let waiting: Arc<Lock<VecDeque<oneshot::Sender<u8>>>> = Arc::default();
        let (requests, mut asked) = mpsc::unbounded_channel::<(String, oneshot::Sender<u8>)>();
        let answered = Arc::clone(&waiting);
        tokio::spawn(async move {
            let mut lines = String::new();
            while let Some((line, answer)) = asked.recv().await {
                let mut next = Some((line, answer));
                while let Some((line, answer)) = next {
                    lines.push_str(&line);
                    waiting.lock().push_back(answer);
                    next = asked.try_recv().ok();
                }
                if to.write_all(lines.as_bytes()).await.is_err() {
                    return;
                }
                lines.clear();
            }
        });
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut buffer).await {
                let mut waiting = answered.lock();
                for byte in &buffer[..read] {
                    // The receiver is dropped if the handler was cancelled.
                    let _ = waiting.pop_front().map(|answer| answer.send(*byte));
                }
            }
            answered.lock().clear();
        });
        Ok(Self {
            requests,
            consumer: consumer.to_owned(),
        })
    }

    /// Applies the effect.
    ///
    /// # Errors
    /// [`NoAnswer`]: it may have happened. Inside, [`Void`]: it did not, and will not under this attempt.
    pub async fn apply(&self, id: &str, attempt: u32) -> Result<Result<(), Void>, NoAnswer> {
        Ok(if self.ask('A', id, attempt).await? == APPLIED {
            Ok(())
        } else {
            Err(Void)
        })
    }

    /// Whether the effect happened; if not, voids this attempt and earlier ones.
    ///
    /// # Errors
    /// [`NoAnswer`].
    pub async fn find_or_void(&self, id: &str, attempt: u32) -> Result<Lookup, NoAnswer> {
        Ok(if self.ask('F', id, attempt).await? == APPLIED {
            Lookup::Happened
        } else {
            Lookup::Voided
        })
    }

    async fn ask(&self, what: char, id: &str, attempt: u32) -> Result<u8, NoAnswer> {
        let (answer, answered) = oneshot::channel();
        let line = format!("{what} {id} {attempt} {}\n", self.consumer);
        self.requests.send((line, answer)).map_err(|_| NoAnswer)?;
        answered.await.map_err(|_| NoAnswer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    #[test]
    fn all_effects_are_recorded_and_the_first_of_each_id_is_unique() {
        let folder = tempfile::tempdir().unwrap();
        let mut table = Table::over(Log::open(&folder.path().join(FILE), "sink").unwrap());
        assert_eq!(
            table.take("A a 1 c0\nA a 2 c1\nA b 1 c0\nnonsense"),
            b"1110"
        );
        let ledger = Ledger::read(folder.path()).unwrap();
        let uniques = |id| {
            ledger
                .history(id)
                .filter(|it| {
                    matches!(
                        it.what,
                        What::Effect {
                            unique: Unique::First,
                            ..
                        }
                    )
                })
                .count()
        };
        assert_eq!(
            (ledger.records().len(), uniques("a"), uniques("b")),
            (3, 1, 1)
        );
    }

    #[test]
    fn a_voided_attempt_is_refused_and_a_later_one_applied() {
        let folder = tempfile::tempdir().unwrap();
        let mut table = Table::over(Log::open(&folder.path().join(FILE), "sink").unwrap());
        assert_eq!(
            table.take("F a 2 c1\nA a 1 c0\nA a 2 c0\nA a 3 c1\nF a 4 c2"),
            b"00011"
        );
        let ledger = Ledger::read(folder.path()).unwrap();
        assert_eq!(
            ledger
                .history("a")
                .filter(|it| matches!(it.what, What::Refused { .. }))
                .count(),
            2
        );
    }

    #[tokio::test]
    async fn concurrent_requests_get_their_own_replies() {
        let folder = tempfile::tempdir().unwrap();
        let (tell, text) = std::sync::mpsc::channel();
        let path = folder.path().to_owned();
        std::thread::spawn(move || serve(&path, |address| tell.send(address).unwrap()));
        let sink = Arc::new(Sink::connect(text.recv().unwrap(), "c0").await.unwrap());
        assert_eq!(sink.find_or_void("id-7", 1).await.unwrap(), Lookup::Voided);
        let asked: Vec<_> = (0..300)
            .map(|number| {
                let sink = Arc::clone(&sink);
                tokio::spawn(async move {
                    sink.apply(&format!("id-{number}"), 1)
                        .await
                        .unwrap()
                        .is_ok()
                })
            })
            .collect();
        for (number, answered) in asked.into_iter().enumerate() {
            assert_eq!(answered.await.unwrap(), number != 7);
        }
        assert_eq!(
            sink.find_or_void("id-8", 1).await.unwrap(),
            Lookup::Happened
        );
        assert_eq!(Ledger::read(folder.path()).unwrap().records().len(), 302);
    }
}
