//! The rounds of a batch: operations that are sent together. The next round starts after the replies
//! to the previous one.

use std::collections::HashMap;

use oncegate_core::Key;
use oncegate_core::marker::{Operation, OperationKind};

use crate::script;

/// Splits the operations into rounds so that operations on one key keep their order. Claims on the
/// same terms may share a round, since a pipeline and a script call run in order; any other
/// operation on a key that occurred before goes to the next round.
///
/// Returns the indices of the operations of each round, in `operations`.
pub(super) fn rounds(operations: &[Operation]) -> Vec<Vec<usize>> {
    if operations.len() == 1 {
        return vec![vec![0]];
    }
    let mut last: HashMap<&Key, (usize, &Operation)> = HashMap::with_capacity(operations.len());
    let mut rounds: Vec<Vec<usize>> = Vec::with_capacity(1);
    for (index, operation) in operations.iter().enumerate() {
        let round = match last.get(&operation.key) {
            None => 0,
            Some((round, before))
                if operation.kind == OperationKind::Claim
                    && script::can_share_call(before, operation) =>
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
