//! The stores without a broker.

use std::sync::Arc;
use std::time::Duration;

use oncegate::marker::{Ask, Guarantee, Operation, Terms, Token};
use oncegate::{Key, MemoryStore, MessageId, Redis, Sqlite};
use redis::aio::MultiplexedConnection;

use super::{Meter, Store, Task, Took};
use crate::Outcome;

/// How many operations of each kind one apply carries: as many as the consumer's.
const BATCH: usize = 256;
/// How many applies are under way at once: as many as a consumer of Kafka has.
const AT_ONCE: usize = 2;

/// Claims and completes new ids, as fast as the store answers: the completions of one batch travel
/// with the claims of the next, as they do in a consumer that has enough to do.
pub(super) async fn run(task: &Task, store: &Store) -> Outcome<Took> {
    let store: Arc<dyn oncegate::Store> = match store {
        Store::Memory { .. } => Arc::new(MemoryStore::new()),
        Store::Sqlite { file } => Arc::new(Sqlite::file(file)),
        Store::Redis { url, prefix } => Arc::new(
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
                        ask: Ask::Complete,
                        attempt: 1,
                        ..claim
                    })
                    .collect();
                let completions = batch.len();
                batch.extend(
                    (next..end.min(next + BATCH))
                        .map(|number| operation("new", number, Ask::Claim)),
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

/// Completes so many ids that nobody else uses.
pub(super) async fn fill(store: &MemoryStore, markers: usize) -> Outcome<()> {
    for first in (0..markers).step_by(BATCH) {
        let batch: Vec<Operation> = (first..markers.min(first + BATCH))
            .map(|number| operation("old", number, Ask::Complete))
            .collect();
        for answer in oncegate::Store::apply(store, &batch).await {
            answer?;
        }
    }
    Ok(())
}

/// Asks the store one thing about one id, under the terms that a consumer has by default.
pub(crate) fn operation(series: &str, number: usize, ask: Ask) -> Operation {
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
        ask,
        token: Token(number as u128 + 1),
        attempt: u32::from(ask == Ask::Complete),
        terms,
    }
}

/// What one writes by hand: remembers an id for a day, and says whether it was new.
pub(super) async fn is_first(connection: &mut MultiplexedConnection, id: &[u8]) -> Outcome<bool> {
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
