//! The sides that call a store without a broker.

use std::sync::Arc;
use std::time::Duration;

use oncegate::marker::{Guarantee, Operation, OperationKind, Terms, Token};
use oncegate::{Key, MemoryStore, MessageId, Redis, Sqlite};
use redis::aio::MultiplexedConnection;

use super::{GateStore, Measurement, Meter, Task};
use crate::BenchResult;

/// The operations of each kind in one `apply`: the same number as in the consumer.
const BATCH: usize = 256;
/// The number of concurrent `apply` calls: the same number as in a Kafka consumer.
const AT_ONCE: usize = 2;

/// Claims and completes new ids as fast as the store replies. Sends the completions of a batch with
/// the claims of the next one, like a consumer under load.
pub(super) async fn run(task: &Task, store: &GateStore) -> BenchResult<Measurement> {
    let store: Arc<dyn oncegate::Store> = match store {
        GateStore::Memory { .. } => Arc::new(MemoryStore::new()),
        GateStore::Sqlite { file } => Arc::new(Sqlite::file(file)),
        GateStore::Redis { url, prefix } => Arc::new(
            Redis::at(url)
                .prefix(prefix)
                .timeout(Duration::from_secs(10)),
        ),
    };
    let meter = Arc::new(Meter::new(task.messages, task.servers.clone()));
    let share = task.messages.div_ceil(AT_ONCE);
    let shares = (0..AT_ONCE).map(|which| {
        let (store, meter, end) = (
            store.clone(),
            meter.clone(),
            task.messages.min((which + 1) * share),
        );
        tokio::spawn(async move {
            let mut next = which * share;
            let mut claimed: Vec<Operation> = Vec::new();
            while next < end || !claimed.is_empty() {
                let mut batch: Vec<Operation> = claimed
                    .drain(..)
                    .map(|claim| Operation {
                        kind: OperationKind::Complete,
                        attempt: 1,
                        ..claim
                    })
                    .collect();
                let completions = batch.len();
                batch.extend(
                    (next..end.min(next + BATCH))
                        .map(|number| operation("new", number, OperationKind::Claim)),
                );
                next = end.min(next + BATCH);
                for answer in store.apply(&batch).await {
                    answer?;
                }
                (0..completions).for_each(|_| meter.saw());
                claimed = batch.split_off(completions);
            }
            Ok::<_, oncegate::StoreError>(())
        })
    });
    for share in futures_util::future::join_all(shares).await {
        share??;
    }
    meter.took()
}

/// Completes this many unique ids.
pub(super) async fn fill(store: &MemoryStore, markers: usize) -> BenchResult<()> {
    for first in (0..markers).step_by(BATCH) {
        let batch: Vec<Operation> = (first..markers.min(first + BATCH))
            .map(|number| operation("old", number, OperationKind::Complete))
            .collect();
        for answer in oncegate::Store::apply(store, &batch).await {
            answer?;
        }
    }
    Ok(())
}

/// An operation on an id with the default terms of a consumer.
pub(crate) fn operation(series: &str, number: usize, kind: OperationKind) -> Operation {
    let key = Key::new(
        &MessageId::new(format!("{series}-{}", crate::load::id(number))).expect("it is not empty"),
    );
    let [lease, window] = [30, 86_400].map(Duration::from_secs);
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease,
        window,
        fingerprint: None,
    };
    Operation {
        key,
        kind,
        token: Token(number as u128 + 1),
        attempt: u32::from(kind == OperationKind::Complete),
        terms,
    }
}

/// Hand-written deduplication: stores an id for a day, and returns whether it was new.
pub(super) async fn is_first(
    connection: &mut MultiplexedConnection,
    id: &[u8],
) -> BenchResult<bool> {
    let set: Option<String> = redis::cmd("SET")
        .arg([b"naive:", id].concat())
        .arg("1")
        .arg("NX")
        .arg("EX")
        .arg(86_400)
        .query_async(connection)
        .await?;
    Ok(set.is_some())
}
