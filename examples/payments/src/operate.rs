//! What `oncegate`, the operator's tool, has to know of a run that is kept.

use std::fmt::Display;
use std::io;
use std::path::Path;

use clap::ValueEnum;

use crate::cli::Guaranteed;
use crate::payment::ID_HEADER;

/// Writes an `oncegate.toml` beside what was kept, and says how to ask by it. `store` and `broker`
/// are lines of their own sections; a broker in memory has none.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn leave(
    directory: &Path,
    guarantee: Guaranteed,
    window: &str,
    (store, broker): (&str, &str),
) -> io::Result<()> {
    let file = std::path::absolute(directory)?.join("oncegate.toml");
    std::fs::write(&file, text(guarantee, window, store, broker))?;
    eprintln!(
        "payments: what became of one: cargo run -q -p oncegate-cli -- --config {} explain pay-000001",
        file.display()
    );
    Ok(())
}

fn text(guarantee: Guaranteed, window: &str, store: &str, broker: &str) -> String {
    let guarantee = guarantee
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default();
    let gate = format!(
        "guarantee = \"{guarantee}\"\ndedup-window = \"{window}\"\nid = \"header {ID_HEADER}\"\n"
    );
    format!("[store]\n{store}\n[gate]\n{gate}\n{broker}")
}

/// A line of it.
pub(crate) fn line(key: &str, value: impl Display) -> String {
    format!("{key} = {:?}\n", value.to_string())
}

/// The store that is this file.
///
/// # Errors
/// If there is no current directory.
pub(crate) fn sqlite(file: &Path) -> io::Result<String> {
    Ok(line(
        "url",
        format!("sqlite:{}", std::path::absolute(file)?.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_run_is_told_as_the_tool_reads_it() {
        let store = sqlite(Path::new("/data/payments.db")).expect("it is absolute");
        let text = text(
            Guaranteed::AtMostOnce,
            "24h",
            &store,
            &format!("[rabbitmq]\n{}", line("queue", "payments")),
        );
        assert_eq!(
            text,
            "[store]\nurl = \"sqlite:/data/payments.db\"\n\n[gate]\nguarantee = \"at-most-once\"\ndedup-window = \"24h\"\nid = \"header payment-id\"\n\n\
             [rabbitmq]\nqueue = \"payments\"\n"
        );
    }
}
