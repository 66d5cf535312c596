//! The polling thread: it alone speaks to the consumer group, and no handler can stop it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use oncegate_core::SourceError;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};
use rdkafka::types::RDKafkaRespErr;

use crate::batch::{self, Adoption, Batch, Fault, Queue};
use crate::kafka::{Kafka, OutOfRange, StartAt};
use crate::open::wrong_setting;
use crate::outage::Outage;
use crate::shared::{Begins, Commit, Jump, Phase, Shared, Way};
use crate::standing;

/// How many events of the group are served in one turn.
const EVENTS: usize = 16;
/// How long one turn waits for a message. Rebalances wait as long.
const TURN: Duration = Duration::from_millis(50);
/// The same, while revoked deliveries are waited for.
const DRAIN_TURN: Duration = Duration::from_millis(5);
/// How long librdkafka may take to begin at another offset.
const SEEK: Duration = Duration::from_secs(1);
/// How long a client that is replaced may take to close before it is left behind.
const CLOSE: Duration = Duration::from_secs(10);
/// The pause before another client begins, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How often it is looked whether markers of transactions are to be passed.
const LOOK: Duration = Duration::from_millis(500);

/// Hands librdkafka's log lines to `tracing`, and what cannot be reached to whoever speaks of that.
pub(crate) struct Log(pub(crate) Arc<Outage>);

impl ClientContext for Log {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log(level, facility, line);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if Outage::is(code) => self.0.tell(reason),
            _ => tracing::warn!(%error, reason, "Kafka, dead letters"),
        }
    }
}

fn log(level: RDKafkaLogLevel, facility: &str, line: &str) {
    match level {
        // Properties are given to consumer and producer alike; each warns of those that are the other's.
        _ if facility == "CONFWARN" => tracing::debug!(facility, "{line}"),
        // A broker failed: each such line that is an error comes as an error of the client too, which is told.
        _ if facility == "FAIL" => tracing::debug!(facility, "{line}"),
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical | RDKafkaLogLevel::Error => {
            tracing::error!(facility, "{line}");
        }
        RDKafkaLogLevel::Warning => tracing::warn!(facility, "{line}"),
        RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => tracing::info!(facility, "{line}"),
        RDKafkaLogLevel::Debug => tracing::debug!(facility, "{line}"),
    }
}

/// What librdkafka calls back into, on the polling thread.
pub(crate) struct Context {
    shared: Arc<Shared>,
    start: StartAt,
    out_of_range: OutOfRange,
    /// Topics that were deleted and made anew, and are to be read from their beginning.
    made_anew: Mutex<Vec<String>>,
    /// How long revoked deliveries are waited for.
    drain: Duration,
    /// Set while the source lives; the queue holds the consumer, so it is taken out before the consumer is dropped.
    queue: Mutex<Option<Arc<Queue<Context>>>>,
    /// The last error of the client as a whole, for whoever waits for the broker.
    trouble: Mutex<Option<(RDKafkaErrorCode, String)>>,
    outage: Arc<Outage>,
    /// Set when another client has taken the place of this one: what it still has to say is of no interest.
    is_replaced: AtomicBool,
}

impl Context {
    pub(crate) fn new(shared: Arc<Shared>, kafka: &Kafka, outage: Arc<Outage>) -> Self {
        let (start, out_of_range, drain) = (kafka.start, kafka.out_of_range, kafka.drain());
        let (made_anew, queue, trouble) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { shared, start, out_of_range, made_anew, drain, queue, trouble, outage, is_replaced: AtomicBool::new(false) }
    }

    /// The last error of the client as a whole, and forgets it.
    pub(crate) fn take_trouble(&self) -> Option<(RDKafkaErrorCode, String)> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn queue(&self) -> Option<Arc<Queue<Context>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_queue(&self, queue: Option<Arc<Queue<Context>>>) {
        *self.queue.lock().unwrap_or_else(PoisonError::into_inner) = queue;
    }

    fn assign(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        // Before assigning, or first messages come through the main queue.
        let queue = self.queue();
        let mut assigned = partitions.clone();
        for (topic, partition, begins) in standing::ask(consumer, partitions) {
            // No queue: the source is leaving, and nothing is read any more.
            let adopted = queue.as_ref().map(|queue| queue.adopt(&topic, partition));
            if adopted == Some(Adoption::NoSuchPartition) {
                tracing::error!(topic, partition, "the partition's queue cannot be read in batches");
            }
            match begins {
                Begins::At(offset) => tracing::info!(topic, partition, offset, "partition assigned"),
                Begins::Unknown => tracing::info!(topic, partition, "partition assigned"),
                Begins::Nowhere if self.start == StartAt::Earliest || standing::is_added(consumer, &topic, partition) => {
                    tracing::info!(
                        topic,
                        partition,
                        "partition assigned; the group has no offset for it yet, so it is read from its beginning"
                    );
                    complain("a beginning", assigned.set_partition_offset(&topic, partition, Offset::Beginning));
                }
                Begins::Nowhere => tracing::info!(topic, partition, "partition assigned; the group has no offset for it"),
            }
            self.shared.assign(&topic, partition, begins);
        }
        metrics::counter!("oncegate_kafka_partitions_assigned_total").increment(partitions.count() as u64);
        let outcome = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(&assigned),
            _ => consumer.assign(&assigned),
        };
        complain("assigning partitions", outcome);
    }

    /// Lets what was handed out be settled, for a while, and stores how far it came; librdkafka commits that when it
    /// unassigns, before anyone else gets the partitions. A lost assignment is someone else's already.
    fn revoke(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let leaving = names(partitions);
        let lost = consumer.assignment_lost();
        let epochs = self.shared.revoke(&leaving);
        if !lost {
            self.drain(&epochs);
            store(consumer, &self.shared);
        }
        let left = self.shared.lock().out(&epochs);
        for (topic, partition) in &leaving {
            tracing::info!(topic, partition, lost, unsettled = left, "partition revoked");
        }
        metrics::counter!("oncegate_kafka_partitions_revoked_total", "lost" => if lost { "yes" } else { "no" })
            .increment(leaving.len() as u64);
        self.shared.lock().forget(&epochs);
        self.unassign(consumer, partitions);
    }

    fn drain(&self, epochs: &[u64]) {
        let end = Instant::now() + self.drain;
        while Instant::now() < end {
            let state = self.shared.lock();
            if state.phase() >= Phase::Closing || state.out(epochs) == 0 {
                return;
            }
            drop(state);
            self.pump(DRAIN_TURN);
        }
        tracing::warn!(bound = ?self.drain, "revoked partitions go with deliveries unsettled: they are delivered again elsewhere");
    }

    fn unassign(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
            _ => consumer.unassign(),
        };
        complain("giving partitions back", unassigned);
    }

    /// Reads one batch, or waits. Does not serve the main queue, so it may run inside a rebalance.
    fn pump(&self, wait: Duration) {
        let room = self.shared.lock().room();
        match self.queue() {
            Some(queue) if room > 0 => self.take_in(queue.read(room, wait), &queue),
            _ => self.shared.wait(wait),
        }
    }

    fn take_in(&self, batch: Batch, queue: &Queue<Self>) {
        for fault in &batch.faults {
            match unreadable(fault) {
                Some(error) => {
                    // Before the records: what follows on the unreadable part may stand in the same batch.
                    self.shared.lock().bar(&fault.topic, fault.partition);
                    self.shared.fail(error);
                }
                None if fault.code == RDKafkaErrorCode::AutoOffsetReset => self.shared.fail(standing::lost(queue, fault)),
                None => self.judge(fault.code, &format!("{}/{}", fault.topic, fault.partition)),
            }
        }
        let findings = self.shared.take_in(batch.records);
        findings.jumps.iter().for_each(|jump| look_into(jump, queue));
        // After the records, which may stand before.
        let faulty = batch.faults.iter().filter(|fault| fault.offset >= 0).map(|fault| (&*fault.topic, fault.partition));
        for (topic, partition) in faulty.chain(findings.restarted.iter().map(|(topic, partition)| (&**topic, *partition))) {
            self.read_on(topic, partition, queue);
        }
    }

    /// Has librdkafka read on after the last message that was read. It counts an error that it hands over as a message, and
    /// does not notice when a log begins anew: after the next rebalance it would read on too far up, and skip what lies
    /// before.
    fn read_on(&self, topic: &str, partition: i32, queue: &Queue<Self>) {
        let Some(offset) = self.shared.lock().distrust(topic, partition) else { return };
        if let Err(error) = queue.consumer().seek(topic, partition, Offset::Offset(offset), SEEK) {
            tracing::warn!(%error, topic, partition, offset, "reading on");
        }
    }
}

/// Tells what was removed before it was read from what nobody is ever handed (compacted away, markers of transactions).
fn look_into(jump: &Jump, queue: &Queue<Context>) {
    let Some(first) = queue.first_offset(&jump.topic, jump.partition) else { return };
    if (jump.from + 1..=jump.to).contains(&first) {
        let missed = first - jump.from;
        metrics::counter!("oncegate_kafka_messages_missed_total").increment(u64::try_from(missed).unwrap_or(0));
        tracing::error!(
            topic = %jump.topic,
            partition = jump.partition,
            stood = jump.from,
            first,
            missed,
            "messages missed: they were removed from the log before the group had read them; reading on at the first that is left"
        );
    }
}

impl Context {
    /// Most errors pass by themselves, and librdkafka retries them. These do not.
    fn judge(&self, code: RDKafkaErrorCode, place: &str) {
        use RDKafkaErrorCode as E;
        let fault = match code {
            E::TopicAuthorizationFailed => {
                SourceError::misconfigured("topic", format!("not allowed to read {place}"), "grant Read and Describe on the topic")
            }
            E::GroupAuthorizationFailed => SourceError::misconfigured("group", "not allowed to use the group", "grant Read on the group"),
            E::FencedInstanceId | E::Fenced => SourceError::misconfigured(
                "group.instance.id",
                "another member of the group uses the same instance id",
                "give each member an instance id of its own",
            ),
            E::InvalidGroupId => SourceError::misconfigured("group", "the broker refuses this group id", "choose another one"),
            // The client as a whole has told it.
            code if Outage::is(code) => return tracing::debug!(%code, place, "Kafka"),
            _ => return tracing::warn!(%code, place, "Kafka"),
        };
        self.shared.fail(fault);
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        if let Some(topic) = standing::with_another_id(line) {
            self.made_anew.lock().unwrap_or_else(PoisonError::into_inner).push(topic.to_owned());
        }
        log(level, facility, line);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if Outage::is(code) => self.outage.tell(reason),
            Some(RDKafkaErrorCode::Fatal) => tracing::error!(%error, reason, "Kafka"),
            _ => tracing::warn!(%error, reason, "Kafka"),
        }
        if let Some(code) = error.rdkafka_error_code() {
            let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            // That all brokers are down is said right after the reason why.
            if !(Outage::is(code) && trouble.as_ref().is_some_and(|(before, _)| is_refusal(*before))) {
                *trouble = Some((code, reason.to_owned()));
            }
        }
    }
}

/// Whether this says that the broker does not let the client in.
pub(crate) fn is_refusal(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(code, E::Authentication | E::SaslAuthenticationFailed | E::UnsupportedSASLMechanism)
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, what: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS if self.is_replaced.load(Ordering::Relaxed) => {
                self.unassign(consumer, partitions);
            }
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.assign(consumer, partitions),
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS => self.revoke(consumer, partitions),
            other => {
                tracing::error!(code = %RDKafkaErrorCode::from(other), "rebalance");
                self.unassign(consumer, partitions);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        let all = match result {
            Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::NoOffset)) => return,
            Err(error) => Some(error),
            Ok(()) => None,
        };
        let failed = |it: &TopicPartitionListElem<'_>| all.clone().or_else(|| it.error().err());
        let failed: Vec<_> = offsets.elements().into_iter().filter_map(|it| Some((failed(&it)?, it))).collect();
        let Some((error, it)) = failed.first() else { return };
        tracing::warn!(%error, topic = it.topic(), partition = it.partition(), partitions = failed.len(), "committing offsets again");
        let mut state = self.shared.lock();
        for (_, it) in &failed {
            state.commit_again(it.topic(), it.partition());
        }
    }
}

/// Joins the group.
///
/// # Errors
/// When librdkafka does not take the topics' names.
pub(crate) fn subscribe(consumer: &BaseConsumer<Context>, kafka: &Kafka) -> Result<(), SourceError> {
    let names: Vec<&str> = kafka.topics.iter().map(String::as_str).collect();
    consumer.subscribe(&names).map_err(|error| SourceError::misconfigured("topic", error.to_string(), "name topics that exist"))
}

/// Serves the group until the source closes, then leaves it. A client that stalls or fails for good is replaced by another
/// one. Runs on a thread of its own.
pub(crate) fn run(kafka: Kafka, mut consumer: Arc<BaseConsumer<Context>>) {
    let (shared, outage) = (consumer.context().shared.clone(), consumer.context().outage.clone());
    let _ended = Ended(shared.clone());
    let mut pause = PAUSES.0;
    loop {
        let begun = Instant::now();
        if stay(consumer, &shared) == Left::ForGood {
            return;
        }
        // One that fails again and again is not replaced in haste.
        pause = if begun.elapsed() > PAUSES.1 * 10 { PAUSES.0 } else { (pause * 2).min(PAUSES.1) };
        consumer = loop {
            let until = Instant::now() + pause;
            while Instant::now() < until {
                if shared.lock().phase() >= Phase::Closing {
                    return;
                }
                shared.wait(TURN);
            }
            let context = Context::new(shared.clone(), &kafka, outage.clone());
            let created = kafka.consumer_config().create_with_context(context).map_err(wrong_setting);
            match created.and_then(|consumer| subscribe(&consumer, &kafka).map(|()| consumer)) {
                Ok(consumer) => break Arc::new(consumer),
                Err(error) => tracing::error!(%error, "there is no other Kafka client; trying again"),
            }
        };
    }
}

/// Why a client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// The source closes.
    ForGood,
    /// Another one is to take its place.
    ForAnother,
}

/// The consumer is dropped when this returns, and has left the group if the source closes.
fn stay(consumer: Arc<BaseConsumer<Context>>, shared: &Shared) -> Left {
    let Some(queue) = Queue::new(&consumer) else {
        shared.fail(SourceError::Unavailable("librdkafka has no memory for a queue".into()));
        return Left::ForGood;
    };
    consumer.context().set_queue(Some(Arc::new(queue)));
    let mut looked = Instant::now();
    while shared.lock().phase() < Phase::Closing {
        serve(&consumer);
        begin_anew(&consumer, shared);
        if looked.elapsed() >= LOOK {
            look_for_a_fatal_error(&consumer, shared);
            pass_markers(&consumer, shared);
            looked = Instant::now();
        }
        store(&consumer, shared);
        if shared.lock().wants_another() {
            make_way(consumer, shared);
            return Left::ForAnother;
        }
        consumer.context().pump(TURN);
    }
    store(&consumer, shared);
    // The queue holds the consumer: first the queue, then the consumer, which gives its partitions back, commits and
    // leaves when it is dropped. Not to be unsubscribed before: closing at once after that never leaves.
    consumer.context().set_queue(None);
    drop(consumer);
    Left::ForGood
}

/// Lets what was handed out be settled, for a while, and leaves with that; whoever has the partitions next delivers the rest
/// again. A client that does not even close is left behind on a thread of its own.
fn make_way(consumer: Arc<BaseConsumer<Context>>, shared: &Shared) {
    let why = shared.lock().replacing().unwrap_or_default();
    tracing::error!(why, "client replaced: the Kafka client does not do its work any more, and another one takes its place");
    metrics::counter!("oncegate_kafka_clients_replaced_total").increment(1);
    let context = consumer.context();
    let partitions = shared.lock().partitions();
    let epochs = shared.revoke(&partitions);
    context.drain(&epochs);
    store(&consumer, shared);
    shared.lock().forget(&epochs);
    context.is_replaced.store(true, Ordering::Relaxed);
    context.set_queue(None);
    let (closed, is_closed) = mpsc::channel();
    let close = move || {
        drop(consumer);
        // Nobody may wait for it any more.
        let _ = closed.send(());
    };
    match std::thread::Builder::new().name("oncegate-kafka-drop".into()).spawn(close) {
        Ok(_) => drop(is_closed.recv_timeout(CLOSE)),
        Err(error) => tracing::error!(%error, "the old Kafka client was closed here"),
    }
}

fn look_for_a_fatal_error(consumer: &BaseConsumer<Context>, shared: &Shared) {
    if let Some((code, text)) = consumer.client().fatal_error() {
        match code {
            RDKafkaErrorCode::FencedInstanceId | RDKafkaErrorCode::Fenced => consumer.context().judge(code, "the group"),
            _ => shared.lock().ask_for_another(format!("it failed for good: {text}")),
        }
    }
}

/// Goes back to the beginning of topics that were deleted and made anew. librdkafka reads on where it stood, and where the
/// new log is longer than that, nobody would ever read what lies before.
fn begin_anew(consumer: &BaseConsumer<Context>, shared: &Shared) {
    let context = consumer.context();
    let topics = std::mem::take(&mut *context.made_anew.lock().unwrap_or_else(PoisonError::into_inner));
    for topic in topics {
        metrics::counter!("oncegate_kafka_topics_made_anew_total").increment(1);
        if context.out_of_range == OutOfRange::Error {
            shared.fail(standing::made_anew(&topic));
            continue;
        }
        tracing::error!(topic, "topic made anew: it was deleted and created again; reading it from its beginning");
        for partition in shared.lock().partitions_of(&topic) {
            if let Err(error) = consumer.seek(&topic, partition, Offset::Beginning, SEEK) {
                tracing::warn!(%error, topic, partition, "going back to the beginning");
            }
        }
    }
}

/// What is handed over is a message; how far librdkafka has read, it counts in markers of transactions too.
fn pass_markers(consumer: &BaseConsumer<Context>, shared: &Shared) {
    let Ok(positions) = consumer.position() else { return };
    let mut state = shared.lock();
    for it in positions.elements() {
        if let Offset::Offset(offset) = it.offset() {
            state.reached(it.topic(), it.partition(), offset);
        }
    }
}

/// Serves rebalances and errors.
fn serve(consumer: &BaseConsumer<Context>) {
    let context = consumer.context();
    for _ in 0..EVENTS {
        // Nothing may mean that there is none left, or that one was served by a callback.
        let Some(event) = consumer.poll(Duration::ZERO) else { continue };
        match event {
            // Not to be seen, since partitions are forwarded before they are assigned; not to be lost either.
            Ok(message) => {
                if let Some(queue) = context.queue() {
                    context.take_in(batch::copy(&message), &queue);
                }
            }
            Err(KafkaError::MessageConsumptionFatal(code)) => {
                context.judge(code, "the client");
                look_for_a_fatal_error(consumer, &context.shared);
            }
            Err(KafkaError::MessageConsumption(code)) => context.judge(code, "the group"),
            Err(error) => tracing::warn!(%error, "Kafka"),
        }
    }
}

/// Stores what is settled; librdkafka commits it within a second, and when it gives partitions back. What it would not
/// commit by itself is sent.
fn store(consumer: &BaseConsumer<Context>, shared: &Shared) {
    let commits = shared.lock().commits();
    if commits.is_empty() {
        return;
    }
    // Also what is sent: what was stored before it may be higher, and librdkafka would commit that next.
    if let Err(error) = consumer.store_offsets(&listed(commits.iter())) {
        // The partition is someone else's by now: they deliver it again, and the gate knows it.
        tracing::debug!(%error, "storing offsets");
    }
    let sent = listed(commits.iter().filter(|commit| commit.way == Way::Sent));
    if sent.count() > 0 {
        complain("sending offsets", consumer.commit(&sent, CommitMode::Async));
    }
}

fn listed<'a>(commits: impl Iterator<Item = &'a Commit>) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for commit in commits {
        complain("an offset", list.add_partition_offset(&commit.topic, commit.partition, Offset::Offset(commit.offset)));
    }
    list
}

/// The error of a part of a log that this client will never read, however often it tries.
fn unreadable(fault: &Fault) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    let Fault { topic, partition, offset, code } = fault;
    let remedy = match code {
        E::BadMessage | E::BadCompression | E::InvalidMessage => "restore that part of the log from a replica",
        E::NotImplemented | E::UnsupportedCompressionType => "let its producer use another format or compression",
        E::MessageSizeTooLarge => "raise receive.message.max.bytes",
        _ => return None,
    };
    Some(SourceError::misconfigured(
        "topic",
        format!("{topic}/{partition} cannot be read on at offset {offset}: {code}"),
        format!("{remedy}, or move the group past it: kafka-consumer-groups.sh --reset-offsets"),
    ))
}

/// Says that the thread is over, also when it panicked, so that nobody waits for it.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.enter(Phase::Ended);
    }
}

fn names(partitions: &TopicPartitionList) -> Vec<(String, i32)> {
    partitions.elements().iter().map(|it| (it.topic().to_owned(), it.partition())).collect()
}

fn complain(what: &str, result: KafkaResult<()>) {
    if let Err(error) = result {
        tracing::error!(%error, "{what}");
    }
}
