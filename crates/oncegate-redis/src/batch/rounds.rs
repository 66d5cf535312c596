//! The rounds of a batch: operations that are sent together. The next round starts after the replies
//! to the previous one.

use std::collections::HashMap;

use oncegate_core::Key;
use oncegate_core::marker::{Operation, OperationKind};

use crate::script;

/// Operations that are sent together.
pub(super) struct OperationRound {
    /// Their indices.
    pub(super) operations: Vec<usize>,
    /// Whether several of them are on one key.
    pub(super) has_repeated_key: bool,
}

/// Splits the operations into rounds so that operations on one key keep their order. Claims on the
/// same terms may share a round, since a pipeline and a script call run in order; any other
/// operation on a key that occurred before goes to the next round.
pub(super) fn rounds(operations: &[Operation]) -> Vec<OperationRound> {
    if operations.len() == 1 {
        return vec![OperationRound {
            operations: vec![0],
            has_repeated_key: false,
        }];
    }
    let mut last: HashMap<&Key, (usize, &Operation)> = HashMap::with_capacity(operations.len());
    let mut rounds: Vec<OperationRound> = Vec::with_capacity(1);
    for (index, operation) in operations.iter().enumerate() {
        let mut repeated = false;
        let round = match last.get(&operation.key) {
            None => 0,
            Some((round, before))
                if operation.kind == OperationKind::Claim
                    && script::can_share_call(before, operation) =>
            {
                repeated = true;
                *round
            }
            Some((round, _)) => round + 1,
        };
        last.insert(&operation.key, (round, operation));
        if round == rounds.len() {
            rounds.push(OperationRound {
                operations: Vec::with_capacity(operations.len()),
                has_repeated_key: false,
            });
        }
        rounds[round].operations.push(index);
        rounds[round].has_repeated_key |= repeated;
    }
    rounds
}
