//! Laws of deliveries.

use std::time::Duration;

use futures_util::FutureExt;
use oncegate_core::{Limit, Message, Source};

use super::TestQueue;
use super::client::*;

/// Body, headers and order are those of the publisher; failures start at 0.
pub async fn messages_are_delivered_unchanged_and_in_order(queue: impl TestQueue) {
    let binary: Vec<u8> = (0..=255).collect();
    let sent = [
        Message::new("plain"),
        Message::new(""),
        Message::new(binary.clone()),
        Message::new("with headers")
            .with_header("payment-id", "42")
            .with_header("Odd name, with spaces", "ä €"),
        Message::new(vec![b'x'; 100_000]),
    ];
    for message in &sent {
        queue.publish(message.clone()).await;
    }
    let mut client = SourceClient::of(&queue).await;
    let received = client.receive(sent.len()).await;
    for (sent, received) in sent.iter().zip(&received) {
        assert_eq!(received.message.body, sent.body);
        for (name, value) in sent.headers.iter() {
            let name = std::str::from_utf8(name).expect("the header name is UTF-8");
            assert_eq!(received.message.headers.last(name), value, "{name}");
        }
        assert_eq!(received.failures, 0);
    }
    client.accept(received).await;
    client.close().await;
}

/// A delivery is not delivered again before it is settled.
pub async fn an_unsettled_delivery_is_not_delivered_again(queue: impl TestQueue) {
    publish_numbers(&queue, 3).await;
    let mut client = SourceClient::of(&queue).await;
    let unsettled = client.receive(3).await;
    client
        .expect_no_delivery(Duration::from_millis(700), "all deliveries are unsettled")
        .await;
    client.accept(unsettled).await;
    client.close().await;
}

/// `receive` returns at most as many deliveries and bytes as its limit, except that a single
/// delivery may have more bytes.
pub async fn receive_respects_its_limit(queue: impl TestQueue) {
    for _ in 0..10 {
        queue.publish(Message::new(vec![b'x'; 1_000])).await;
    }
    let mut client = SourceClient::of(&queue).await;
    let mut all = Vec::new();
    for limit in [
        Limit::new(1, 1 << 20),
        Limit::new(3, 1 << 20),
        Limit::new(100, 2_500),
        Limit::new(100, 10),
    ] {
        let mut incoming = Vec::new();
        while incoming.is_empty() {
            let receiving = client.0.receive(limit, &mut incoming);
            tokio::time::timeout(queue.step_timeout(), receiving)
                .await
                .expect("the queue has more messages")
                .expect("receive succeeds");
        }
        let deliveries: Vec<_> = incoming.into_iter().filter_map(delivery).collect();
        let bytes: usize = deliveries.iter().map(|it| it.message.size()).sum();
        assert!(
            deliveries.len() <= limit.count && (deliveries.len() <= 1 || bytes <= limit.bytes),
            "{limit:?}: {} deliveries, {bytes} bytes",
            deliveries.len()
        );
        all.extend(deliveries);
    }
    let remaining = client.receive(10 - all.len()).await;
    client.accept(all.into_iter().chain(remaining)).await;
    client.close().await;
}

/// A consumer at its limit waits for revocations and receives no delivery.
pub async fn receive_with_an_empty_limit_delivers_nothing(queue: impl TestQueue) {
    publish_numbers(&queue, 3).await;
    let mut client = SourceClient::of(&queue).await;
    let first = client.receive(1).await;
    for _ in 0..5 {
        let mut incoming = Vec::new();
        let _ = tokio::time::timeout(
            Duration::from_millis(100),
            client.0.receive(Limit::NOTHING, &mut incoming),
        )
        .await;
        assert!(incoming.into_iter().filter_map(delivery).next().is_none());
    }
    let remaining = client.receive(2).await;
    assert_eq!(bodies(&remaining), ["1", "2"]);
    client.accept(first.into_iter().chain(remaining)).await;
    client.close().await;
}

/// `receive` may be dropped at any time: the next call returns the same deliveries.
pub async fn a_dropped_receive_loses_nothing(queue: impl TestQueue) {
    let mut client = SourceClient::of(&queue).await;
    let publishing = async {
        for number in numbers(0..100) {
            queue.publish(Message::new(number)).await;
            tokio::task::yield_now().await;
        }
    };
    let receiving = async {
        let mut all = Vec::new();
        while all.len() < 100 {
            let mut incoming = Vec::new();
            // Every second call is polled once and dropped, the others wait a little.
            let dropped = client
                .0
                .receive(Limit::new(7, ALL.bytes), &mut incoming)
                .now_or_never();
            dropped.unwrap_or(Ok(())).expect("receive succeeds");
            let waiting = client.0.receive(Limit::new(7, ALL.bytes), &mut incoming);
            if let Ok(received) = tokio::time::timeout(Duration::from_millis(3), waiting).await {
                received.expect("receive succeeds");
            }
            all.extend(incoming.into_iter().filter_map(delivery));
        }
        all
    };
    let both = async { tokio::join!(publishing, receiving).1 };
    let all = tokio::time::timeout(queue.step_timeout(), both)
        .await
        .expect("all messages are delivered");
    assert_eq!(bodies(&all), numbers(0..100));
    client.accept(all).await;
    client.close().await;
}
