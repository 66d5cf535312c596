//! Operations on the wire: pipelines there, verdicts back.

use std::collections::HashMap;
use std::time::Duration;

use oncegate_core::marker::{self, Age, Ask, Guarantee, Hold, Marker, Operation, Terms, Verdict};
use oncegate_core::{Key, StoreError};
use redis::{Cmd, Pipeline, Value};

use crate::failure::Failure;
use crate::link::Link;
use crate::record::{self, Unreadable};
use crate::script::{self, By};

/// The most keys that one script call changes: it holds everyone else up meanwhile.
const KEYS_PER_CALL: usize = 256;

type Answer = Result<Verdict, Failure>;

/// One command of a pipeline, and the operations (by index) that it carries.
enum Step {
    /// `SET … NX GET PX`.
    Claim(usize),
    /// The literal gate: `SET … 1 EX … NX`.
    BareClaim(usize),
    /// The literal gate: `DEL`.
    BareDelete(usize),
    /// One script call for all of them; there is at least one.
    Script(By, Vec<usize>),
}

impl Step {
    fn operations(&self) -> &[usize] {
        match self {
            Self::Claim(one) | Self::BareClaim(one) | Self::BareDelete(one) => std::slice::from_ref(one),
            Self::Script(_, many) => many,
        }
    }
}

/// Applies the operations and answers each, in order.
pub(crate) async fn apply(link: &Link, prefix: &[u8], operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
    let answers = operations.iter().map(answer_unsent).collect();
    let mut batch = Batch { prefix, operations, answers, primary: Primary::Here };
    for round in rounds(operations) {
        if batch.run(link, plan(operations, &round)).await.is_err() {
            break;
        }
    }
    if batch.primary == Primary::Elsewhere {
        link.distrust().await;
    }
    let unsent = || Err(Failure::not_applied("not sent, because an earlier command in the same batch was not answered"));
    batch.answers.into_iter().map(|answer| answer.unwrap_or_else(unsent).map_err(Into::into)).collect()
}

/// The literal gate neither renews nor completes: there is nothing to send.
fn answer_unsent(operation: &Operation) -> Option<Answer> {
    match (operation.terms.guarantee, operation.ask) {
        (Guarantee::Bare, Ask::Renew) => Some(Ok(Verdict::Kept)),
        (Guarantee::Bare, Ask::Complete) => Some(Ok(Verdict::Done { marker_lost: false })),
        _ => None,
    }
}

/// Splits the operations so that what is on one key keeps its order: claims on the same terms may follow each other in
/// one part, since a pipeline runs in order and so does the script call that they meet in; anything else that has its key
/// before it waits for the next part.
fn rounds(operations: &[Operation]) -> Vec<Vec<usize>> {
    if operations.len() == 1 {
        return vec![vec![0]];
    }
    let mut last: HashMap<&Key, (usize, &Operation)> = HashMap::with_capacity(operations.len());
    let mut rounds: Vec<Vec<usize>> = Vec::with_capacity(1);
    for (index, operation) in operations.iter().enumerate() {
        let round = match last.get(&operation.key) {
            None => 0,
            Some((round, before)) if operation.ask == Ask::Claim && script::together(before, operation) => *round,
            Some((round, _)) => round + 1,
        };
        last.insert(&operation.key, (round, operation));
        if round == rounds.len() {
            rounds.push(Vec::with_capacity(operations.len()));
        }
        rounds[round].push(index);
    }
    rounds
}

/// Script calls first, completions among them, then claims.
fn plan(operations: &[Operation], round: &[usize]) -> Vec<Step> {
    let mut calls = Vec::new();
    let mut singles = Vec::with_capacity(round.len());
    for &index in round {
        let operation = &operations[index];
        match (operation.terms.guarantee, operation.ask) {
            (Guarantee::Bare, Ask::Claim) => singles.push(Step::BareClaim(index)),
            (Guarantee::Bare, Ask::Renew | Ask::Complete) => {}
            (Guarantee::Bare, _) => singles.push(Step::BareDelete(index)),
            (_, Ask::Claim) => singles.push(Step::Claim(index)),
            _ => add_call(&mut calls, operations, By::Hash, index),
        }
    }
    calls.append(&mut singles);
    calls
}

/// Adds an operation to the script call that it can travel in.
fn add_call(steps: &mut Vec<Step>, operations: &[Operation], how: By, index: usize) {
    for step in steps.iter_mut() {
        if let Step::Script(by, call) = step
            && *by == how
            && call.len() < KEYS_PER_CALL
            && script::together(&operations[call[0]], &operations[index])
        {
            call.push(index);
            return;
        }
    }
    steps.push(Step::Script(how, vec![index]));
}

/// The connection gave out; nothing more is to be sent.
struct Interrupted;

struct Batch<'a> {
    prefix: &'a [u8],
    operations: &'a [Operation],
    answers: Vec<Option<Answer>>,
    primary: Primary,
}

/// Whether the server at the other end may write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Primary {
    Here,
    Elsewhere,
}

impl Batch<'_> {
    /// Sends the steps in one pipeline, and again what could not be decided: at most claim, script, script by text.
    async fn run(&mut self, link: &Link, mut steps: Vec<Step>) -> Result<(), Interrupted> {
        while !steps.is_empty() {
            let mut pipeline = Pipeline::with_capacity(steps.len());
            for step in &steps {
                pipeline.add_command(self.command(step));
            }
            match link.ask(&pipeline).await {
                Ok(replies) => {
                    let mut again = Vec::new();
                    for (step, reply) in steps.into_iter().zip(replies) {
                        self.read(step, reply, &mut again);
                    }
                    steps = again;
                }
                Err(failure) => {
                    for index in steps.iter().flat_map(|step| step.operations()) {
                        self.answers[*index] = Some(Err(failure.clone()));
                    }
                    return Err(Interrupted);
                }
            }
        }
        Ok(())
    }

    fn command(&self, step: &Step) -> Cmd {
        match step {
            Step::Claim(index) => {
                let Operation { token, terms, .. } = self.operations[*index];
                let Terms { guarantee, lease, fingerprint, .. } = terms;
                let hold = Hold { token, attempt: 1, lease, horizon: terms.horizon(), guarantee, fingerprint };
                let record = record::encode(&Marker::InProgress(hold));
                let mut set = Cmd::with_capacity(7, 256);
                set.arg("SET").arg(self.key(*index)).arg(record).arg("NX").arg("GET").arg("PX").arg(record::expiry(hold.horizon));
                set
            }
            Step::BareClaim(index) => {
                let window = self.operations[*index].terms.window;
                let mut set = Cmd::with_capacity(6, 128);
                set.arg("SET").arg(self.key(*index)).arg("1").arg("EX").arg(seconds(window)).arg("NX");
                set
            }
            Step::BareDelete(index) => {
                let mut delete = Cmd::with_capacity(2, 128);
                delete.arg("DEL").arg(self.key(*index));
                delete
            }
            Step::Script(by, call) => {
                let operations = call.iter().map(|index| &self.operations[*index]);
                script::call(*by, self.prefix, &self.operations[call[0]], operations)
            }
        }
    }

    fn key(&self, index: usize) -> Vec<u8> {
        [self.prefix, self.operations[index].key.as_bytes()].concat()
    }

    /// Reads one reply: an answer to each operation of the step, or another step.
    fn read(&mut self, step: Step, reply: Value, again: &mut Vec<Step>) {
        match (step, reply) {
            (Step::Script(By::Hash, call), Value::ServerError(error)) if error.code() == "NOSCRIPT" => {
                again.push(Step::Script(By::Text, call));
            }
            (step, Value::ServerError(error)) => {
                let failure = self.said_by_server(error.code(), error.details().unwrap_or_default());
                self.answer_all(step.operations(), &failure);
            }
            (Step::Claim(index), reply) => match self.read_claim(index, reply) {
                Some(answer) => self.answers[index] = Some(answer),
                None => add_call(again, self.operations, By::Hash, index),
            },
            (Step::BareClaim(index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Okay => Ok(Verdict::Granted { attempt: 1 }),
                    Value::Nil => Ok(Verdict::Duplicate),
                    other => Err(unexpected(&other)),
                });
            }
            (Step::BareDelete(index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Int(_) => Ok(Verdict::Kept),
                    other => Err(unexpected(&other)),
                });
            }
            (Step::Script(_, call), Value::Array(verdicts)) if verdicts.len() == call.len() => {
                for (index, verdict) in call.into_iter().zip(verdicts) {
                    self.answers[index] = Some(self.read_verdict(&verdict));
                }
            }
            (step, other) => self.answer_all(step.operations(), &unexpected(&other)),
        }
    }

    fn said_by_server(&mut self, code: &str, detail: &str) -> Failure {
        if matches!(code, "READONLY" | "MASTERDOWN") {
            self.primary = Primary::Elsewhere;
        }
        Failure::said_by_server(code, detail)
    }

    /// Reads one of the texts of `apply.lua`.
    fn read_verdict(&mut self, value: &Value) -> Answer {
        let Value::BulkString(text) = value else { return Err(unexpected(value)) };
        match String::from_utf8_lossy(text).strip_prefix("error ") {
            Some(said) => {
                let (code, detail) = said.split_once(' ').unwrap_or((said, ""));
                Err(self.said_by_server(code, detail))
            }
            None => read_verdict(value),
        }
    }

    fn answer_all(&mut self, operations: &[usize], failure: &Failure) {
        for index in operations {
            self.answers[*index] = Some(Err(failure.clone()));
        }
    }

    /// What a claim's fast path tells; `None` where the holder's age matters, or the holder is the asker.
    fn read_claim(&self, index: usize, reply: Value) -> Option<Answer> {
        match reply {
            Value::Nil => Some(Ok(Verdict::Granted { attempt: 1 })),
            Value::BulkString(record) => match record::decode(&record) {
                Ok(marker @ (Marker::Done(_) | Marker::Rejected(_))) => {
                    Some(Ok(marker::apply(marker, Age::Unknown, &self.operations[index]).1))
                }
                Ok(_) => None,
                Err(why) => Some(Err(Failure::unreadable(why))),
            },
            other => Some(Err(unexpected(&other))),
        }
    }
}

/// Whole seconds, rounded up, at least one: what `EX` takes.
fn seconds(window: Duration) -> u64 {
    record::expiry(window).div_ceil(1000)
}

/// Reads a text of `apply.lua` that is no error of a command in it.
fn read_verdict(value: &Value) -> Answer {
    let Value::BulkString(text) = value else { return Err(unexpected(value)) };
    let text = String::from_utf8_lossy(text);
    let (word, rest) = text.split_once(' ').unwrap_or((&text, ""));
    let attempt = || rest.parse().map_err(|_| unexpected(value));
    Ok(match (word, rest) {
        ("granted", _) => Verdict::Granted { attempt: attempt()? },
        ("in-doubt", _) => Verdict::InDoubt { attempt: attempt()? },
        ("busy", _) => Verdict::Busy { remaining: rest.parse().map(Duration::from_millis).map_err(|_| unexpected(value))? },
        ("duplicate", "") => Verdict::Duplicate,
        ("rejected", "") => Verdict::Rejected,
        ("conflict", "") => Verdict::Conflict,
        ("kept", "") => Verdict::Kept,
        ("done", "") => Verdict::Done { marker_lost: false },
        ("done", "lost") => Verdict::Done { marker_lost: true },
        ("lost", "") => Verdict::Lost,
        ("unknown", "version") => return Err(Failure::unreadable(Unreadable::UnknownVersion)),
        ("unreadable", "") => return Err(Failure::unreadable(Unreadable::NotAMarker)),
        _ => return Err(unexpected(value)),
    })
}

fn unexpected(reply: &Value) -> Failure {
    let shown: String = format!("{reply:?}").chars().take(120).collect();
    Failure::unknown(format!("Redis gave an answer of the wrong kind: {shown}"))
}
