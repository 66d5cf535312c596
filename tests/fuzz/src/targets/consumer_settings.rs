//! Settings of a consumer with any values: they are rejected with an error text or accepted,
//! without a panic.

use std::time::Duration;

use oncegate_core::{
    Consumer, Context, Failure, Fingerprints, Guarantee, Handler, IdSource, MemoryBroker,
    MemoryStore,
};

struct Nothing;

impl Handler for Nothing {
    type Payload = u64;

    async fn handle(&self, _: u64, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

fn number(data: &mut &[u8]) -> u64 {
    let Some((shape, rest)) = data.split_first() else {
        return 0;
    };
    let length = usize::from(shape % 9).min(rest.len());
    let (taken, rest) = rest.split_at(length);
    *data = rest;
    taken
        .iter()
        .fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

fn duration(data: &mut &[u8]) -> Duration {
    match number(data) {
        u64::MAX => Duration::MAX,
        milliseconds => Duration::from_millis(milliseconds),
    }
}

/// Settings are rejected with an error text, or the consumer runs.
///
/// # Panics
/// If an error has no text.
pub fn settings(data: &[u8]) {
    let mut data = data;
    let (source, store) = (MemoryBroker::new("fuzz").source(), MemoryStore::new());
    let data = &mut data;
    let guarantee = [
        Guarantee::AtMostOnce,
        Guarantee::EffectivelyOnce,
        Guarantee::Bare,
    ][number(data) as usize % 3];
    let mut builder = Consumer::builder()
        .source(source)
        .store(store)
        .handler(Nothing)
        .guarantee(guarantee)
        .fingerprints(if number(data) & 1 == 0 {
            Fingerprints::Body
        } else {
            Fingerprints::Off
        });
    // Each byte selects a setting, perhaps one that is already set.
    for _ in 0..12 {
        builder = match number(data) % 12 {
            0 => builder.dedup_window(duration(data)),
            1 => builder.lease(duration(data)),
            2 => builder.lease_for(duration(data)),
            3 => builder.adaptive_lease(duration(data), duration(data)),
            4 => builder.dedup_window_for(duration(data)),
            5 => builder.max_attempts(number(data) as u32),
            6 => builder.max_inline_retries(number(data) as u32),
            7 => builder.backoff(duration(data), duration(data)),
            8 => builder.handler_timeout(duration(data)),
            9 => builder.max_in_flight(number(data) as usize),
            10 => builder.scope(String::from_utf8_lossy(
                &data[..data.len().min(usize::from(u8::MAX))],
            )),
            _ => builder.id(IdSource::header("id")),
        };
    }
    builder = builder.drain_timeout(Duration::ZERO);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    if let Err(error) = runtime.block_on(builder.run_until(std::future::ready(()))) {
        assert!(!error.to_string().is_empty());
    }
}
