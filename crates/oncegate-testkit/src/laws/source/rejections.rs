//! Laws of rejection.

use std::time::Duration;

use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::headers;
use oncegate_core::{FailureHistory, Message};

use super::client::*;
use super::{Destination, TestQueue};

fn header<'a>(message: &'a Message, name: &str) -> Option<&'a str> {
    message
        .headers
        .last(name)
        .map(|value| std::str::from_utf8(value).expect("oncegate writes UTF-8 headers"))
}

/// A rejected message is in the dead letters with its body, its headers and the failure history,
/// and is not redelivered.
pub async fn a_rejected_message_is_a_dead_letter_with_its_failure_history(queue: impl TestQueue) {
    queue
        .publish(Message::new("poison").with_header("payment-id", "42"))
        .await;
    let mut client = SourceClient::of(&queue).await;
    let poison = client.receive_one().await;
    let mut failure_history = FailureHistory::default();
    failure_history.id = Some("42".into());
    failure_history.attempts = 3;
    failure_history.crashes = 2;
    failure_history.last_attempt = 7;
    failure_history.first_error = Some("no route".into());
    failure_history.last_error = Some("no such card".into());
    client
        .settle_with(
            poison,
            Settlement::Reject(Reason::AttemptsSpent),
            failure_history,
        )
        .await;
    client.close().await;
    let rejected = rejected_messages(&queue, Destination::DeadLetters, 1).await;
    let message = &rejected[0];
    assert_eq!(message.body, "poison");
    for (name, value) in [
        ("payment-id", "42"),
        (headers::REASON, "attempts-spent"),
        (headers::ID, "42"),
        (headers::ATTEMPTS, "3"),
        (headers::CRASHES, "2"),
        (headers::LAST_ATTEMPT, "7"),
        (headers::FIRST_ERROR, "no route"),
        (headers::LAST_ERROR, "no such card"),
    ] {
        assert_eq!(header(message, name), Some(value), "{name}");
    }
    assert!(header(message, headers::ORIGIN).is_some_and(|origin| !origin.is_empty()));
    assert!(
        queue
            .rejected_messages(Destination::InDoubt)
            .await
            .is_empty()
    );
    let mut next = SourceClient::of(&queue).await;
    next.expect_no_delivery(Duration::from_secs(2), "it was rejected")
        .await;
    next.close().await;
}

/// In-doubt messages have a destination of their own.
pub async fn in_doubt_messages_have_a_destination_of_their_own(queue: impl TestQueue) {
    publish_numbers(&queue, 1).await;
    let mut client = SourceClient::of(&queue).await;
    let delivery = client.receive_one().await;
    client
        .settle([(
            delivery,
            Settlement::Reject(Reason::InDoubt(DoubtCause::TimedOut)),
        )])
        .await;
    client.close().await;
    let rejected = rejected_messages(&queue, Destination::InDoubt, 1).await;
    assert_eq!(
        (&rejected[0].body[..], header(&rejected[0], headers::REASON)),
        (&b"0"[..], Some("in-doubt-timed-out"))
    );
    assert!(
        queue
            .rejected_messages(Destination::DeadLetters)
            .await
            .is_empty()
    );
}

/// All of 300 rejections in one batch reach the dead letters.
pub async fn many_rejections_at_once_all_arrive(queue: impl TestQueue) {
    const MANY: usize = 300;
    publish_numbers(&queue, MANY).await;
    let mut client = SourceClient::of(&queue).await;
    let all = client.receive(MANY).await;
    client
        .settle(
            all.into_iter()
                .map(|delivery| (delivery, Settlement::Reject(Reason::Refused))),
        )
        .await;
    client.close().await;
    let rejected = rejected_messages(&queue, Destination::DeadLetters, MANY).await;
    let mut numbers: Vec<usize> = rejected
        .iter()
        .map(|it| String::from_utf8_lossy(&it.body).parse().expect("a number"))
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, Vec::from_iter(0..MANY));
    let mut next = SourceClient::of(&queue).await;
    next.expect_no_delivery(Duration::from_secs(2), "all were rejected")
        .await;
    next.close().await;
}

/// Accepted, released and rejected deliveries in one batch are each settled as requested.
pub async fn settlements_in_one_batch_are_independent(queue: impl TestQueue) {
    publish_numbers(&queue, 60).await;
    let mut client = SourceClient::of(&queue).await;
    let (all, delay) = (client.receive(60).await, client.delay(300));
    let settled = all.into_iter().enumerate().map(|(number, delivery)| {
        let settlement = match number % 3 {
            0 => accepted(),
            1 => released(delay, 1),
            _ => Settlement::Reject(Reason::Unreadable),
        };
        (delivery, settlement)
    });
    client.settle(settled.collect::<Vec<_>>()).await;
    let again = client.receive(20).await;
    assert_eq!(
        bodies(&again),
        numbers((0..60).filter(|number| number % 3 == 1))
    );
    client.accept(again).await;
    client.close().await;
    let rejected = rejected_messages(&queue, Destination::DeadLetters, 20).await;
    let mut numbers: Vec<usize> = rejected
        .iter()
        .map(|it| String::from_utf8_lossy(&it.body).parse().expect("a number"))
        .collect();
    numbers.sort_unstable();
    assert_eq!(
        numbers,
        Vec::from_iter((0..60).filter(|number| number % 3 == 2))
    );
    let mut next = SourceClient::of(&queue).await;
    next.expect_no_delivery(Duration::from_secs(2), "all were settled")
        .await;
    next.close().await;
}
