//! Dead letters on topics that reject some messages.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Limit, Source};
use rdkafka::Message;
use rdkafka::message::{BorrowedMessage, Header, OwnedHeaders};

use crate::fixture::*;

/// Rejects the first messages of a topic.
async fn reject_all(topic: &Topic, count: usize) {
    let mut source = topic
        .source()
        .accept_limited_retention()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    for delivery in receive(&mut source, count).await {
        reject(&mut source, delivery, Reason::Refused).await;
    }
    topic.await_commit(0, count as i64).await;
    close(source).await;
}

fn header(message: &BorrowedMessage<'_>, name: &str) -> Option<String> {
    text_headers(message)
        .into_iter()
        .rfind(|(it, _)| it == name)
        .and_then(|(_, value)| value)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_has_the_time_of_publishing_and_a_header_with_the_original_timestamp() {
    const YEAR: i64 = 365 * 86_400_000;
    let now = now();
    // The topic would expire the first message at once, and never accept the second.
    let topic = Topic::with_dead_letters(&[
        ("retention.ms", "3600000"),
        ("message.timestamp.after.max.ms", "3600000"),
    ])
    .await;
    for (at, headers) in [
        (now - 3 * YEAR, OwnedHeaders::new()),
        (now + YEAR, OwnedHeaders::new()),
        (
            now,
            OwnedHeaders::new().insert(Header {
                key: "oncegate-first-seen",
                value: Some("1234567890123"),
            }),
        ),
        (
            now,
            OwnedHeaders::new().insert(Header {
                key: "oncegate-first-seen",
                value: Some("long ago"),
            }),
        ),
    ] {
        topic
            .send_as_of(Some(at), None, Some(b"body"), headers)
            .await;
    }
    reject_all(&topic, 4).await;
    let copy = |message: &BorrowedMessage<'_>| {
        (
            header(message, "oncegate-first-seen"),
            message.timestamp().to_millis(),
            header(message, "oncegate-origin"),
        )
    };
    let mut dead = topic.read(topic.dead_letters(), 4, copy).await;
    dead.sort_by_key(|(_, _, origin)| origin.clone());
    let seen: Vec<_> = dead
        .iter()
        .map(|(seen, _, _)| seen.clone().expect("a header"))
        .collect();
    assert_eq!(
        seen,
        [
            (now - 3 * YEAR).to_string(),
            (now + YEAR).to_string(),
            "1234567890123".into(),
            now.to_string()
        ]
    );
    let published = now..now + BOUND.as_millis() as i64;
    assert!(
        dead.iter()
            .all(|(_, at, _)| at.is_some_and(|at| published.contains(&at))),
        "{dead:?}"
    );
}

fn now() -> i64 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a clock after 1970");
    since.as_millis() as i64
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_for_the_dead_letter_topic_is_omitted_with_a_header() {
    let topic = Topic::with_dead_letters(&[("max.message.bytes", "2000")]).await;
    topic
        .send(Some(b"key"), Some(&[b'x'; 5_000]), OwnedHeaders::new())
        .await;
    reject_all(&topic, 1).await;
    let copy = |it: &BorrowedMessage<'_>| {
        (
            it.key().map(<[u8]>::to_vec),
            it.payload().map(<[u8]>::len),
            text_headers(it),
        )
    };
    let (key, length, headers) = topic.read(topic.dead_letters(), 1, copy).await.remove(0);
    assert_eq!((key.as_deref(), length), (Some(&b"key"[..]), Some(0)));
    assert!(
        headers.contains(&("oncegate-body-omitted".to_owned(), Some("5000".to_owned()))),
        "{headers:?}"
    );
    assert!(
        !headers
            .iter()
            .any(|(name, _)| name == "oncegate-key-omitted" || name == "oncegate-headers-omitted"),
        "{headers:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_dead_letters_keep_their_bodies() {
    const COUNT: usize = 256;
    // Each message is below the limit, and a batch of them above it.
    let topic = Topic::with_dead_letters(&[("max.message.bytes", "20000")]).await;
    let body = [b'x'; 5_000];
    for _ in 0..COUNT {
        topic.send(None, Some(&body), OwnedHeaders::new()).await;
    }
    reject_all(&topic, COUNT).await;
    let lengths = topic
        .read(topic.dead_letters(), COUNT, |it| {
            it.payload().map(<[u8]>::len)
        })
        .await;
    assert_eq!(lengths, [Some(body.len()); COUNT]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_dead_letter_does_not_delay_others_of_its_batch() {
    const COUNT: usize = 300;
    // A compacted topic rejects messages without a key.
    let topic = Topic::with_dead_letters(&[("cleanup.policy", "compact")]).await;
    for number in 0..COUNT {
        topic
            .send(
                (number % 3 > 0).then_some(&b"key"[..]),
                Some(b"body"),
                OwnedHeaders::new(),
            )
            .await;
    }
    let mut source = topic
        .source()
        .accept_limited_retention()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    for delivery in receive(&mut source, COUNT).await {
        reject(&mut source, delivery, Reason::Refused).await;
    }
    let origins = topic
        .read(topic.dead_letters(), COUNT / 3 * 2, |it| {
            header(it, "oncegate-origin")
        })
        .await;
    let origins: BTreeSet<_> = origins.into_iter().collect();
    assert_eq!(
        origins.len(),
        COUNT / 3 * 2,
        "a dead letter was published twice or not at all"
    );
    topic.await_commit(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_dead_letters_are_rejected_does_not_delay_others() {
    // More than the source holds of one partition.
    const COUNT: usize = 30_000;
    let topic = Topic::alone(2).await;
    topic
        .create(
            &topic.dead_letters(),
            1,
            &[&UNLIMITED_RETENTION[..], &[("cleanup.policy", "compact")]].concat(),
        )
        .await;
    topic
        .create(&topic.in_doubt(), 1, &UNLIMITED_RETENTION)
        .await;
    topic.send_numbers(0, COUNT).await;
    let mut source = topic
        .source()
        .accept_limited_retention()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    for delivery in receive(&mut source, 10_000).await {
        reject(&mut source, delivery, Reason::Refused).await;
    }
    topic.send_numbers(1, 5).await;
    let mut others = Vec::new();
    while others.len() < 5 {
        for delivery in receive(&mut source, 1).await {
            match delivery.receipt.partition {
                0 => reject(&mut source, delivery, Reason::Refused).await,
                _ => others.push(delivery),
            }
        }
    }
    accept(&mut source, others).await;
    topic.await_commit(1, 5).await;
    topic.await_commit(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_was_full_of_dead_letters_is_read_again_once_they_are_confirmed() {
    const COUNT: usize = 60_000;
    let topic = Topic::alone(2).await;
    topic
        .create(&topic.in_doubt(), 1, &UNLIMITED_RETENTION)
        .await;
    topic
        .create(
            &topic.dead_letters(),
            1,
            &[&UNLIMITED_RETENTION[..], &[("cleanup.policy", "compact")]].concat(),
        )
        .await;
    topic.send_numbers(0, COUNT).await;
    let mut source = topic
        .source()
        .accept_limited_retention()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut rejected = 0;
    let limit = Limit::new(512, 1 << 20);
    let mut incoming = Vec::new();
    // Ends when the partition is full, or on a slow machine when nothing arrives in time.
    while tokio::time::timeout(Duration::from_secs(2), source.receive(limit, &mut incoming))
        .await
        .is_ok()
    {
        for delivery in incoming.drain(..).filter_map(delivery) {
            rejected += 1;
            reject(&mut source, delivery, Reason::Refused).await;
        }
    }
    assert!(rejected < COUNT, "the partition was never full");
    topic
        .configure(
            &topic.dead_letters(),
            &[&UNLIMITED_RETENTION[..], &[("cleanup.policy", "delete")]].concat(),
        )
        .await;
    for delivery in receive(&mut source, COUNT - rejected).await {
        reject(&mut source, delivery, Reason::Refused).await;
    }
    topic.await_commit(0, COUNT as i64).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_or_header_that_is_too_large_is_omitted_with_a_header() {
    // Each message is as large as its own topic allows, and larger with the headers of the
    // rejection.
    const LARGE: usize = 3_000;
    let topic = Topic::with_dead_letters(&[("max.message.bytes", "2000")]).await;
    let huge = "h".repeat(LARGE);
    topic
        .send(Some(huge.as_bytes()), Some(b"one"), OwnedHeaders::new())
        .await;
    let headers = OwnedHeaders::new().insert(Header {
        key: "huge",
        value: Some(&huge),
    });
    let headers = headers.insert(Header {
        key: "oncegate-first-seen",
        value: Some("1234567890123"),
    });
    topic.send(Some(b"key"), Some(b"three"), headers).await;
    reject_all(&topic, 2).await;

    let copy = |it: &BorrowedMessage<'_>| {
        (
            it.key().is_some(),
            it.payload().map(<[u8]>::len),
            text_headers(it),
        )
    };
    let mut dead = topic.read(topic.dead_letters(), 2, copy).await;
    dead.sort_by_key(|(_, _, headers)| {
        headers
            .iter()
            .find(|(name, _)| name == "oncegate-origin")
            .cloned()
    });
    for ((key, length, headers), (offset, body, key_length, count)) in
        dead.into_iter().zip([(0, 3, LARGE, 0), (1, 5, 3, 2)])
    {
        assert_eq!((key, length), (false, Some(0)));
        let value = |name: &str| {
            headers
                .iter()
                .find(|(it, _)| it == name)
                .and_then(|(_, value)| value.clone())
        };
        assert_eq!(value("oncegate-reason").as_deref(), Some("refused"));
        assert_eq!(
            value("oncegate-origin"),
            Some(format!("{}/0/{offset}", topic.name))
        );
        assert_eq!(value("oncegate-body-omitted"), Some(body.to_string()));
        assert_eq!(value("oncegate-key-omitted"), Some(key_length.to_string()));
        assert_eq!(value("oncegate-headers-omitted"), Some(count.to_string()));
        assert_eq!(
            value("oncegate-first-seen").is_some_and(|seen| seen == "1234567890123"),
            offset == 1
        );
        assert_eq!(value("huge"), None);
    }
}

/// Brokers that create topics automatically would create one with limited retention.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_dead_letter_topic_is_waited_for_and_not_created_again() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 1).await;
    let mut source = topic.open().await;
    let delivery = receive(&mut source, 1).await.remove(0);
    topic.delete(&topic.dead_letters()).await;
    reject(&mut source, delivery, Reason::Refused).await;
    assert!(is_silent(&mut source, Duration::from_secs(2)).await);
    assert!(
        !topic.exists(&topic.dead_letters()),
        "the dead-letter topic was created again"
    );
    topic.await_commit(0, 0).await;
    topic
        .create(&topic.dead_letters(), 1, &UNLIMITED_RETENTION)
        .await;
    topic.await_commit(0, 1).await;
    assert_eq!(topic.end_of(&topic.dead_letters()).await, 1);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_headers_are_stripped_from_every_dead_letter() {
    const LIMIT: usize = 10;
    let topic = Topic::new(1).await;
    for body in [&[b'x'; LIMIT + 1][..], b"no id", b"in doubt"] {
        let names = [
            "oncegate-id",
            "oncegate-reason",
            "mine",
            "oncegate-id",
            "oncegate-body-omitted",
            "oncegate-failures",
        ];
        let headers = names.iter().fold(OwnedHeaders::new(), |all, name| {
            all.insert(Header {
                key: name,
                value: Some("victim"),
            })
        });
        topic.send(Some(b"key"), Some(body), headers).await;
    }
    let mut source = topic
        .source()
        .body_limit(LIMIT)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    for (delivery, reason) in receive(&mut source, 2).await.into_iter().zip([
        Reason::MissingId,
        Reason::InDoubt(DoubtCause::HandlerReported),
    ]) {
        reject(&mut source, delivery, reason).await;
    }
    topic.await_commit(0, 3).await;
    close(source).await;
    let mut published = topic.read(topic.dead_letters(), 2, text_headers).await;
    published.extend(topic.read(topic.in_doubt(), 1, text_headers).await);
    let reasons: Vec<_> = published
        .iter()
        .map(|headers| {
            headers
                .iter()
                .find(|(name, _)| name == "oncegate-reason")
                .cloned()
        })
        .collect();
    for reason in ["missing-id", "too-large", "in-doubt-handler-reported"] {
        assert!(
            reasons.contains(&Some((
                "oncegate-reason".to_owned(),
                Some(reason.to_owned())
            ))),
            "{reasons:?}"
        );
    }
    for headers in published {
        let names: Vec<&str> = headers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "mine",
                "oncegate-reason",
                "oncegate-attempts",
                "oncegate-origin",
                "oncegate-first-seen"
            ]
        );
    }
}
