//! URLs with a password in them: whatever is wrong with one, nothing that is shown holds the
//! password.

use oncegate_amqp::fuzzing;
use oncegate_redis::Redis;

/// Nothing that a fuzzer writes by chance, nor an encoding: no digit of it is hexadecimal.
const PASSWORD: &str = "zqWxvkTsyGuRh";

/// Whatever is wrong with a URL, nothing that is shown of it holds its password.
///
/// # Panics
/// If that does not hold.
pub fn urls(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    // Whoever writes it where a user, a host or a path stands gets it shown; and the fuzzer learns
    // what it is looked for. A URL is read without its line ends and tabs.
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
                // Whoever gives the password as the user, host or path gets it shown.
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
        // The name of a socket is shown, whatever it looks like.
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
