//! The outbox: messages are stored by the commit of their handler, and one relay publishes them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::outbox::{
    NotPublished, Outbox, OutboxMessage, OutboxSession, Outgoing, Publisher, UnsentQuery,
};
use oncegate_core::{
    Consumer, Context, Failure, FailureExt, IdSource, MemoryBroker, Message, Relay, SourceError,
    Store, StoreError, TransactionalHandler,
};
use oncegate_postgres::{
    OutboxFilter, Postgres, PostgresInbox, PostgresOutbox, PostgresTransaction,
};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, Executor, PgPool, Row, query};
use tokio::sync::Notify;

use crate::support::{SECOND, new_schema, raw, store_at, terms};

/// A pool with the tables in a schema of its own, and the URL of the schema.
async fn tables() -> (PgPool, String) {
    let url = new_schema().await;
    store_at(&url).await;
    let pool = PgPoolOptions::new().max_connections(8).connect(&url);
    let pool = pool.await.expect("a pool");
    let ledger = "CREATE TABLE ledger (id text)";
    pool.execute(ledger).await.expect("a ledger");
    (pool, url)
}

/// What the first run of a handler does after it has sent its messages. Later runs succeed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Fail,
    Commit,
    ChangeSchema,
    SendTooMuch,
}

struct SendsTwo {
    ending: Ending,
    runs: AtomicUsize,
}

impl TransactionalHandler<PostgresInbox> for SendsTwo {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let insert = query("INSERT INTO ledger (id) VALUES ($1)").bind(cx.id());
        insert.execute(transaction.connection()).await.retry()?;
        transaction.send(Outgoing::to("booked").key("k").json(&cents))?;
        transaction.send(
            Outgoing::to("rates")
                .exchange("events")
                .header("currency", "EUR\0")
                .body(vec![0, 255]),
        )?;
        match self.ending {
            _ if self.runs.fetch_add(1, Ordering::Relaxed) > 0 => {}
            Ending::Fail => return Err("out of paper").retry(),
            Ending::Commit => {
                transaction.connection().execute("COMMIT").await.retry()?;
            }
            Ending::ChangeSchema => {
                let elsewhere = "CREATE SCHEMA IF NOT EXISTS elsewhere;
                    CREATE TABLE IF NOT EXISTS elsewhere.oncegate_outbox (LIKE oncegate_outbox INCLUDING ALL);
                    SET LOCAL search_path = elsewhere";
                transaction.connection().execute(elsewhere).await.retry()?;
            }
            Ending::SendTooMuch => loop {
                transaction.send(Outgoing::to("booked"))?;
            },
        }
        Ok(())
    }
}

/// Consumes these messages. Returns the number of dead letters.
async fn consume(pool: &PgPool, ids: &[&'static str], ending: Ending) -> usize {
    let broker = MemoryBroker::new("transfers");
    for id in ids {
        broker.publish(Message::new("5").with_message_id(*id));
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        .inbox(PostgresInbox::new(pool.clone()))
        .transactional_handler(SendsTwo {
            ending,
            runs: AtomicUsize::new(0),
        })
        .scope("ledger")
        .id(IdSource::message_id())
        .backoff(SECOND / 100, SECOND / 10)
        .run_until(broker.all_settled());
    let ended = tokio::time::timeout(60 * SECOND, consumer).await;
    ended.expect("it ends").expect("no error");
    broker.dead_letters().len()
}

async fn count(pool: &PgPool, sql: &'static str) -> i64 {
    query(sql).fetch_one(pool).await.expect("a count").get(0)
}

async fn session(pool: &PgPool) -> impl OutboxSession + use<> {
    let session = PostgresOutbox::new(pool).try_lead().await;
    session.expect("an answer").expect("the lock is free")
}

fn all() -> UnsentQuery {
    UnsentQuery {
        max_rows: 1_000,
        max_bytes: 1 << 20,
        except: Vec::new(),
        except_destinations: Vec::new(),
    }
}

async fn insert(pool: &PgPool, key: Option<&str>, body: usize) -> i64 {
    let insert = query(
        "INSERT INTO oncegate_outbox (id, exchange, destination, key, headers, body)
        VALUES (gen_random_uuid(), '', 'booked', $1, '[]', $2) RETURNING number",
    );
    let insert = insert.bind(key.map(str::as_bytes)).bind(vec![0_u8; body]);
    insert.fetch_one(pool).await.expect("a row").get(0)
}

async fn numbers(session: &impl OutboxSession, query: &UnsentQuery) -> Vec<i64> {
    let rows = session.read(query).await.expect("rows");
    rows.iter().map(|row| row.number).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_stored_by_the_commit_of_their_handler_and_once() {
    let (pool, _) = tables().await;
    assert_eq!(consume(&pool, &["t-1", "t-1"], Ending::Fail).await, 0);
    let rows = session(&pool).await.read(&all()).await.expect("rows");
    let mut first = OutboxMessage::new("ledger/t-1/1", "booked", "5");
    first.key = Some("k".into());
    first.headers = vec![("content-type".into(), "application/json".into())];
    let mut second = OutboxMessage::new("ledger/t-1/2", "rates", vec![0, 255]);
    second.exchange = "events".into();
    second.headers = vec![("currency".into(), "EUR\0".into())];
    let messages: Vec<_> = rows.into_iter().map(|row| row.message).collect();
    assert_eq!(messages, [first, second]);
    assert_eq!(count(&pool, "SELECT count(*) FROM ledger").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_commits_by_itself_sends_nothing() {
    let (pool, _) = tables().await;
    assert_eq!(consume(&pool, &["t-1"], Ending::Commit).await, 1);
    assert_eq!(
        count(&pool, "SELECT count(*) FROM oncegate_outbox").await,
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_path_of_the_handler_does_not_change_the_outbox() {
    let (pool, _) = tables().await;
    assert_eq!(consume(&pool, &["t-1"], Ending::ChangeSchema).await, 0);
    assert_eq!(
        count(&pool, "SELECT count(*) FROM oncegate_outbox").await,
        2
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_sends_too_much_is_rejected_and_sends_nothing() {
    let (pool, _) = tables().await;
    assert_eq!(consume(&pool, &["t-1"], Ending::SendTooMuch).await, 1);
    assert_eq!(
        count(&pool, "SELECT count(*) FROM oncegate_outbox").await,
        0
    );
}

/// Numbers are given before the commit, so a row may appear behind one with a greater number. A
/// reader that remembers the greatest number never finds it.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_committed_out_of_order_are_all_read() {
    const INSERT: &str = "INSERT INTO oncegate_outbox (id, exchange, destination, headers, body)
        VALUES ('t', '', 'booked', '[]', '') RETURNING number";
    const NAIVE: &str = "SELECT number FROM oncegate_outbox WHERE number > $1 ORDER BY number";
    let (pool, _) = tables().await;
    let session = session(&pool).await;
    let (mut slow, mut fast) = (
        pool.begin().await.expect("begun"),
        pool.begin().await.expect("begun"),
    );
    let number = |row: sqlx::postgres::PgRow| row.get::<i64, _>(0);
    let first = number(query(INSERT).fetch_one(&mut *slow).await.expect("a row"));
    let second = number(query(INSERT).fetch_one(&mut *fast).await.expect("a row"));
    fast.commit().await.expect("committed");

    let naive = async |after: i64| {
        let rows = query(NAIVE).bind(after).fetch_all(&pool).await;
        rows.expect("rows")
            .into_iter()
            .map(number)
            .collect::<Vec<_>>()
    };
    assert_eq!(naive(0).await, [second]);
    assert_eq!(numbers(&session, &all()).await, [second]);
    slow.commit().await.expect("committed");
    assert_eq!(
        naive(second).await,
        [] as [i64; 0],
        "the naive read loses it"
    );
    let except = vec![second];
    assert_eq!(
        numbers(&session, &UnsentQuery { except, ..all() }).await,
        [first]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_behind_a_parked_one_wait_and_reads_are_bounded() {
    let (pool, _) = tables().await;
    let session = session(&pool).await;
    let first = insert(&pool, Some("k"), 100).await;
    let behind = insert(&pool, Some("k"), 100).await;
    let other_key = insert(&pool, Some("l"), 100).await;
    let no_key = insert(&pool, None, 100).await;
    session.park(first, "too large\0").await.expect("parked");
    assert_eq!(numbers(&session, &all()).await, [other_key, no_key]);
    let level = session.level().await.expect("a level");
    assert_eq!((level.unsent, level.parked), (3, 1));
    assert!(level.oldest_age < 60 * SECOND && !level.oldest_age.is_zero());

    session.remove(&[first]).await.expect("removed");
    for (max_bytes, expected) in [
        (1, vec![behind]),
        (100, vec![behind]),
        (101, vec![behind, other_key]),
    ] {
        let query = UnsentQuery { max_bytes, ..all() };
        assert_eq!(numbers(&session, &query).await, expected);
    }
    let elsewhere = query("UPDATE oncegate_outbox SET destination = 'rates' WHERE number = $1");
    let elsewhere = elsewhere.bind(other_key).execute(&pool).await;
    elsewhere.expect("updated");
    let in_order = [behind, other_key, no_key];
    assert_eq!(numbers(&session, &all()).await, in_order);
    let first_two = UnsentQuery {
        max_rows: 2,
        ..all()
    };
    assert_eq!(numbers(&session, &first_two).await, in_order[..2]);
    let without_booked = UnsentQuery {
        except_destinations: vec![("".into(), "booked".into())],
        ..all()
    };
    assert_eq!(numbers(&session, &without_booked).await, [other_key]);

    session.park(no_key, "too large").await.expect("parked");
    let again = session.read_again(&[first, behind, no_key]).await;
    let again = again.expect("rows");
    assert_eq!(again.len(), 1, "the others are deleted or parked");
    assert_eq!(again[0].number, behind);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_considers_a_thousand_destinations_and_the_next_one_others() {
    let (pool, _) = tables().await;
    let session = session(&pool).await;
    let insert = "INSERT INTO oncegate_outbox (id, exchange, destination, headers, body)
        SELECT n, 'x', to_char(n, 'FM0000'), '[]', '' FROM generate_series(1, 2500) AS n";
    pool.execute(insert).await.expect("inserted");
    let max_rows = 10_000;
    let query = UnsentQuery { max_rows, ..all() };
    for expected in [1..=1_000, 1_001..=2_000, 2_001..=2_500, 1..=1_000] {
        let expected: Vec<i64> = expected.collect();
        assert_eq!(numbers(&session, &query).await, expected);
    }
    let failing = (1..=2_499).map(|number| ("x".to_owned(), format!("{number:04}")));
    let except_destinations = failing.collect();
    let only_last = UnsentQuery {
        except_destinations,
        ..all()
    };
    assert_eq!(numbers(&session, &only_last).await, [2_500]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_is_parked_and_rows_of_other_keys_are_read() {
    let (pool, _) = tables().await;
    let session = session(&pool).await;
    let bad = insert(&pool, Some("k"), 0).await;
    insert(&pool, Some("k"), 0).await;
    let good = insert(&pool, None, 0).await;
    let spoil = query("UPDATE oncegate_outbox SET headers = 'x' WHERE number = $1").bind(bad);
    spoil.execute(&pool).await.expect("updated");
    assert_eq!(numbers(&session, &all()).await, [] as [i64; 0]);
    assert_eq!(numbers(&session, &all()).await, [good]);
    assert_eq!(session.level().await.expect("a level").parked, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_message_in_its_listed_state_is_dropped() {
    let (pool, _) = tables().await;
    let (store, session) = (Postgres::pool(&pool), session(&pool).await);
    let (first, second) = (insert(&pool, None, 0).await, insert(&pool, None, 0).await);
    session.park(first, "too large").await.expect("parked");
    let list = async |filter: OutboxFilter| store.list_outbox(&filter, 10).await.expect("a list");
    let parked = list(OutboxFilter::default()).await;
    assert_eq!(parked.len(), 1);
    assert!(store.retry_outbox(first).await.expect("an answer"));
    assert!(!store.drop_outbox(&parked[0]).await.expect("an answer"));
    let unsent = list(OutboxFilter {
        unsent: true,
        destination: Some("booked".into()),
        numbers: vec![first, second],
    });
    let unsent = unsent.await;
    assert_eq!(unsent.len(), 2);
    session.park(second, "too large").await.expect("parked");
    assert!(store.drop_outbox(&unsent[0]).await.expect("an answer"));
    assert!(!store.drop_outbox(&unsent[1]).await.expect("an answer"));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_session_leads_until_its_connection_ends() {
    let (pool, _) = tables().await;
    let (other_pool, _) = tables().await;
    let leader = session(&pool).await;
    let _of_another_outbox = session(&other_pool).await;
    let standby = PostgresOutbox::new(&pool);
    assert!(standby.try_lead().await.expect("an answer").is_none());
    end_leader(&pool).await;
    let next = wait_for_lock(&standby).await;
    for result in [
        leader.read(&all()).await.map(drop),
        leader.level().await.map(drop),
        leader.remove(&[1]).await,
        leader.park(1, "").await,
    ] {
        result.expect_err("it no longer leads");
    }
    next.close().await;
    wait_for_lock(&standby).await;
}

/// Ends the session that has the lock of this schema's outbox.
async fn end_leader(pool: &PgPool) {
    let end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1702060386
        AND objid = to_regclass('oncegate_outbox')::oid AND granted";
    pool.fetch_one(end).await.expect("a leader");
}

async fn wait_for_lock(outbox: &PostgresOutbox) -> impl OutboxSession + use<> {
    for _ in 0..100 {
        if let Some(session) = outbox.try_lead().await.expect("an answer") {
            return session;
        }
        tokio::time::sleep(SECOND / 20).await;
    }
    panic!("the lock is not free");
}

/// Records the ids that are published, in order. Confirms after a pause, and not while frozen.
#[derive(Clone, Default)]
struct Recorder(Arc<Recorded>);

#[derive(Default)]
struct Recorded {
    published: Mutex<Vec<OutboxMessage>>,
    is_frozen: AtomicBool,
    thawed: Notify,
}

impl Recorder {
    fn published(&self) -> Vec<OutboxMessage> {
        self.0.published.lock().expect("no panic").clone()
    }
}

impl Publisher for Recorder {
    fn described(&self) -> String {
        "recorder".into()
    }

    async fn preflight(&self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        let thawed = self.0.thawed.notified();
        self.0
            .published
            .lock()
            .expect("no panic")
            .push(message.clone());
        if self.0.is_frozen.load(Ordering::Relaxed) {
            thawed.await;
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..3))).await;
        Ok(())
    }
}

async fn until_empty(pool: &PgPool) {
    for _ in 0..600 {
        if count(pool, "SELECT count(*) FROM oncegate_outbox").await == 0 {
            return;
        }
        tokio::time::sleep(SECOND / 10).await;
    }
    panic!("rows are left");
}

/// Three relays, whose leader is disconnected again and again while messages are sent.
#[tokio::test(flavor = "multi_thread")]
async fn while_leaders_are_disconnected_every_message_is_published_in_the_order_of_its_key() {
    const KEYS: [&str; 3] = ["k", "l", "m"];
    let (pool, _) = tables().await;
    let recorder = Recorder::default();
    let relays: Vec<_> = (0..3)
        .map(|_| {
            let relay = Relay::from(PostgresOutbox::new(&pool)).to(recorder.clone());
            tokio::spawn(relay.run_until(std::future::pending()))
        })
        .collect();
    let mut sent: HashMap<&[u8], Vec<String>> = HashMap::new();
    for number in 0..600 {
        let key = KEYS[number % 3];
        let row = query(
            "INSERT INTO oncegate_outbox (id, exchange, destination, key, headers, body)
            VALUES ($1, '', 'booked', $2, '[]', '')",
        );
        let id = format!("t-{number}/1");
        let row = row.bind(&id).bind(key.as_bytes());
        row.execute(&pool).await.expect("a row");
        sent.entry(key.as_bytes()).or_default().push(id);
        if number % 150 == 100 {
            tokio::time::sleep(SECOND / 2).await; // a relay leads again
            end_leader(&pool).await;
        }
    }
    until_empty(&pool).await;
    relays.iter().for_each(|relay| relay.abort());
    let mut first_copies: HashMap<&[u8], Vec<String>> = HashMap::new();
    let published = recorder.published();
    for message in &published {
        let of_key = first_copies
            .entry(message.key.as_deref().expect("a key"))
            .or_default();
        if !of_key.contains(&message.id) {
            of_key.push(message.id.clone());
        }
    }
    assert_eq!(first_copies, sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_whose_connection_is_lost_begins_no_message_that_it_had_not_begun() {
    const WAIT: &str =
        "SELECT pg_advisory_lock(1702060386, to_regclass('oncegate_outbox')::oid::int4)";
    const WAITING: &str =
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND objid = to_regclass('oncegate_outbox')::oid";
    let (pool, url) = tables().await;
    for _ in 0..20 {
        insert(&pool, None, 0).await;
    }
    let recorder = Recorder::default();
    recorder.0.is_frozen.store(true, Ordering::Relaxed);
    let relay = Relay::from(PostgresOutbox::new(&pool))
        .to(recorder.clone())
        .max_in_flight(3);
    let relay = tokio::spawn(relay.run_until(std::future::pending()));
    while recorder.published().len() < 3 {
        tokio::time::sleep(SECOND / 50).await;
    }
    // Another process, which takes the lock before the relay can connect again.
    let mut other_leader = raw(&url).await;
    let locking = tokio::spawn(async move {
        other_leader.execute(WAIT).await.expect("the lock");
        other_leader
    });
    while count(&pool, WAITING).await == 0 {
        tokio::time::sleep(SECOND / 50).await;
    }
    end_leader(&pool).await;
    let other_leader = locking.await.expect("no panic");
    tokio::time::sleep(3 * SECOND).await; // longer than the interval of its checks
    recorder.0.is_frozen.store(false, Ordering::Relaxed);
    recorder.0.thawed.notify_waiters();
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(recorder.published().len(), 3);
    other_leader.close().await.expect("closed");
    until_empty(&pool).await;
    relay.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_version_1_are_refused_or_updated() {
    let (pool, url) = tables().await;
    let older = "DROP TABLE oncegate_outbox, oncegate_results; DELETE FROM oncegate_schema WHERE version > 1";
    raw(&url).await.execute(older).await.expect("as version 1");
    let guarantee = terms(oncegate_core::Guarantee::EffectivelyOnce).guarantee;
    let refused = [
        Postgres::url(&url).preflight(guarantee).await,
        PostgresOutbox::new(&pool).preflight().await,
    ];
    for result in refused {
        let Err(StoreError::Misconfigured(error)) = result else {
            panic!("not refused: {result:?}");
        };
        let text = error.to_string();
        assert!(
            text.contains("have version 1, this release supports 3"),
            "{text}"
        );
    }
    let updated = PostgresOutbox::new(&pool).create_tables().preflight().await;
    updated.expect("the tables are updated");
    insert(&pool, None, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_on_the_outbox_are_named() {
    let (_, url) = tables().await;
    let user = format!("relay{}", fastrand::u64(..));
    let (_, schema) = url.rsplit_once('=').expect("a schema");
    let create = format!(
        "CREATE ROLE {user} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {user};
        GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {user}"
    );
    let mut admin = raw(&url).await;
    admin.execute(AssertSqlSafe(create)).await.expect("a role");
    let url = url.replace("postgres@", &format!("{user}@"));
    let pool = PgPool::connect(&url).await.expect("a pool");
    let outbox = PostgresOutbox::new(&pool);
    let error = outbox.preflight().await.expect_err("refused").to_string();
    assert!(
        error.contains("GRANT SELECT, UPDATE, DELETE ON oncegate_outbox"),
        "{error}"
    );
    let grant = format!("GRANT UPDATE, DELETE ON {schema}.oncegate_outbox TO {user}");
    admin.execute(AssertSqlSafe(grant)).await.expect("granted");
    outbox.preflight().await.expect("the rights suffice");
}
