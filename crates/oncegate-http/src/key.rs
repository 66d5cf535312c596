//! The key of a request, its id in the store and its fingerprint.

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use http::request::Parts;
use sha2::{Digest, Sha256};

/// The request header with the key.
pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Reads the key: `None` if the request has none.
///
/// # Errors
/// What is wrong with the key, for the client.
pub(crate) fn read(headers: &HeaderMap, max_bytes: usize) -> Result<Option<Vec<u8>>, String> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(first) = values.next() else {
        return Ok(None);
    };
    if values.any(|other| other != first) {
        return Err("it occurs several times with different values".to_owned());
    }
    let key = parse(first)?;
    if key.is_empty() {
        return Err("it is empty".to_owned());
    }
    if key.len() > max_bytes {
        return Err(format!("it is longer than {max_bytes} bytes"));
    }
    Ok(Some(key))
}

/// The key of a header value: a structured string (RFC 9651), as the draft has it, or the bare key,
/// as most clients send it. `"a"` and `a` are the same key.
fn parse(value: &HeaderValue) -> Result<Vec<u8>, String> {
    let bytes = value.as_bytes();
    let Some(quoted) = bytes.strip_prefix(b"\"") else {
        return if bytes.iter().all(u8::is_ascii_graphic) {
            Ok(bytes.to_vec())
        } else {
            Err("it has a byte that is not visible ASCII".to_owned())
        };
    };
    let mut key = Vec::with_capacity(quoted.len());
    let mut rest = quoted.iter().copied();
    loop {
        match rest.next() {
            Some(b'"') if rest.len() == 0 => return Ok(key),
            Some(b'\\') => match rest.next() {
                Some(escaped @ (b'"' | b'\\')) => key.push(escaped),
                _ => {
                    return Err(
                        "it has a backslash before another character than \" and \\".to_owned()
                    );
                }
            },
            Some(byte @ b' '..=b'~') if byte != b'"' => key.push(byte),
            Some(b'"') => return Err("something follows its closing quote".to_owned()),
            Some(_) => return Err("it has a byte that is not printable ASCII".to_owned()),
            None => return Err("its closing quote is missing".to_owned()),
        }
    }
}

/// The id of a key: the key itself, or, if the layer has scopes, a text from which
/// [`MessageId`](oncegate_core::MessageId) makes a hash of scope and key.
pub(crate) fn id(scope: Option<&[u8]>, key: Vec<u8>) -> Vec<u8> {
    let Some(scope) = scope else {
        return key;
    };
    // Joined with the length of the scope, so that no other scope and key have the same id. Its
    // zero bytes are not plain, so `MessageId` never uses the text unchanged.
    let mut id = (scope.len() as u64).to_be_bytes().to_vec();
    id.extend_from_slice(scope);
    id.extend(key);
    id
}

/// A hash of the request, which detects that its key was used for another one: method, path, query
/// and body.
pub(crate) fn fingerprint(parts: &Parts, body: &[u8]) -> [u8; 32] {
    let path_and_query = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut hash = Sha256::new();
    for part in [
        parts.method.as_str().as_bytes(),
        path_and_query.as_bytes(),
        body,
    ] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncegate_core::MessageId;

    fn key(values: &[&[u8]]) -> Result<Option<String>, String> {
        let mut headers = HeaderMap::new();
        for value in values {
            let value = HeaderValue::from_bytes(value).expect("a header value");
            headers.append(IDEMPOTENCY_KEY, value);
        }
        let key = read(&headers, 8)?;
        Ok(key.map(|key| String::from_utf8(key).expect("ASCII")))
    }

    #[test]
    fn quoted_and_bare_keys_are_the_same_key() {
        assert_eq!(key(&[]), Ok(None));
        for values in [
            &[&b"8e03978e"[..]][..],
            &[b"\"8e03978e\""],
            &[b"8e03978e", b"8e03978e"],
        ] {
            assert_eq!(key(values), Ok(Some("8e03978e".into())), "{values:?}");
        }
        assert_eq!(key(&[br#""a \"\\""#]), Ok(Some(r#"a "\"#.into())));
    }

    #[test]
    fn malformed_keys_are_refused() {
        for values in [
            &[&b""[..]][..],
            &[b"\"\""],
            &[b"\"a"],
            &[b"\"a\"b"],
            &[b"\"a\";b=1"],
            &[br#""\a""#],
            &[b"\"a\\"],
            &[b"\"\xff\""],
            &[b"\"a\tb\""],
            &[b"\xc3\xa9"],
            &[b"a b"],
            &[b"a, b"],
            &[b"a\tb"],
            &[b"123456789"],
            &[b"\"123456789\""],
            &[b"a", b"b"],
        ] {
            assert!(key(values).is_err(), "{values:?}");
        }
    }

    #[test]
    fn ids_of_other_scopes_and_keys_differ_and_do_not_show_the_scope() {
        let text = |scope: Option<&str>, key: &str| {
            let raw = id(scope.map(str::as_bytes), key.into());
            MessageId::new(raw).expect("an id").to_string()
        };
        assert_eq!(text(None, "k"), "k");
        let ids = [
            text(Some("ab"), "c"),
            text(Some("a"), "bc"),
            text(Some(""), "abc"),
            text(Some("abc"), "c"),
        ];
        for (at, id) in ids.iter().enumerate() {
            assert!(id.starts_with("h:") && id.len() == 66, "{id}");
            assert!(!ids[..at].contains(id));
        }
        assert_eq!(text(Some("ab"), "c"), ids[0]);
    }
}
