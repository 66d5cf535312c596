//! Reads the markers of a run from Redis.

use crate::Error;

/// The ids of a scope whose markers are not done, with the markers as Redis stores them.
///
/// # Errors
/// The error of Redis.
pub async fn unfinished(url: &str, scope: &str) -> Result<Vec<(String, String)>, Error> {
    let prefix = format!("processed:{scope}|");
    let mut connection = redis::Client::open(url)?
        .get_multiplexed_async_connection()
        .await?;
    let (mut cursor, mut found) = ("0".to_owned(), Vec::new());
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor)
            .arg("MATCH")
            .arg(format!("{prefix}*"))
            .arg("COUNT")
            .arg(1_000);
        let (next, keys): (String, Vec<String>) = scan.query_async(&mut connection).await?;
        if !keys.is_empty() {
            let records: Vec<Option<String>> = redis::cmd("MGET")
                .arg(&keys)
                .query_async(&mut connection)
                .await?;
            let open = keys
                .into_iter()
                .zip(records)
                .filter_map(|(key, record)| Some((key, record.filter(|it| !is_done(it))?)));
            found.extend(open.map(|(key, record)| {
                (key.strip_prefix(&prefix).unwrap_or(&key).to_owned(), record)
            }));
        }
        if next == "0" {
            return Ok(found);
        }
        cursor = next;
    }
}

/// `1`, or `-1` and the fingerprint of the body.
fn is_done(record: &str) -> bool {
    record == "1" || record.starts_with("-1")
}
