//! Random histories: the store applies `marker::apply` to each row, also to old rows, to rows from
//! the future and to expired rows.

use std::sync::Mutex;
use std::time::Duration;

use oncegate_core::marker::Marker;
use oncegate_core::{Key, Store, async_trait};
use oncegate_sql::Sqlite;
use oncegate_testkit::laws::{AgingStore, agrees_with_marker_apply};
use rusqlite::{Connection, OptionalExtension};

use crate::support::{Directory, key};

/// Two handles to a file, and a plain connection.
struct File {
    handles: [Sqlite; 2],
    raw: Mutex<Connection>,
    _directory: Directory,
}

#[async_trait]
impl AgingStore for File {
    fn handles(&self) -> [&dyn Store; 2] {
        self.handles.each_ref().map(|handle| handle as &dyn Store)
    }

    async fn read_marker(&self, key: &Key) -> Marker {
        self.handles[0].read_marker(key).await.expect("a marker")
    }

    async fn set_time_left(&self, key: &Key, left: Duration) {
        let expires = now() + i64::try_from(left.as_millis()).expect("years");
        let raw = self.raw.lock().expect("no panic");
        let update = "UPDATE oncegate_merged_markers SET expires = ?2 WHERE key = ?1";
        raw.execute(update, (key.as_str(), expires))
            .expect("it is there");
    }

    async fn time_left(&self, key: &Key) -> Option<Duration> {
        let raw = self.raw.lock().expect("no panic");
        let select = "SELECT expires FROM oncegate_markers WHERE key = ?1";
        let expires = raw.query_row(select, [key.as_str()], |row| row.get::<_, i64>(0));
        let left = expires.optional().expect("a number")? - now();
        let left = u64::try_from(left).ok().filter(|left| *left > 0);
        left.map(Duration::from_millis)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_agrees_with_marker_apply() {
    agrees_with_marker_apply(async || {
        let directory = Directory::new();
        let handles = [directory.store(), directory.store()];
        handles[0]
            .read_marker(&key("a"))
            .await
            .expect("nothing yet");
        File {
            handles,
            raw: Mutex::new(directory.raw()),
            _directory: directory,
        }
    })
    .await;
}

fn now() -> i64 {
    let since = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .expect("after 1970");
    i64::try_from(since.as_millis()).expect("not so late")
}
