//! Reads an id from a JSON body, without allocating memory for the other fields.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::IdError;

/// The maximum number of digits of a whole number. Without it, the digits of `1e999999999` would
/// take a gigabyte.
const LONGEST_NUMBER: usize = 200;

/// Reads the id at a JSON pointer (RFC 6901), as text.
pub(super) fn read(pointer: &str, body: &[u8]) -> Result<String, IdError> {
    let unusable =
        |problem: &str| IdError::Unusable(format!("the id at JSON pointer `{pointer}` {problem}"));
    let path: Vec<String> = pointer
        .split('/')
        .skip(1)
        .map(|token| token.replace("~1", "/").replace("~0", "~"))
        .collect();
    let mut json = serde_json::Deserializer::from_slice(without_byte_order_mark(body));
    let found = PathReader(&path)
        .deserialize(&mut json)
        .and_then(|found| json.end().map(|()| found));
    // The text of the error may quote the body; its line and column do not.
    let found = found.map_err(|error| {
        unusable(&format!(
            "was not found: no JSON at line {}, column {}",
            error.line(),
            error.column()
        ))
    })?;
    let raw = match found {
        PathValue::Absent => return Err(IdError::Missing),
        PathValue::Twice => {
            return Err(unusable(
                "is ambiguous: a name on its path occurs twice in one object",
            ));
        }
        PathValue::Once(raw) => raw.get(),
    };
    match raw.as_bytes().first() {
        Some(b'"') => {
            serde_json::from_str(raw).map_err(|_| unusable("is text that is not Unicode"))
        }
        Some(b'n') => Err(IdError::Missing),
        Some(b'{') => Err(unusable("is an object: name the field in it")),
        Some(b'[') => Err(unusable("is a list: name the element in it")),
        Some(b't' | b'f') => Err(unusable("is a boolean")),
        _ => whole_number(raw)
            .ok_or_else(|| unusable("is a number that is not whole, or has more than 200 digits")),
    }
}

/// A body without the byte order mark that some producers put before their JSON.
pub(crate) fn without_byte_order_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)
}

/// The sign and the digits of a whole number: `1`, `1.0`, `10e-1` and `1e0` all become `1`. `None`
/// for a fraction, and for more than [`LONGEST_NUMBER`] digits.
fn whole_number(number: &str) -> Option<String> {
    let (sign, number) = number
        .strip_prefix('-')
        .map_or(("", number), |digits| ("-", digits));
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (before, after) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let after = after.trim_end_matches('0');
    let digits = format!("{before}{after}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some("0".into());
    }
    let shift = exponent
        .parse::<i64>()
        .ok()?
        .checked_sub(i64::try_from(after.len()).ok()?)?;
    let digits = match usize::try_from(shift) {
        Ok(zeros) if digits.len().checked_add(zeros)? <= LONGEST_NUMBER => {
            format!("{digits}{}", "0".repeat(zeros))
        }
        Ok(_) => return None,
        Err(_) => {
            let (whole, fraction) = digits.split_at_checked(
                digits
                    .len()
                    .checked_sub(usize::try_from(shift.unsigned_abs()).ok()?)?,
            )?;
            if whole.is_empty() || fraction.bytes().any(|digit| digit != b'0') {
                return None;
            }
            whole.to_owned()
        }
    };
    (digits.len() <= LONGEST_NUMBER).then(|| format!("{sign}{digits}"))
}

/// The value at a path.
enum PathValue<'de> {
    /// The body has no value at the path.
    Absent,
    /// The body has one value at the path.
    Once(&'de RawValue),
    /// A field of the path occurs twice in its object. JSON parsers differ in which of the two
    /// values they use.
    Twice,
}

/// Reads the value at a path and skips everything else.
#[derive(Clone, Copy)]
struct PathReader<'p>(&'p [String]);

impl<'de> DeserializeSeed<'de> for PathReader<'_> {
    type Value = PathValue<'de>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<PathValue<'de>, D::Error> {
        match self.0 {
            [] => serde::Deserialize::deserialize(deserializer).map(PathValue::Once),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for PathReader<'_> {
    type Value = PathValue<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PathValue<'de>, A::Error> {
        let Some((first, remaining_path)) = self.0.split_first() else {
            return Ok(PathValue::Absent);
        };
        let mut found = None;
        while let Some(name) = map.next_key::<FieldName<'de>>()? {
            if name.0 != first.as_str() {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_none() {
                found = Some(map.next_value_seed(PathReader(remaining_path))?);
            } else {
                map.next_value::<IgnoredAny>()?;
                found = Some(PathValue::Twice);
            }
        }
        Ok(found.unwrap_or(PathValue::Absent))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PathValue<'de>, A::Error> {
        let Some((first, remaining_path)) = self.0.split_first() else {
            return Ok(PathValue::Absent);
        };
        // By RFC 6901 an index has no leading zeros.
        let index = first
            .parse::<usize>()
            .ok()
            .filter(|index| index.to_string() == *first);
        let mut found = PathValue::Absent;
        for at in 0_usize.. {
            if Some(at) == index {
                match seq.next_element_seed(PathReader(remaining_path))? {
                    Some(value) => found = value,
                    None => break,
                }
            } else if seq.next_element::<IgnoredAny>()?.is_none() {
                break;
            }
        }
        Ok(found)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<PathValue<'de>, E> {
        Ok(PathValue::Absent)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<PathValue<'de>, E> {
        Ok(PathValue::Absent)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<PathValue<'de>, E> {
        Ok(PathValue::Absent)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<PathValue<'de>, E> {
        Ok(PathValue::Absent)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<PathValue<'de>, E> {
        Ok(PathValue::Absent)
    }

    fn visit_unit<E: Error>(self) -> Result<PathValue<'de>, E> {
        Ok(PathValue::Absent)
    }
}

/// The name of a field: a slice of the body, or a copy if the name has escape sequences.
#[derive(serde::Deserialize)]
struct FieldName<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(pointer: &str, body: &str) -> Result<String, IdError> {
        read(pointer, body.as_bytes())
    }

    fn found(body: &str) -> Option<String> {
        at("/id", &format!(r#"{{"id":{body}}}"#)).ok()
    }

    #[test]
    fn a_whole_number_is_one_id_however_it_is_written() {
        for one in [
            "1", "1.0", "1e0", "1E+0", "10e-1", "0.1e1", "1.000", "100e-2",
        ] {
            assert_eq!(found(one).as_deref(), Some("1"), "{one}");
        }
        for zero in ["0", "-0", "0.0", "0e7", "0e-7"] {
            assert_eq!(found(zero).as_deref(), Some("0"), "{zero}");
        }
        for (written, id) in [
            ("18446744073709551616", "18446744073709551616"),
            (
                "123456789012345678901234567890",
                "123456789012345678901234567890",
            ),
            ("1.5e1", "15"),
            ("-7", "-7"),
            ("12e2", "1200"),
        ] {
            assert_eq!(found(written).as_deref(), Some(id));
        }
        assert_eq!(found("1e199").map(|id| id.len()), Some(200));
    }

    #[test]
    fn an_unusable_id_names_what_was_found() {
        let too_long = format!("1{}", "0".repeat(200));
        for (value, expected) in [
            ("1.5", "not whole"),
            ("1e-1", "not whole"),
            ("0.05", "not whole"),
            ("1e200", "200 digits"),
            ("1e999999999999999999999", "200 digits"),
            ("1e-9223372036854775808", "200 digits"),
            (too_long.as_str(), "200 digits"),
            ("{}", "is an object"),
            (r#"["a"]"#, "is a list"),
            ("true", "boolean"),
            (r#""\ud800""#, "not Unicode"),
            (r#""a","id":"b""#, "ambiguous"),
            (r#""a","id":"a""#, "ambiguous"),
            ("oops", "no JSON at line 1, column"),
            (r#""a"} {"id":"b""#, "no JSON at line 1, column"),
        ] {
            let Err(IdError::Unusable(text)) = at("/id", &format!(r#"{{"id":{value}}}"#)) else {
                panic!("{value}")
            };
            assert!(
                text.contains(expected) && text.contains("`/id`"),
                "{value}: {text}"
            );
        }
    }

    #[test]
    fn an_absent_value_is_a_missing_id() {
        for body in [
            r#"{"id":null}"#,
            "{}",
            "[]",
            "7",
            r#""id""#,
            "true",
            "null",
            "1.5",
            "-1",
        ] {
            assert_eq!(at("/id", body), Err(IdError::Missing), "{body}");
        }
        assert_eq!(at("/ids/2", r#"{"ids":["a","b"]}"#), Err(IdError::Missing));
        assert_eq!(at("/ids/01", r#"{"ids":["a","b"]}"#), Err(IdError::Missing));
    }

    #[test]
    fn a_pointer_selects_nested_fields_and_elements() {
        let body = r#"{"before":{"ids":[9]},"a/b":{"m~n":[{"id":"x"},{"id":7}]},"after":[[],{}]}"#;
        assert_eq!(at("/a~1b/m~0n/1/id", body).as_deref(), Ok("7"));
        assert_eq!(at("/a~1b/m~0n/0/id", body).as_deref(), Ok("x"));
        assert_eq!(at("", "\"whole\"").as_deref(), Ok("whole"));
        // The same name elsewhere is not a second id.
        assert_eq!(
            at(
                "/p/id",
                r#"{"id":"other","p":{"id":"own","q":{"id":"more"}}}"#
            )
            .as_deref(),
            Ok("own")
        );
        assert!(matches!(
            at("/p/id", r#"{"p":{"id":"a"},"p":{"id":"b"}}"#),
            Err(IdError::Unusable(_))
        ));
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        assert_eq!(at("/id", "\u{feff}{\"id\":\"a\"}").as_deref(), Ok("a"));
        assert!(
            at("/id", "\u{feff}\u{feff}{\"id\":\"a\"}").is_err(),
            "only one is skipped"
        );
    }
}
