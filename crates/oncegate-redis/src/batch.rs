//! Operations on the wire: pipelines there, verdicts back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::marker::{Ask, Attempts, Guarantee, Operation, Verdict};
use oncegate_core::{Key, StoreError};
use redis::{Cmd, Value};

use crate::doubt::Doubt;
use crate::durability::Durability;
use crate::failure::Failure;
use crate::record;
use crate::reply;
use crate::route::{At, Lane, Route, View};
use crate::script::{self, By};
use crate::watch::Watch;
use sending::{Parcel, Replies};

mod sending;

/// The most keys that one script call changes: it holds everyone else up meanwhile, and Lua unpacks
/// no more than some thousands.
const KEYS_PER_CALL: usize = 256;

pub(crate) type Answer = Result<Verdict, Failure>;

/// How often one step follows a node of a Cluster that names another.
const REDIRECTIONS: u32 = 3;

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
            Self::Claim(one) | Self::BareClaim(one) | Self::BareDelete(one) => {
                std::slice::from_ref(one)
            }
            Self::Script(_, many) => many,
        }
    }
}

/// Applies the operations and answers each, in order. Those that have an answer already are not
/// sent. With a watch, at most once is claimed only of servers that it looked at since they were
/// connected to.
pub(crate) async fn apply(
    route: &Route,
    watch: Option<&Watch>,
    durability: Durability,
    prefix: &[u8],
    operations: &[Operation],
    answers: Vec<Option<Answer>>,
) -> Vec<Result<Verdict, StoreError>> {
    let mut batch = Batch {
        route,
        watch,
        durability,
        prefix,
        operations,
        answers,
        doubt: Doubt::of(route),
    };
    for round in rounds(operations) {
        let unanswered: Vec<usize> = round
            .into_iter()
            .filter(|index| batch.answers[*index].is_none())
            .collect();
        let steps = batch.plan(&unanswered);
        if batch.run(steps).await.is_err() {
            break;
        }
    }
    batch.doubt.unfinished = false;
    let unsent = || {
        Err(Failure::not_applied(
            "not sent, because an earlier command in the same batch was not answered",
        ))
    };
    batch
        .answers
        .into_iter()
        .map(|answer| answer.unwrap_or_else(unsent).map_err(Into::into))
        .collect()
}

/// Whether it claims at most once.
pub(crate) fn is_strict(operation: &Operation) -> bool {
    operation.ask == Ask::Claim && operation.terms.guarantee == Guarantee::AtMostOnce
}

/// What needs no sending.
pub(crate) fn unsent(operations: &[Operation]) -> Vec<Option<Answer>> {
    operations.iter().map(answer_unsent).collect()
}

/// The literal gate neither renews nor completes: there is nothing to send.
fn answer_unsent(operation: &Operation) -> Option<Answer> {
    match (operation.terms.guarantee, operation.ask) {
        (Guarantee::Bare, Ask::Renew) => Some(Ok(Verdict::Kept)),
        (Guarantee::Bare, Ask::Complete) => Some(Ok(Verdict::Done { marker_lost: false })),
        _ => None,
    }
}

/// Splits the operations so that what is on one key keeps its order: claims on the same terms may
/// follow each other in one part, since a pipeline runs in order and so does the script call that
/// they meet in; anything else that has its key before it waits for the next part.
fn rounds(operations: &[Operation]) -> Vec<Vec<usize>> {
    if operations.len() == 1 {
        return vec![vec![0]];
    }
    let mut last: HashMap<&Key, (usize, &Operation)> = HashMap::with_capacity(operations.len());
    let mut rounds: Vec<Vec<usize>> = Vec::with_capacity(1);
    for (index, operation) in operations.iter().enumerate() {
        let round = match last.get(&operation.key) {
            None => 0,
            Some((round, before))
                if operation.ask == Ask::Claim && script::together(before, operation) =>
            {
                *round
            }
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

/// The connection gave out; nothing more is to be sent.
struct Interrupted;

struct Batch<'a> {
    route: &'a Route,
    watch: Option<&'a Watch>,
    durability: Durability,
    prefix: &'a [u8],
    operations: &'a [Operation],
    answers: Vec<Option<Answer>>,
    doubt: Doubt<'a>,
}

/// A step, and the server that it is for.
type Sending = (Step, At);

impl Batch<'_> {
    /// Script calls first, completions among them, then claims.
    fn plan(&self, round: &[usize]) -> Vec<Sending> {
        let mut calls = Vec::new();
        let mut singles = Vec::with_capacity(round.len());
        for &index in round {
            let operation = &self.operations[index];
            match (operation.terms.guarantee, operation.ask) {
                (Guarantee::Bare, Ask::Claim) => singles.push((Step::BareClaim(index), At::Owner)),
                (Guarantee::Bare, Ask::Renew | Ask::Complete) => {}
                (Guarantee::Bare, _) => singles.push((Step::BareDelete(index), At::Owner)),
                (_, Ask::Claim) => singles.push((Step::Claim(index), At::Owner)),
                _ => self.add_call(&mut calls, At::Owner, index),
            }
        }
        calls.append(&mut singles);
        calls
    }

    /// Adds an operation to the script call that it can travel in. In a Cluster each key travels
    /// alone: two that lie with one node today may not do so tomorrow.
    fn add_call(&self, steps: &mut Vec<Sending>, at: At, index: usize) {
        if let Route::One(_) = self.route {
            for (step, _) in steps.iter_mut() {
                if let Step::Script(By::Hash, call) = step
                    && call.len() < KEYS_PER_CALL
                    && script::together(&self.operations[call[0]], &self.operations[index])
                {
                    call.push(index);
                    return;
                }
            }
        }
        steps.push((Step::Script(By::Hash, vec![index]), at));
    }

    /// Sends the steps, in one pipeline to each server, and again what could not be decided: at
    /// most claim, script, script by text, and each of them once more wherever a node of a Cluster
    /// names another.
    async fn run(&mut self, mut steps: Vec<Sending>) -> Result<(), Interrupted> {
        let mut redirections = REDIRECTIONS;
        let mut whole = Ok(());
        while !steps.is_empty() {
            let parcels = self.sorted(steps).await?;
            let sent = join_all(parcels.iter().map(|parcel| self.send(parcel))).await;
            let mut again = Vec::new();
            let mut redirected = false;
            for (parcel, replies) in parcels.into_iter().zip(sent) {
                match replies {
                    Ok(replies) => {
                        redirected |= self.read_parcel(parcel, replies, redirections, &mut again)
                    }
                    Err(failure) => {
                        self.doubt.doubted |= matches!(self.route, Route::Cluster(_));
                        for step in &parcel.steps {
                            self.answer_all(step.operations(), &failure);
                        }
                        whole = Err(Interrupted);
                    }
                }
            }
            if redirected {
                redirections -= 1;
                // Who serves what has changed; the rest of the batch may know it by now.
                self.route.distrust();
            }
            steps = again;
        }
        whole
    }

    /// One parcel for each server and connection; what is for one server keeps its order.
    async fn sorted(&mut self, steps: Vec<Sending>) -> Result<Vec<Parcel>, Interrupted> {
        let mut parcels: Vec<Parcel> = Vec::with_capacity(1);
        let view = match self.route.view().await {
            Ok(view) => view,
            Err(failure) => {
                for (step, _) in &steps {
                    self.answer_all(step.operations(), &failure);
                }
                return Err(Interrupted);
            }
        };
        for (step, at) in steps {
            let first = step.operations()[0];
            let lanes = match (&view, &at) {
                (View::One(lanes), _) => Arc::clone(lanes),
                (view, at) => match view.lanes(&self.key(first), at).await {
                    Ok(lanes) => lanes,
                    Err(failure) => {
                        self.doubt.doubted = true;
                        self.answer_all(step.operations(), &failure);
                        continue;
                    }
                },
            };
            let lane = self.lane(&self.operations[first]);
            let asking = matches!(at, At::Asking(_));
            let same = |parcel: &&mut Parcel| {
                Arc::ptr_eq(&parcel.lanes, &lanes) && parcel.lane == lane && parcel.asking == asking
            };
            match parcels.iter_mut().find(same) {
                Some(parcel) => parcel.steps.push(step),
                None => parcels.push(Parcel {
                    lanes,
                    lane,
                    asking,
                    steps: vec![step],
                }),
            }
        }
        Ok(parcels)
    }

    /// Claims travel alone where replicas have to know of them, but for those of the literal gate.
    /// So do renewals at most once: a primary that was cut off would renew what others take over
    /// elsewhere.
    fn lane(&self, operation: &Operation) -> Lane {
        match (self.durability, operation.ask, operation.terms.guarantee) {
            (Durability::Primary, ..) | (_, _, Guarantee::Bare) => Lane::General,
            (Durability::Replicas { .. }, Ask::Claim, _) => Lane::Claims,
            (Durability::Replicas { .. }, Ask::Renew, Guarantee::AtMostOnce) => Lane::Claims,
            _ => Lane::General,
        }
    }

    /// Reads what one server replied. Answers whether it named another.
    fn read_parcel(
        &mut self,
        parcel: Parcel,
        replies: Replies,
        redirections: u32,
        again: &mut Vec<Sending>,
    ) -> bool {
        let Replies {
            each,
            waited,
            watched,
        } = replies;
        let mut redirected = false;
        for (step, reply) in parcel.steps.into_iter().zip(each) {
            if let (Route::Cluster(_), Value::ServerError(error)) = (self.route, &reply)
                && let Some(at) =
                    reply::named_elsewhere(error.code(), error.details().unwrap_or_default())
            {
                redirected = true;
                if redirections > 0 {
                    again.push((step, at));
                } else {
                    self.answer_all(
                        step.operations(),
                        &Failure::not_applied(
                            "the nodes of the Cluster do not agree on who serves this key",
                        ),
                    );
                }
                continue;
            }
            let operations = step.operations().to_vec();
            self.read(step, reply, again);
            if let Err(failure) = &waited {
                self.withdraw(&operations, failure, |_| true);
            }
            if let Err(failure) = &watched {
                self.withdraw(&operations, failure, is_strict);
            }
        }
        redirected && redirections > 0
    }

    /// What was granted or renewed is not, where too few replicas know of it, or the server was
    /// seen to forget.
    fn withdraw(
        &mut self,
        operations: &[usize],
        failure: &Failure,
        concerned: impl Fn(&Operation) -> bool,
    ) {
        for index in operations
            .iter()
            .filter(|index| concerned(&self.operations[**index]))
        {
            let answer = &mut self.answers[*index];
            if matches!(
                answer,
                Some(Ok(Verdict::Granted(_)
                    | Verdict::InDoubt(_)
                    | Verdict::Kept))
            ) {
                *answer = Some(Err(failure.clone()));
            }
        }
    }

    fn command(&self, step: &Step) -> Cmd {
        match step {
            Step::Claim(index) => {
                let operation = &self.operations[*index];
                let (record, horizon) = (
                    record::granted(operation, 1),
                    record::expiry(operation.terms.horizon()),
                );
                let mut set = Cmd::with_capacity(7, 256);
                set.arg("SET")
                    .arg(self.key(*index))
                    .arg(record)
                    .arg("NX")
                    .arg("GET")
                    .arg("PX")
                    .arg(horizon);
                set
            }
            Step::BareClaim(index) => {
                let window = self.operations[*index].terms.window;
                let mut set = Cmd::with_capacity(6, 128);
                set.arg("SET")
                    .arg(self.key(*index))
                    .arg("1")
                    .arg("EX")
                    .arg(seconds(window))
                    .arg("NX");
                set
            }
            Step::BareDelete(index) => {
                let mut delete = Cmd::with_capacity(2, 128);
                delete.arg("DEL").arg(self.key(*index));
                delete
            }
            Step::Script(by, call) => self.call(*by, call),
        }
    }

    fn call(&self, by: By, call: &[usize]) -> Cmd {
        let operations = call.iter().map(|index| &self.operations[*index]);
        script::call(by, self.prefix, &self.operations[call[0]], operations)
    }

    fn key(&self, index: usize) -> Vec<u8> {
        [self.prefix, self.operations[index].key.as_bytes()].concat()
    }

    /// Reads one reply: an answer to each operation of the step, or another step.
    fn read(&mut self, step: Step, reply: Value, again: &mut Vec<Sending>) {
        match (step, reply) {
            (Step::Script(By::Hash, call), Value::ServerError(error))
                if error.code() == "NOSCRIPT" =>
            {
                again.push((Step::Script(By::Text, call), At::Owner));
            }
            (step, Value::ServerError(error)) => {
                let failure =
                    self.said_by_server(error.code(), error.details().unwrap_or_default());
                self.answer_all(step.operations(), &failure);
            }
            (Step::Claim(index), reply) => match reply::claim(reply, &self.operations[index]) {
                Some(answer) => self.answers[index] = Some(answer),
                None => self.add_call(again, At::Owner, index),
            },
            (Step::BareClaim(index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Okay => Ok(Verdict::Granted(Attempts::new(1))),
                    Value::Nil => Ok(Verdict::Duplicate),
                    other => Err(reply::unexpected(&other)),
                });
            }
            (Step::BareDelete(index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Int(_) => Ok(Verdict::Kept),
                    other => Err(reply::unexpected(&other)),
                });
            }
            (Step::Script(_, call), Value::Array(verdicts)) if verdicts.len() == call.len() => {
                for (index, verdict) in call.into_iter().zip(verdicts) {
                    self.answers[index] = Some(self.read_verdict(&verdict));
                }
            }
            (step, other) => self.answer_all(step.operations(), &reply::unexpected(&other)),
        }
    }

    fn said_by_server(&mut self, code: &str, detail: &str) -> Failure {
        let moved = matches!(code, "MOVED" | "ASK" | "CLUSTERDOWN" | "CROSSSLOT")
            && matches!(self.route, Route::Cluster(_));
        if moved || matches!(code, "READONLY" | "MASTERDOWN") {
            self.doubt.doubted = true;
        }
        if moved {
            Failure::not_applied(format!("Redis says {code} {detail}"))
        } else {
            Failure::said_by_server(code, detail)
        }
    }

    /// Reads one of the texts of `apply.lua`.
    fn read_verdict(&mut self, value: &Value) -> Answer {
        let Value::BulkString(text) = value else {
            return Err(reply::unexpected(value));
        };
        match String::from_utf8_lossy(text).strip_prefix("error ") {
            Some(said) => {
                let (code, detail) = said.split_once(' ').unwrap_or((said, ""));
                Err(self.said_by_server(code, detail))
            }
            None => reply::verdict(value),
        }
    }

    fn answer_all(&mut self, operations: &[usize], failure: &Failure) {
        for index in operations {
            self.answers[*index] = Some(Err(failure.clone()));
        }
    }
}

/// Whole seconds, rounded up, at least one: what `EX` takes.
fn seconds(window: Duration) -> u64 {
    record::expiry(window).div_ceil(1000)
}
