//! Laws of what is accepted, and of sources that end.

use std::time::Duration;

use oncegate_core::Source;

use super::TestQueue;
use super::client::*;

/// `settle` takes all that it is given, and does nothing if that is nothing.
pub async fn settling_empties_the_list(queue: impl TestQueue) {
    publish_numbers(&queue, 2).await;
    let mut client = Client::of(&queue).await;
    client.settle([]).await;
    let both = client.receive(2).await;
    client.accept(both).await;
    client.settle([]).await;
    client.close().await;
}

/// In whatever order and in however many calls it was accepted.
pub async fn what_is_accepted_never_comes_back(queue: impl TestQueue) {
    publish_numbers(&queue, 40).await;
    let mut client = Client::of(&queue).await;
    let mut all = client.receive(40).await;
    let later = all.split_off(20);
    client.accept(later.into_iter().rev()).await;
    for delivery in all.into_iter().rev() {
        client.accept([delivery]).await;
    }
    client.close().await;
    let mut next = Client::of(&queue).await;
    next.hears_nothing(Duration::from_secs(2), "all were accepted")
        .await;
    next.close().await;
}

/// After a close in good order. A shutdown is no failure.
pub async fn what_is_not_settled_comes_back(queue: impl TestQueue) {
    publish_numbers(&queue, 5).await;
    let mut client = Client::of(&queue).await;
    let open = client.receive(5).await;
    client.close_unsettled().await;
    drop(open);
    let mut next = Client::of(&queue).await;
    let again = next.receive(5).await;
    assert_eq!(bodies(&again), numbers(0..5));
    assert!(
        again.iter().all(|it| it.failures == 0),
        "a shutdown is no failure"
    );
    next.accept(again).await;
    next.close().await;
}

/// A source that is dropped is one whose process died.
pub async fn what_is_dropped_with_its_source_comes_back(queue: impl TestQueue) {
    publish_numbers(&queue, 5).await;
    let mut client = Client::of(&queue).await;
    let open = client.receive(5).await;
    drop(client);
    drop(open);
    let mut next = Client::of(&queue).await;
    let again = next.receive(5).await;
    let mut came = bodies(&again);
    came.sort();
    assert_eq!(came, numbers(0..5));
    next.accept(again).await;
    next.close().await;
}

/// What is accepted beyond a delivery that is not does not take it along; that one comes back.
pub async fn a_gap_keeps_its_place_and_nothing_else(queue: impl TestQueue) {
    publish_numbers(&queue, 10).await;
    let mut client = Client::of(&queue).await;
    let mut all = client.receive(10).await;
    let gap = all.remove(3);
    client.accept(all).await;
    client.close_unsettled().await;
    drop(gap);
    let mut next = Client::of(&queue).await;
    let mut came = Vec::new();
    while !bodies(&came).contains(&"3".to_owned()) {
        came.push(next.receive_one().await);
    }
    // What lies beyond a gap may come again, and its done marker tells. What lies before it may
    // not.
    assert!(
        bodies(&came)
            .iter()
            .all(|it| it.parse::<u32>().is_ok_and(|it| it >= 3)),
        "{:?}",
        bodies(&came)
    );
    next.accept(came).await;
    next.close_unsettled().await;
}

/// After `stop`, what is out may still be settled, and counts.
pub async fn a_stopped_source_still_settles(queue: impl TestQueue) {
    publish_numbers(&queue, 3).await;
    let mut client = Client::of(&queue).await;
    let all = client.receive(3).await;
    client.0.stop().await;
    client.accept(all).await;
    client.close().await;
    let mut next = Client::of(&queue).await;
    next.hears_nothing(Duration::from_secs(2), "all were accepted")
        .await;
    next.close().await;
}
