//! From a file and from variables to one table, and where each value came from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::settings::{Kind, SETTINGS, find, nearest};
use crate::failure::Failure;

/// The file that is read where no other is named.
const FILE: &str = "oncegate.toml";

/// What was read.
#[derive(Default)]
pub(crate) struct Read {
    pub(crate) table: Table,
    /// By key.
    pub(crate) origins: BTreeMap<&'static str, String>,
    /// The file, where there is one.
    pub(crate) file: Option<PathBuf>,
}

/// Reads the file that was named, or `oncegate.toml` here if there is one, and then the variables, which win.
///
/// # Errors
/// A file that cannot be read or is no TOML; a key that is none; a value of the wrong kind.
pub(crate) fn read(named: Option<&Path>, variables: impl Iterator<Item = (String, String)>) -> Result<Read, Failure> {
    let mut read = Read::default();
    let path = named.unwrap_or(Path::new(FILE));
    match std::fs::read_to_string(path) {
        Ok(text) => read.take_file(path, &text)?,
        Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::usage(format!("{}: {error}", path.display()))),
    }
    read.take_variables(variables)?;
    Ok(read)
}

impl Read {
    fn take_file(&mut self, path: &Path, text: &str) -> Result<(), Failure> {
        let shown = path.display();
        // The parser's own message shows the line, which may hold a password.
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].lines().count().max(1));
            Failure::usage(format!("{shown}: line {line}: {}", error.message()))
        })?;
        for (section, values) in table {
            let Value::Table(values) = values else {
                return Err(unknown(&format!("{shown}: `{section}`"), &section, sections()));
            };
            if !sections().any(|name| name == section) {
                return Err(unknown(&format!("{shown}: the section [{section}]"), &section, sections()));
            }
            for (name, value) in values {
                self.take_value(path, &section, &name, value)?;
            }
        }
        self.file = Some(path.to_owned());
        Ok(())
    }

    fn take_value(&mut self, path: &Path, section: &str, name: &str, value: Value) -> Result<(), Failure> {
        let shown = path.display();
        let key = format!("{section}.{name}");
        let secret = key.strip_suffix("-file").and_then(find).filter(|setting| setting.is_secret());
        if let Some(setting) = secret {
            let Value::String(named) = value else {
                return Err(Failure::usage(format!("{shown}: {key} wants the name of a file")));
            };
            // Beside the file that names it.
            let named = path.parent().unwrap_or(Path::new("")).join(named);
            return self.put(setting.key, Value::String(secret_in(&named, &key)?), format!("{}", named.display()));
        }
        match find(&key) {
            Some(setting) => self.put(setting.key, value, shown.to_string()),
            None => {
                let known = SETTINGS.iter().map(|setting| setting.key).filter(|key| key.starts_with(&format!("{section}.")));
                Err(unknown(&format!("{shown}: {key}"), &key, known))
            }
        }
    }

    /// Variables of a section are ours; others that begin with `ONCEGATE_` belong to somebody else.
    fn take_variables(&mut self, variables: impl Iterator<Item = (String, String)>) -> Result<(), Failure> {
        let ours = |name: &str| sections().any(|section| name.starts_with(&format!("ONCEGATE_{}_", section.to_uppercase())));
        for (name, text) in variables.filter(|(name, _)| ours(name)) {
            let named = |wanted: &str| SETTINGS.iter().find(|setting| setting.variable().as_deref() == Some(wanted));
            let in_a_file = name.strip_suffix("_FILE").and_then(named).filter(|setting| setting.is_secret());
            if let Some(setting) = in_a_file {
                let secret = secret_in(Path::new(&text), &name)?;
                self.put(setting.key, Value::String(secret), format!("{text}, named by {name}"))?;
                continue;
            }
            let Some(setting) = named(&name) else {
                let all: Vec<String> = SETTINGS.iter().filter_map(|setting| setting.variable()).collect();
                return Err(unknown(&format!("the variable {name}"), &name, all.iter().map(String::as_str)));
            };
            let value = match setting.kind {
                Kind::Number => Value::Integer(text.parse().map_err(|_| Failure::usage(format!("{name}: {text:?} is no whole number")))?),
                Kind::List => Value::Array(text.split(',').map(|part| Value::String(part.trim().to_owned())).collect()),
                Kind::Text | Kind::Names => Value::String(text),
            };
            self.put(setting.key, value, name)?;
        }
        Ok(())
    }

    fn put(&mut self, key: &'static str, value: Value, origin: String) -> Result<(), Failure> {
        let setting = find(key).unwrap_or(&SETTINGS[0]);
        let is_text = |value: &Value| matches!(value, Value::String(_));
        let (fits, wanted) = match (setting.kind, &value) {
            (Kind::Text, value) => (is_text(value), "a text, in quotes"),
            (Kind::Number, value) => (value.as_integer().is_some_and(|number| number >= 0), "a whole number, 0 or more"),
            (Kind::List, value) => (value.as_array().is_some_and(|list| list.iter().all(is_text)), "a list of texts, in brackets"),
            (Kind::Names, value) => (value.as_table().is_some_and(|table| table.values().all(is_text)), "a table of texts"),
        };
        if !fits {
            return Err(Failure::usage(format!("{origin}: {key} wants {wanted}")));
        }
        let (section, name) = key.split_once('.').unwrap_or((key, ""));
        let section = self.table.entry(section).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.insert(name.to_owned(), value);
        }
        self.origins.insert(key, origin);
        Ok(())
    }
}

fn sections() -> impl Iterator<Item = &'static str> {
    let mut last = "";
    SETTINGS.iter().filter_map(move |setting| {
        let section = setting.key.split('.').next()?;
        (section != std::mem::replace(&mut last, section)).then_some(section)
    })
}

fn unknown<'a>(what: &str, wrong: &str, right: impl Iterator<Item = &'a str>) -> Failure {
    match nearest(wrong, right) {
        Some(near) => Failure::usage(format!("{what} means nothing here; did you mean {near}?")),
        None => Failure::usage(format!("{what} means nothing here; `oncegate config keys` lists what does")),
    }
}

fn secret_in(path: &Path, named_by: &str) -> Result<String, Failure> {
    let secret = std::fs::read_to_string(path).map_err(|error| Failure::usage(format!("{named_by}: {}: {error}", path.display())))?;
    Ok(secret.trim_end_matches(['\r', '\n']).to_owned())
}
