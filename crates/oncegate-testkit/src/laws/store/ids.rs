//! Two ids never share a marker.

use std::collections::HashSet;
use std::sync::Arc;

use oncegate_core::marker::{Attempts, Fingerprint, Marker, Operation, OperationKind, Verdict};
use oncegate_core::{Key, MessageId, Scope, Store};

use crate::laws::fixtures::{
    Claimant, DONE_WITH_LOST_MARKER, EFFECTIVELY_ONCE, OTHER_TOKEN, OWN_TOKEN, verdicts,
};

/// Ids as producers write them, and unusual ones.
fn ids() -> Vec<Vec<u8>> {
    let mut ids: Vec<Vec<u8>> = [
        // Ids that a store may mistake for a number, a pattern, a path, a reserved name, or the
        // same id in another case.
        "pay-42",
        "PAY-42",
        "pay_42",
        "payX42",
        "1",
        "01",
        "1.0",
        "+1",
        "1e0",
        "0x1",
        "-0",
        "0",
        "null",
        "NULL",
        "true",
        ".",
        "..",
        "/",
        "a/b",
        "a//b",
        "./a",
        "../a",
        "a:b",
        "a::b",
        ":",
        "processed",
        "processed:pay-42",
        "processed:processed:pay-42",
        "@",
        "a=b",
        "-",
        "--",
        "=1",
        // Blanks, quotes, patterns, braces, separators of scopes, and reserved characters.
        " ",
        "  ",
        "\t",
        "\n",
        " pay-42",
        "pay-42 ",
        "pay-42\n",
        "'",
        "''",
        "\"",
        "\\",
        "\\\\",
        "%",
        "pay%42",
        "*",
        "?",
        "[a]",
        "{}",
        "{a}b",
        "{a}c",
        "a{b}",
        "|",
        "a|b",
        "a|",
        "|b",
        "!",
        "!canary",
        "h:",
        "h:0",
        "H:0",
        ";",
        "--; DROP TABLE",
        "$1",
        ":1",
        "?1",
        "a,b",
        "a\0b",
        "a\0",
        "\0",
        "a",
        "a\r\n$3\r\nSET\r\n",
        "*1\r\n$8\r\nFLUSHALL\r\n",
        // The same text in two normal forms is two ids.
        "\u{e9}",
        "e\u{301}",
        "\u{212b}",
        "\u{c5}",
        "\u{df}",
        "ss",
        "\u{1f600}",
        "\u{202e}a",
        "\u{feff}a",
        "\u{200b}",
    ]
    .into_iter()
    .map(Vec::from)
    .collect();
    ids.extend([
        vec![0xff],
        vec![0xff, 0xfe],
        vec![0xc3],
        vec![0xc3, 0x28],
        vec![0xed, 0xa0, 0x80],
    ]);
    for length in [199, 200, 201, 202, 255, 256, 65_535, 65_536, 10 << 20] {
        ids.push(vec![b'a'; length]);
    }
    // Long ids that differ only in their last byte.
    ids.extend([b'x', b'y'].map(|last| [vec![b'b'; 199], vec![last]].concat()));
    ids.extend([b'x', b'y'].map(|last| [vec![b'b'; 400], vec![last]].concat()));
    // An id that equals the hash of another.
    let hashed = MessageId::new("{}").expect("not empty").to_string();
    ids.push(hashed.into_bytes());
    ids
}

/// Each of the unusual ids has its own marker: numbers, letters that differ in case, patterns,
/// paths, Redis commands, NUL, bytes that are not UTF-8, 10 MiB, two Unicode normal forms of one
/// text.
pub async fn ids_of_every_kind_stay_distinct(store: Arc<dyn Store>) {
    let ids = ids();
    assert_eq!(
        ids.iter().collect::<HashSet<_>>().len(),
        ids.len(),
        "the list names each id once"
    );
    let keys = ids
        .iter()
        .map(|id| Key::new(&MessageId::new(id).expect("not empty")))
        .collect();
    check_distinct_markers(&*store, keys).await;
}

/// The same id in several scopes has a marker in each, and no id has the key of an id in another
/// scope.
pub async fn scopes_stay_distinct(store: Arc<dyn Store>) {
    let scopes = ["a", "A", "a:", "a:b", "b", "ab", "1"]
        .map(|name| Scope::named(name).expect("a name in the alphabet"));
    let ids = ["a", "b", "ab", "a|b", "|b", "a|", "1", "b|b"]
        .map(|id| MessageId::new(id).expect("not empty"));
    let scoped = scopes
        .iter()
        .chain([&Scope::none()])
        .flat_map(|scope| ids.iter().map(|id| scope.key(id)))
        .collect();
    check_distinct_markers(&*store, scoped).await;
}

/// Completes each key with a different fingerprint, and checks after all completions that each key
/// still has its own.
async fn check_distinct_markers(store: &dyn Store, keys: Vec<Key>) {
    let claimant = |it: usize| {
        Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1).fingerprint(Some(Fingerprint::new(it as u64)))
    };
    let every = |operation_of: &dyn Fn(usize, &Key) -> Operation| -> Vec<Operation> {
        keys.iter()
            .enumerate()
            .map(|(it, key)| operation_of(it, key))
            .collect()
    };
    let expect = |received: Vec<Verdict>, expected: Verdict| {
        for (received, key) in received.into_iter().zip(&keys) {
            assert_eq!(received, expected, "{}", key.as_str());
        }
    };
    // One at a time: each key has no marker although all earlier ones have one.
    for (it, key) in keys.iter().enumerate() {
        let received = verdicts(
            store,
            &[claimant(it).operation(OperationKind::Complete, key)],
        )
        .await;
        assert_eq!(
            received,
            [DONE_WITH_LOST_MARKER],
            "{} has the marker of another id",
            key.as_str()
        );
    }
    expect(
        verdicts(store, &every(&|it, key| claimant(it).claim(key))).await,
        Verdict::Duplicate,
    );
    let seen = |it| Marker::Done(Some(Fingerprint::new(it as u64)));
    expect(
        verdicts(
            store,
            &every(&|it, key| {
                claimant(it).operation(OperationKind::Forget { seen: seen(it) }, key)
            }),
        )
        .await,
        Verdict::Applied,
    );
    // All in one batch: all keys are free again, and no claim affects another key.
    let another = |it: usize| {
        Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 0).fingerprint(claimant(it).terms.fingerprint)
    };
    let after_forget = Attempts {
        number: 2,
        base: 1,
        crashes: 0,
    };
    expect(
        verdicts(store, &every(&|it, key| another(it).claim(key))).await,
        Verdict::Granted(after_forget),
    );
}
