//! Values of settings.

use std::time::Duration;

/// A value of the kind that its key requires.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingValue {
    /// A text; durations and choices are texts too.
    Text(String),
    /// A whole number, 0 or more.
    Number(u64),
    /// Several texts.
    List(Vec<String>),
    /// Pairs of name and text.
    Pairs(Vec<(String, String)>),
}

impl std::fmt::Debug for SettingValue {
    /// Shows only the kind: the value may be a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Text(_) => "Text(***)",
            Self::Number(_) => "Number(***)",
            Self::List(_) => "List(***)",
            Self::Pairs(_) => "Pairs(***)",
        })
    }
}

/// Parses a duration such as `500ms`, `30s`, `5m`, `24h` or `7d`.
///
/// # Errors
/// The text is not a duration; the message shows the format.
pub fn time(text: &str) -> Result<Duration, String> {
    let invalid = || {
        format!(
            "{text:?} is not a duration; write a whole number and a unit: 500ms, 30s, 5m, 24h or 7d"
        )
    };
    let unit = text
        .find(|character: char| !character.is_ascii_digit())
        .ok_or_else(invalid)?;
    let number: u64 = text[..unit].parse().map_err(|_| invalid())?;
    let unit = match text[unit..].trim() {
        "ms" => return Ok(Duration::from_millis(number)),
        "s" => 1,
        "m" | "min" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(invalid()),
    };
    Ok(Duration::from_secs(
        number.checked_mul(unit).ok_or_else(invalid)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_number_and_a_unit() {
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
                time(wrong).is_err_and(|error| error.contains("30s, 5m, 24h or 7d")),
                "{wrong}"
            );
        }
    }
}
