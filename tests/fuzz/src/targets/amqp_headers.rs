//! Headers and properties of an AMQP message, of any types and values.

use std::time::{Duration, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::message::Delivery as Raw;
use lapin::types::{AMQPValue, FieldArray, FieldTable, ShortString};
use oncegate_amqp::fuzzing::{INVALID_UTF8_MARK, parse_delivery};
use oncegate_amqp::{RabbitMq, Rejects, Topology};

/// Headers that the source interprets.
const NAMES: [&str; 8] = [
    "x-death",
    "oncegate-failures",
    "oncegate-not-before",
    "oncegate-routing-key",
    "count",
    "queue",
    "reason",
    "x-delivery-count",
];

fn take<const N: usize>(data: &mut &[u8]) -> [u8; N] {
    let mut taken = [0; N];
    let count = N.min(data.len());
    taken[..count].copy_from_slice(&data[..count]);
    *data = &data[count..];
    taken
}

fn bytes(data: &mut &[u8]) -> Vec<u8> {
    let [length] = take(data);
    let (taken, rest) = data.split_at(usize::from(length % 40).min(data.len()));
    *data = rest;
    taken.to_vec()
}

fn text(data: &mut &[u8]) -> ShortString {
    String::from_utf8_lossy(&bytes(data))
        .into_owned()
        .chars()
        .take(60)
        .collect::<String>()
        .into()
}

/// A small number, or a time in the next 512 days in milliseconds, because `oncegate-not-before`
/// has no effect in the past.
fn number_or_time(byte: u8) -> u128 {
    let days = Duration::from_secs(86_400 * 4 * u64::from(byte.saturating_sub(127)));
    if days.is_zero() {
        return byte.into();
    }
    let now = UNIX_EPOCH.elapsed().expect("a clock after 1970");
    (now + days).as_millis()
}

fn value(data: &mut &[u8], depth: u8) -> AMQPValue {
    let [kind] = take(data);
    match kind % 17 {
        0 => AMQPValue::Boolean(take::<1>(data)[0] & 1 == 1),
        1 => AMQPValue::ShortShortInt(i8::from_be_bytes(take(data))),
        2 => AMQPValue::ShortShortUInt(u8::from_be_bytes(take(data))),
        3 => AMQPValue::ShortInt(i16::from_be_bytes(take(data))),
        4 => AMQPValue::ShortUInt(u16::from_be_bytes(take(data))),
        5 => AMQPValue::LongInt(i32::from_be_bytes(take(data))),
        6 => AMQPValue::LongUInt(u32::from_be_bytes(take(data))),
        7 => AMQPValue::LongLongInt(i64::from_be_bytes(take(data))),
        8 => AMQPValue::Float(f32::from_be_bytes(take(data))),
        9 => AMQPValue::Double(f64::from_be_bytes(take(data))),
        10 => AMQPValue::Timestamp(u64::from_be_bytes(take(data))),
        11 => AMQPValue::ByteArray(bytes(data).into()),
        12 => AMQPValue::Void,
        13 if depth < 4 => AMQPValue::FieldTable(table(data, depth + 1)),
        14 if depth < 4 => {
            let mut array = FieldArray::default();
            for _ in 0..take::<1>(data)[0] % 5 {
                array.push(value(data, depth + 1));
            }
            AMQPValue::FieldArray(array)
        }
        15 => {
            let [number] = take(data);
            AMQPValue::LongString(number_or_time(number).to_string().into())
        }
        _ => AMQPValue::LongString(bytes(data).into()),
    }
}

fn table(data: &mut &[u8], depth: u8) -> FieldTable {
    let mut table = FieldTable::default();
    while !data.is_empty() && table.inner().len() < 12 {
        let [name] = take(data);
        match name {
            0xff => break,
            name if name < 128 => drop(table.insert(
                NAMES[usize::from(name) % NAMES.len()].into(),
                value(data, depth),
            )),
            _ => drop(table.insert(text(data), value(data, depth))),
        }
    }
    table
}

/// Implausible numbers in headers are ignored, and delays are bounded.
///
/// # Panics
/// If a property is violated.
pub fn amqp_headers(data: &[u8]) {
    let mut rest = data;
    let mut properties = BasicProperties::default()
        .with_message_id(text(&mut rest))
        .with_timestamp(u64::from_be_bytes(take(&mut rest)));
    if take(&mut rest) != [0] {
        properties = properties
            .with_expiration(text(&mut rest))
            .with_user_id(text(&mut rest));
    }
    let properties = properties.with_headers(table(&mut rest, 0));
    let mut raw = Raw::mock(7, "".into(), text(&mut rest), false, rest.to_vec());
    raw.properties = properties;
    let names = raw
        .properties
        .headers()
        .iter()
        .flat_map(|table| table.inner().keys())
        .filter(|name| name.as_str().contains(INVALID_UTF8_MARK))
        .count();
    let [by_queue, keyed, declared] =
        take::<1>(&mut rest).map(|byte| [1, 2, 4].map(|bit| byte & bit == bit))[0];
    let mut settings = RabbitMq::queue("queue");
    if by_queue {
        settings = settings.rejects(Rejects::ByQueue);
    }
    if keyed {
        settings = settings.key_header("count");
    }
    if !declared {
        settings = settings.topology(Topology::Check);
    }
    let parsed = parse_delivery(raw, settings).expect("valid settings");
    assert!(parsed.has_invalid_utf8 || names == 0);
    // An implausible number counts as none.
    assert!(parsed.failures <= 100_000);
    let longest = Duration::from_secs(if declared { 366 * 86_400 } else { 600 });
    assert!(parsed.remaining_delay.is_none_or(|wait| wait <= longest));
}
