//! A builder of ledgers.

use crate::check::{CheckRules, Checked, Invariant, check};
use crate::ledger::{
    FaultEdge, HandlerEnd, Ledger, Record, SentSignal, SettlementKind, StoreOperation, Unique, What,
};

/// A ledger under construction; times are in milliseconds.
#[derive(Default)]
pub(super) struct LedgerBuilder(pub(super) Vec<Record>);

impl LedgerBuilder {
    pub(super) fn at(mut self, ms: u64, by: &str, what: What) -> Self {
        self.0.push(Record {
            at: ms * 1_000,
            wall: 0,
            by: by.into(),
            what,
        });
        self
    }

    pub(super) fn sent(self, id: &str) -> Self {
        self.at(0, "harness", What::Attempted { id: id.into() }).at(
            1,
            "harness",
            What::Confirmed { id: id.into() },
        )
    }

    pub(super) fn start(self, ms: u64, by: &str, id: &str, attempt: u32) -> Self {
        self.at(
            ms,
            by,
            What::Started {
                id: id.into(),
                attempt,
                run: 1,
            },
        )
    }

    pub(super) fn end(self, ms: u64, by: &str, id: &str, how: HandlerEnd) -> Self {
        self.at(
            ms,
            by,
            What::Ended {
                id: id.into(),
                run: 1,
                how,
            },
        )
    }

    pub(super) fn effect(
        self,
        ms: u64,
        consumer: &str,
        id: &str,
        attempt: u32,
        unique: Unique,
    ) -> Self {
        self.at(
            ms,
            "sink",
            What::Effect {
                id: id.into(),
                consumer: consumer.into(),
                attempt,
                unique,
            },
        )
    }

    pub(super) fn answer(
        self,
        ms: u64,
        by: &str,
        id: &str,
        operation: StoreOperation,
        verdict: &str,
    ) -> Self {
        self.at(
            ms,
            by,
            What::Answered {
                id: id.into(),
                operation,
                verdict: verdict.into(),
            },
        )
    }

    pub(super) fn accept(self, ms: u64, by: &str, id: &str, why: &str) -> Self {
        let settled = What::Settled {
            id: id.into(),
            position: "0/1".into(),
            how: SettlementKind::Accepted,
            why: why.into(),
        };
        self.at(
            ms,
            by,
            What::Received {
                id: id.into(),
                position: "0/1".into(),
            },
        )
        .at(ms, by, settled)
    }

    pub(super) fn fault(self, kind: &str, target: Option<&str>, from: u64, to: u64) -> Self {
        let number = self.0.len() as u64;
        let fault = |edge| What::Fault {
            number,
            kind: kind.into(),
            target: target.map(str::to_owned),
            edge,
        };
        self.at(from, "harness", fault(FaultEdge::Begin))
            .at(to, "harness", fault(FaultEdge::End))
    }

    pub(super) fn process_ended(
        self,
        ms: u64,
        consumer: &str,
        after: SentSignal,
        status: &str,
        took_ms: u64,
    ) -> Self {
        self.at(
            ms,
            "harness",
            What::ProcessEnded {
                consumer: consumer.into(),
                after,
                status: status.into(),
                took_ms,
            },
        )
    }

    /// A message that a consumer receives, handles and settles without a fault.
    pub(super) fn handled(self, ms: u64, by: &str, id: &str) -> Self {
        self.answer(ms, by, id, StoreOperation::Claim, "granted 1")
            .start(ms + 1, by, id, 1)
            .effect(ms + 5, by, id, 1, Unique::First)
            .end(ms + 9, by, id, HandlerEnd::Ok)
            .answer(ms + 10, by, id, StoreOperation::Complete, "done")
            .accept(ms + 11, by, id, "completed")
    }

    pub(super) fn check(self, rules: &CheckRules) -> Checked {
        check(&Ledger::of(self.0), rules)
    }

    /// The violations, by invariant and id.
    pub(super) fn violations(self, rules: &CheckRules) -> Vec<(Invariant, Option<String>)> {
        self.check(rules)
            .violations
            .into_iter()
            .map(|violation| (violation.invariant, violation.id))
            .collect()
    }
}
