//! Random histories: the store applies `marker::apply` to each row, also to old rows, to rows from
//! the future and to expired rows.

use std::time::Duration;

use oncegate_core::marker::Marker;
use oncegate_core::{Key, Store, async_trait};
use oncegate_postgres::Postgres;
use oncegate_testkit::laws::{AgingStore, agrees_with_marker_apply};

use sqlx::PgConnection;
use tokio::sync::Mutex;

use crate::support::{new_schema, raw, store_at};

/// Two handles to a schema.
struct Table {
    handles: [Postgres; 2],
    raw: Mutex<PgConnection>,
}

#[async_trait]
impl AgingStore for Table {
    fn handles(&self) -> [&dyn Store; 2] {
        self.handles.each_ref().map(|handle| handle as &dyn Store)
    }

    async fn read_marker(&self, key: &Key) -> Marker {
        self.handles[0].read_marker(key).await.expect("a marker")
    }

    async fn set_time_left(&self, key: &Key, left: Duration) {
        let set = "UPDATE oncegate_markers SET expires = $2 + floor(extract(epoch FROM clock_timestamp()) * 1000) WHERE key = $1";
        let updated = sqlx::query(set)
            .bind(key.as_str())
            .bind(i64::try_from(left.as_millis()).expect("years"))
            .execute(&mut *self.raw.lock().await)
            .await;
        assert_eq!(updated.expect("it is updated").rows_affected(), 1);
    }

    async fn time_left(&self, key: &Key) -> Option<Duration> {
        let found = self.handles[1].read_marker_with_expiry(key).await;
        found.expect("a marker").expires_in
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_agrees_with_marker_apply() {
    agrees_with_marker_apply(async || {
        let url = new_schema().await;
        let handles = [store_at(&url).await, store_at(&url).await];
        let raw = Mutex::new(raw(&url).await);
        Table { handles, raw }
    })
    .await;
}
