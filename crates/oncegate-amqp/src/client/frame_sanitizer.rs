//! Rewrites incoming frames that the client cannot parse or must not log.
//!
//! # Workarounds
//! Seen with lapin 4.12.3 and amq-protocol 10.6.3.
//!
//! - *Symptom:* nested field tables are parsed by recursion: a few kilobytes of headers, nested deeply
//!   enough, overflow the stack of every process that receives the message. *Workaround:* tables and
//!   arrays below [`MAX_DEPTH`] become byte strings. *Upstream:*
//!   `docs/upstream/amq-protocol-nested-tables.md`. *Test:*
//!   `bad_input::deeply_nested_headers_crash_nothing` in `tests/amqp`. *May be removed* when the
//!   parser limits the depth.
//! - *Symptom:* a short string that is not UTF-8 closes the connection, at each redelivery.
//!   *Workaround:* such a string is filled with [`INVALID_UTF8_MARK`]. *Upstream:*
//!   `docs/upstream/amq-protocol-short-string.md`. *Test:*
//!   `bad_input::a_short_string_that_is_not_utf8_is_dead_lettered_and_blocks_nothing`. *May be
//!   removed* when the parser accepts any bytes.
//! - *Symptom:* a returned message (`basic.return`) is logged with its headers and body.
//!   *Workaround:* it arrives without both. *Upstream:* `docs/upstream/lapin-returned-message-log.md`.
//!   *Test:* `tests/secrets.rs`. *May be removed* when lapin logs neither.

use std::collections::BTreeMap;

use crate::protocol::broker_version::{BrokerVersion, VersionCell};
use crate::protocol::incoming::INVALID_UTF8_MARK;

/// Tables and arrays nested deeper than this stay unparsed bytes.
const MAX_DEPTH: usize = 32;

/// The number of bytes around a frame's payload: type (1), channel (2) and size (4) before it, and the
/// frame-end octet after it.
const FRAME_OVERHEAD: usize = 8;

/// Sanitizes the frames in the byte stream from the broker to the client.
#[derive(Default)]
pub(crate) struct FrameSanitizer {
    /// Received bytes of a frame that is not complete yet.
    partial: Vec<u8>,
    /// Sanitized frames, of which the client has read up to `read_offset`.
    ready: Vec<u8>,
    read_offset: usize,
    /// Returned messages that are not complete yet, by channel.
    returned: BTreeMap<[u8; 2], ReturnedMessage>,
    /// The version in the first frame.
    version: VersionCell,
}

/// The part of a returned message that the broker has not sent yet.
enum ReturnedMessage {
    /// The content header and the body.
    HeaderAndBody,
    /// The body: this number of bytes.
    Body(u64),
}

impl FrameSanitizer {
    /// Also sets the cell to the version in the first frame.
    pub(crate) fn with_version(version: VersionCell) -> Self {
        Self {
            version,
            ..Self::default()
        }
    }

    /// Adds bytes from the broker.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.read_offset == self.ready.len() {
            self.ready.clear();
            self.read_offset = 0;
        }
        self.partial.extend_from_slice(bytes);
        let (mut complete, mut copied) = (0, 0);
        while let Some(size) = frame_size(&self.partial[complete..]) {
            let Some(frame) = self.partial.get_mut(complete..complete + size) else {
                break;
            };
            self.version
                .get_or_init(|| BrokerVersion::from_start(frame));
            sanitize(frame);
            if let Some(kept) = strip_returned_message(frame, &mut self.returned) {
                self.ready
                    .extend_from_slice(&self.partial[copied..complete + kept]);
                copied = complete + size;
            }
            complete += size;
        }
        self.ready
            .extend_from_slice(&self.partial[copied..complete]);
        self.partial.drain(..complete);
    }

    /// Ends the stream: the bytes of an incomplete frame are passed on unchanged.
    pub(crate) fn finish(&mut self) {
        self.ready.append(&mut self.partial);
    }

    /// Copies sanitized bytes into the buffer and returns their number.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.ready.len() - self.read_offset);
        into[..count].copy_from_slice(&self.ready[self.read_offset..self.read_offset + count]);
        self.read_offset += count;
        count
    }
}

/// The size of the first frame in bytes; `None` before its size field has arrived. Bytes without a
/// frame's type count as one frame, and are passed on: a broker with another protocol version sends
/// `AMQP` and four bytes with its version instead of a frame.
fn frame_size(bytes: &[u8]) -> Option<usize> {
    let [kind, _, _, size @ ..] = bytes.get(..7)? else {
        return None;
    };
    if ![METHOD, HEADER, BODY, HEARTBEAT].contains(kind) {
        return Some(bytes.len());
    }
    let size = u32::from_be_bytes(size.try_into().ok()?);
    Some(size as usize + FRAME_OVERHEAD)
}

/// The frame types.
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// The frame-end octet.
const FRAME_END: u8 = 0xce;

/// `basic.deliver`, `basic.get-ok` and `basic.return`: the methods with short strings from
/// producers.
const DELIVER: [u8; 4] = [0, 60, 0, 60];
const GET_OK: [u8; 4] = [0, 60, 0, 71];
const RETURN: [u8; 4] = [0, 60, 0, 50];

/// The payload of a content header without properties and body.
const EMPTY_HEADER: [u8; 14] = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Empties a frame of a returned message and returns how many of its bytes to pass on: an empty
/// content header, and none of the body. `None` for any other frame.
fn strip_returned_message(
    frame: &mut [u8],
    returned: &mut BTreeMap<[u8; 2], ReturnedMessage>,
) -> Option<usize> {
    let [kind, first, second, ..] = *frame else {
        return None;
    };
    let (channel, end) = ([first, second], frame.len().checked_sub(1)?);
    let payload = frame.get(7..end)?;
    match (kind, returned.get_mut(&channel)) {
        (METHOD, _) if payload.starts_with(&RETURN) => {
            returned.insert(channel, ReturnedMessage::HeaderAndBody);
            None
        }
        // Another method on this channel ends the returned message.
        (METHOD, Some(_)) => {
            returned.remove(&channel);
            None
        }
        // A valid content header is at least as long as an empty one.
        (HEADER, Some(remaining @ ReturnedMessage::HeaderAndBody))
            if payload.len() >= EMPTY_HEADER.len() =>
        {
            let size = u64::from_be_bytes(payload.get(4..12)?.try_into().ok()?);
            *remaining = ReturnedMessage::Body(size);
            if size == 0 {
                returned.remove(&channel);
            }
            let size = u32::try_from(EMPTY_HEADER.len()).ok()?.to_be_bytes();
            frame.get_mut(3..7)?.copy_from_slice(&size);
            frame
                .get_mut(7..7 + EMPTY_HEADER.len())?
                .copy_from_slice(&EMPTY_HEADER);
            *frame.get_mut(7 + EMPTY_HEADER.len())? = FRAME_END;
            Some(EMPTY_HEADER.len() + FRAME_OVERHEAD)
        }
        (BODY, Some(ReturnedMessage::Body(remaining))) => {
            *remaining = remaining.saturating_sub(payload.len() as u64);
            if *remaining == 0 {
                returned.remove(&channel);
            }
            Some(0)
        }
        _ => None,
    }
}

/// Sanitizes one complete frame in place, without changing its size.
fn sanitize(frame: &mut [u8]) {
    let (frame_type, end) = (frame[0], frame.len().saturating_sub(1));
    let Some(payload) = frame.get_mut(7..end) else {
        return;
    };
    let mut reader = FrameReader {
        bytes: payload,
        position: 0,
    };
    // An incomplete payload is passed on, and the client returns the error.
    let _ = match frame_type {
        HEADER => reader.header(),
        METHOD => reader.method(),
        _ => None,
    };
}

/// Parses a payload and sanitizes it in place. Each method returns `None` if the payload is incomplete
/// or invalid.
struct FrameReader<'a> {
    bytes: &'a mut [u8],
    /// The number of bytes that are parsed.
    position: usize,
}

impl FrameReader<'_> {
    /// The payload of a method frame.
    fn method(&mut self) -> Option<()> {
        let method: [u8; 4] = self.take(4)?.try_into().ok()?;
        match method {
            DELIVER => {
                self.short_string()?;
                self.take(9)?;
                self.short_string()?;
                self.short_string()
            }
            GET_OK => {
                self.take(9)?;
                self.short_string()?;
                self.short_string()
            }
            RETURN => {
                self.take(2)?;
                self.short_string()?;
                self.short_string()?;
                self.short_string()
            }
            _ => None,
        }
    }

    /// The payload of a content header.
    fn header(&mut self) -> Option<()> {
        // Class, weight and the body's size.
        self.take(12)?;
        let flags = u16::from_be_bytes(self.take(2)?.try_into().ok()?);
        for property in PROPERTIES
            .iter()
            .enumerate()
            .filter(|(index, _)| flags & (0x8000 >> index) != 0)
            .map(|(_, property)| property)
        {
            match property {
                PropertyType::ShortString => self.short_string()?,
                PropertyType::Table => self.table()?,
                PropertyType::Bytes(count) => self.take(*count).map(drop)?,
            }
        }
        Some(())
    }

    fn take(&mut self, count: usize) -> Option<&mut [u8]> {
        let taken = self
            .bytes
            .get_mut(self.position..self.position.checked_add(count)?)?;
        self.position += count;
        Some(taken)
    }

    fn number(&mut self) -> Option<usize> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?) as usize)
    }

    fn short_string(&mut self) -> Option<()> {
        let count = self.take(1)?[0];
        let text = self.take(count.into())?;
        if std::str::from_utf8(text).is_err() {
            text.fill(INVALID_UTF8_MARK as u8);
        }
        Some(())
    }

    /// Parses a table with its nested tables and arrays. Not recursive, because the sender chooses the
    /// depth.
    fn table(&mut self) -> Option<()> {
        // The containers around the current position, with the position of their end.
        let mut open_containers = vec![(ContainerKind::Table, 0)];
        let count = self.number()?;
        open_containers[0].1 = self.position.checked_add(count)?;
        while let Some((kind, end)) = open_containers.last().copied() {
            if self.position >= end {
                open_containers.pop();
                continue;
            }
            if kind == ContainerKind::Table {
                self.short_string()?;
            }
            let depth = open_containers.len();
            let tag = &mut self.take(1)?[0];
            match *tag {
                b'F' | b'A' if depth >= MAX_DEPTH => {
                    // Becomes a long string, which has the same layout: a length and that many bytes.
                    *tag = b'S';
                    self.long_string()?;
                }
                b'F' | b'A' => {
                    let kind = if *tag == b'F' {
                        ContainerKind::Table
                    } else {
                        ContainerKind::Array
                    };
                    let count = self.number()?;
                    open_containers.push((kind, self.position.checked_add(count)?));
                }
                b'S' | b'x' => self.long_string()?,
                b't' | b'b' | b'B' => self.take(1).map(drop)?,
                b's' | b'u' | b'U' => self.take(2).map(drop)?,
                b'I' | b'i' | b'f' => self.take(4).map(drop)?,
                b'D' => self.take(5).map(drop)?,
                b'd' | b'l' | b'L' | b'T' => self.take(8).map(drop)?,
                b'V' => {}
                _ => return None,
            }
        }
        Some(())
    }

    fn long_string(&mut self) -> Option<()> {
        let count = self.number()?;
        self.take(count).map(drop)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ContainerKind {
    Table,
    Array,
}

/// The encoding of a message property.
enum PropertyType {
    ShortString,
    Table,
    Bytes(usize),
}

/// The properties of a message, in the order of their flags.
const PROPERTIES: [PropertyType; 14] = [
    PropertyType::ShortString,
    PropertyType::ShortString,
    PropertyType::Table,
    PropertyType::Bytes(1),
    PropertyType::Bytes(1),
    PropertyType::ShortString,
    PropertyType::ShortString,
    PropertyType::ShortString,
    PropertyType::ShortString,
    PropertyType::Bytes(8),
    PropertyType::ShortString,
    PropertyType::ShortString,
    PropertyType::ShortString,
    PropertyType::ShortString,
];

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::protocol::basic::{gen_properties, parse_properties};
    use lapin::types::{AMQPValue, FieldTable};

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).expect("the payload is shorter than 4 GiB");
        [&[kind, 0, 1][..], &size.to_be_bytes(), payload, &[0xce]].concat()
    }

    fn header(properties: &BasicProperties) -> Vec<u8> {
        let (written, _) = gen_properties(properties)(Vec::<u8>::new().into())
            .expect("writing to memory does not fail")
            .into_inner();
        frame(
            HEADER,
            &[&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5][..], &written].concat(),
        )
    }

    /// The sanitized bytes, pushed and read in pieces of this size.
    fn sanitize_in_pieces(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut sanitizer, mut sanitized) = (FrameSanitizer::default(), Vec::new());
        for part in bytes.chunks(piece) {
            sanitizer.push(part);
            let mut buffer = vec![0; piece];
            while let count @ 1.. = sanitizer.read(&mut buffer) {
                sanitized.extend_from_slice(&buffer[..count]);
            }
        }
        sanitizer.finish();
        let mut incomplete = vec![0; bytes.len()];
        let count = sanitizer.read(&mut incomplete);
        sanitized.extend_from_slice(&incomplete[..count]);
        sanitized
    }

    /// Properties with headers of many types.
    fn properties_of_many_types() -> BasicProperties {
        let mut table = FieldTable::default();
        let mut inner = FieldTable::default();
        inner.insert(
            "é".into(),
            AMQPValue::FieldArray(vec![AMQPValue::LongLongInt(-1), AMQPValue::Void].into()),
        );
        for (name, value) in [
            ("text", AMQPValue::LongString(vec![0xff; 9].into())),
            ("bytes", AMQPValue::ByteArray(vec![0xfe].into())),
            ("truth", AMQPValue::Boolean(true)),
            ("short", AMQPValue::ShortInt(-2)),
            ("long", AMQPValue::LongInt(7)),
            ("float", AMQPValue::Double(0.5)),
            ("time", AMQPValue::Timestamp(9)),
            ("table", AMQPValue::FieldTable(inner)),
        ] {
            table.insert(name.into(), value);
        }
        BasicProperties::default()
            .with_content_type("text/plain".into())
            .with_headers(table)
            .with_delivery_mode(2)
            .with_priority(255)
            .with_expiration("60000".into())
            .with_message_id("m-ü".into())
            .with_timestamp(1)
            .with_cluster_id("c".into())
    }

    #[test]
    fn valid_frames_are_passed_on_unchanged_in_pieces_of_any_size() {
        let deliver = frame(
            METHOD,
            &[&DELIVER[..], b"\x01c", &[0; 9], b"\x00", b"\x03key"].concat(),
        );
        let all = [
            deliver,
            header(&properties_of_many_types()),
            frame(BODY, &[0xff; 300]),
            frame(HEARTBEAT, &[]),
            frame(METHOD, &[0, 20, 0, 41]),
        ]
        .concat();
        for piece in [1, 2, 7, 64, 5_000] {
            assert_eq!(sanitize_in_pieces(&all, piece), all, "in pieces of {piece}");
        }
        let version = b"AMQP\x00\x00\x09\x01";
        assert_eq!(sanitize_in_pieces(version, 8), version);
        assert_eq!(
            sanitize_in_pieces(&all[..all.len() - 3], 64),
            &all[..all.len() - 3],
            "an incomplete frame at the end of the stream is passed on"
        );
    }

    #[test]
    fn a_returned_message_loses_its_content_and_no_other_message_does() {
        let method = frame(
            METHOD,
            &[&RETURN[..], &[1, 0x38], b"\x08NO_ROUTE\x00\x05queue"].concat(),
        );
        let confirmed = frame(METHOD, &[0, 60, 0, 80, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        let large = header(&properties_of_many_types());
        let other = |mut frame: Vec<u8>| {
            frame[2] = 2;
            frame
        };
        // A body of five bytes in two frames, with another channel's message in between.
        let interleaved = [other(large.clone()), other(frame(BODY, b"other"))].concat();
        let returned = [
            method.clone(),
            large.clone(),
            frame(BODY, b"abc"),
            interleaved.clone(),
            frame(BODY, b"de"),
        ]
        .concat();
        let after = [confirmed, large, frame(BODY, b"valid")].concat();
        let expected = [
            method.clone(),
            frame(HEADER, &EMPTY_HEADER),
            interleaved,
            after.clone(),
        ]
        .concat();
        for piece in [1, 7, 5_000] {
            assert_eq!(
                sanitize_in_pieces(&[returned.clone(), after.clone()].concat(), piece),
                expected,
                "in pieces of {piece}"
            );
        }
        let without_body = [method, frame(HEADER, &EMPTY_HEADER)].concat();
        let all = [without_body, after].concat();
        assert_eq!(
            sanitize_in_pieces(&all, 64),
            all,
            "a returned message without content is unchanged"
        );
        let deliver = frame(
            METHOD,
            &[&DELIVER[..], b"\x01c", &[0; 9], b"\x00", b"\x03key"].concat(),
        );
        let interrupted = [
            frame(METHOD, &[&RETURN[..], &[1, 0x38], b"\x00\x00\x00"].concat()),
            deliver,
            header(&properties_of_many_types()),
            frame(BODY, b"whole"),
        ];
        assert_eq!(
            sanitize_in_pieces(&interrupted.concat(), 64),
            interrupted.concat(),
            "another method ends the returned message"
        );
    }

    #[test]
    fn a_short_string_that_is_not_utf8_is_replaced_by_marks() {
        let valid = header(
            &BasicProperties::default()
                .with_message_id("@@@@".into())
                .with_app_id("mine".into()),
        );
        let invalid: Vec<u8> = valid
            .iter()
            .map(|byte| if *byte == b'@' { 0xff } else { *byte })
            .collect();
        let sanitized = sanitize_in_pieces(&invalid, 9);
        let (_, properties) = parse_properties(&sanitized[19..sanitized.len() - 1])
            .expect("lapin parses the sanitized header");
        assert_eq!(
            properties
                .message_id()
                .as_ref()
                .map(|id| id.as_str().to_owned()),
            Some(INVALID_UTF8_MARK.to_string().repeat(4))
        );
        assert_eq!(
            properties.app_id().as_ref().map(|id| id.as_str()),
            Some("mine")
        );
        let deliver = frame(
            METHOD,
            &[&DELIVER[..], b"\x01c", &[0; 9], b"\x00", b"\x02\xff\xfe"].concat(),
        );
        assert!(sanitize_in_pieces(&deliver, 99).ends_with(&[
            2,
            INVALID_UTF8_MARK as u8,
            INVALID_UTF8_MARK as u8,
            0xce
        ]));
        let get_ok = |key: &[u8]| {
            frame(
                METHOD,
                &[&GET_OK[..], &[0; 9], b"\x02dx", &[2], key, &[0, 0, 0, 7]].concat(),
            )
        };
        assert_eq!(
            sanitize_in_pieces(&get_ok(b"\xff\xfe"), 99),
            get_ok(&[INVALID_UTF8_MARK as u8; 2])
        );
        assert_eq!(sanitize_in_pieces(&get_ok(b"ok"), 99), get_ok(b"ok"));
    }

    #[test]
    fn a_table_that_is_nested_too_deeply_becomes_bytes() {
        let mut value = AMQPValue::FieldTable(FieldTable::default());
        for level in 0..200 {
            let mut table = FieldTable::default();
            table.insert("a".into(), value);
            value = if level % 2 == 0 {
                AMQPValue::FieldTable(table)
            } else {
                AMQPValue::FieldArray(vec![AMQPValue::FieldTable(table)].into())
            };
        }
        let mut table = FieldTable::default();
        table.insert("deep".into(), value);
        let deep = header(
            &BasicProperties::default()
                .with_headers(table)
                .with_message_id("m".into()),
        );
        let sanitized = sanitize_in_pieces(&deep, 1_000);
        assert_eq!(sanitized.len(), deep.len());
        let changed: Vec<_> = sanitized
            .iter()
            .zip(&deep)
            .filter(|(now, before)| now != before)
            .collect();
        assert_eq!(changed.len(), 1, "{changed:?}");
        let (_, properties) = parse_properties(&sanitized[19..sanitized.len() - 1])
            .expect("lapin parses the sanitized header");
        assert_eq!(
            properties.message_id().as_ref().map(|id| id.as_str()),
            Some("m")
        );
    }

    #[test]
    fn random_bytes_cause_no_panic_and_keep_the_length() {
        let valid = [header(&properties_of_many_types()), frame(BODY, b"body")].concat();
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..20_000 {
            let mut bytes = valid.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            assert_eq!(
                sanitize_in_pieces(&bytes, random.usize(1..80)).len(),
                bytes.len()
            );
        }
    }
}
