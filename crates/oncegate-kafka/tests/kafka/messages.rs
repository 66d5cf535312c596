//! The contents of delivered messages.

use std::time::SystemTime;

use oncegate_core::source::{Connect, ConnectOptions};
use rdkafka::message::{Header, OwnedHeaders};

use crate::fixture::*;

#[tokio::test(flavor = "multi_thread")]
async fn null_values_and_header_names_that_are_not_utf8_are_read_unchanged() {
    let topic = Topic::new(1).await;
    topic.send(None, None, OwnedHeaders::new()).await;
    topic.send(Some(b""), Some(b""), OwnedHeaders::new()).await;
    let headers = OwnedHeaders::new()
        .insert(Header {
            key: invalid_utf8(&[b'a', 0xff]),
            value: Some(&[0_u8, 0xff][..]),
        })
        .insert(Header {
            key: "null",
            value: None::<&[u8]>,
        })
        .insert(Header {
            key: "empty",
            value: Some(&[][..]),
        });
    topic.send(Some(b"key"), Some(b"body"), headers).await;

    let mut source = topic.open().await;
    let deliveries = receive(&mut source, 3).await;
    let message = |index: usize| &deliveries[index].message;
    assert_eq!(
        (
            &message(0).key,
            message(0).body.len(),
            message(0).headers.is_empty()
        ),
        (&None, 0, true)
    );
    assert_eq!(
        (message(1).key.as_deref(), message(1).body.len()),
        (Some(&b""[..]), 0)
    );
    assert_eq!(
        (message(2).key.as_deref(), &message(2).body[..]),
        (Some(&b"key"[..]), &b"body"[..])
    );
    let headers: Vec<_> = message(2).headers.iter().collect();
    assert_eq!(
        headers,
        [
            (&[b'a', 0xff][..], Some(&[0, 0xff][..])),
            (b"null", None),
            (b"empty", Some(b""))
        ]
    );
    let age = SystemTime::now()
        .duration_since(message(2).sent_at.expect("a timestamp"))
        .unwrap_or_default();
    assert!(age < BOUND);
    assert_eq!(&*message(2).origin.name, topic.name);
    assert_eq!(message(2).origin.system, Some("kafka"));

    for delivery in deliveries {
        reject(
            &mut source,
            delivery,
            oncegate_core::lifecycle::Reason::MissingId,
        )
        .await;
    }
    topic.await_commit(0, 3).await;
    close(source).await;
    let dead = topic.read(topic.dead_letters(), 3, text_headers).await;
    assert!(
        dead.iter()
            .any(|headers| headers.iter().any(|(name, _)| name == "a\u{fffd}"))
    );
}

/// A header name that the Rust producers cannot send.
#[allow(unsafe_code)]
fn invalid_utf8(name: &[u8]) -> &str {
    // SAFETY: the client reads only its pointer and length; nothing uses it as text.
    unsafe { std::str::from_utf8_unchecked(name) }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_a_receive_counts_messages_and_bytes() {
    use oncegate_core::{Limit, Source};
    let topic = Topic::new(1).await;
    for _ in 0..4 {
        topic
            .send(None, Some(&[b'x'; 1_000]), OwnedHeaders::new())
            .await;
    }
    let mut source = topic.open().await;
    // All of them are ready when the first one is.
    let mut waiting = receive(&mut source, 1).await;
    for (limit, expected) in [(Limit::new(2, 1 << 20), 2), (Limit::new(9, 10), 1)] {
        let mut incoming = Vec::new();
        source
            .receive(limit, &mut incoming)
            .await
            .expect("deliveries");
        assert_eq!(incoming.len(), expected);
        waiting.extend(incoming.into_iter().filter_map(delivery));
    }
    accept(&mut source, waiting).await;
    topic.await_commit(0, 4).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_backlog_is_read_completely_with_small_receives() {
    let topic = Topic::new(2).await;
    topic.send_numbers(0, 6_000).await;
    topic.send_numbers(1, 6_000).await;
    let mut source = topic.open().await;
    let mut next = [0; 2];
    for _ in 0..120 {
        let deliveries = receive(&mut source, 100).await;
        for it in &deliveries {
            let partition = it.receipt.partition as usize;
            assert_eq!(offset(it), next[partition]);
            next[partition] += 1;
        }
        accept(&mut source, deliveries).await;
    }
    assert_eq!(next, [6_000; 2]);
    topic.await_commit(0, 6_000).await;
    topic.await_commit(1, 6_000).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_ten_megabytes_is_rejected_with_its_body_and_later_messages_are_delivered() {
    const LARGE: usize = 10 << 20;
    let topic = Topic::of_large_messages().await;
    topic
        .send(None, Some(&vec![b'x'; LARGE]), OwnedHeaders::new())
        .await;
    topic.send(None, Some(b"small"), OwnedHeaders::new()).await;
    let mut source = topic
        .source()
        .body_limit(1 << 20)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let deliveries = receive(&mut source, 1).await;
    assert_eq!(offsets(&deliveries), [1]);
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 2).await;
    close(source).await;
    let copy = |it: &rdkafka::message::BorrowedMessage<'_>| {
        (
            rdkafka::Message::payload(it).map(<[u8]>::len),
            text_headers(it),
        )
    };
    let (length, headers) = topic.read(topic.dead_letters(), 1, copy).await.remove(0);
    assert_eq!(
        (length, headers[0].1.as_deref()),
        (Some(LARGE), Some("too-large"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_headers_are_read_and_published_to_the_dead_letter_topic() {
    const COUNT: usize = 10_000;
    let topic = Topic::new(1).await;
    let names: Vec<String> = (0..COUNT).map(|number| format!("h{number}")).collect();
    let headers = names
        .iter()
        .fold(OwnedHeaders::new_with_capacity(COUNT), |all, name| {
            all.insert(Header {
                key: name,
                value: Some("v"),
            })
        });
    topic.send(Some(b"key"), Some(b"body"), headers).await;
    topic.send(None, Some(b"next"), OwnedHeaders::new()).await;
    let mut source = topic.open().await;
    let mut deliveries = receive(&mut source, 2).await;
    let first = deliveries.remove(0);
    let read: Vec<_> = first.message.headers.iter().collect();
    assert_eq!(
        (read.len(), read[0], read[COUNT - 1]),
        (
            COUNT,
            (&b"h0"[..], Some(&b"v"[..])),
            (&b"h9999"[..], Some(&b"v"[..]))
        )
    );
    reject(
        &mut source,
        first,
        oncegate_core::lifecycle::Reason::Refused,
    )
    .await;
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 2).await;
    close(source).await;
    let dead = topic
        .read(topic.dead_letters(), 1, text_headers)
        .await
        .remove(0);
    assert_eq!(
        dead.iter()
            .filter(|(name, _)| name.starts_with('h'))
            .count(),
        COUNT
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_a_timestamp_has_none() {
    let topic = Topic::new(1).await;
    topic
        .send_as_of(Some(1), None, Some(b"1970"), OwnedHeaders::new())
        .await;
    topic
        .send_as_of(Some(-1), None, Some(b"no timestamp"), OwnedHeaders::new())
        .await;
    let mut source = topic.open().await;
    let deliveries = receive(&mut source, 2).await;
    let sent_at: Vec<_> = deliveries.iter().map(|it| it.message.sent_at).collect();
    assert_eq!(
        sent_at,
        [
            Some(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1)),
            None
        ]
    );
    for delivery in deliveries {
        reject(
            &mut source,
            delivery,
            oncegate_core::lifecycle::Reason::Refused,
        )
        .await;
    }
    topic.await_commit(0, 2).await;
    close(source).await;
    let dead = topic.read(topic.dead_letters(), 2, text_headers).await;
    let seen = |headers: &[(String, Option<String>)]| {
        headers
            .iter()
            .any(|(name, _)| name == "oncegate-first-seen")
    };
    assert_eq!(dead.iter().filter(|headers| seen(headers)).count(), 1);
}
