//! Message ids of any bytes.

use oncegate_core::id::{IdSource, Key, MessageId, Scope};
use oncegate_core::message::Message;

/// Different ids have different keys, and ids contain only characters of their alphabet.
///
/// # Panics
/// If that does not hold.
pub fn ids(data: &[u8]) {
    let (first, second) = data.split_at(data.len() / 2);
    let ids = [MessageId::new(first), MessageId::new(second)];
    for (raw, id) in [first, second].into_iter().zip(&ids) {
        assert_eq!(id.is_none(), raw.is_empty());
        if let Some(id) = id {
            assert!(!id.as_str().is_empty() && id.as_str().len() <= 200);
            assert!(
                id.as_str()
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._:@/+=-".contains(&byte))
            );
            assert!(id.as_str().as_bytes() == raw || id.as_str().starts_with("h:"));
        }
    }
    if let [Some(a), Some(b)] = &ids {
        assert_eq!(a == b, first == second);
        assert_eq!(Key::new(a) == Key::new(b), first == second);
        if let Ok(scope) = std::str::from_utf8(first)
            .map_err(drop)
            .and_then(|name| Scope::named(name).map_err(drop))
        {
            // The scope ends at the first `|`, so keys of different scopes differ.
            let key = scope.key(b);
            assert_eq!(
                key.as_str().split_once('|'),
                Some((std::str::from_utf8(first).unwrap_or_default(), b.as_str()))
            );
        }
    }
    let message = Message::new(data.to_vec())
        .with_key(first.to_vec())
        .with_message_id(second.to_vec())
        .with_header("id", data);
    let pointer = String::from_utf8_lossy(first);
    for source in [
        IdSource::header("id"),
        IdSource::message_id(),
        IdSource::key(),
        IdSource::cloud_events(),
        IdSource::json_pointer("/a/0/id"),
        IdSource::json_pointer(&pointer),
        IdSource::body_hash(),
        IdSource::position(),
        IdSource::first_of([IdSource::header("id"), IdSource::json_pointer(&pointer)]),
        IdSource::all_of([IdSource::header("id"), IdSource::message_id()]),
    ] {
        let _ = source.read(&message);
    }
}
