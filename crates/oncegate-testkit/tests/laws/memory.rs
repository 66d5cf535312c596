//! The memory store.

use oncegate_core::MemoryStore;

oncegate_testkit::store_laws!(async || MemoryStore::new());

/// Exact limits, which only a store that applies a batch at a single time can test.
mod borders {
    use std::time::Duration;

    use oncegate_core::marker::{Guarantee, Operation, OperationKind, Terms, Token, Verdict};
    use oncegate_core::{Key, MemoryStore, MessageId, Store};

    #[tokio::test]
    async fn a_lease_holds_to_its_last_moment() {
        let key = Key::new(&MessageId::new("k").expect("an id"));
        for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
            let terms = Terms {
                guarantee,
                lease: Duration::ZERO,
                window: Duration::from_secs(9),
                fingerprint: None,
            };
            let claim = |token| Operation {
                key: key.clone(),
                kind: OperationKind::Claim,
                token: Token(token),
                attempt: 0,
                terms,
            };
            let verdicts = MemoryStore::new().apply(&[claim(1), claim(2)]).await;
            assert!(
                matches!(
                    verdicts[1],
                    Ok(Verdict::Busy {
                        remaining: Duration::ZERO
                    })
                ),
                "{verdicts:?}"
            );
        }
    }
}
