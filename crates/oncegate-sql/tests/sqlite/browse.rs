//! The functions for operators.

use oncegate_core::marker::Marker;

use crate::support::{Directory, GRANTED, SECOND, apply_one, claim, complete, key};

#[tokio::test]
async fn a_marker_is_read_with_its_expiry() {
    let directory = Directory::new();
    let store = directory.store();
    assert_eq!(
        store
            .read_marker_with_expiry(&key("a"))
            .await
            .expect("a marker"),
        (Marker::Absent, None)
    );
    assert_eq!(
        apply_one(&store, claim("a", 1)).await.expect("a verdict"),
        GRANTED
    );
    let (marker, left) = store
        .read_marker_with_expiry(&key("a"))
        .await
        .expect("a marker");
    let Marker::InProgress(hold) = marker else {
        panic!("{marker:?}")
    };
    let age = hold
        .horizon
        .checked_sub(left.expect("it expires"))
        .expect("it was written before now");
    assert!(age < 60 * SECOND, "written {age:?} ago");
    apply_one(&store, complete("a", 1))
        .await
        .expect("a verdict");
    let (marker, left) = store
        .read_marker_with_expiry(&key("a"))
        .await
        .expect("a marker");
    assert!(
        marker == Marker::Done(None) && left.is_some_and(|left| !left.is_zero()),
        "{marker:?} {left:?}"
    );
}

#[tokio::test]
async fn all_markers_except_expired_ones_are_listed_by_pages() {
    let directory = Directory::new();
    let store = directory.store();
    let ids: Vec<String> = (0..7).map(|n| format!("id-{n}")).collect();
    for id in &ids {
        apply_one(&store, claim(id, 1)).await.expect("a verdict");
    }
    // Expired, whether the sweep has deleted it or not.
    directory
        .raw()
        .execute(
            "UPDATE oncegate_merged_markers SET expires = 1 WHERE key = 'id-3'",
            [],
        )
        .expect("written");
    directory
        .raw()
        .execute(
            "UPDATE oncegate_merged_markers SET state = 99 WHERE key = 'id-5'",
            [],
        )
        .expect("written");
    let mut browse = store.browse(2);
    let (mut found, mut pages) = (Vec::new(), 0);
    while let Some(page) = browse.next().await.expect("the file") {
        assert!(page.len() <= 2);
        pages += 1;
        found.extend(page);
    }
    assert!(pages >= 3, "{pages}");
    let keys: Vec<&str> = found.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["id-0", "id-1", "id-2", "id-4", "id-5", "id-6"]);
    for (key, stored) in &found {
        match stored {
            Ok((Marker::InProgress(_), left)) => assert!(key != "id-5" && !left.is_zero(), "{key}"),
            Err(error) => assert!(
                key == "id-5" && error.to_string().contains("id-5"),
                "{key}: {error}"
            ),
            other => panic!("{key}: {other:?}"),
        }
    }
    assert!(
        browse.next().await.expect("the file").is_none(),
        "after the end is the end"
    );
}
