//! The laws of a [`Store`](oncegate_core::Store): each is a function that panics if the given store
//! violates the law.
//!
//! The store must be empty. [`store_laws!`](crate::store_laws) makes a test of each.

mod batches;
mod claims;
mod concurrency;
mod histories;
mod holders;
mod ids;
mod leases;
mod linearizable;
mod windows;

pub use batches::*;
pub use claims::*;
pub use concurrency::*;
pub use histories::*;
pub use holders::*;
pub use ids::*;
pub use leases::*;
pub use linearizable::*;
pub use windows::*;

/// Calls a macro with the given arguments and the name of each law.
#[doc(hidden)]
#[macro_export]
macro_rules! __each_store_law {
    ($callback:ident, $($with:tt)*) => {
        $crate::$callback! {
            $($with)*;
            a_new_id_is_granted
            a_cleared_id_is_granted_its_next_attempt
            an_unknown_outcome_is_in_doubt_in_at_most_once
            a_repeated_claim_is_the_same_grant
            a_live_lease_is_busy
            an_ended_lease_is_taken_over_in_effectively_once
            an_ended_lease_is_in_doubt_in_at_most_once
            a_repeated_claim_is_the_same_doubt
            a_doubt_goes_to_who_claims_it
            a_doubt_that_another_reconciles_is_busy
            a_rejected_id_stays_rejected
            a_done_id_is_a_duplicate
            another_body_waits_for_the_first
            another_body_conflicts_with_what_was_first
            a_missing_fingerprint_matches_any_body
            every_fingerprint_is_told_from_every_other
            the_holder_renews
            the_holder_completes
            a_doubt_is_completed_by_whoever
            completing_again_is_done
            completing_a_lost_marker_says_so
            clearing_a_first_attempt_deletes_it
            clearing_keeps_the_attempt
            withdrawing_spends_nothing
            an_unknown_outcome_is_not_cleared_in_at_most_once
            clearing_what_is_free_changes_nothing
            rejecting_is_remembered_in_at_most_once
            rejecting_clears_in_effectively_once
            the_holder_doubts
            what_is_free_can_be_doubted
            a_doubt_is_resolved_as_it_was_seen
            a_person_sends_back_what_was_seen
            a_person_forgets_what_is_done
            what_is_unknown_stays_unknown
            another_permit_changes_nothing
            bare_is_the_literal_gate
            a_lease_ends_when_it_was_said
            a_renewal_starts_the_lease_anew
            asking_in_vain_does_not_lengthen_a_lease
            the_holders_lease_decides
            who_takes_over_holds_for_their_own_lease
            what_has_the_window_is_forgotten_after_it
            asking_in_vain_does_not_lengthen_a_window
            every_write_starts_the_window_anew
            the_holders_window_decides
            what_is_unresolved_at_most_once_outlives_the_window
            a_window_may_be_long
            ids_of_every_kind_stay_distinct
            scopes_stay_distinct
            a_batch_is_answered_in_order
            one_bad_item_spoils_no_other
            the_same_key_twice_in_a_batch_keeps_its_order
            half_a_batch_and_its_reply_lost_is_repaired_by_asking_again
            a_lost_reply_is_repaired_by_asking_again
            a_dropped_apply_is_repaired_by_asking_again
            of_a_hundred_simultaneous_claims_one_is_granted
            of_a_hundred_simultaneous_takeovers_one_wins
            of_a_hundred_who_find_a_doubt_one_reconciles
            the_handle_for_renewals_is_the_same_store
            random_histories_go_as_the_reference_says
            what_concurrent_clients_saw_has_one_order
        }
    };
}

#[cfg(test)]
mod tests {
    /// A law that is not in the list would never run.
    #[test]
    fn every_law_is_in_the_list() {
        let files = [
            include_str!("store/batches.rs"),
            include_str!("store/claims.rs"),
            include_str!("store/concurrency.rs"),
            include_str!("store/histories.rs"),
            include_str!("store/holders.rs"),
            include_str!("store/ids.rs"),
            include_str!("store/leases.rs"),
            include_str!("store/linearizable.rs"),
            include_str!("store/windows.rs"),
        ];
        let lines = files.iter().flat_map(|file| file.lines());
        let written: Vec<&str> = lines
            .filter_map(|line| line.strip_prefix("pub async fn ")?.split('(').next())
            .collect();
        let mut listed: Vec<&str> = crate::laws::STORE_LAWS
            .iter()
            .map(|(name, _)| *name)
            .collect();
        assert!(
            written.iter().all(|law| listed.contains(law)),
            "{written:?} are not all in {listed:?}"
        );
        let all = listed.len();
        listed.sort_unstable();
        listed.dedup();
        assert_eq!(
            (listed.len(), all),
            (written.len(), written.len()),
            "each law is listed once"
        );
    }
}
