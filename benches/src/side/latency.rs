//! Measures the latency at 1,000 messages per second. One process sends, receives and handles the
//! messages, so that it uses one clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::{
    DedupMethod, GateStore, Measurement, MessageSource, Meter, Task, gated, kafka, rabbitmq,
};
use crate::BenchResult;
use crate::load::{KafkaSender, RabbitSender};

/// The time between two messages.
const INTERVAL: Duration = Duration::from_millis(1);
/// Messages at the start that are not measured: clients connect, groups form, scripts load.
const WARM_UP: usize = 2_500;

/// The time since the sender wrote this body.
pub(super) fn sent_ago(body: &[u8]) -> Duration {
    let sent = body
        .first_chunk::<8>()
        .map_or(0, |nanos| u64::from_le_bytes(*nanos));
    Duration::from_nanos(now().saturating_sub(sent))
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// A body of 100 bytes that starts with the time.
fn body() -> Vec<u8> {
    let mut body = vec![b'x'; 100];
    body[..8].copy_from_slice(&now().to_le_bytes());
    body
}

pub(super) async fn run(task: &Task) -> BenchResult<Measurement> {
    let meter = Arc::new(Meter::new(task.messages, task.servers.clone()).after(WARM_UP));
    match &task.from {
        MessageSource::None => round_trips(task, &meter).await?,
        _ => beside_a_sender(task, &meter).await?,
    }
    meter.took()
}

/// Sends one command per millisecond, one after the other.
async fn round_trips(task: &Task, meter: &Meter) -> BenchResult<()> {
    let (DedupMethod::Naive { redis: url }
    | DedupMethod::Gated {
        store: GateStore::Redis { url, .. },
        ..
    }) = &task.method
    else {
        return Err("a round trip needs a Redis server".into());
    };
    let mut store = redis::Client::open(url.as_str())?
        .get_multiplexed_async_connection()
        .await?;
    let mut ticks = tokio::time::interval(INTERVAL);
    for number in 0..WARM_UP + task.messages {
        ticks.tick().await;
        let asked = Instant::now();
        super::store::is_first(&mut store, crate::load::id(number).as_bytes()).await?;
        meter.saw_after(asked.elapsed());
    }
    Ok(())
}

async fn beside_a_sender(task: &Task, meter: &Arc<Meter>) -> BenchResult<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let (from, stopping) = (task.from.clone(), stop.clone());
    // A separate thread: sending must not wait for receiving.
    let sender = std::thread::spawn(move || send(&from, &stopping));
    consume(task, meter).await?;
    stop.store(true, Ordering::Relaxed);
    sender.join().map_err(|_| "the sender panicked")??;
    Ok(())
}

async fn consume(task: &Task, meter: &Arc<Meter>) -> BenchResult<()> {
    match (&task.method, &task.from) {
        (DedupMethod::Gated { .. }, _) => gated::consume(task, meter).await,
        (_, MessageSource::Kafka { .. }) => kafka::consume(task, meter).await,
        (_, _) => rabbitmq::consume(task, meter).await,
    }
}

fn send(from: &MessageSource, stop: &AtomicBool) -> BenchResult<()> {
    let mut sender: Box<dyn FnMut(usize) -> BenchResult<()>> = match from {
        MessageSource::Kafka { brokers, topic, .. } => {
            let sender = KafkaSender::new(brokers, topic, "0")?;
            Box::new(move |number| sender.send(&crate::load::id(number), &body()))
        }
        MessageSource::RabbitMq { url, queue, .. } => {
            let mut sender = RabbitSender::open(url, queue)?;
            Box::new(move |number| sender.send(&crate::load::id(number), &body()))
        }
        MessageSource::None => return Err("sending needs a broker".into()),
    };
    let begun = Instant::now();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let due = begun + INTERVAL * number;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        sender(number as usize)?;
    }
    Ok(())
}
