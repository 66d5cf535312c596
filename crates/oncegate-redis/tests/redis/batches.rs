//! Batches, as far as they are specific to Redis; `laws` tests what every store must do.

use oncegate_core::marker::{
    Attempts, Effect, Fingerprint, Guarantee, Marker, OperationKind, Terms, Token, Verdict,
};
use oncegate_core::{Store, StoreError};

use crate::support::{
    DONE, GRANTED, apply_one, claim, client, complete, key, operation, store, terms, verdicts,
};

#[tokio::test]
async fn one_bad_key_does_not_affect_the_others() {
    let (store, prefix) = store();
    let mut raw = client().await;
    let _: i64 = redis::cmd("RPUSH")
        .arg(format!("{prefix}list"))
        .arg("x")
        .query_async(&mut raw)
        .await
        .expect("an answer");
    for (id, value) in [
        ("newer", "v2 p something"),
        ("other", "processing"),
        ("cut", "v1 p 0000 1"),
    ] {
        let _: () = redis::cmd("SET")
            .arg(format!("{prefix}{id}"))
            .arg(value)
            .query_async(&mut raw)
            .await
            .expect("an answer");
    }
    let bad = ["list", "newer", "other", "cut"];
    for request in [
        OperationKind::Claim,
        OperationKind::Complete,
        OperationKind::Renew,
        OperationKind::Clear(Effect::Nothing),
    ] {
        let good = format!("good-{request:?}");
        assert_eq!(
            apply_one(&store, claim(&good, 1)).await.expect("a verdict"),
            GRANTED
        );
        let mut batch = vec![operation(
            &good,
            request,
            1,
            1,
            terms(Guarantee::EffectivelyOnce),
        )];
        batch.extend(bad.map(|id| operation(id, request, 1, 1, terms(Guarantee::EffectivelyOnce))));
        batch.push(claim(&format!("{good}-too"), 2));
        let answers = store.apply(&batch).await;
        assert!(answers[0].is_ok() && answers[5].is_ok(), "{answers:?}");
        for (answer, says) in answers[1..5].iter().zip([
            "WRONGTYPE",
            "newer release wrote this marker (record version 2, this release reads 1)",
            "another program",
            "another program",
        ]) {
            let message = match answer {
                Err(StoreError::UnreadableMarker(why)) => why.to_string(),
                _ => panic!("{request:?}: {answer:?}"),
            };
            assert!(message.contains(says), "{request:?}: {message}");
        }
    }
    for (id, value) in [
        ("newer", "v2 p something"),
        ("other", "processing"),
        ("cut", "v1 p 0000 1"),
    ] {
        let left: String = redis::cmd("GET")
            .arg(format!("{prefix}{id}"))
            .query_async(&mut raw)
            .await
            .expect("an answer");
        assert_eq!(left, value, "never overwritten");
    }
    assert!(matches!(
        store.read_marker(&key("newer")).await,
        Err(StoreError::UnreadableMarker(_))
    ));
}

/// More completions than one script call takes: of unchanged claims, of missing markers, of another
/// token's claims, and of keys with another type.
#[tokio::test]
async fn hundreds_of_completions_each_get_their_own_answer() {
    let (store, prefix) = store();
    let ids: Vec<String> = (0..300).map(|it| format!("k{it}")).collect();
    let mine = |it: usize| it % 50 > 2;
    let claims: Vec<_> = ids
        .iter()
        .enumerate()
        .filter(|(it, _)| mine(*it))
        .map(|(_, id)| claim(id, 1))
        .collect();
    assert_eq!(verdicts(&store, &claims).await, vec![GRANTED; claims.len()]);
    for it in (0..300).step_by(50) {
        assert_eq!(
            apply_one(&store, claim(&ids[it], 2))
                .await
                .expect("a verdict"),
            GRANTED
        );
        let list = format!("{prefix}{}", ids[it + 1]);
        let _: i64 = redis::cmd("RPUSH")
            .arg(list)
            .arg("x")
            .query_async(&mut client().await)
            .await
            .expect("an answer");
    }
    let completions: Vec<_> = ids.iter().map(|id| complete(id, 1, 1)).collect();
    for (it, answer) in store.apply(&completions).await.into_iter().enumerate() {
        match it % 50 {
            0 => assert_eq!(answer.expect("a verdict"), Verdict::Lost, "k{it}"),
            1 => assert!(
                matches!(&answer, Err(StoreError::UnreadableMarker(why)) if why.to_string().contains("WRONGTYPE")),
                "{answer:?}"
            ),
            2 => assert_eq!(
                answer.expect("a verdict"),
                Verdict::Done { marker_lost: true },
                "k{it}"
            ),
            _ => assert_eq!(answer.expect("a verdict"), DONE, "k{it}"),
        }
    }
}

#[tokio::test]
async fn order_is_kept_when_the_script_cache_is_flushed() {
    let server =
        oncegate_testkit::servers::RedisServer::start(Default::default()).expect("a Redis");
    let store = crate::support::at(&server.url());
    let mut raw = crate::support::client_of(&server.url()).await;
    for round in 0..3u128 {
        let _: () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut raw)
            .await
            .expect("an answer");
        let id = format!("k{round}");
        let batch = [
            claim(&id, 1),
            complete(&id, 1, 1),
            claim(&id, 2),
            complete("x", 7, 1),
        ];
        let lost = Verdict::Done { marker_lost: true };
        let last = if round == 0 { lost } else { DONE };
        assert_eq!(
            verdicts(&store, &batch).await,
            vec![GRANTED, DONE, Verdict::Duplicate, last]
        );
    }
}

#[tokio::test]
async fn done_markers_are_integers_with_and_without_a_fingerprint() {
    let (store, prefix) = store();
    let mut raw = client().await;
    let with = |body| Terms {
        fingerprint: Some(Fingerprint::new(body)),
        ..terms(Guarantee::EffectivelyOnce)
    };
    let bodies = [
        ("plain", terms(Guarantee::EffectivelyOnce)),
        ("body", with(42)),
        ("large", with(Fingerprint::LIMIT - 1)),
    ];
    let batch = |kind: OperationKind, attempt| {
        bodies.map(|(id, terms)| operation(id, kind, 1, attempt, terms))
    };
    assert_eq!(
        verdicts(&store, &batch(OperationKind::Claim, 0)).await,
        [GRANTED; 3]
    );
    assert_eq!(
        verdicts(&store, &batch(OperationKind::Complete, 1)).await,
        [DONE; 3]
    );
    let info: String = redis::cmd("INFO")
        .arg("server")
        .query_async(&mut raw)
        .await
        .expect("an answer");
    // Valkey 9 keeps a string of this length beside its key, which takes no more memory.
    let long = if info.contains("valkey_version:9.") {
        "embstr"
    } else {
        "int"
    };
    for (id, value, expected) in [
        ("plain", "1", "int"),
        ("body", "-1000000000000000042", long),
        ("large", "-1999999999999999999", long),
    ] {
        let name = format!("{prefix}{id}");
        let written: String = redis::cmd("GET")
            .arg(&name)
            .query_async(&mut raw)
            .await
            .expect("an answer");
        let encoding: String = redis::cmd("OBJECT")
            .arg("ENCODING")
            .arg(&name)
            .query_async(&mut raw)
            .await
            .expect("an answer");
        assert_eq!((written.as_str(), encoding.as_str()), (value, expected));
    }
    let again = |body| operation("body", OperationKind::Claim, 2, 0, with(body));
    assert_eq!(
        verdicts(&store, &[again(42), again(43)]).await,
        [Verdict::Duplicate, Verdict::Conflict]
    );
    assert_eq!(
        verdicts(
            &store,
            &[operation("plain", OperationKind::Claim, 2, 0, with(43))]
        )
        .await,
        [Verdict::Duplicate]
    );
}

#[tokio::test]
async fn an_operator_sends_back_only_the_marker_that_was_seen() {
    let (store, _) = store();
    let strict = terms(Guarantee::AtMostOnce);
    verdicts(
        &store,
        &[
            operation("k", OperationKind::Claim, 1, 0, strict),
            operation("k", OperationKind::Doubt, 1, 1, strict),
        ],
    )
    .await;
    let seen = store.read_marker(&key("k")).await.expect("a marker");
    assert!(
        matches!(seen, Marker::InDoubt(hold, _) if hold.token == Token(1)),
        "{seen:?}"
    );
    // Another process reconciles meanwhile: the marker differs from the one that was seen.
    let doubted = Verdict::InDoubt(Attempts {
        number: 2,
        base: 1,
        crashes: 0,
    });
    assert_eq!(
        verdicts(
            &store,
            &[operation("k", OperationKind::Claim, 2, 0, strict)]
        )
        .await,
        [doubted]
    );
    let redrive = |seen| {
        operation(
            "k",
            OperationKind::Redrive {
                seen,
                effect: Effect::Nothing,
            },
            0,
            0,
            strict,
        )
    };
    assert_eq!(verdicts(&store, &[redrive(seen)]).await, [Verdict::Lost]);
    let seen = store.read_marker(&key("k")).await.expect("a marker");
    let granted = Verdict::Granted(Attempts {
        number: 3,
        base: 2,
        crashes: 0,
    });
    assert_eq!(
        verdicts(
            &store,
            &[
                redrive(seen),
                operation("k", OperationKind::Claim, 3, 0, strict)
            ]
        )
        .await,
        [Verdict::Applied, granted]
    );
}
