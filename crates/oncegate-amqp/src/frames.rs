//! Frames as the broker sends them, made such that the client survives them.
//!
//! The client reads a table in a table by calling itself: a few kilobytes of headers, nested deeply
//! enough, would end the process, and each process after it to which the broker hands the message.
//! And where AMQP has a short string, the client takes only UTF-8; anything else costs the
//! connection, again and again. A message that comes back because no queue took it, the client
//! writes into the log with its body and its headers: here it comes back empty.

use std::collections::BTreeMap;

/// What stands in place of each byte of a short string that is not UTF-8. A message that holds it
/// has no name that one could go by.
pub(crate) const SPOILT: char = '\u{1a}';

/// Tables and arrays nested deeper than this are left unread, as the bytes that they are.
const DEEPEST: usize = 32;

/// The bytes around a frame's payload: kind, channel and size before it, a mark behind it.
const AROUND: usize = 8;

/// Bytes on their way to the client.
#[derive(Default)]
pub(crate) struct Frames {
    /// What came in, and is no whole frame yet.
    waiting: Vec<u8>,
    /// Frames that may pass, and how far they have.
    ready: Vec<u8>,
    passed: usize,
    /// What is still to come of messages that come back, by channel.
    returned: BTreeMap<[u8; 2], Returned>,
}

/// What is still to come of a message that comes back.
enum Returned {
    /// Its properties, then its body.
    Properties,
    /// So many bytes of its body.
    Body(u64),
}

impl Frames {
    /// Takes in what the broker sent.
    pub(crate) fn take_in(&mut self, bytes: &[u8]) {
        if self.passed == self.ready.len() {
            self.ready.clear();
            self.passed = 0;
        }
        self.waiting.extend_from_slice(bytes);
        let (mut whole, mut taken) = (0, 0);
        while let Some(size) = size(&self.waiting[whole..]) {
            let Some(frame) = self.waiting.get_mut(whole..whole + size) else {
                break;
            };
            mend(frame);
            if let Some(left) = empty(frame, &mut self.returned) {
                self.ready
                    .extend_from_slice(&self.waiting[taken..whole + left]);
                taken = whole + size;
            }
            whole += size;
        }
        self.ready.extend_from_slice(&self.waiting[taken..whole]);
        self.waiting.drain(..whole);
    }

    /// The broker sends no more: what is left passes as it is.
    pub(crate) fn end(&mut self) {
        self.ready.append(&mut self.waiting);
    }

    /// Hands out what may pass; how many bytes that was.
    pub(crate) fn hand_out(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.ready.len() - self.passed);
        into[..count].copy_from_slice(&self.ready[self.passed..self.passed + count]);
        self.passed += count;
        count
    }
}

/// How many bytes a frame has, once that can be told. What is no frame (a broker of another version
/// answers with eight bytes of text) passes as it is.
fn size(bytes: &[u8]) -> Option<usize> {
    let [kind, _, _, size @ ..] = bytes.get(..7)? else {
        return None;
    };
    if ![METHOD, HEADER, BODY, HEARTBEAT].contains(kind) {
        return Some(bytes.len());
    }
    let size = u32::from_be_bytes(size.try_into().ok()?);
    Some(size as usize + AROUND)
}

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// The mark behind a frame's payload.
const END: u8 = 0xce;

/// `basic.deliver`, `basic.get-ok` and `basic.return`: the methods whose short strings come from
/// producers.
const DELIVER: [u8; 4] = [0, 60, 0, 60];
const GET_OK: [u8; 4] = [0, 60, 0, 71];
const RETURN: [u8; 4] = [0, 60, 0, 50];

/// The payload of a header with no properties and no body.
const NOTHING: [u8; 14] = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Empties a frame that is of a message that comes back: so many of its bytes may pass. Of its
/// header that is one with nothing in it, and of its body none.
fn empty(frame: &mut [u8], returned: &mut BTreeMap<[u8; 2], Returned>) -> Option<usize> {
    let [kind, first, second, ..] = *frame else {
        return None;
    };
    let (channel, end) = ([first, second], frame.len().checked_sub(1)?);
    let payload = frame.get(7..end)?;
    match (kind, returned.get_mut(&channel)) {
        (METHOD, _) if payload.starts_with(&RETURN) => {
            returned.insert(channel, Returned::Properties);
            None
        }
        // Whatever else begins on this channel, nothing comes back any more.
        (METHOD, Some(_)) => {
            returned.remove(&channel);
            None
        }
        // A header has at least as many bytes as one with nothing in it.
        (HEADER, Some(left @ Returned::Properties)) if payload.len() >= NOTHING.len() => {
            let size = u64::from_be_bytes(payload.get(4..12)?.try_into().ok()?);
            *left = Returned::Body(size);
            if size == 0 {
                returned.remove(&channel);
            }
            let size = u32::try_from(NOTHING.len()).ok()?.to_be_bytes();
            frame.get_mut(3..7)?.copy_from_slice(&size);
            frame
                .get_mut(7..7 + NOTHING.len())?
                .copy_from_slice(&NOTHING);
            *frame.get_mut(7 + NOTHING.len())? = END;
            Some(NOTHING.len() + AROUND)
        }
        (BODY, Some(Returned::Body(left))) => {
            *left = left.saturating_sub(payload.len() as u64);
            if *left == 0 {
                returned.remove(&channel);
            }
            Some(0)
        }
        _ => None,
    }
}

fn mend(frame: &mut [u8]) {
    let (kind, end) = (frame[0], frame.len().saturating_sub(1));
    let Some(payload) = frame.get_mut(7..end) else {
        return;
    };
    let mut reader = Reader {
        bytes: payload,
        at: 0,
    };
    // What ends too early is left to the client's judgement.
    let _ = match kind {
        HEADER => reader.header(),
        METHOD => reader.method(),
        _ => None,
    };
}

/// Reads along, and mends on the way.
struct Reader<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Reader<'_> {
    fn method(&mut self) -> Option<()> {
        let method: [u8; 4] = self.take(4)?.try_into().ok()?;
        match method {
            DELIVER => {
                self.short()?;
                self.take(9)?;
                self.short()?;
                self.short()
            }
            GET_OK => {
                self.take(9)?;
                self.short()?;
                self.short()
            }
            RETURN => {
                self.take(2)?;
                self.short()?;
                self.short()?;
                self.short()
            }
            _ => None,
        }
    }

    fn header(&mut self) -> Option<()> {
        // Class, weight and the body's size.
        self.take(12)?;
        let flags = u16::from_be_bytes(self.take(2)?.try_into().ok()?);
        for property in PROPERTIES
            .iter()
            .enumerate()
            .filter(|(place, _)| flags & (0x8000 >> place) != 0)
            .map(|(_, property)| property)
        {
            match property {
                Property::Short => self.short()?,
                Property::Table => self.table()?,
                Property::Bytes(count) => self.take(*count).map(drop)?,
            }
        }
        Some(())
    }

    fn take(&mut self, count: usize) -> Option<&mut [u8]> {
        let taken = self.bytes.get_mut(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        Some(taken)
    }

    fn number(&mut self) -> Option<usize> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?) as usize)
    }

    fn short(&mut self) -> Option<()> {
        let count = self.take(1)?[0];
        let text = self.take(count.into())?;
        if std::str::from_utf8(text).is_err() {
            text.fill(SPOILT as u8);
        }
        Some(())
    }

    /// A table, with all that is in it. Not by calling itself, which is the client's mistake.
    fn table(&mut self) -> Option<()> {
        let mut inside = vec![(Kind::Table, 0)];
        let count = self.number()?;
        inside[0].1 = self.at.checked_add(count)?;
        while let Some((kind, end)) = inside.last().copied() {
            if self.at >= end {
                inside.pop();
                continue;
            }
            if kind == Kind::Table {
                self.short()?;
            }
            let depth = inside.len();
            let tag = &mut self.take(1)?[0];
            match *tag {
                b'F' | b'A' if depth >= DEEPEST => {
                    // A long string has the same form: a length and so many bytes.
                    *tag = b'S';
                    self.long()?;
                }
                b'F' | b'A' => {
                    let kind = if *tag == b'F' {
                        Kind::Table
                    } else {
                        Kind::Array
                    };
                    let count = self.number()?;
                    inside.push((kind, self.at.checked_add(count)?));
                }
                b'S' | b'x' => self.long()?,
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

    fn long(&mut self) -> Option<()> {
        let count = self.number()?;
        self.take(count).map(drop)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Table,
    Array,
}

enum Property {
    Short,
    Table,
    Bytes(usize),
}

/// The properties of a message, in the order of their flags.
const PROPERTIES: [Property; 14] = [
    Property::Short,
    Property::Short,
    Property::Table,
    Property::Bytes(1),
    Property::Bytes(1),
    Property::Short,
    Property::Short,
    Property::Short,
    Property::Short,
    Property::Bytes(8),
    Property::Short,
    Property::Short,
    Property::Short,
    Property::Short,
];

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::protocol::basic::{gen_properties, parse_properties};
    use lapin::types::{AMQPValue, FieldTable};

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).expect("small");
        [&[kind, 0, 1][..], &size.to_be_bytes(), payload, &[0xce]].concat()
    }

    fn header(properties: &BasicProperties) -> Vec<u8> {
        let (written, _) = gen_properties(properties)(Vec::<u8>::new().into())
            .expect("into memory")
            .into_inner();
        frame(
            HEADER,
            &[&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5][..], &written].concat(),
        )
    }

    /// What passes, handed in and out in pieces of this size.
    fn passes(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut frames, mut passed) = (Frames::default(), Vec::new());
        for part in bytes.chunks(piece) {
            frames.take_in(part);
            let mut buffer = vec![0; piece];
            while let count @ 1.. = frames.hand_out(&mut buffer) {
                passed.extend_from_slice(&buffer[..count]);
            }
        }
        frames.end();
        let mut rest = vec![0; bytes.len()];
        let count = frames.hand_out(&mut rest);
        passed.extend_from_slice(&rest[..count]);
        passed
    }

    fn rich() -> BasicProperties {
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
    fn what_is_sound_passes_byte_for_byte_in_whatever_pieces() {
        let deliver = frame(
            METHOD,
            &[&DELIVER[..], b"\x01c", &[0; 9], b"\x00", b"\x03key"].concat(),
        );
        let all = [
            deliver,
            header(&rich()),
            frame(BODY, &[0xff; 300]),
            frame(HEARTBEAT, &[]),
            frame(METHOD, &[0, 20, 0, 41]),
        ]
        .concat();
        for piece in [1, 2, 7, 64, 5_000] {
            assert_eq!(passes(&all, piece), all, "in pieces of {piece}");
        }
        let version = b"AMQP\x00\x00\x09\x01";
        assert_eq!(passes(version, 8), version);
        assert_eq!(
            passes(&all[..all.len() - 3], 64),
            &all[..all.len() - 3],
            "an end in the middle"
        );
    }

    #[test]
    fn what_comes_back_comes_back_empty_and_no_other_message_does() {
        let method = frame(
            METHOD,
            &[&RETURN[..], &[1, 0x38], b"\x08NO_ROUTE\x00\x05queue"].concat(),
        );
        let confirmed = frame(METHOD, &[0, 60, 0, 80, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        let large = header(&rich());
        let other = |mut frame: Vec<u8>| {
            frame[2] = 2;
            frame
        };
        // Of five bytes: in two parts, with another channel's message in between.
        let inside = [other(large.clone()), other(frame(BODY, b"other"))].concat();
        let back = [
            method.clone(),
            large.clone(),
            frame(BODY, b"abc"),
            inside.clone(),
            frame(BODY, b"de"),
        ]
        .concat();
        let after = [confirmed, large, frame(BODY, b"sound")].concat();
        let left = [
            method.clone(),
            frame(HEADER, &NOTHING),
            inside,
            after.clone(),
        ]
        .concat();
        for piece in [1, 7, 5_000] {
            assert_eq!(
                passes(&[back.clone(), after.clone()].concat(), piece),
                left,
                "in pieces of {piece}"
            );
        }
        let without_body = [method, frame(HEADER, &NOTHING)].concat();
        let all = [without_body, after].concat();
        assert_eq!(passes(&all, 64), all, "one that had nothing is the same");
        let deliver = frame(
            METHOD,
            &[&DELIVER[..], b"\x01c", &[0; 9], b"\x00", b"\x03key"].concat(),
        );
        let broken_off = [
            frame(METHOD, &[&RETURN[..], &[1, 0x38], b"\x00\x00\x00"].concat()),
            deliver,
            header(&rich()),
            frame(BODY, b"whole"),
        ];
        assert_eq!(
            passes(&broken_off.concat(), 64),
            broken_off.concat(),
            "what follows is another message"
        );
    }

    #[test]
    fn a_short_string_that_is_not_utf8_is_marked() {
        let sound = header(
            &BasicProperties::default()
                .with_message_id("@@@@".into())
                .with_app_id("mine".into()),
        );
        let spoilt: Vec<u8> = sound
            .iter()
            .map(|byte| if *byte == b'@' { 0xff } else { *byte })
            .collect();
        let mended = passes(&spoilt, 9);
        let (_, properties) =
            parse_properties(&mended[19..mended.len() - 1]).expect("the client reads it");
        assert_eq!(
            properties
                .message_id()
                .as_ref()
                .map(|id| id.as_str().to_owned()),
            Some(SPOILT.to_string().repeat(4))
        );
        assert_eq!(
            properties.app_id().as_ref().map(|id| id.as_str()),
            Some("mine")
        );
        let deliver = frame(
            METHOD,
            &[&DELIVER[..], b"\x01c", &[0; 9], b"\x00", b"\x02\xff\xfe"].concat(),
        );
        assert!(passes(&deliver, 99).ends_with(&[2, SPOILT as u8, SPOILT as u8, 0xce]));
        let got = |key: &[u8]| {
            frame(
                METHOD,
                &[&GET_OK[..], &[0; 9], b"\x02dx", &[2], key, &[0, 0, 0, 7]].concat(),
            )
        };
        assert_eq!(passes(&got(b"\xff\xfe"), 99), got(&[SPOILT as u8; 2]));
        assert_eq!(passes(&got(b"ok"), 99), got(b"ok"));
    }

    #[test]
    fn what_is_nested_too_deeply_stays_bytes() {
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
        let mended = passes(&deep, 1_000);
        assert_eq!(mended.len(), deep.len());
        let changed: Vec<_> = mended
            .iter()
            .zip(&deep)
            .filter(|(now, before)| now != before)
            .collect();
        assert_eq!(changed.len(), 1, "{changed:?}");
        let (_, properties) =
            parse_properties(&mended[19..mended.len() - 1]).expect("the client reads it");
        assert_eq!(
            properties.message_id().as_ref().map(|id| id.as_str()),
            Some("m")
        );
    }

    #[test]
    fn whatever_comes_nothing_panics_and_no_byte_is_lost() {
        let sound = [header(&rich()), frame(BODY, b"body")].concat();
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..20_000 {
            let mut bytes = sound.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            assert_eq!(passes(&bytes, random.usize(1..80)).len(), bytes.len());
        }
    }
}
