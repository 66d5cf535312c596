//! From a file and from variables to one value a key, and where each came from.

use std::path::Path;

use toml::Table;

use crate::config::{Config, Set};
use crate::error::Error;
use crate::settings::{Kind, SETTINGS, Setting, find, nearest, sections};
use crate::value::{Value, time};

/// The file that is read where no other is named.
pub(crate) const FILE: &str = "oncegate.toml";

/// The variable that names another one.
pub(crate) const NAMES_THE_FILE: &str = "ONCEGATE_CONFIG";

impl Config {
    /// Reads the file that the variable `ONCEGATE_CONFIG` names, or `oncegate.toml` here if there
    /// is one, and then the variables `ONCEGATE_<SECTION>_<KEY>`, which win.
    ///
    /// # Errors
    /// [`Error::Misconfigured`], as for [`Config::read`].
    pub fn load() -> Result<Self, Error> {
        let named = std::env::var_os(NAMES_THE_FILE).filter(|name| !name.is_empty());
        // A variable that is no text is nobody's that we know.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::read(named.as_deref().map(Path::new), variables)
    }

    /// Reads the file that was named, or `oncegate.toml` here if there is one, and then these
    /// variables, which win. Variables of other sections are somebody else's, unless a section is
    /// but misspelt.
    ///
    /// # Errors
    /// [`Error::Misconfigured`]: a file that cannot be read or is no TOML, a key that is none, a value of the wrong kind. It names
    /// the key, and shows no secret. Whether keys go together is for [`Config::check`] to say.
    pub fn read(
        named: Option<&Path>,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Error> {
        let mut config = Self::default();
        let path = named.unwrap_or(Path::new(FILE));
        match std::fs::read_to_string(path) {
            Ok(text) => config.take_file(path, &text)?,
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::misconfigured(format!("{}: {error}", path.display()))),
        }
        config.take_variables(variables)?;
        Ok(config)
    }

    fn take_file(&mut self, path: &Path, text: &str) -> Result<(), Error> {
        let shown = path.display();
        // The parser's own message shows the line, which may hold a password.
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(0, |span| {
                text[..span.start.min(text.len())].lines().count().max(1)
            });
            Error::misconfigured(format!("{shown}: line {line}: {}", error.message()))
        })?;
        for (section, values) in table {
            let toml::Value::Table(values) = values else {
                return Err(unknown(
                    &format!("{shown}: `{section}`"),
                    &section,
                    sections(),
                ));
            };
            if !sections().any(|name| name == section) {
                return Err(unknown(
                    &format!("{shown}: the section [{section}]"),
                    &section,
                    sections(),
                ));
            }
            for (name, value) in values {
                self.take_value(path, &section, &name, value)?;
            }
        }
        self.file = Some(path.to_owned());
        Ok(())
    }

    fn take_value(
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
                    "{shown}: {key} wants the name of a file"
                )));
            };
            // Beside the file that names it.
            let named = path.parent().unwrap_or(Path::new("")).join(named);
            return self.put(
                setting,
                Value::Text(secret_in(&named, &key)?),
                named.display().to_string(),
            );
        }
        let Some(setting) = find(&key) else {
            let known = SETTINGS
                .iter()
                .map(|setting| setting.key)
                .filter(|key| key.starts_with(&format!("{section}.")));
            return Err(unknown(&format!("{shown}: {key}"), &key, known));
        };
        let value =
            of_toml(setting.kind, value).ok_or_else(|| wants(&shown.to_string(), setting))?;
        self.put(setting, value, shown.to_string())
    }

    /// Variables of a section are ours, and so are those of what is nearly one: nobody else would
    /// tell that it is misspelt. Others that begin with `ONCEGATE_` belong to somebody else.
    fn take_variables(
        &mut self,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<(), Error> {
        for (name, text) in variables.into_iter().filter(|(name, _)| is_ours(name)) {
            let named = |wanted: &str| SETTINGS.iter().find(|setting| setting.variable() == wanted);
            let in_a_file = name
                .strip_suffix("_FILE")
                .and_then(named)
                .filter(|setting| setting.is_secret());
            if let Some(setting) = in_a_file {
                let secret = secret_in(Path::new(&text), &name)?;
                self.put(
                    setting,
                    Value::Text(secret),
                    format!("{text}, named by {name}"),
                )?;
                continue;
            }
            let Some(setting) = named(&name) else {
                let in_files = SETTINGS
                    .iter()
                    .filter(|setting| setting.is_secret())
                    .map(Setting::variable);
                let in_files = in_files.map(|name| format!("{name}_FILE"));
                let all: Vec<String> = SETTINGS
                    .iter()
                    .map(Setting::variable)
                    .chain(in_files)
                    .collect();
                return Err(unknown(
                    &format!("the variable {name}"),
                    &name,
                    all.iter().map(String::as_str),
                ));
            };
            let value = match setting.kind {
                Kind::Number => Value::Number(text.parse().map_err(|_| {
                    Error::misconfigured(format!("{name}: {text:?} is no whole number"))
                })?),
                Kind::List => {
                    Value::List(text.split(',').map(|part| part.trim().to_owned()).collect())
                }
                Kind::Names => Value::Names(names_in(&name, &text)?),
                Kind::Text | Kind::Time | Kind::Choice(_) => Value::Text(text),
            };
            self.put(setting, value, name)?;
        }
        Ok(())
    }

    fn put(
        &mut self,
        setting: &'static Setting,
        value: Value,
        origin: String,
    ) -> Result<(), Error> {
        let key = setting.key;
        match (setting.kind, &value) {
            (Kind::Time, Value::Text(text)) => {
                time(text)
                    .map_err(|wrong| Error::misconfigured(format!("{origin}: {key}: {wrong}")))?;
            }
            (Kind::Choice(words), Value::Text(text)) if !words.contains(&text.as_str()) => {
                let near = nearest(text, words.iter().copied())
                    .map(|near| format!("; did you mean {near}?"))
                    .unwrap_or_default();
                let words = words.join(", ");
                return Err(Error::misconfigured(format!(
                    "{origin}: {key}: {text:?} means nothing; write one of {words}{near}"
                )));
            }
            _ => {}
        }
        self.set.insert(
            key,
            Set {
                setting,
                value,
                origin,
            },
        );
        Ok(())
    }
}

/// Whether a variable has a section of ours, or nearly. What has no section at all is not ours:
/// `ONCEGATE_KAFKA` names the broker of the tests, `ONCEGATE_CONFIG` the file, `ONCEGATE_OPERATOR`
/// who acts.
fn is_ours(variable: &str) -> bool {
    let Some((section, _)) = variable
        .strip_prefix("ONCEGATE_")
        .and_then(|rest| rest.split_once('_'))
    else {
        return false;
    };
    // A letter too many, too few or another one, or two that changed places; two such in a long
    // name.
    sections()
        .any(|ours| strsim::damerau_levenshtein(&section.to_lowercase(), ours) <= ours.len() / 4)
}

/// A value of TOML's, if it is of the kind that is wanted.
fn of_toml(kind: Kind, value: toml::Value) -> Option<Value> {
    let text = |value: toml::Value| match value {
        toml::Value::String(text) => Some(text),
        _ => None,
    };
    match (kind, value) {
        (Kind::Number, value) => value
            .as_integer()
            .and_then(|number| u64::try_from(number).ok())
            .map(Value::Number),
        (Kind::List, toml::Value::Array(list)) => list
            .into_iter()
            .map(text)
            .collect::<Option<_>>()
            .map(Value::List),
        (Kind::Names, toml::Value::Table(table)) => table
            .into_iter()
            .map(|(name, value)| Some((name, text(value)?)))
            .collect::<Option<_>>()
            .map(Value::Names),
        (Kind::Text | Kind::Time | Kind::Choice(_), value) => text(value).map(Value::Text),
        (Kind::List | Kind::Names, _) => None,
    }
}

fn wants(origin: &str, setting: &Setting) -> Error {
    let wanted = match setting.kind {
        Kind::Text => "a text, in quotes".to_owned(),
        Kind::Time => "a time, in quotes, such as \"30s\"".to_owned(),
        Kind::Choice(words) => format!("one of {}, in quotes", words.join(", ")),
        Kind::Number => "a whole number, 0 or more".to_owned(),
        Kind::List => "a list of texts, in brackets".to_owned(),
        Kind::Names => "a table of texts".to_owned(),
    };
    Error::misconfigured(format!("{origin}: {} wants {wanted}", setting.key))
}

fn unknown<'a>(what: &str, wrong: &str, right: impl Iterator<Item = &'a str>) -> Error {
    Error::misconfigured(match nearest(wrong, right) {
        Some(near) => format!("{what} means nothing here; did you mean {near}?"),
        None => format!("{what} means nothing here; `oncegate config keys` lists what does"),
    })
}

/// Names and their texts: one a line, or, in a single line, with commas between them. No error
/// shows a text, nor what may be one.
fn names_in(variable: &str, text: &str) -> Result<Vec<(String, String)>, Error> {
    let between = if text.contains('\n') { '\n' } else { ',' };
    let mut names: Vec<(String, String)> = Vec::new();
    for (place, pair) in text
        .split(between)
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
                "{variable}: number {} is no name=value; where a value has a comma, put each pair on a line of its own",
                place + 1
            )));
        };
        if names.iter().any(|(known, _)| known == name) {
            return Err(Error::misconfigured(format!(
                "{variable}: {name} stands there twice"
            )));
        }
        names.push((name.to_owned(), value.to_owned()));
    }
    Ok(names)
}

fn secret_in(path: &Path, named_by: &str) -> Result<String, Error> {
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
            .names("kafka.properties")
            .to_vec())
    }

    #[test]
    fn properties_stand_in_one_variable() {
        let names = |pairs: &[(&str, &str)]| {
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
            names(&login)
        );
        assert_eq!(
            read("security.protocol=SASL_SSL\r\nsasl.username=me\n\nssl.key.password=a=b\n"),
            names(&login)
        );
        // One line is enough, with its end.
        assert_eq!(
            read("debug=broker,topic\n"),
            names(&[("debug", "broker,topic")])
        );
        assert_eq!(read(""), names(&[]));
    }

    #[test]
    fn what_is_no_pair_is_refused_and_not_shown() {
        for (text, says) in [
            (
                "ssl.key.password=s3cret,s3cret",
                "number 2 is no name=value",
            ),
            ("=s3cret", "number 1 is no name=value"),
            (
                "client.rack=s3cret,client.rack=s3cret",
                "client.rack stands there twice",
            ),
        ] {
            let said = read(text).expect_err("it is refused");
            assert!(
                said.contains("ONCEGATE_KAFKA_PROPERTIES")
                    && said.contains(says)
                    && !said.contains("s3cret"),
                "{said}"
            );
        }
    }
}
