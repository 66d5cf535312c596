//! Laws of acceptance and of closed sources.

use std::time::Duration;

use oncegate_core::Source;

use super::TestQueue;
use super::client::*;

/// `settle` empties the list that it receives, and does nothing with an empty list.
pub async fn settling_empties_the_list(queue: impl TestQueue) {
    publish_numbers(&queue, 2).await;
    let mut client = SourceClient::of(&queue).await;
    client.settle([]).await;
    let both = client.receive(2).await;
    client.accept(both).await;
    client.settle([]).await;
    client.close().await;
}

/// An accepted delivery is not redelivered, whatever the order and the number of calls.
pub async fn an_accepted_delivery_is_not_redelivered(queue: impl TestQueue) {
    publish_numbers(&queue, 40).await;
    let mut client = SourceClient::of(&queue).await;
    let mut all = client.receive(40).await;
    let later = all.split_off(20);
    client.accept(later.into_iter().rev()).await;
    for delivery in all.into_iter().rev() {
        client.accept([delivery]).await;
    }
    client.close().await;
    let mut next = SourceClient::of(&queue).await;
    next.expect_no_delivery(Duration::from_secs(2), "all were accepted")
        .await;
    next.close().await;
}

/// Unsettled deliveries are redelivered after `close`, which does not count as a failure.
pub async fn unsettled_deliveries_are_redelivered_after_a_close(queue: impl TestQueue) {
    publish_numbers(&queue, 5).await;
    let mut client = SourceClient::of(&queue).await;
    let unsettled = client.receive(5).await;
    client.close_unsettled().await;
    drop(unsettled);
    let mut next = SourceClient::of(&queue).await;
    let again = next.receive(5).await;
    assert_eq!(bodies(&again), numbers(0..5));
    assert!(
        again.iter().all(|it| it.failures == 0),
        "a close does not count as a failure"
    );
    next.accept(again).await;
    next.close().await;
}

/// Unsettled deliveries are redelivered after the source is dropped, as in a crash of its process.
pub async fn unsettled_deliveries_are_redelivered_after_a_crash(queue: impl TestQueue) {
    publish_numbers(&queue, 5).await;
    let mut client = SourceClient::of(&queue).await;
    let unsettled = client.receive(5).await;
    drop(client);
    drop(unsettled);
    let mut next = SourceClient::of(&queue).await;
    let again = next.receive(5).await;
    let mut received = bodies(&again);
    received.sort();
    assert_eq!(received, numbers(0..5));
    next.accept(again).await;
    next.close().await;
}

/// Accepting a later delivery does not accept an earlier, unsettled one: the earlier one is
/// redelivered.
pub async fn accepting_a_later_delivery_does_not_accept_an_earlier_one(queue: impl TestQueue) {
    publish_numbers(&queue, 10).await;
    let mut client = SourceClient::of(&queue).await;
    let mut all = client.receive(10).await;
    let unsettled = all.remove(3);
    client.accept(all).await;
    client.close_unsettled().await;
    drop(unsettled);
    let mut next = SourceClient::of(&queue).await;
    let mut received = Vec::new();
    while !bodies(&received).contains(&"3".to_owned()) {
        received.push(next.receive_one().await);
    }
    // The broker may redeliver messages after the unsettled one; the consumer detects them as
    // duplicates by their done markers. It must not redeliver earlier ones.
    assert!(
        bodies(&received)
            .iter()
            .all(|it| it.parse::<u32>().is_ok_and(|it| it >= 3)),
        "{:?}",
        bodies(&received)
    );
    next.accept(received).await;
    next.close_unsettled().await;
}

/// After `stop`, unsettled deliveries can still be settled.
pub async fn a_stopped_source_still_settles(queue: impl TestQueue) {
    publish_numbers(&queue, 3).await;
    let mut client = SourceClient::of(&queue).await;
    let all = client.receive(3).await;
    client.0.stop().await;
    client.accept(all).await;
    client.close().await;
    let mut next = SourceClient::of(&queue).await;
    next.expect_no_delivery(Duration::from_secs(2), "all were accepted")
        .await;
    next.close().await;
}
