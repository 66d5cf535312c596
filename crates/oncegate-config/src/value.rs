//! What may stand behind a key.

use std::time::Duration;

/// A value as it was written, of the kind that its key wants.
#[derive(Clone, PartialEq, Eq)]
pub enum Value {
    /// A text; a time and a choice are texts too.
    Text(String),
    /// A whole number, 0 or more.
    Number(u64),
    /// Several texts.
    List(Vec<String>),
    /// Names and texts, by name.
    Names(Vec<(String, String)>),
}

impl std::fmt::Debug for Value {
    /// Its kind alone: it may be a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Text(_) => "Text(***)",
            Self::Number(_) => "Number(***)",
            Self::List(_) => "List(***)",
            Self::Names(_) => "Names(***)",
        })
    }
}

/// Reads a time such as `500ms`, `30s`, `5m`, `24h` or `7d`.
///
/// # Errors
/// Says how times are written.
pub fn time(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!("{text:?} is no time; write a whole number and its unit: 500ms, 30s, 5m, 24h or 7d")
    };
    let unit = text
        .find(|letter: char| !letter.is_ascii_digit())
        .ok_or_else(wrong)?;
    let number: u64 = text[..unit].parse().map_err(|_| wrong())?;
    let unit = match text[unit..].trim() {
        "ms" => return Ok(Duration::from_millis(number)),
        "s" => 1,
        "m" | "min" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(wrong()),
    };
    Ok(Duration::from_secs(
        number.checked_mul(unit).ok_or_else(wrong)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_number_and_a_unit() {
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("2 h"), Ok(Duration::from_secs(7_200)));
        for wrong in [
            "",
            "5",
            "h",
            "1.5h",
            "-1s",
            "5 fortnights",
            "99999999999999999d",
        ] {
            assert!(
                time(wrong).is_err_and(|said| said.contains("30s, 5m, 24h or 7d")),
                "{wrong}"
            );
        }
    }
}
