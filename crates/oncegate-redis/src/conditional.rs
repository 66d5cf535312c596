//! Commands that change a key only if it has an expected value: `SET … IFEQ` (Valkey 8.1, Redis 8.4),
//! `DELIFEQ` (Valkey 9.0) and `DELEX … IFEQ` (Redis 8.4).
//!
//! Nearly every completion finds its own claim unchanged. Then one of these commands does the same
//! as `apply.lua` at a lower cost. If the value differs, or the server does not have the command,
//! `apply.lua` runs. The reply to the first command on each connection shows whether the server has
//! it.

use std::sync::atomic::{AtomicU8, Ordering};

use oncegate_core::marker::{Effect, Guarantee, Operation, OperationKind};
use redis::{Cmd, Value};

use crate::record;

/// A conditional command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConditionalCommand {
    SetIfEqual,
    DelIfEq,
    DelEx,
}

/// Whether the server has one command, as far as its replies have shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandSupport {
    /// No reply has shown it yet; one command is sent to find out.
    Untested = 0,
    Available = 1,
    /// The server does not have it, or the user has no right to it.
    Unavailable = 2,
}

/// The [`CommandSupport`] of the server of a connection, for all callers that share it.
#[derive(Default)]
pub(crate) struct SharedSupport(AtomicU8);

impl SharedSupport {
    pub(crate) fn get(&self) -> CommandSupport {
        match self.0.load(Ordering::Relaxed) {
            0 => CommandSupport::Untested,
            1 => CommandSupport::Available,
            _ => CommandSupport::Unavailable,
        }
    }

    fn set(&self, support: CommandSupport) {
        self.0.store(support as u8, Ordering::Relaxed);
    }

    pub(crate) fn reset(&self) {
        self.set(CommandSupport::Untested);
    }

    /// Records whether the server has the command, if the reply to it shows that.
    pub(crate) fn record_reply(&self, reply: &Value) {
        match reply {
            Value::ServerError(error) if is_unavailable(error.code()) => {
                self.set(CommandSupport::Unavailable);
            }
            Value::ServerError(_) => {}
            _ => self.set(CommandSupport::Available),
        }
    }
}

/// Which conditional commands the server of a connection has, as far as its replies have shown.
#[derive(Default)]
pub(crate) struct ConditionalSupport([SharedSupport; 3]);

/// How the operations of one kind in a batch are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendPlan {
    /// All by the script.
    Script,
    /// One by this command, to find out whether the server has it; the others by the script.
    One(ConditionalCommand),
    /// All by this command.
    All(ConditionalCommand),
}

impl ConditionalSupport {
    /// Resets the results: the connection is new, perhaps to another server.
    pub(crate) fn reset(&self) {
        self.0.iter().for_each(SharedSupport::reset);
    }

    /// How operations like this one are sent.
    pub(crate) fn plan_for(&self, operation: &Operation) -> SendPlan {
        if cfg!(oncegate_script_only) {
            return SendPlan::Script; // a build that measures the script: `examples/server_cpu.rs`
        }
        let candidates: &[ConditionalCommand] = match (operation.kind, operation.terms.guarantee) {
            (OperationKind::Complete, _) => &[ConditionalCommand::SetIfEqual],
            // After a first attempt without effect there is nothing to keep: the marker is deleted. Later
            // attempts are counted in it, and with `AtMostOnce` a rejected marker is kept, by the script.
            (OperationKind::Clear(Effect::Nothing), _)
            | (OperationKind::Reject(Effect::Nothing), Guarantee::EffectivelyOnce)
                if operation.attempt == 1 =>
            {
                &[ConditionalCommand::DelIfEq, ConditionalCommand::DelEx]
            }
            _ => &[],
        };
        for &candidate in candidates {
            match self.0[candidate as usize].get() {
                CommandSupport::Available => return SendPlan::All(candidate),
                CommandSupport::Untested => return SendPlan::One(candidate),
                CommandSupport::Unavailable => {}
            }
        }
        SendPlan::Script
    }

    /// Records whether the server has the command, if the reply shows it.
    pub(crate) fn record_reply(&self, command: ConditionalCommand, reply: &Value) {
        self.0[command as usize].record_reply(reply);
    }
}

/// Whether an error with this code may mean that the server does not have the command (`ERR`; the
/// texts of servers and proxies differ), or that the user may not call it. Other failures have
/// other codes.
fn is_unavailable(code: &str) -> bool {
    matches!(code, "ERR" | "NOPERM")
}

/// Whether the script has to run after this reply: the key has another value, the command is not
/// available, or the key has another type, which the script reports.
pub(crate) fn needs_script(command: ConditionalCommand, reply: &Value) -> bool {
    match (command, reply) {
        (ConditionalCommand::SetIfEqual, Value::Nil)
        | (ConditionalCommand::DelIfEq | ConditionalCommand::DelEx, Value::Int(0)) => true,
        (_, Value::ServerError(error)) => {
            error.code() == "WRONGTYPE" || is_unavailable(error.code())
        }
        _ => false,
    }
}

/// Builds the command. The expected value is the marker of a claim without earlier crashes, unknown
/// effects or redrives; the script handles any other marker.
pub(crate) fn command(command: ConditionalCommand, key: &[u8], operation: &Operation) -> Cmd {
    let expected = record::first_claim(operation, operation.attempt);
    let mut sent = Cmd::with_capacity(7, 256);
    match command {
        ConditionalCommand::SetIfEqual => sent
            .arg("SET")
            .arg(key)
            .arg(record::done(operation.terms.fingerprint))
            .arg("IFEQ")
            .arg(expected)
            .arg("PX")
            .arg(record::expiry(operation.terms.window)),
        ConditionalCommand::DelIfEq => sent.arg("DELIFEQ").arg(key).arg(expected),
        ConditionalCommand::DelEx => sent.arg("DELEX").arg(key).arg("IFEQ").arg(expected),
    };
    sent
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncegate_core::marker::{Terms, Token};
    use oncegate_core::{Key, MessageId};

    use super::*;

    fn operation(kind: OperationKind, attempt: u32, guarantee: Guarantee) -> Operation {
        let second = Duration::from_secs(1);
        Operation {
            key: Key::new(&MessageId::new("a").expect("an id")),
            kind,
            token: Token(7),
            attempt,
            terms: Terms {
                guarantee,
                lease: 30 * second,
                window: 600 * second,
                fingerprint: None,
            },
        }
    }

    fn error(line: &str) -> Value {
        let parsed = redis::parse_redis_value(format!("-{line}\r\n").as_bytes());
        let value = parsed.expect("a reply");
        assert!(matches!(value, Value::ServerError(_)), "{value:?}");
        value
    }

    const UNKNOWN: [&str; 4] = [
        "ERR syntax error",
        "ERR wrong number of arguments for 'set' command",
        "ERR unknown command 'DELIFEQ', with args beginning with: 'a' 'b' ",
        "NOPERM User some has no permissions to run the 'delifeq' command",
    ];

    #[test]
    fn one_command_finds_out_what_the_server_has() {
        let complete = operation(OperationKind::Complete, 1, Guarantee::AtMostOnce);
        let support = ConditionalSupport::default();
        assert_eq!(
            support.plan_for(&complete),
            SendPlan::One(ConditionalCommand::SetIfEqual)
        );
        // This error does not show whether the server has the command.
        support.record_reply(
            ConditionalCommand::SetIfEqual,
            &error("OOM command not allowed"),
        );
        assert_eq!(
            support.plan_for(&complete),
            SendPlan::One(ConditionalCommand::SetIfEqual)
        );
        support.record_reply(ConditionalCommand::SetIfEqual, &Value::Nil);
        assert_eq!(
            support.plan_for(&complete),
            SendPlan::All(ConditionalCommand::SetIfEqual)
        );
        support.reset();
        assert_eq!(
            support.plan_for(&complete),
            SendPlan::One(ConditionalCommand::SetIfEqual)
        );
        for line in UNKNOWN {
            support.reset();
            support.record_reply(ConditionalCommand::SetIfEqual, &error(line));
            assert_eq!(support.plan_for(&complete), SendPlan::Script, "{line}");
        }
    }

    #[test]
    fn the_command_of_valkey_is_tried_before_that_of_redis() {
        let clear = operation(
            OperationKind::Clear(Effect::Nothing),
            1,
            Guarantee::EffectivelyOnce,
        );
        let support = ConditionalSupport::default();
        assert_eq!(
            support.plan_for(&clear),
            SendPlan::One(ConditionalCommand::DelIfEq)
        );
        support.record_reply(ConditionalCommand::DelIfEq, &error(UNKNOWN[2]));
        assert_eq!(
            support.plan_for(&clear),
            SendPlan::One(ConditionalCommand::DelEx)
        );
        support.record_reply(ConditionalCommand::DelEx, &Value::Int(0));
        assert_eq!(
            support.plan_for(&clear),
            SendPlan::All(ConditionalCommand::DelEx)
        );
    }

    #[test]
    fn only_the_marker_of_a_first_attempt_is_deleted_without_the_script() {
        let support = ConditionalSupport::default();
        let by_script = [
            (
                OperationKind::Clear(Effect::Nothing),
                2,
                Guarantee::EffectivelyOnce,
            ),
            (
                OperationKind::Clear(Effect::Unknown),
                1,
                Guarantee::EffectivelyOnce,
            ),
            (
                OperationKind::Reject(Effect::Nothing),
                1,
                Guarantee::AtMostOnce,
            ),
            (
                OperationKind::Reject(Effect::Unknown),
                1,
                Guarantee::EffectivelyOnce,
            ),
            (OperationKind::Withdraw, 1, Guarantee::EffectivelyOnce),
            (OperationKind::Renew, 1, Guarantee::EffectivelyOnce),
            (OperationKind::Doubt, 1, Guarantee::AtMostOnce),
        ];
        for (kind, attempt, guarantee) in by_script {
            let operation = operation(kind, attempt, guarantee);
            assert_eq!(
                support.plan_for(&operation),
                SendPlan::Script,
                "{operation:?}"
            );
        }
    }

    #[test]
    fn the_script_decides_about_any_other_value() {
        let (set, delete) = (ConditionalCommand::SetIfEqual, ConditionalCommand::DelIfEq);
        assert!(needs_script(set, &Value::Nil) && !needs_script(set, &Value::Okay));
        assert!(needs_script(delete, &Value::Int(0)) && !needs_script(delete, &Value::Int(1)));
        assert!(needs_script(
            set,
            &error("WRONGTYPE Operation against a key")
        ));
        assert!(
            UNKNOWN
                .iter()
                .all(|line| needs_script(delete, &error(line)))
        );
        assert!(!needs_script(set, &error("READONLY You can't write")));
    }
}
