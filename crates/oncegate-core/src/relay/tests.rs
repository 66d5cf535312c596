use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tokio::sync::Notify;

use super::*;
use crate::internal::Lock;
use crate::outbox::UnsentQuery;
use crate::source::SourceError;

/// An outbox in memory. Clones share it, as processes share a database.
#[derive(Clone, Default)]
struct FakeOutbox(Arc<FakeRows>);

#[derive(Default)]
struct FakeRows {
    rows: Lock<BTreeMap<i64, OutboxRow>>,
    parked: Lock<BTreeMap<i64, String>>,
    /// The session of the leader; 0 without one.
    leader: AtomicU64,
    sessions: AtomicU64,
    is_misconfigured: AtomicBool,
    /// Whether requests get no answer, as after a machine failed.
    is_silent: AtomicBool,
    /// Whether every read fails.
    fails_reads: AtomicBool,
    /// How long a read takes.
    read_seconds: AtomicU64,
}

struct FakeSession(Arc<FakeRows>, u64);

impl FakeOutbox {
    fn insert(&self, number: i64, destination: &str, key: Option<&'static str>) {
        let mut message = OutboxMessage::new(format!("t/{number}"), destination, "");
        message.key = key.map(|key| Bytes::from_static(key.as_bytes()));
        let row = OutboxRow { number, message };
        self.0.rows.lock().insert(number, row);
    }

    fn len(&self) -> usize {
        self.0.rows.lock().len()
    }

    /// The database closes the leader's session.
    fn end_session(&self) {
        self.0.leader.store(0, Ordering::Relaxed);
    }
}

impl Outbox for FakeOutbox {
    type Session = FakeSession;

    fn described(&self) -> String {
        "memory".into()
    }

    async fn preflight(&self) -> Result<(), StoreError> {
        match self.0.is_misconfigured.load(Ordering::Relaxed) {
            true => Err(StoreError::Misconfigured("no table".into())),
            false => Ok(()),
        }
    }

    async fn try_lead(&self) -> Result<Option<FakeSession>, StoreError> {
        let id = self.0.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        let taken = self
            .0
            .leader
            .compare_exchange(0, id, Ordering::Relaxed, Ordering::Relaxed);
        Ok(taken.ok().map(|_| FakeSession(self.0.clone(), id)))
    }
}

impl FakeSession {
    async fn check(&self) -> Result<(), StoreError> {
        if self.0.is_silent.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        match self.0.leader.load(Ordering::Relaxed) == self.1 {
            true => Ok(()),
            false => Err(StoreError::Unknown("connection lost".into())),
        }
    }
}

impl Drop for FakeSession {
    fn drop(&mut self) {
        let _ = self
            .0
            .leader
            .compare_exchange(self.1, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl OutboxSession for FakeSession {
    async fn read(&self, query: &UnsentQuery) -> Result<Vec<OutboxRow>, StoreError> {
        self.check().await?;
        if self.0.fails_reads.load(Ordering::Relaxed) {
            return Err(StoreError::Unknown("statement timeout".into()));
        }
        sleep(Duration::from_secs(
            self.0.read_seconds.load(Ordering::Relaxed),
        ))
        .await;
        let (rows, parked) = (self.0.rows.lock(), self.0.parked.lock());
        let selected = rows.values().filter(|row| {
            let address = ("".into(), row.message.destination.clone());
            !query.except.contains(&row.number)
                && !query.except_destinations.contains(&address)
                && !parked.contains_key(&row.number)
        });
        Ok(selected.take(query.max_rows).cloned().collect())
    }

    async fn read_again(&self, numbers: &[i64]) -> Result<Vec<OutboxRow>, StoreError> {
        self.check().await?;
        let (rows, parked) = (self.0.rows.lock(), self.0.parked.lock());
        let numbers = numbers.iter().filter(|it| !parked.contains_key(it));
        Ok(numbers.filter_map(|it| rows.get(it).cloned()).collect())
    }

    async fn remove(&self, numbers: &[i64]) -> Result<(), StoreError> {
        self.check().await?;
        self.0
            .rows
            .lock()
            .retain(|number, _| !numbers.contains(number));
        Ok(())
    }

    async fn park(&self, number: i64, error: &str) -> Result<(), StoreError> {
        self.check().await?;
        self.0.parked.lock().insert(number, error.to_owned());
        Ok(())
    }

    async fn level(&self) -> Result<OutboxLevel, StoreError> {
        self.check().await?;
        Ok(OutboxLevel {
            unsent: self.0.rows.lock().len() as u64,
            parked: 0,
            oldest_age: Duration::from_secs(90),
        })
    }

    async fn close(self) {}
}

/// Records what is published. Its broker does not confirm while it is frozen.
#[derive(Clone, Default)]
struct FakePublisher(Arc<FakeBroker>);

#[derive(Default)]
struct FakeBroker {
    begun: AtomicUsize,
    published: Lock<Vec<String>>,
    is_frozen: AtomicBool,
    thawed: Notify,
}

impl FakePublisher {
    fn published(&self) -> Vec<String> {
        self.0.published.lock().clone()
    }

    fn thaw(&self) {
        self.0.is_frozen.store(false, Ordering::Relaxed);
        self.0.thawed.notify_waiters();
    }
}

impl Publisher for FakePublisher {
    fn described(&self) -> String {
        "memory".into()
    }

    async fn preflight(&self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        self.0.begun.fetch_add(1, Ordering::Relaxed);
        if message.destination == "too-small" {
            return Err(NotPublished::Refused("too large".into()));
        }
        if message.destination == "missing" {
            return Err(NotPublished::NotConfirmed("no route".into()));
        }
        let thawed = self.0.thawed.notified();
        self.0.published.lock().push(message.id.clone());
        if self.0.is_frozen.load(Ordering::Relaxed) {
            thawed.await;
        }
        Ok(())
    }
}

/// Waits until the condition holds. Time is paused.
async fn until(holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(60), waiting)
        .await
        .expect("it holds within a minute");
}

fn ids(numbers: impl IntoIterator<Item = i64>) -> Vec<String> {
    numbers
        .into_iter()
        .map(|number| format!("t/{number}"))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn messages_are_published_in_order_and_removed_after_the_confirm() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    (1..=1_500).for_each(|number| outbox.insert(number, "a", Some("k")));
    let relay = Relay::from(outbox.clone()).to(publisher.clone());
    relay
        .run_until(until(|| outbox.len() == 0))
        .await
        .expect("no error");
    assert_eq!(publisher.published(), ids(1..=1_500));
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_recorded_confirm_is_published_again_with_its_id() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    outbox.insert(1, "a", None);
    publisher.0.is_frozen.store(true, Ordering::Relaxed);
    let crashing = Relay::from(outbox.clone()).to(publisher.clone());
    let crashing = tokio::spawn(crashing.run_until(std::future::pending()));
    until(|| !publisher.published().is_empty()).await;
    assert_eq!(outbox.len(), 1);
    crashing.abort();
    publisher.thaw();
    let next = Relay::from(outbox.clone()).to(publisher.clone());
    next.run_until(until(|| outbox.len() == 0))
        .await
        .expect("no error");
    assert_eq!(publisher.published(), ids([1, 1]));
}

#[tokio::test(start_paused = true)]
async fn one_relay_publishes_and_another_one_takes_over() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    let relays: Vec<_> = (0..2)
        .map(|_| {
            let relay = Relay::from(outbox.clone()).to(publisher.clone());
            tokio::spawn(relay.run_until(std::future::pending()))
        })
        .collect();
    (1..=100).for_each(|number| outbox.insert(number, "a", None));
    until(|| outbox.len() == 0).await;
    assert_eq!(publisher.published().len(), 100, "none is published twice");
    relays[0].abort();
    outbox.insert(101, "a", None);
    until(|| outbox.len() == 0).await;
    relays[1].abort();
}

/// The database ends the session of the leader, or no longer answers it.
async fn begins_no_further_message(lose: impl Fn(&FakeRows)) {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    (1..=10).for_each(|number| outbox.insert(number, "a", None));
    publisher.0.is_frozen.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox.clone())
        .to(publisher.clone())
        .max_in_flight(2);
    let relay = tokio::spawn(relay.run_until(std::future::pending()));
    until(|| publisher.published().len() == 2).await;
    outbox.0.leader.store(u64::MAX, Ordering::Relaxed); // another process leads
    lose(&outbox.0);
    sleep(Duration::from_secs(7)).await; // the check, and its timeout
    publisher.thaw();
    sleep(Duration::from_secs(30)).await;
    assert_eq!(publisher.0.begun.load(Ordering::Relaxed), 2);
    outbox.0.is_silent.store(false, Ordering::Relaxed);
    outbox.end_session();
    until(|| outbox.len() == 0).await;
    relay.abort();
}

#[tokio::test(start_paused = true)]
async fn a_relay_whose_session_has_ended_begins_no_further_message() {
    begins_no_further_message(|_| {}).await;
}

#[tokio::test(start_paused = true)]
async fn a_relay_whose_requests_get_no_answer_begins_no_further_message() {
    let silence = |rows: &FakeRows| rows.is_silent.store(true, Ordering::Relaxed);
    begins_no_further_message(silence).await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_message_is_parked_a_missing_destination_waits_and_others_continue() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    outbox.insert(1, "too-small", Some("k"));
    (2..=2_000).for_each(|number| outbox.insert(number, "missing", None));
    outbox.insert(2_001, "a", None);
    let relay = Relay::from(outbox.clone()).to(publisher.clone());
    let is_done = until(|| !publisher.published().is_empty() && outbox.0.parked.lock().len() == 1);
    relay.run_until(is_done).await.expect("no error");
    assert_eq!(publisher.published(), ids([2_001]));
    let parked = BTreeMap::from([(1, "too large".to_owned())]);
    assert_eq!(*outbox.0.parked.lock(), parked);
    assert!(
        publisher.0.begun.load(Ordering::Relaxed) < 200,
        "one probe at a time"
    );
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_confirms_and_begins_nothing() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    (1..=10).for_each(|number| outbox.insert(number, "a", None));
    publisher.0.is_frozen.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox.clone())
        .to(publisher.clone())
        .max_in_flight(4);
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let relay = tokio::spawn(relay.run_until(async move { drop(stopped.await) }));
    until(|| publisher.published().len() == 4).await;
    stop.send(()).expect("the relay runs");
    sleep(Duration::from_secs(5)).await;
    assert!(!relay.is_finished());
    publisher.thaw();
    relay.await.expect("no panic").expect("no error");
    assert_eq!((publisher.published().len(), outbox.len()), (4, 6));
}

#[tokio::test(start_paused = true)]
async fn a_drain_whose_session_is_lost_ends_the_relay() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    outbox.insert(1, "a", None);
    publisher.0.is_frozen.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox.clone()).to(publisher.clone());
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let relay = tokio::spawn(relay.run_until(async move { drop(stopped.await) }));
    until(|| publisher.published().len() == 1).await;
    stop.send(()).expect("the relay runs");
    sleep(Duration::from_millis(1)).await;
    outbox.end_session();
    publisher.thaw();
    let ended = timeout(Duration::from_secs(60), relay).await;
    ended
        .expect("it ends")
        .expect("no panic")
        .expect("no error");
}

#[tokio::test(start_paused = true)]
async fn while_reads_fail_the_pauses_between_sessions_grow() {
    let outbox = FakeOutbox::default();
    outbox.0.fails_reads.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox.clone()).to(FakePublisher::default());
    let relay = relay.run_until(sleep(Duration::from_secs(60)));
    relay.await.expect("no error");
    let sessions = outbox.0.sessions.load(Ordering::Relaxed);
    assert!((2..60).contains(&sessions), "{sessions}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_read_does_not_end_the_session_and_begins_no_message_without_an_answer() {
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    (1..=3).for_each(|number| outbox.insert(number, "a", None));
    publisher.0.is_frozen.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox.clone())
        .to(publisher.clone())
        .max_in_flight(2);
    let relay = tokio::spawn(relay.run_until(std::future::pending()));
    until(|| publisher.published().len() == 2).await;
    outbox.0.read_seconds.store(20, Ordering::Relaxed);
    sleep(Duration::from_secs(8)).await;
    publisher.thaw();
    sleep(Duration::from_secs(5)).await;
    assert_eq!(publisher.published().len(), 2);
    until(|| outbox.len() == 0).await;
    assert_eq!(outbox.0.sessions.load(Ordering::Relaxed), 1);
    relay.abort();
}

#[tokio::test(start_paused = true)]
async fn a_misconfigured_outbox_ends_the_relay_at_the_start() {
    let outbox = FakeOutbox::default();
    outbox.0.is_misconfigured.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox).to(FakePublisher::default());
    let ended = relay.run_until(std::future::pending()).await;
    assert!(matches!(
        ended,
        Err(Error::Store(StoreError::Misconfigured(_)))
    ));
}

#[tokio::test(start_paused = true)]
async fn the_listed_metrics_are_recorded() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _here = metrics::set_default_local_recorder(&recorder);
    let recorded = || -> BTreeMap<String, DebugValue> {
        let all = snapshotter.snapshot().into_vec().into_iter();
        all.map(|(key, _, _, value)| (key.key().name().to_owned(), value))
            .collect()
    };
    let (outbox, publisher) = (FakeOutbox::default(), FakePublisher::default());
    outbox.insert(1, "too-small", None);
    outbox.insert(2, "a", None);
    publisher.0.is_frozen.store(true, Ordering::Relaxed);
    let relay = Relay::from(outbox.clone()).to(publisher.clone());
    let mut while_leading = BTreeMap::new();
    let shutdown = async {
        until(|| outbox.0.parked.lock().len() == 1).await;
        sleep(Duration::from_secs(6)).await; // the interval of the level
        while_leading = recorded();
        publisher.thaw();
        until(|| outbox.len() == 1).await;
    };
    relay.run_until(shutdown).await.expect("no error");
    let listed: Vec<&str> = metric::OUTBOX_METRICS.iter().map(|it| it.name).collect();
    let mut names: Vec<&str> = while_leading.keys().map(String::as_str).collect();
    names.sort_by_key(|name| listed.iter().position(|other| other == name));
    assert_eq!(names, listed);
    let of = |name| &while_leading[name];
    assert_eq!(of(metric::OUTBOX_REFUSED), &DebugValue::Counter(1));
    assert_eq!(
        of(metric::OUTBOX_OLDEST_AGE_SECONDS),
        &DebugValue::Gauge(90.0.into())
    );
    assert_eq!(of(metric::OUTBOX_UNSENT), &DebugValue::Gauge(2.0.into()));
    assert_eq!(of(metric::OUTBOX_LEADING), &DebugValue::Gauge(1.0.into()));
    let afterwards = recorded();
    let leading = &afterwards[metric::OUTBOX_LEADING];
    assert_eq!(leading, &DebugValue::Gauge(0.0.into()));
    assert_eq!(afterwards[metric::OUTBOX_PUBLISHED], DebugValue::Counter(1));
    let age = &afterwards[metric::OUTBOX_OLDEST_AGE_SECONDS];
    assert_eq!(
        age,
        &DebugValue::Gauge(0.0.into()),
        "the next leader sets its own"
    );
}
