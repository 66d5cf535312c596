//! Reads the file and the environment variables into one value per key, with the origin of the
//! value.

use std::path::Path;

use toml::Table;

use crate::config::{Config, ConfiguredValue};
use crate::error::Error;
use crate::settings::{SETTINGS, Setting, ValueKind, find, nearest, sections};
use crate::value::{SettingValue, time};

/// The file that is read if no other is named.
pub(crate) const DEFAULT_FILE: &str = "oncegate.toml";

/// The variable that names another file.
pub(crate) const FILE_VARIABLE: &str = "ONCEGATE_CONFIG";

impl Config {
    /// Reads the file in the variable `ONCEGATE_CONFIG`, or `oncegate.toml` in the current
    /// directory if it exists, and then the variables `ONCEGATE_<SECTION>_<KEY>`, which take
    /// precedence.
    ///
    /// # Errors
    /// [`Error::Misconfigured`], as for [`Config::read`].
    pub fn load() -> Result<Self, Error> {
        let named = std::env::var_os(FILE_VARIABLE).filter(|name| !name.is_empty());
        if let Some(file) = named.as_deref().map(Path::new)
            && let Err(error) = std::fs::File::open(file)
        {
            return Err(Error::misconfigured(format!(
                "{}: {error}; the variable {FILE_VARIABLE} names this file",
                file.display()
            )));
        }
        // A variable that is not UTF-8 is ignored.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::read(named.as_deref().map(Path::new), variables)
    }

    /// Reads the file `named`, or `oncegate.toml` in the current directory if it exists, and then
    /// these variables, which take precedence. Variables with an unknown section are ignored,
    /// unless the section is a misspelling of a known one.
    ///
    /// # Errors
    /// [`Error::Misconfigured`]: the file cannot be read or parsed, a key is unknown, or a value
    /// has the wrong kind. The error names the key and shows no secret. [`Config::check`] detects
    /// contradictions between keys.
    pub fn read(
        named: Option<&Path>,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Error> {
        let mut config = Self::default();
        let path = named.unwrap_or(Path::new(DEFAULT_FILE));
        match std::fs::read_to_string(path) {
            Ok(text) => config.read_file(path, &text)?,
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::misconfigured(format!("{}: {error}", path.display()))),
        }
        config.read_variables(variables)?;
        Ok(config)
    }

    fn read_file(&mut self, path: &Path, text: &str) -> Result<(), Error> {
        let shown = path.display();
        // `Display` of this error quotes the line, which may contain a password; `message` does
        // not.
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(0, |span| {
                text[..span.start.min(text.len())].lines().count().max(1)
            });
            Error::misconfigured(format!("{shown}: line {line}: {}", error.message()))
        })?;
        for (section, values) in table {
            let toml::Value::Table(values) = values else {
                return Err(unknown_name(
                    &format!("{shown}: `{section}`"),
                    &section,
                    sections(),
                ));
            };
            if !sections().any(|name| name == section) {
                return Err(unknown_name(
                    &format!("{shown}: the section [{section}]"),
                    &section,
                    sections(),
                ));
            }
            for (name, value) in values {
                self.read_value(path, &section, &name, value)?;
            }
            self.sections.insert(section);
        }
        self.file = Some(path.to_owned());
        Ok(())
    }

    fn read_value(
        &mut self,
        path: &Path,
        section: &str,
        name: &str,
        value: toml::Value,
    ) -> Result<(), Error> {
        let shown = path.display();
        let key = format!("{section}.{name}");
        let secret = key
            .strip_suffix("-file")
            .and_then(find)
            .filter(|setting| setting.is_secret());
        if let Some(setting) = secret {
            let toml::Value::String(named) = value else {
                return Err(Error::misconfigured(format!(
                    "{shown}: {key} requires a file name"
                )));
            };
            // The path is relative to the directory of the configuration file.
            let named = path.parent().unwrap_or(Path::new("")).join(named);
            return self.insert(
                setting,
                SettingValue::Text(read_secret(&named, &key)?),
                named.display().to_string(),
            );
        }
        let Some(setting) = find(&key) else {
            let known = SETTINGS
                .iter()
                .map(|setting| setting.key)
                .filter(|key| key.starts_with(&format!("{section}.")));
            return Err(unknown_name(&format!("{shown}: {key}"), &key, known));
        };
        let value = from_toml(setting.kind, value)
            .ok_or_else(|| wrong_kind(&shown.to_string(), setting))?;
        self.insert(setting, value, shown.to_string())
    }

    /// Reads the variables of known sections. Those of a misspelt section are read, too, so that
    /// the misspelling is reported. Other `ONCEGATE_` variables are ignored.
    fn read_variables(
        &mut self,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<(), Error> {
        for (name, text) in variables
            .into_iter()
            .filter(|(name, _)| is_oncegate_variable(name))
        {
            let find_variable = |expected: &str| {
                SETTINGS
                    .iter()
                    .find(|setting| setting.variable() == expected)
            };
            let secret_file = name
                .strip_suffix("_FILE")
                .and_then(find_variable)
                .filter(|setting| setting.is_secret());
            if let Some(setting) = secret_file {
                let secret = read_secret(Path::new(&text), &name)?;
                self.insert(
                    setting,
                    SettingValue::Text(secret),
                    format!("{text}, named by {name}"),
                )?;
                continue;
            }
            let Some(setting) = find_variable(&name) else {
                let secret_variables = SETTINGS
                    .iter()
                    .filter(|setting| setting.is_secret())
                    .map(Setting::variable);
                let secret_variables = secret_variables.map(|name| format!("{name}_FILE"));
                let all: Vec<String> = SETTINGS
                    .iter()
                    .map(Setting::variable)
                    .chain(secret_variables)
                    .collect();
                return Err(unknown_name(
                    &format!("the variable {name}"),
                    &name,
                    all.iter().map(String::as_str),
                ));
            };
            let value = match setting.kind {
                ValueKind::Number => SettingValue::Number(text.parse().map_err(|_| {
                    Error::misconfigured(format!("{name}: {text:?} is not a whole number"))
                })?),
                ValueKind::List => {
                    SettingValue::List(text.split(',').map(|part| part.trim().to_owned()).collect())
                }
                ValueKind::Pairs => SettingValue::Pairs(parse_pairs(&name, &text)?),
                ValueKind::Text | ValueKind::Time | ValueKind::Choice(_) => {
                    SettingValue::Text(text)
                }
            };
            self.insert(setting, value, name)?;
        }
        Ok(())
    }

    /// Sets a key, if its value is valid.
    fn insert(
        &mut self,
        setting: &'static Setting,
        value: SettingValue,
        origin: String,
    ) -> Result<(), Error> {
        let key = setting.key;
        match (setting.kind, &value) {
            (ValueKind::Time, SettingValue::Text(text)) => {
                time(text)
                    .map_err(|wrong| Error::misconfigured(format!("{origin}: {key}: {wrong}")))?;
            }
            (ValueKind::Choice(words), SettingValue::Text(text))
                if !words.contains(&text.as_str()) =>
            {
                let near = nearest(text, words.iter().copied())
                    .map(|near| format!("; did you mean {near}?"))
                    .unwrap_or_default();
                let words = words.join(", ");
                return Err(Error::misconfigured(format!(
                    "{origin}: {key}: {text:?} is not valid; write one of {words}{near}"
                )));
            }
            _ => {}
        }
        self.set.insert(
            key,
            ConfiguredValue {
                setting,
                value,
                origin,
            },
        );
        Ok(())
    }
}

/// Whether a variable begins with `ONCEGATE_` and a known section, or a misspelling of one.
/// Variables without a second `_` are not settings: `ONCEGATE_KAFKA` names the broker for tests,
/// `ONCEGATE_CONFIG` the file, `ONCEGATE_OPERATOR` the operator.
fn is_oncegate_variable(variable: &str) -> bool {
    let Some((section, _)) = variable
        .strip_prefix("ONCEGATE_")
        .and_then(|name| name.split_once('_'))
    else {
        return false;
    };
    // A misspelling has at most one edit per four letters of the section's name.
    sections().any(|section_name| {
        strsim::damerau_levenshtein(&section.to_lowercase(), section_name) <= section_name.len() / 4
    })
}

/// Converts a TOML value; `None` if it has another kind.
fn from_toml(kind: ValueKind, value: toml::Value) -> Option<SettingValue> {
    let text = |value: toml::Value| match value {
        toml::Value::String(text) => Some(text),
        _ => None,
    };
    match (kind, value) {
        (ValueKind::Number, value) => value
            .as_integer()
            .and_then(|number| u64::try_from(number).ok())
            .map(SettingValue::Number),
        (ValueKind::List, toml::Value::Array(list)) => list
            .into_iter()
            .map(text)
            .collect::<Option<_>>()
            .map(SettingValue::List),
        (ValueKind::Pairs, toml::Value::Table(table)) => table
            .into_iter()
            .map(|(name, value)| Some((name, text(value)?)))
            .collect::<Option<_>>()
            .map(SettingValue::Pairs),
        (ValueKind::Text | ValueKind::Time | ValueKind::Choice(_), value) => {
            text(value).map(SettingValue::Text)
        }
        (ValueKind::List | ValueKind::Pairs, _) => None,
    }
}

fn wrong_kind(origin: &str, setting: &Setting) -> Error {
    let expected = match setting.kind {
        ValueKind::Text => "a text, in quotes".to_owned(),
        ValueKind::Time => "a duration, in quotes, such as \"30s\"".to_owned(),
        ValueKind::Choice(words) => format!("one of {}, in quotes", words.join(", ")),
        ValueKind::Number => "a whole number, 0 or more".to_owned(),
        ValueKind::List => "a list of texts, in brackets".to_owned(),
        ValueKind::Pairs => "a table of texts".to_owned(),
    };
    Error::misconfigured(format!("{origin}: {} requires {expected}", setting.key))
}

fn unknown_name<'a>(what: &str, unknown: &str, known: impl Iterator<Item = &'a str>) -> Error {
    Error::misconfigured(match nearest(unknown, known) {
        Some(near) => format!("{what} is unknown; did you mean {near}?"),
        None => format!("{what} is unknown; `oncegate config keys` lists all keys"),
    })
}

/// Parses `name=value` pairs: one per line, or separated by commas in a single line. Errors show
/// neither a value nor a text that may be a value.
fn parse_pairs(variable: &str, text: &str) -> Result<Vec<(String, String)>, Error> {
    let separator = if text.contains('\n') { '\n' } else { ',' };
    let mut pairs: Vec<(String, String)> = Vec::new();
    for (index, pair) in text
        .split(separator)
        .map(str::trim)
        .enumerate()
        .filter(|(_, pair)| !pair.is_empty())
    {
        let Some((name, value)) = pair
            .split_once('=')
            .map(|(name, value)| (name.trim(), value.trim()))
            .filter(|(name, _)| !name.is_empty())
        else {
            return Err(Error::misconfigured(format!(
                "{variable}: entry {} is not name=value; if a value contains a comma, write one pair per line",
                index + 1
            )));
        };
        if pairs.iter().any(|(earlier, _)| earlier == name) {
            return Err(Error::misconfigured(format!(
                "{variable}: {name} occurs twice"
            )));
        }
        pairs.push((name.to_owned(), value.to_owned()));
    }
    Ok(pairs)
}

fn read_secret(path: &Path, named_by: &str) -> Result<String, Error> {
    let secret = std::fs::read_to_string(path).map_err(|error| {
        Error::misconfigured(format!("{named_by}: {}: {error}", path.display()))
    })?;
    Ok(secret.trim_end_matches(['\r', '\n']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, String)>, String> {
        let config = Config::read(
            Some(Path::new("/dev/null")),
            [("ONCEGATE_KAFKA_PROPERTIES".to_owned(), text.to_owned())],
        );
        Ok(config
            .map_err(|error| error.to_string())?
            .pairs("kafka.properties")
            .to_vec())
    }

    #[test]
    fn one_variable_holds_all_properties() {
        let owned = |pairs: &[(&str, &str)]| {
            Ok(pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect())
        };
        let login = [
            ("security.protocol", "SASL_SSL"),
            ("sasl.username", "me"),
            ("ssl.key.password", "a=b"),
        ];
        assert_eq!(
            read("security.protocol=SASL_SSL, sasl.username = me,ssl.key.password=a=b,"),
            owned(&login)
        );
        assert_eq!(
            read("security.protocol=SASL_SSL\r\nsasl.username=me\n\nssl.key.password=a=b\n"),
            owned(&login)
        );
        // A single line with a line break.
        assert_eq!(
            read("debug=broker,topic\n"),
            owned(&[("debug", "broker,topic")])
        );
        assert_eq!(read(""), owned(&[]));
    }

    #[test]
    fn malformed_pairs_are_rejected_without_their_values() {
        for (text, expected) in [
            (
                "ssl.key.password=s3cret,s3cret",
                "entry 2 is not name=value",
            ),
            ("=s3cret", "entry 1 is not name=value"),
            (
                "client.rack=s3cret,client.rack=s3cret",
                "client.rack occurs twice",
            ),
        ] {
            let error = read(text).expect_err("it is refused");
            assert!(
                error.contains("ONCEGATE_KAFKA_PROPERTIES")
                    && error.contains(expected)
                    && !error.contains("s3cret"),
                "{error}"
            );
        }
    }
}
