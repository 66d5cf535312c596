//! Laws of release.

use std::time::{Duration, Instant};

use oncegate_core::Message;

use super::TestQueue;
use super::client::*;

/// A released message is redelivered with the failure count of the release. A source with
/// `RetryDelays::InSource` redelivers it after its delay and delivers other messages meanwhile.
pub async fn a_release_is_redelivered_after_its_delay_and_blocks_no_other(queue: impl TestQueue) {
    publish_numbers(&queue, 1).await;
    let mut client = SourceClient::of(&queue).await;
    let (first, delay) = (client.receive_one().await, client.delay(1_500));
    let released_at = Instant::now();
    client.settle([(first, released(delay, 2))]).await;
    for other in ["a", "b"] {
        queue.publish(Message::new(other)).await;
    }
    let mut received = client.receive(3).await;
    let after = released_at.elapsed();
    assert!(after >= delay, "it was redelivered after {after:?}");
    if delay.is_zero() {
        received.sort_by_key(|it| it.failures);
    }
    assert_eq!(bodies(&received), ["a", "b", "0"]);
    assert_eq!(received[2].failures, 2);
    client.accept(received).await;
    client.close().await;
    let mut next = SourceClient::of(&queue).await;
    next.expect_no_delivery(Duration::from_secs(1), "all were accepted")
        .await;
    next.close().await;
}

/// A released message whose delay has not ended when the source is closed is redelivered.
pub async fn a_release_with_a_long_delay_survives_a_close(queue: impl TestQueue) {
    publish_numbers(&queue, 3).await;
    let mut client = SourceClient::of(&queue).await;
    let mut all = client.receive(3).await;
    let (last, delay) = (all.pop().expect("there are three"), client.delay(4_000));
    client
        .settle(
            all.into_iter()
                .map(|delivery| (delivery, released(delay, 1))),
        )
        .await;
    client.accept([last]).await;
    client.close_unsettled().await;
    let mut next = SourceClient::of(&queue).await;
    let again = next.receive(2).await;
    let mut received = bodies(&again);
    received.sort();
    assert_eq!(received, numbers(0..2));
    next.accept(again).await;
    next.close_unsettled().await;
}

/// Each release carries the number of failed attempts, and the next delivery has that number.
pub async fn repeated_releases_keep_the_failure_count(queue: impl TestQueue) {
    publish_numbers(&queue, 1).await;
    let mut client = SourceClient::of(&queue).await;
    let delay = client.delay(10);
    for failures in 0..5 {
        let delivery = client.receive_one().await;
        assert_eq!(
            (body(&delivery).as_str(), delivery.failures),
            ("0", failures)
        );
        client
            .settle([(delivery, released(delay, failures + 1))])
            .await;
    }
    // A delivery whose id another consumer holds did not fail: its release keeps the count.
    let busy = client.receive_one().await;
    client.settle([(busy, released(delay, 5))]).await;
    let last = client.receive_one().await;
    assert_eq!(last.failures, 5);
    client.accept([last]).await;
    client.close().await;
}

/// Messages with shorter delays are redelivered before those with longer ones. A source without
/// delays redelivers messages in the order of their releases.
pub async fn releases_are_redelivered_in_the_order_of_their_delays(queue: impl TestQueue) {
    publish_numbers(&queue, 3).await;
    let mut client = SourceClient::of(&queue).await;
    let all = client.receive(3).await;
    let delays = [5_000, 2_400, 1_000].map(|millis| client.delay(millis));
    client
        .settle(
            all.into_iter()
                .zip(delays)
                .map(|(delivery, delay)| (delivery, released(delay, 1))),
        )
        .await;
    let again = client.receive(3).await;
    let expected = match delays[0].is_zero() {
        true => ["0", "1", "2"],
        false => ["2", "1", "0"],
    };
    assert_eq!(bodies(&again), expected);
    client.accept(again).await;
    client.close().await;
}
