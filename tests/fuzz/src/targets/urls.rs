//! URLs with a password: no output contains the password, even if the URL is malformed.

use oncegate_amqp::fuzzing;
use oncegate_redis::Redis;

/// A text that a fuzzer does not generate by chance, without hexadecimal digits, so that it differs
/// from any encoding.
const PASSWORD: &str = "zqWxvkTsyGuRh";

/// Neither errors nor redacted forms of a URL contain its password.
///
/// # Panics
/// If the password is visible.
pub fn urls(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    // The fuzzer may learn the password and use it as user, host or path, which are shown. URL
    // parsers remove line breaks and tabs.
    if text.replace(['\n', '\r', '\t'], "").contains(PASSWORD) {
        return;
    }
    let (before, after) = text.split_once('\n').unwrap_or((&text, ""));
    for url in [
        text.to_string(),
        format!("amqp://{before}:{PASSWORD}@{after}"),
        format!("amqps://{before}{PASSWORD}{after}@h"),
        format!("{before}://u:{PASSWORD}@{after}"),
    ] {
        let shown = match fuzzing::parse_url(&url) {
            Ok((uri, redacted)) => {
                // A password in place of the user, host or path is shown.
                let misplaced = uri.authority.userinfo.username.contains(PASSWORD)
                    || uri.authority.host.contains(PASSWORD)
                    || uri.vhost.contains(PASSWORD);
                if misplaced { String::new() } else { redacted }
            }
            Err(error) => format!("{error} {error:?}"),
        };
        assert!(!shown.contains(PASSWORD), "{url:?} is shown as {shown:?}");
        assert!(
            !shown.contains(['\n', '\r']) || url.contains("://") || !url.contains(PASSWORD),
            "{shown:?}"
        );
    }
    for url in [
        text.to_string(),
        format!("redis://{before}:{PASSWORD}@{after}"),
        format!("rediss://:{PASSWORD}{before}@127.0.0.1:6379/{after}"),
        format!("{before}://u:{PASSWORD}@{after}"),
    ] {
        // The path of a Unix socket is shown unredacted.
        if url
            .to_ascii_lowercase()
            .replace(['\n', '\r', '\t'], "")
            .contains("unix:")
        {
            continue;
        }
        let shown = format!("{:?}", Redis::at(&url));
        let place = url
            .split_once("://")
            .map_or("", |(_, rest)| rest)
            .rsplit_once('@')
            .map_or("", |(_, place)| place);
        assert!(
            !shown.contains(PASSWORD) || place.contains(PASSWORD),
            "{url:?} is shown as {shown}"
        );
    }
}
