//! One pipeline to one server, with the commands that check around its claims whether the server
//! lost data and whether enough replicas have the claims.

use std::sync::Arc;

use oncegate_core::marker::Terms;
use redis::{Pipeline, Value};

use super::{BatchCommand, OperationBatch, is_at_most_once_claim};
use crate::canary::{self, Canary, CanaryError};
use crate::client::connection::PinnedConnection;
use crate::durability::{self, Durability};
use crate::failure::StoreFailure;
use crate::loss_detector::{CanaryBaseline, CanaryExpectation, LossDetector};
use crate::record;
use crate::router::{ConnectionKind, ConnectionPair};
use crate::script::ScriptRef;

/// The commands for one server and connection.
pub(super) struct ServerPipeline {
    pub(super) connections: Arc<ConnectionPair>,
    pub(super) connection_kind: ConnectionKind,
    /// Whether `ASKING` precedes each command, because its slot is migrating to this server.
    pub(super) asking: bool,
    pub(super) commands: Vec<BatchCommand>,
}

/// The replies of one server.
pub(super) struct PipelineReplies {
    /// One reply for each command.
    pub(super) replies: Vec<Value>,
    /// Whether enough replicas acknowledged the writes.
    pub(super) replicated: Result<(), StoreFailure>,
    /// Whether the server still has all earlier writes.
    pub(super) intact: Result<(), StoreFailure>,
}

impl OperationBatch<'_> {
    /// Sends one pipeline and reads a reply to each of its commands.
    pub(super) async fn send(
        &self,
        server_pipeline: &ServerPipeline,
    ) -> Result<PipelineReplies, StoreFailure> {
        let mut pipeline = Pipeline::with_capacity(server_pipeline.commands.len() + 2);
        let mut source_calls = 0;
        for command in &server_pipeline.commands {
            if server_pipeline.asking {
                pipeline.cmd("ASKING");
            }
            // The first EVAL loads the script; the others can use its digest.
            source_calls += u32::from(matches!(
                command,
                BatchCommand::Script(ScriptRef::Source, _)
            ));
            match command {
                BatchCommand::Script(ScriptRef::Source, call) if source_calls > 1 => {
                    pipeline.add_command(self.script_call(ScriptRef::Digest, call))
                }
                command => pipeline.add_command(self.command(command)),
            };
        }
        let connection = server_pipeline
            .connections
            .get(server_pipeline.connection_kind)
            .pin()
            .await?;
        let canary = self
            .check_before_claims(&connection, server_pipeline)
            .await?;
        // The canary's count is the last write of the pipeline: a server that has it has the claims
        // before it.
        for command in canary
            .iter()
            .flat_map(|(_, expected)| canary::after_claims(&expected.keys, expected.minimum))
        {
            pipeline.add_command(command);
        }
        // `WAIT` is last, so that it covers every write of the pipeline.
        let replicas = match (server_pipeline.connection_kind, self.durability) {
            (ConnectionKind::Claims, Durability::Replicas { count, timeout }) => {
                pipeline.cmd("WAIT").arg(count).arg(record::expiry(timeout));
                Some(count)
            }
            _ => None,
        };
        let mut replies = connection.send(&pipeline).await?;
        let mut pop_reply = || replies.pop().unwrap_or(Value::Nil);
        let replicated = replicas.map_or(Ok(()), |count| {
            durability::check_replicas(count, &pop_reply())
        });
        let intact = match canary {
            Some((detector, expected)) => {
                let (count, generation) = (pop_reply(), pop_reply());
                let baseline = if replicated.is_ok() {
                    CanaryBaseline::Full
                } else {
                    CanaryBaseline::Unchanged
                };
                self.check_after_claims(
                    server_pipeline,
                    detector,
                    expected,
                    canary::read(generation, &count),
                    baseline,
                )
            }
            None => Ok(()),
        };
        if server_pipeline.asking {
            // Removes the reply to each `ASKING`.
            let mut nth = 0;
            replies.retain(|_| {
                nth += 1;
                nth % 2 == 0
            });
        }
        Ok(PipelineReplies {
            replies,
            replicated,
            intact,
        })
    }

    /// The terms of the at-most-once claims in a pipeline.
    fn at_most_once_terms<'a>(
        &'a self,
        server_pipeline: &'a ServerPipeline,
    ) -> impl Iterator<Item = &'a Terms> {
        let operations = server_pipeline
            .commands
            .iter()
            .flat_map(BatchCommand::operations)
            .map(|index| &self.operations[*index]);
        operations
            .filter(|operation| is_at_most_once_claim(operation))
            .map(|operation| &operation.terms)
    }

    /// Checks the server after a reconnect, before at-most-once claims are sent to it. Returns the
    /// canary to send after them, if the server has one.
    async fn check_before_claims(
        &self,
        connection: &PinnedConnection<'_>,
        server_pipeline: &ServerPipeline,
    ) -> Result<Option<(&LossDetector, CanaryExpectation)>, StoreFailure> {
        let Some(detector) = self
            .detector
            .filter(|_| self.at_most_once_terms(server_pipeline).next().is_some())
        else {
            return Ok(None);
        };
        detector
            .ensure_checked(
                connection,
                self.router,
                &server_pipeline.connections,
                self.prefix,
                self.durability,
            )
            .await?;
        if let Some(refusal) = self
            .at_most_once_terms(server_pipeline)
            .find_map(|terms| detector.claim_refusal(terms))
        {
            return Err(refusal);
        }
        let keys = detector
            .canary_keys(self.router, &server_pipeline.connections, self.prefix)
            .await?;
        Ok(keys.map(|keys| (detector, detector.expectation(keys))))
    }

    /// Evaluates the canary's replies after the claims.
    ///
    /// # Errors
    /// Why no at-most-once claim of the pipeline is granted.
    fn check_after_claims(
        &self,
        server_pipeline: &ServerPipeline,
        detector: &LossDetector,
        expected: CanaryExpectation,
        read: Result<Canary, CanaryError>,
        baseline: CanaryBaseline,
    ) -> Result<(), StoreFailure> {
        match read {
            Ok(canary) => detector.record_reply(expected, canary, baseline),
            // Its slot is migrating: the next check finds the canary on its new server.
            Err(CanaryError::Moved { migrating, .. }) => self.router.invalidate_slot(migrating),
            Err(CanaryError::Failed(failure)) => return Err(failure.possibly_applied()),
        }
        match self
            .at_most_once_terms(server_pipeline)
            .find_map(|terms| detector.claim_refusal(terms))
        {
            Some(refusal) => Err(refusal.possibly_applied()),
            None => Ok(()),
        }
    }
}
