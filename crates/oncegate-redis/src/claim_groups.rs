//! Claims of several ids by one `MSETEX … NX` (Redis 8.4, Valkey 9.1), which sets all keys or none.
//!
//! Nearly every claim finds no marker, and then one command for many ids takes half of the server's
//! CPU time. If a key exists, the group is refused, and each of its ids is claimed by a command of
//! its own, after another round trip. So the size of groups follows the share of ids that had a
//! marker.

use std::iter;
use std::sync::atomic::{AtomicU32, Ordering};

use redis::Value;

use crate::conditional::{CommandSupport, SharedSupport};

/// The largest group: it costs 2 % less than one of 16.
const LARGEST: f32 = 64.0;

/// The smallest group by the share of duplicates. Where smaller ones would be best, most batches of 64
/// would wait for a second round trip, because one of their groups is refused.
const SMALLEST: f32 = 8.0;

/// The number of claims after which an observation has lost two thirds of its weight.
const AVERAGED: f32 = 4096.0;

/// The share of claims that found a marker, as a moving average.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DuplicateShare(f32);

impl DuplicateShare {
    /// The share after this many claims more, all with the same result: 0 if they found no marker, 1
    /// if they found one.
    fn after(self, claims: usize, found: f32) -> Self {
        Self(self.0 + (found - self.0) * (claims as f32 / AVERAGED).min(1.0))
    }

    /// The number of claims of a group; 1 if each is sent singly. In units of a single claim's CPU
    /// time, a group of `n` costs 0.43 / n more per claim than a large one, and the refusals of a share
    /// `p` of duplicates cost 0.6 * n * p: together the least at `n² = 0.7 / p`. Measured in
    /// `docs/evidence/servers.md`.
    fn group_size(self) -> usize {
        let size = (0.7 / self.0).sqrt().min(LARGEST);
        if size < SMALLEST { 1 } else { size as usize }
    }
}

/// How the claims on one connection are grouped.
#[derive(Default)]
pub(crate) struct ClaimGroups {
    support: SharedSupport,
    /// The bits of a [`DuplicateShare`]. An update that is lost to a concurrent one does no harm.
    duplicates: AtomicU32,
}

impl ClaimGroups {
    /// The connection is new, perhaps to another server.
    pub(crate) fn reset(&self) {
        self.support.reset();
    }

    /// Splits claims, at least one, into the groups to send; a group of one is a single claim. While it
    /// is unknown whether the server has the command, only the first group has more than one.
    pub(crate) fn split<'a>(&self, claims: &'a [usize]) -> impl Iterator<Item = &'a [usize]> {
        let support = self.support.get();
        // A build that measures the script measures it beside single claims.
        let size = if support == CommandSupport::Unavailable || cfg!(oncegate_script_only) {
            1
        } else {
            self.share().group_size()
        };
        let (first, others) = claims.split_at(size.min(claims.len()));
        let next = if support == CommandSupport::Available {
            size
        } else {
            1
        };
        iter::once(first).chain(others.chunks(next))
    }

    /// Records the reply to a group of this many claims.
    pub(crate) fn record_group(&self, claims: usize, reply: &Value) {
        self.support.record_reply(reply);
        if *reply == Value::Int(1) {
            self.record(claims, 0.0);
        }
    }

    /// Records the reply to a single claim.
    pub(crate) fn record_single(&self, reply: &Value) {
        match reply {
            Value::Nil => self.record(1, 0.0),
            Value::BulkString(_) => self.record(1, 1.0),
            _ => {}
        }
    }

    fn record(&self, claims: usize, found: f32) {
        let DuplicateShare(share) = self.share().after(claims, found);
        self.duplicates.store(share.to_bits(), Ordering::Relaxed);
    }

    fn share(&self) -> DuplicateShare {
        DuplicateShare(f32::from_bits(self.duplicates.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_groups_follows_the_share_of_duplicates() {
        let sizes = [0.0, 0.0001, 0.001, 0.01, 0.02, 0.1, 1.0]
            .map(|share| DuplicateShare(share).group_size());
        assert_eq!(sizes, [64, 64, 26, 8, 1, 1, 1]);
    }

    #[test]
    fn a_batch_of_duplicates_ends_groups_and_many_new_ids_restore_them() {
        let none = DuplicateShare::default();
        assert_eq!(none.after(1, 1.0).group_size(), 53);
        let burst = (0..64).fold(none, |share, _| share.after(1, 1.0));
        assert_eq!(burst.group_size(), 1);
        let later = (0..6000).fold(burst, |share, _| share.after(1, 0.0));
        assert!((8..64).contains(&later.group_size()), "{later:?}");
        assert_eq!(later.after(1_000_000, 0.0), none);
    }

    #[test]
    fn the_first_group_finds_out_whether_the_server_has_the_command() {
        let groups = ClaimGroups::default();
        let claims: Vec<usize> = (0..150).collect();
        let sizes = |groups: &ClaimGroups| -> Vec<usize> {
            groups.split(&claims).map(<[usize]>::len).collect()
        };
        let mut first = vec![1; 87];
        first[0] = 64;
        assert_eq!(sizes(&groups), first);
        // A refusal, too, shows that the server has it; a failure of another kind does not.
        groups.record_group(64, &Value::Int(0));
        assert_eq!(sizes(&groups), [64, 64, 22]);
        groups.reset();
        assert_eq!(sizes(&groups), first);
        let error = |line: &str| {
            redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("a reply")
        };
        groups.record_group(64, &error("OOM command not allowed"));
        assert_eq!(sizes(&groups), first);
        groups.record_group(64, &error("ERR unknown command 'MSETEX'"));
        assert_eq!(sizes(&groups), [1; 150]);
        groups.reset();
        groups.record_group(64, &Value::Int(1));
        assert_eq!(sizes(&groups), [64, 64, 22]);
        assert_eq!(groups.split(&claims[..1]).count(), 1);
        (0..60).for_each(|_| groups.record_single(&Value::BulkString(b"1".to_vec())));
        assert_eq!(sizes(&groups), [1; 150]);
    }
}
