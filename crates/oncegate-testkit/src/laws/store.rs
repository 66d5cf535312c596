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
mod results;
mod windows;

pub use batches::*;
pub use claims::*;
pub use concurrency::*;
pub use histories::*;
pub use holders::*;
pub use ids::*;
pub use leases::*;
pub use linearizable::*;
pub use results::*;
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
            a_claim_takes_over_a_doubt_without_reconciler
            a_doubt_that_another_reconciles_is_busy
            a_rejected_id_stays_rejected
            a_done_id_is_a_duplicate
            another_body_waits_for_the_first
            another_body_conflicts_with_an_in_doubt_rejected_or_done_id
            a_missing_fingerprint_matches_any_body
            all_fingerprints_are_distinguished
            the_holder_renews
            the_holder_completes
            any_token_completes_a_doubt
            completing_again_is_done
            completing_a_lost_marker_reports_it
            clearing_a_first_attempt_deletes_it
            clearing_keeps_the_attempt
            withdrawing_keeps_the_attempt_budget
            an_unknown_outcome_is_not_cleared_in_at_most_once
            clearing_a_free_marker_changes_nothing
            a_rejection_is_kept_in_at_most_once
            rejecting_clears_in_effectively_once
            the_holder_marks_the_id_in_doubt
            a_free_marker_can_be_doubted
            a_doubt_is_resolved_by_its_finding
            sending_back_requires_the_expected_marker
            forgetting_requires_the_expected_done_marker
            an_unknown_outcome_stays_unknown
            another_token_or_attempt_changes_nothing
            bare_sets_and_deletes_a_done_marker
            a_lease_ends_after_its_duration
            a_renewal_restarts_the_lease
            an_operation_without_effect_does_not_extend_a_lease
            the_holders_lease_decides
            a_takeover_has_the_lease_of_the_new_holder
            a_marker_expires_after_its_window
            an_operation_without_effect_does_not_extend_a_window
            every_write_restarts_the_window
            the_holders_window_decides
            an_unresolved_at_most_once_marker_outlives_the_window
            a_window_may_be_long
            a_result_is_stored_with_its_completion
            the_first_result_is_kept
            a_lost_completion_stores_no_result
            concurrent_completions_agree_on_one_result
            a_forgotten_id_has_no_result
            a_result_expires_with_its_marker
            random_results_match_the_memory_store
            ids_of_every_kind_stay_distinct
            scopes_stay_distinct
            a_batch_is_answered_in_order
            an_invalid_operation_does_not_affect_the_others
            operations_on_one_key_in_a_batch_keep_their_order
            a_partly_applied_batch_can_be_repeated
            an_operation_can_be_repeated_after_a_lost_reply
            an_operation_can_be_repeated_after_a_dropped_apply
            of_a_hundred_simultaneous_claims_one_is_granted
            of_a_hundred_simultaneous_takeovers_one_wins
            of_a_hundred_simultaneous_claims_of_a_doubt_one_reconciles
            the_handle_for_renewals_is_the_same_store
            random_histories_match_the_reference
            concurrent_operations_are_linearizable
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
            include_str!("store/results.rs"),
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
