//! The script alone: its verdicts on claims without the fast path, and the records that it decodes.
//! Both must agree with the Rust code.

use oncegate_core::StoreError;
use oncegate_core::marker::{Guarantee, OperationKind, Token, Verdict};
use redis::aio::MultiplexedConnection;

use crate::support::{apply_one, client, key, operation, store, terms};

const SCRIPT: &str = include_str!("../../src/apply.lua");

/// The token of the caller in a record, and the token of another.
const OWN_TOKEN: &str = "00000000000000000000000000000001";
const OTHER_TOKEN: &str = "00000000000000000000000000000002";

/// Two fingerprints, and none.
const FINGERPRINT_7: &str = "000000000000000007";
const FINGERPRINT_8: &str = "000000000000000008";
const NO_BODY: &str = "-";

/// The horizon of the records, and the remaining expiry of a marker whose lease of 30 s is valid or
/// has expired.
const HORIZON: u64 = 600_000;
const LEASE_VALID: u64 = HORIZON;
const LEASE_EXPIRED: u64 = HORIZON - 100_000;

fn held(kind: char, token: &str, attempts: &str, guarantee: char, body: &str) -> String {
    format!("v1 {kind} {token} {attempts} 30000 {HORIZON} {guarantee} {body}")
}

/// Sends an effectively-once claim for this fingerprint to the script, as the store does.
async fn claim(raw: &mut MultiplexedConnection, key: &str, body: &str) -> String {
    let mut call = redis::cmd("EVAL");
    call.arg(SCRIPT).arg(1).arg(key);
    // The request and its terms: guarantee, lease, window, horizon, the horizon of unresolved
    // at-most-once markers, and no marker to free.
    call.arg("claim")
        .arg("e")
        .arg(30_000)
        .arg(HORIZON)
        .arg(HORIZON)
        .arg(HORIZON * 1000)
        .arg("")
        .arg("");
    // The claim: its token, attempt and fingerprint.
    call.arg(held('p', OWN_TOKEN, "0 0 0 n", 'e', body));
    let mut answers: Vec<String> = call.query_async(raw).await.expect("an answer");
    assert_eq!(answers.len(), 1, "{answers:?}");
    answers.remove(0)
}

async fn put(raw: &mut MultiplexedConnection, key: &str, record: &[u8], left: u64) {
    let _: () = redis::cmd("SET")
        .arg(key)
        .arg(record)
        .arg("PX")
        .arg(left)
        .query_async(raw)
        .await
        .expect("written");
}

#[tokio::test]
async fn the_script_agrees_with_marker_apply_on_claims() {
    let prefix = format!("test:{:032x}:", Token::random().0);
    let mut raw = client().await;
    let running = |token, body| held('p', token, "3 1 0 n", 'e', body);
    let [waiting, reconciled] = ['w', 'r']
        .map(|kind| move |token: &str, body: &str| held(kind, token, "3 1 0 u", 'a', body));
    let done = |body: &str| format!("-1{body}");
    let rejected = |body: &str| format!("v1 x 3 {body}");
    // The record and its remaining expiry; the claimed fingerprint; the answer; and the record
    // afterwards: unchanged, or a claim of the caller in that state.
    let kept = None;
    let taken = |kind, attempts, guarantee| Some((kind, attempts, guarantee));
    let rows = [
        (
            "v1 c 3 1 2 n".into(),
            LEASE_VALID,
            FINGERPRINT_7,
            "granted 4 1 2",
            taken('p', "4 1 2 n", 'e'),
        ),
        (
            "v1 c 3 0 0 u".into(),
            LEASE_VALID,
            FINGERPRINT_7,
            "granted 4 0 0",
            taken('p', "4 0 0 u", 'e'),
        ),
        (
            "v1 c 4294967295 0 0 n".into(),
            LEASE_VALID,
            FINGERPRINT_7,
            "granted 4294967295 0 0",
            taken('p', "4294967295 0 0 n", 'e'),
        ),
        ("1".into(), LEASE_VALID, FINGERPRINT_7, "duplicate", kept),
        ("1".into(), LEASE_VALID, NO_BODY, "duplicate", kept),
        (
            done(FINGERPRINT_7),
            LEASE_VALID,
            FINGERPRINT_7,
            "duplicate",
            kept,
        ),
        (done(FINGERPRINT_7), LEASE_VALID, NO_BODY, "duplicate", kept),
        (
            done(FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "conflict",
            kept,
        ),
        (
            rejected(NO_BODY),
            LEASE_VALID,
            FINGERPRINT_7,
            "rejected 3",
            kept,
        ),
        (rejected(NO_BODY), LEASE_VALID, NO_BODY, "rejected 3", kept),
        (
            rejected(FINGERPRINT_7),
            LEASE_VALID,
            FINGERPRINT_7,
            "rejected 3",
            kept,
        ),
        (
            rejected(FINGERPRINT_7),
            LEASE_VALID,
            NO_BODY,
            "rejected 3",
            kept,
        ),
        (
            rejected(FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "conflict",
            kept,
        ),
        (
            running(OWN_TOKEN, FINGERPRINT_7),
            LEASE_VALID,
            FINGERPRINT_7,
            "granted 3 1 0",
            kept,
        ),
        (
            running(OWN_TOKEN, FINGERPRINT_8),
            LEASE_EXPIRED,
            FINGERPRINT_7,
            "granted 3 1 0",
            kept,
        ),
        (
            running(OTHER_TOKEN, FINGERPRINT_7),
            LEASE_VALID,
            FINGERPRINT_7,
            "busy",
            kept,
        ),
        (
            running(OTHER_TOKEN, FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "busy",
            kept,
        ),
        (
            running(OTHER_TOKEN, FINGERPRINT_8),
            LEASE_EXPIRED,
            FINGERPRINT_7,
            "conflict",
            kept,
        ),
        (
            running(OTHER_TOKEN, FINGERPRINT_8),
            LEASE_EXPIRED,
            NO_BODY,
            "granted 4 2 1",
            taken('p', "4 2 1 u", 'e'),
        ),
        (
            running(OTHER_TOKEN, FINGERPRINT_7),
            LEASE_EXPIRED,
            FINGERPRINT_7,
            "granted 4 2 1",
            taken('p', "4 2 1 u", 'e'),
        ),
        (
            held('p', OTHER_TOKEN, "3 1 0 n", 'a', FINGERPRINT_7),
            LEASE_EXPIRED,
            FINGERPRINT_7,
            "in-doubt 4 3 1",
            taken('r', "4 3 1 u", 'a'),
        ),
        (
            waiting(OWN_TOKEN, FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "in-doubt 3 1 0",
            kept,
        ),
        (
            waiting(OTHER_TOKEN, FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "conflict",
            kept,
        ),
        (
            waiting(OTHER_TOKEN, FINGERPRINT_7),
            LEASE_VALID,
            FINGERPRINT_7,
            "in-doubt 4 2 0",
            taken('r', "4 2 0 u", 'a'),
        ),
        (
            reconciled(OWN_TOKEN, FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "in-doubt 3 1 0",
            kept,
        ),
        (
            reconciled(OTHER_TOKEN, FINGERPRINT_8),
            LEASE_VALID,
            FINGERPRINT_7,
            "conflict",
            kept,
        ),
        (
            reconciled(OTHER_TOKEN, FINGERPRINT_8),
            LEASE_EXPIRED,
            FINGERPRINT_7,
            "conflict",
            kept,
        ),
        (
            reconciled(OTHER_TOKEN, FINGERPRINT_7),
            LEASE_VALID,
            FINGERPRINT_7,
            "busy",
            kept,
        ),
        (
            reconciled(OTHER_TOKEN, FINGERPRINT_7),
            LEASE_EXPIRED,
            FINGERPRINT_7,
            "in-doubt 4 2 1",
            taken('r', "4 2 1 u", 'a'),
        ),
    ];
    for (it, (record, left, body, expected, record_after)) in rows.into_iter().enumerate() {
        let key = format!("{prefix}{it}");
        put(&mut raw, &key, record.as_bytes(), left).await;
        let answer = claim(&mut raw, &key, body).await;
        // The remaining lease depends on the time.
        let answer = if answer.starts_with("busy ") {
            "busy"
        } else {
            &answer
        };
        assert_eq!(answer, expected, "{body} on {record} with {left} ms left");
        let after: String = redis::cmd("GET")
            .arg(&key)
            .query_async(&mut raw)
            .await
            .expect("a record");
        let record_after = record_after.map_or(record.clone(), |(kind, attempts, guarantee)| {
            let horizon = if guarantee == 'a' {
                HORIZON * 1000
            } else {
                HORIZON
            };
            format!("v1 {kind} {OWN_TOKEN} {attempts} 30000 {horizon} {guarantee} {body}")
        });
        assert_eq!(
            after, record_after,
            "{body} on {record} with {left} ms left"
        );
    }
    assert_eq!(
        claim(&mut raw, &format!("{prefix}absent"), FINGERPRINT_7).await,
        "granted 1 0 0"
    );
}

/// Invalid records, each with one error.
fn unreadable() -> Vec<String> {
    let mut records: Vec<String> = [
        "",
        " ",
        "0",
        "2",
        "01",
        "11",
        "1 ",
        "1x",
        "-1",
        "1\n",
        "processing",
        "v1",
        "v1 ",
        "v1 q 1 0 0 n",
        "V1 c 1 0 0 n",
    ]
    .into_iter()
    .chain([
        "v1 c ",
        "v1 c 1",
        "v1 c 1 0",
        "v1 c 1 0 0",
        "v1 c 1 0 0 ",
        "v1 c 1 0 0 x",
        "v1 c 1 0 0 nu",
        "v1 c 1 0 0 n ",
        "v1 c 1 0  0 n",
    ])
    .chain([
        "v1 c  1 0 0 n",
        "v1  c 1 0 0 n",
        "v1 C 1 0 0 n",
        "v1 c 1 0 n",
        "v1 c 1 0 0 N",
        "v1 x",
        "v1 x 1",
        "v1 x 1 ",
        "v1 x -",
    ])
    // A time in nanoseconds, as another program may write it.
    .chain(["1763900000000000000"])
    .map(Into::into)
    .collect();
    // A fingerprint is 18 digits, or `-` where it is optional.
    let bodies = [
        "00000000000000007",
        "0000000000000000007",
        "00000000000000000x",
        "00000000000000000\n",
        "00000000000000000\0",
        "x",
        "--",
        "",
    ];
    for body in bodies {
        records.extend([
            format!("-1{body}x"),
            format!("-1{body}"),
            format!("v1 x 3 {body}"),
            held('p', OTHER_TOKEN, "3 0 0 n", 'e', body),
        ]);
    }
    records.extend([
        format!("1{FINGERPRINT_7}"),
        "1-".into(),
        "--".into(),
        "1".repeat(20),
        format!("v1 x 3 {FINGERPRINT_7} "),
    ]);
    // A count is at most ten digits, and at most 2^32 - 1.
    let counts = [
        "00000000001",
        "4294967296",
        "9999999999",
        "-1",
        "+1",
        "0x1",
        "3.0",
        "x",
        "",
    ];
    let tried = counts.iter().flat_map(|it| {
        [
            format!("{it} 0 0 n"),
            format!("3 {it} 0 n"),
            format!("3 0 {it} n"),
        ]
    });
    let tried: Vec<String> = tried.collect();
    records.extend(tried.iter().map(|tried| format!("v1 c {tried}")));
    records.extend(counts.map(|count| format!("v1 x {count} -")));
    for kind in ['p', 'w', 'r'] {
        records.extend(
            tried
                .iter()
                .map(|tried| held(kind, OTHER_TOKEN, tried, 'e', NO_BODY)),
        );
    }
    // A token is 32 digits in lower case.
    for token in [
        &OTHER_TOKEN[1..],
        &format!("0{OTHER_TOKEN}"),
        &OTHER_TOKEN.replace('2', "A"),
        &OTHER_TOKEN.replace('2', "g"),
        &OTHER_TOKEN.replace('2', " "),
        "",
    ] {
        records.push(held('p', token, "3 0 0 n", 'e', NO_BODY));
    }
    // A time is at most 15 digits.
    for time in ["0000000000030000", "1000000000000000", "-1", "1e3", "x", ""] {
        records.push(format!("v1 p {OTHER_TOKEN} 3 0 0 n {time} {HORIZON} e -"));
        records.push(format!("v1 p {OTHER_TOKEN} 3 0 0 n 30000 {time} e -"));
    }
    let whole = held('p', OTHER_TOKEN, "3 0 0 n", 'e', NO_BODY);
    records.extend(
        ['x', 'E', ' ', '1'].map(|guarantee| held('p', OTHER_TOKEN, "3 0 0 n", guarantee, NO_BODY)),
    );
    records.extend([
        format!("{whole} "),
        format!("{whole} -"),
        format!(" {whole}"),
        format!("{whole}\n"),
        whole.replace(' ', "  "),
    ]);
    records
}

/// Valid records at the limits of the format.
fn readable() -> Vec<String> {
    let mut records: Vec<String> = [
        "1",
        "v1 x 0 -",
        "v1 c 0 0 0 n",
        "v1 c 0000000001 0 0 u",
        "v1 c 4294967295 4294967295 4294967295 u",
    ]
    .map(Into::into)
    .into();
    for body in ["000000000000000000", "999999999999999999"] {
        records.extend([
            format!("-1{body}"),
            format!("v1 x 3 {body}"),
            held('w', OTHER_TOKEN, "3 0 0 n", 'a', body),
        ]);
    }
    for kind in ['p', 'w', 'r'] {
        records.extend(
            ['a', 'e', 'b']
                .map(|guarantee| held(kind, OTHER_TOKEN, "4294967295 0 0 u", guarantee, NO_BODY)),
        );
        records.push(format!(
            "v1 {kind} {} 0000000003 0 0 n 999999999999999 999999999999999 e -",
            "f".repeat(32)
        ));
    }
    records
}

/// The errors of the script, of `read_marker` and of a claim's fast path for a record; `None` if it
/// is valid.
async fn read(record: &[u8]) -> [Option<String>; 3] {
    let (store, prefix) = store();
    let id = "k";
    put(
        &mut client().await,
        &format!("{prefix}{id}"),
        record,
        HORIZON,
    )
    .await;
    let lax = terms(Guarantee::EffectivelyOnce);
    let refused = |error: StoreError| match error {
        StoreError::Misconfigured(why) | StoreError::UnreadableMarker(why) => why.to_string(),
        other => panic!("{:?}: {other:?}", String::from_utf8_lossy(record)),
    };
    // This token holds no record, so that valid records are unchanged.
    let scripted = apply_one(&store, operation(id, OperationKind::Renew, 99, 1, lax))
        .await
        .inspect(|verdict| assert_eq!(*verdict, Verdict::Lost));
    let by_read = store.read_marker(&key(id)).await;
    let claimed = apply_one(&store, operation(id, OperationKind::Claim, 99, 0, lax)).await;
    [
        scripted.err().map(refused),
        by_read.err().map(refused),
        claimed.err().map(refused),
    ]
}

#[tokio::test]
async fn the_script_decodes_the_same_records_as_the_store() {
    let newer = ["v2 p x", "v10 ", "v0 c 1 0 0 n", "v01 c 1 0 0 n", "v2 "]
        .map(|record| record.as_bytes().to_vec());
    let bytes = [
        b"\xff".to_vec(),
        b"v1 c \xff 0 0 n".to_vec(),
        [b"v1 x 3 00000000000000000", &b"\xff"[..]].concat(),
    ];
    let unreadable: Vec<Vec<u8>> = unreadable()
        .into_iter()
        .map(String::into_bytes)
        .chain(bytes)
        .collect();
    let (mut no_marker, mut other_release) = (None, None);
    for (records, error) in [
        (unreadable, &mut no_marker),
        (newer.into(), &mut other_release),
    ] {
        for record in records {
            let shown = String::from_utf8_lossy(&record).into_owned();
            let [scripted, by_read, claimed] = read(&record).await;
            assert!(scripted.is_some(), "the script reads {shown:?}");
            assert_eq!((&by_read, &claimed), (&scripted, &scripted), "of {shown:?}");
            // The version, which differs.
            let text = scripted.and_then(|error| error.split("version").next().map(str::to_owned));
            assert_eq!(
                error.get_or_insert_with(|| text.clone()),
                &text,
                "of {shown:?}"
            );
        }
    }
    assert_ne!(no_marker, other_release);
    for record in readable() {
        assert_eq!(
            read(record.as_bytes()).await,
            [None, None, None],
            "{record}"
        );
    }
}

/// The preflight check sends such a call, and an error would look like a command that the server
/// rejects.
#[tokio::test]
async fn a_call_without_keys_and_terms_is_no_error() {
    let answers: Vec<String> = redis::cmd("EVAL")
        .arg(SCRIPT)
        .arg(0)
        .query_async(&mut client().await)
        .await
        .expect("no error");
    assert_eq!(answers, Vec::<String>::new());
}
