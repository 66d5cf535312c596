//! Sends operations as pipelines and reads their verdicts.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::StoreError;
use oncegate_core::marker::{Attempts, Guarantee, Operation, OperationKind, Verdict};
use redis::{Cmd, Value};

use crate::client::connection::SharedConnection;
use crate::conditional::{self, ConditionalCommand, SendPlan};
use crate::durability::Durability;
use crate::failure::{StoreFailure, denied_user, is_denied};
use crate::loss_detector::LossDetector;
use crate::preflight::{self, PreflightRequest};
use crate::record;
use crate::refresh::TopologyRefresh;
use crate::reply;
use crate::results::KeepsResults;
use crate::router::{CommandRouter, CommandTarget, ConnectionKind, RoutingView};
use crate::script::{self, ScriptRef};
use pipeline::{PipelineReplies, ServerPipeline};
use rounds::{OperationRound, rounds};

mod pipeline;
mod rounds;

/// The maximum number of keys in one script call: a script blocks the server, and Lua unpacks only a
/// few thousand values.
const KEYS_PER_CALL: usize = 256;

/// The answer to one operation.
pub(crate) type VerdictResult = Result<Verdict, StoreFailure>;

/// How often the commands of a round are sent again because a Cluster node redirected some of them.
const MAX_REDIRECTIONS: u32 = 3;

/// One command of a pipeline, with the indices of its operations.
enum BatchCommand {
    /// `SET … NX GET PX`.
    Claim(usize),
    /// `MSETEX … NX PX`: claims of different keys with the same terms.
    ClaimGroup(Vec<usize>),
    /// `SET … 1 EX … NX`, for [`Guarantee::Bare`].
    BareClaim(usize),
    /// `DEL`, for [`Guarantee::Bare`].
    BareDelete(usize),
    /// Operations with the same terms that become conditional commands or a script call, or claims
    /// that become groups or single ones, when their server is determined; at least one.
    Undecided(Vec<usize>),
    /// A completion or clearing without the script.
    Conditional(ConditionalCommand, usize),
    /// One script call; at least one operation.
    Script(ScriptRef, Vec<usize>),
}

impl BatchCommand {
    fn operations(&self) -> &[usize] {
        match self {
            Self::Claim(one)
            | Self::BareClaim(one)
            | Self::BareDelete(one)
            | Self::Conditional(_, one) => std::slice::from_ref(one),
            Self::ClaimGroup(many) | Self::Undecided(many) | Self::Script(_, many) => many,
        }
    }

    fn is_conditional(&self, conditional: ConditionalCommand) -> bool {
        matches!(self, Self::Conditional(it, _) if *it == conditional)
    }
}

/// Applies the operations and returns one answer for each, in order. Operations that have an answer
/// already are not sent. With a detector, at-most-once claims are sent only to servers that it has
/// checked over the same connection.
pub(crate) async fn apply(
    router: &CommandRouter,
    detector: Option<&LossDetector>,
    durability: Durability,
    prefix: &[u8],
    operations: &[Operation],
    answers: Vec<Option<VerdictResult>>,
) -> Vec<Result<Verdict, StoreError>> {
    let mut batch = OperationBatch {
        router,
        detector,
        durability,
        prefix,
        operations,
        answers,
        refresh: TopologyRefresh::of(router),
    };
    for round in rounds(operations) {
        let commands = batch.plan(&round);
        if batch.execute(commands).await.is_err() {
            break;
        }
    }
    batch.refresh.unfinished = false;
    let unsent = || {
        Err(StoreFailure::not_applied(
            "not sent: an earlier command of the same batch got no reply",
        ))
    };
    batch
        .answers
        .into_iter()
        .map(|answer| answer.unwrap_or_else(unsent).map_err(Into::into))
        .collect()
}

/// Whether the operation is an at-most-once claim.
pub(crate) fn is_at_most_once_claim(operation: &Operation) -> bool {
    operation.kind == OperationKind::Claim && operation.terms.guarantee == Guarantee::AtMostOnce
}

/// The answers that need no command, by operation.
pub(crate) fn local_answers(operations: &[Operation]) -> Vec<Option<VerdictResult>> {
    operations.iter().map(local_answer).collect()
}

/// The answer to a renewal or completion of [`Guarantee::Bare`], for which nothing is sent.
fn local_answer(operation: &Operation) -> Option<VerdictResult> {
    match (operation.terms.guarantee, operation.kind) {
        (Guarantee::Bare, OperationKind::Renew) => Some(Ok(Verdict::Applied)),
        (Guarantee::Bare, OperationKind::Complete) => {
            Some(Ok(Verdict::Done { marker_lost: false }))
        }
        _ => None,
    }
}

/// A server could not be reached or did not reply; the later rounds of the batch are not sent.
struct BatchInterrupted;

/// The state of one call of [`apply`].
struct OperationBatch<'a> {
    router: &'a CommandRouter,
    detector: Option<&'a LossDetector>,
    durability: Durability,
    prefix: &'a [u8],
    operations: &'a [Operation],
    answers: Vec<Option<VerdictResult>>,
    refresh: TopologyRefresh<'a>,
}

/// A command and its target.
type RoutedCommand = (BatchCommand, CommandTarget);

impl OperationBatch<'_> {
    /// Plans the commands of the unanswered operations of a round: script calls, then single commands
    /// and claims. Only claims of effectively once are grouped, and several claims of one key are sent
    /// singly, so that only the first is granted.
    fn plan(&self, round: &OperationRound) -> Vec<RoutedCommand> {
        let mut calls = Vec::new();
        let mut singles = Vec::with_capacity(round.operations.len());
        // A server replicates `MSETEX` as it is, and a replica of a release without it confirms the claims
        // and skips them. After a failover to that replica they would be granted again, and no loss
        // would be detected.
        let can_group = matches!(self.router, CommandRouter::Single(_))
            && self.durability == Durability::Primary
            && !round.has_repeated_key;
        for &index in &round.operations {
            if self.answers[index].is_some() {
                continue;
            }
            let operation = &self.operations[index];
            match (operation.terms.guarantee, operation.kind) {
                (Guarantee::Bare, OperationKind::Claim) => {
                    singles.push((BatchCommand::BareClaim(index), CommandTarget::Owner))
                }
                (Guarantee::Bare, OperationKind::Renew | OperationKind::Complete) => {}
                (Guarantee::Bare, _) => {
                    singles.push((BatchCommand::BareDelete(index), CommandTarget::Owner))
                }
                (Guarantee::EffectivelyOnce, OperationKind::Claim) if can_group => {
                    self.add_to_call(&mut singles, index, BatchCommand::Undecided)
                }
                (_, OperationKind::Claim) => {
                    singles.push((BatchCommand::Claim(index), CommandTarget::Owner))
                }
                _ => self.add_to_call(&mut calls, index, BatchCommand::Undecided),
            }
        }
        calls.append(&mut singles);
        calls
    }

    /// Adds an operation to a call with the same terms, or to a new one. In a Cluster each call has one
    /// key: keys of one node may belong to different slots.
    fn add_to_call(
        &self,
        commands: &mut Vec<RoutedCommand>,
        index: usize,
        new_command: fn(Vec<usize>) -> BatchCommand,
    ) {
        if let CommandRouter::Single(_) = self.router {
            for (command, _) in commands.iter_mut() {
                if let BatchCommand::Undecided(call) | BatchCommand::Script(ScriptRef::Digest, call) =
                    command
                    && call.len() < KEYS_PER_CALL
                    && script::can_share_call(&self.operations[call[0]], &self.operations[index])
                {
                    call.push(index);
                    return;
                }
            }
        }
        commands.push((new_command(vec![index]), CommandTarget::Owner));
    }

    /// Sends the commands, in one pipeline to each server, and the commands that follow from the
    /// replies: a claim may need the script, the script may need its source, and each may be
    /// redirected.
    async fn execute(&mut self, mut commands: Vec<RoutedCommand>) -> Result<(), BatchInterrupted> {
        let mut redirections = MAX_REDIRECTIONS;
        let mut outcome = Ok(());
        while !commands.is_empty() {
            let pipelines = self.group_by_server(commands).await?;
            let sent = join_all(
                pipelines
                    .iter()
                    .map(|server_pipeline| self.send(server_pipeline)),
            )
            .await;
            let mut follow_up = Vec::new();
            let mut redirected = false;
            for (server_pipeline, replies) in pipelines.into_iter().zip(sent) {
                match replies {
                    Ok(replies) => {
                        redirected |= self.read_replies(
                            server_pipeline,
                            replies,
                            redirections,
                            &mut follow_up,
                        )
                    }
                    Err(failure) => {
                        self.refresh.stale |= matches!(self.router, CommandRouter::Cluster(_));
                        for command in &server_pipeline.commands {
                            self.answer_all(command.operations(), &failure);
                        }
                        outcome = Err(BatchInterrupted);
                    }
                }
            }
            if redirected {
                redirections -= 1;
                // The slots moved; the rest of the batch uses the new slot map.
                self.router.invalidate();
            }
            commands = follow_up;
        }
        outcome
    }

    /// Groups the commands by server and connection, in order.
    async fn group_by_server(
        &mut self,
        commands: Vec<RoutedCommand>,
    ) -> Result<Vec<ServerPipeline>, BatchInterrupted> {
        let mut pipelines: Vec<ServerPipeline> = Vec::with_capacity(1);
        let view = match self.router.view().await {
            Ok(view) => view,
            Err(failure) => {
                for (command, _) in &commands {
                    self.answer_all(command.operations(), &failure);
                }
                return Err(BatchInterrupted);
            }
        };
        for (command, target) in commands {
            let first = command.operations()[0];
            let connections = match (&view, &target) {
                (RoutingView::Single(connections), _) => Arc::clone(connections),
                (view, target) => match view.connections(&self.key(first), target).await {
                    Ok(connections) => connections,
                    Err(failure) => {
                        self.refresh.stale = true;
                        self.answer_all(command.operations(), &failure);
                        continue;
                    }
                },
            };
            let connection_kind = self.connection_kind(&self.operations[first]);
            let asking = matches!(target, CommandTarget::Ask(_));
            let has_same_target = |server_pipeline: &ServerPipeline| {
                Arc::ptr_eq(&server_pipeline.connections, &connections)
                    && server_pipeline.connection_kind == connection_kind
                    && server_pipeline.asking == asking
            };
            let at = pipelines.iter().position(has_same_target);
            let at = at.unwrap_or_else(|| {
                pipelines.push(ServerPipeline {
                    connections,
                    connection_kind,
                    asking,
                    commands: Vec::new(),
                });
                pipelines.len() - 1
            });
            let ServerPipeline {
                connections,
                commands,
                ..
            } = &mut pipelines[at];
            self.add_for_server(command, connections.get(connection_kind), commands);
        }
        Ok(pipelines)
    }

    /// Adds a command to those for a server. [`BatchCommand::Undecided`] becomes conditional
    /// commands if the server has them, otherwise a script call; or groups of claims and single ones.
    fn add_for_server(
        &self,
        command: BatchCommand,
        connection: &SharedConnection,
        commands: &mut Vec<BatchCommand>,
    ) {
        let BatchCommand::Undecided(call) = command else {
            commands.push(command);
            return;
        };
        if self.operations[call[0]].kind == OperationKind::Claim {
            let groups = connection.claim_groups.split(&call);
            commands.extend(groups.map(|group| match group {
                [index] => BatchCommand::Claim(*index),
                group => BatchCommand::ClaimGroup(group.to_vec()),
            }));
            return;
        }
        let mut by_script = Vec::new();
        for index in call {
            match connection.conditional.plan_for(&self.operations[index]) {
                SendPlan::All(conditional) => {
                    commands.push(BatchCommand::Conditional(conditional, index));
                }
                SendPlan::One(conditional)
                    if !commands.iter().any(|it| it.is_conditional(conditional)) =>
                {
                    commands.push(BatchCommand::Conditional(conditional, index));
                }
                SendPlan::One(_) | SendPlan::Script => by_script.push(index),
            }
        }
        if !by_script.is_empty() {
            commands.push(script_call(by_script));
        }
    }

    /// With [`Durability::Replicas`], claims and at-most-once renewals use the connection with
    /// `WAIT`: otherwise a partitioned primary would renew leases that others take over on the new
    /// primary. [`Guarantee::Bare`] never waits.
    fn connection_kind(&self, operation: &Operation) -> ConnectionKind {
        match (self.durability, operation.kind, operation.terms.guarantee) {
            (Durability::Primary, ..) | (_, _, Guarantee::Bare) => ConnectionKind::General,
            (Durability::Replicas { .. }, OperationKind::Claim, _) => ConnectionKind::Claims,
            (Durability::Replicas { .. }, OperationKind::Renew, Guarantee::AtMostOnce) => {
                ConnectionKind::Claims
            }
            _ => ConnectionKind::General,
        }
    }

    /// Reads the replies of one server. Returns whether redirected commands are to be sent again.
    fn read_replies(
        &mut self,
        server_pipeline: ServerPipeline,
        replies: PipelineReplies,
        redirections: u32,
        follow_up: &mut Vec<RoutedCommand>,
    ) -> bool {
        let PipelineReplies {
            replies,
            replicated,
            intact,
        } = replies;
        let mut redirected = false;
        for (command, reply) in server_pipeline.commands.into_iter().zip(replies) {
            if let (CommandRouter::Cluster(_), Value::ServerError(error)) = (self.router, &reply)
                && let Some(target) =
                    reply::redirection(error.code(), error.details().unwrap_or_default())
            {
                redirected = true;
                if redirections > 0 {
                    follow_up.push((command, target));
                } else {
                    self.answer_all(
                        command.operations(),
                        &StoreFailure::not_applied(
                            "too many Cluster redirections: the nodes do not agree on the owner of this key's slot",
                        ),
                    );
                }
                continue;
            }
            let connection = server_pipeline
                .connections
                .get(server_pipeline.connection_kind);
            match &command {
                BatchCommand::Conditional(conditional, _) => {
                    connection.conditional.record_reply(*conditional, &reply);
                }
                BatchCommand::Claim(_) => connection.claim_groups.record_single(&reply),
                BatchCommand::ClaimGroup(group) => {
                    connection.claim_groups.record_group(group.len(), &reply);
                }
                _ => {}
            }
            let operations = command.operations().to_vec();
            self.read(command, reply, follow_up);
            if let Err(failure) = &replicated {
                self.replace_grants(&operations, failure, |_| true);
            }
            if let Err(failure) = &intact {
                self.replace_grants(&operations, failure, is_at_most_once_claim);
            }
        }
        redirected && redirections > 0
    }

    /// Replaces grants and renewals by a failure: too few replicas have them, or the server lost
    /// data.
    fn replace_grants(
        &mut self,
        operations: &[usize],
        failure: &StoreFailure,
        applies: impl Fn(&Operation) -> bool,
    ) {
        for index in operations
            .iter()
            .filter(|index| applies(&self.operations[**index]))
        {
            let answer = &mut self.answers[*index];
            if matches!(
                answer,
                Some(Ok(Verdict::Granted(_)
                    | Verdict::InDoubt(_)
                    | Verdict::Applied))
            ) {
                *answer = Some(Err(failure.clone()));
            }
        }
    }

    fn command(&self, command: &BatchCommand) -> Cmd {
        match command {
            BatchCommand::Claim(index) => {
                let operation = &self.operations[*index];
                let (record, horizon) = (
                    record::first_claim(operation, 1),
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
            BatchCommand::ClaimGroup(group) => {
                let mut set = Cmd::with_capacity(5 + 2 * group.len(), 64 + 192 * group.len());
                set.arg("MSETEX").arg(group.len());
                for &index in group {
                    let record = record::first_claim(&self.operations[index], 1);
                    set.arg(self.key(index)).arg(record);
                }
                let horizon = record::expiry(self.operations[group[0]].terms.horizon());
                set.arg("NX").arg("PX").arg(horizon);
                set
            }
            BatchCommand::BareClaim(index) => {
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
            BatchCommand::BareDelete(index) => {
                let mut delete = Cmd::with_capacity(2, 128);
                delete.arg("DEL").arg(self.key(*index));
                delete
            }
            BatchCommand::Conditional(conditional, index) => {
                conditional::command(*conditional, &self.key(*index), &self.operations[*index])
            }
            BatchCommand::Undecided(call) => self.script_call(ScriptRef::Digest, call),
            BatchCommand::Script(script, call) => self.script_call(*script, call),
        }
    }

    fn script_call(&self, script: ScriptRef, call: &[usize]) -> Cmd {
        let operations = call.iter().map(|index| &self.operations[*index]);
        let results = KeepsResults::of(self.router, self.prefix);
        let first = &self.operations[call[0]];
        script::call(script, self.prefix, first, operations, results)
    }

    fn key(&self, index: usize) -> Vec<u8> {
        [self.prefix, self.operations[index].key.as_bytes()].concat()
    }

    /// Reads one reply: an answer to each operation of the command, or another command.
    fn read(&mut self, command: BatchCommand, reply: Value, follow_up: &mut Vec<RoutedCommand>) {
        match (command, reply) {
            (BatchCommand::Script(ScriptRef::Digest, call), Value::ServerError(error))
                if error.code() == "NOSCRIPT" =>
            {
                follow_up.push((
                    BatchCommand::Script(ScriptRef::Source, call),
                    CommandTarget::Owner,
                ));
            }
            (BatchCommand::Conditional(conditional, index), reply)
                if conditional::needs_script(conditional, &reply) =>
            {
                self.add_to_call(follow_up, index, script_call);
            }
            (BatchCommand::ClaimGroup(group), Value::Int(1)) => {
                for index in group {
                    self.answers[index] = Some(Ok(Verdict::Granted(Attempts::new(1))));
                }
            }
            // Refused, or failed. After a lost reply all keys are set: the single claims recognise their
            // tokens.
            (BatchCommand::ClaimGroup(group), _) => {
                let claims = group.into_iter().map(BatchCommand::Claim);
                follow_up.extend(claims.map(|claim| (claim, CommandTarget::Owner)));
            }
            (command, Value::ServerError(error)) => {
                let failure =
                    self.server_failure(error.code(), error.details().unwrap_or_default());
                self.answer_all(command.operations(), &failure);
            }
            (BatchCommand::Claim(index), reply) => {
                match reply::claim(reply, &self.operations[index]) {
                    Some(answer) => self.answers[index] = Some(answer),
                    None => self.add_to_call(follow_up, index, script_call),
                }
            }
            (BatchCommand::Conditional(_, index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Okay => Ok(Verdict::Done { marker_lost: false }),
                    Value::Int(_) => Ok(Verdict::Applied),
                    other => Err(reply::unexpected(&other)),
                });
            }
            (BatchCommand::BareClaim(index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Okay => Ok(Verdict::Granted(Attempts::new(1))),
                    Value::Nil => Ok(Verdict::Duplicate),
                    other => Err(reply::unexpected(&other)),
                });
            }
            (BatchCommand::BareDelete(index), reply) => {
                self.answers[index] = Some(match reply {
                    Value::Int(_) => Ok(Verdict::Applied),
                    other => Err(reply::unexpected(&other)),
                });
            }
            (BatchCommand::Script(_, call), Value::Array(verdicts))
                if verdicts.len() == call.len() =>
            {
                for (index, verdict) in call.into_iter().zip(verdicts) {
                    self.answers[index] = Some(self.read_verdict(&verdict));
                }
            }
            (command, other) => self.answer_all(command.operations(), &reply::unexpected(&other)),
        }
    }

    fn server_failure(&mut self, code: &str, detail: &str) -> StoreFailure {
        let moved = matches!(code, "MOVED" | "ASK" | "CLUSTERDOWN" | "CROSSSLOT")
            && matches!(self.router, CommandRouter::Cluster(_));
        if moved || matches!(code, "READONLY" | "MASTERDOWN") {
            self.refresh.stale = true;
        }
        if moved {
            StoreFailure::not_applied(format!("Redis replied {code} {detail}"))
        } else if is_denied(code, detail) {
            StoreFailure::misconfigured(format!(
                "Redis replied {code} {detail}: {}",
                self.grant_command(denied_user(detail))
            ))
        } else {
            crate::failure::from_server_error(code, detail)
        }
    }

    /// The command that grants a user, by default the one in the URL, all rights of a consumer.
    #[cold]
    fn grant_command(&self, user: Option<&str>) -> String {
        let login = match self.router {
            CommandRouter::Single(connections) => connections.general.user(),
            CommandRouter::Cluster(_) => None,
        };
        let request = PreflightRequest {
            guarantee: self
                .operations
                .first()
                .map_or(Guarantee::AtMostOnce, |it| it.terms.guarantee),
            durability: self.durability,
            prefix: self.prefix,
        };
        preflight::grant(user.or(login), self.router, request, std::iter::empty())
    }

    /// Reads one answer of `apply.lua`.
    fn read_verdict(&mut self, value: &Value) -> VerdictResult {
        let Value::BulkString(text) = value else {
            return Err(reply::unexpected(value));
        };
        match String::from_utf8_lossy(text).strip_prefix("error ") {
            Some(error) => {
                let (code, detail) = error.split_once(' ').unwrap_or((error, ""));
                Err(self.server_failure(code, detail))
            }
            None => reply::verdict(value),
        }
    }

    fn answer_all(&mut self, operations: &[usize], failure: &StoreFailure) {
        for index in operations {
            self.answers[*index] = Some(Err(failure.clone()));
        }
    }
}

fn script_call(call: Vec<usize>) -> BatchCommand {
    BatchCommand::Script(ScriptRef::Digest, call)
}

/// Whole seconds for `EX`, rounded up, at least 1.
fn seconds(window: Duration) -> u64 {
    record::expiry(window).div_ceil(1000)
}
