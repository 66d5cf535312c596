//! Draws the tables of a run as bar charts in SVG.

use std::fmt::Write as _;
use std::path::Path;

use crate::BenchResult;
use crate::report::{BenchReport, BenchTable, Ratio, spread};

/// One bar: its name, length and label.
struct Bar {
    name: String,
    length: f64,
    label: String,
}

/// Writes the charts of each table, named by its title, and `tables.md` into a directory.
///
/// # Errors
/// The directory cannot be written.
pub fn draw(report: &BenchReport, into: &Path) -> BenchResult<()> {
    std::fs::create_dir_all(into)?;
    std::fs::write(into.join("tables.md"), report.markdown())?;
    for table in &report.tables {
        let name = file_name(&table.title);
        let latencies = latencies(table);
        if latencies.is_empty() {
            std::fs::write(
                into.join(format!("{name}.svg")),
                bars(&table.title, "messages a second", &rates(table)),
            )?;
            std::fs::write(
                into.join(format!("{name}-cpu.svg")),
                bars(&table.title, "CPU of the client, µs a message", &cpu(table)),
            )?;
        } else {
            std::fs::write(
                into.join(format!("{name}.svg")),
                bars(&table.title, "p50, p99 and p99.9, µs", &latencies),
            )?;
        }
    }
    std::fs::write(
        into.join("rabbitmq-by-prefetch.svg"),
        bars(
            "RabbitMQ by prefetch",
            "Redis, inline / bare",
            &by_prefetch(report),
        ),
    )?;
    Ok(())
}

fn rates(table: &BenchTable) -> Vec<Bar> {
    let bar = |name: &String, rates: &[f64]| {
        let [middle, least, most] = spread(rates);
        Bar {
            name: name.clone(),
            length: middle,
            label: format!(
                "{} ({} to {})",
                thousands(middle),
                thousands(least),
                thousands(most)
            ),
        }
    };
    table
        .lines
        .iter()
        .map(|line| bar(&line.name, &line.rates))
        .collect()
}

fn cpu(table: &BenchTable) -> Vec<Bar> {
    let bar = |name: &String, micros: f64| Bar {
        name: name.clone(),
        length: micros,
        label: format!("{micros:.2}"),
    };
    table
        .lines
        .iter()
        .filter_map(|line| Some(bar(&line.name, line.client_micros?)))
        .collect()
}

fn latencies(table: &BenchTable) -> Vec<Bar> {
    let measured = table.lines.iter().filter(|line| !line.latencies.is_empty());
    let bars = measured.flat_map(|line| {
        [50.0, 99.0, 99.9].into_iter().filter_map(|percentile| {
            let (_, micros) = line.latencies.iter().find(|(at, _)| *at == percentile)?;
            Some(Bar {
                name: format!("{}, p{percentile}", line.name),
                length: *micros as f64,
                label: micros.to_string(),
            })
        })
    });
    bars.collect()
}

/// The ratios at each prefetch.
fn by_prefetch(report: &BenchReport) -> Vec<Bar> {
    let at_a_prefetch = |ratio: &&Ratio| {
        ratio.name.starts_with("rabbitmq_") && ratio.meaning == "Redis, inline / bare"
    };
    let durable = report
        .tables
        .iter()
        .filter(|table| !table.title.contains("not persistent"));
    let ratios = durable
        .flat_map(|table| &table.ratios)
        .filter(at_a_prefetch);
    let bars = ratios.map(|ratio| {
        let [middle, least, most] = spread(&ratio.rounds);
        Bar {
            name: ratio.name.clone(),
            length: middle,
            label: format!("{middle:.2} ({least:.2} to {most:.2})"),
        }
    });
    bars.collect()
}

fn thousands(rate: f64) -> String {
    if rate >= 10_000.0 {
        format!("{:.0} k", rate / 1000.0)
    } else {
        format!("{rate:.0}")
    }
}

fn file_name(title: &str) -> String {
    let words = title
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect::<Vec<_>>().join("-")
}

const WIDTH: f64 = 900.0;
const LEFT: f64 = 250.0;
const LONGEST: f64 = 440.0;
const ROW: f64 = 26.0;

/// Horizontal bars under a title, with a white background for dark pages.
fn bars(title: &str, unit: &str, bars: &[Bar]) -> String {
    let height = 70.0 + ROW * bars.len() as f64;
    let longest = bars
        .iter()
        .map(|bar| bar.length)
        .fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{}</text>\n\
         <text x=\"12\" y=\"44\" fill=\"#555\">{}</text>\n",
        escaped(title),
        escaped(unit)
    );
    for (row, bar) in bars.iter().enumerate() {
        let (y, length) = (60.0 + ROW * row as f64, bar.length / longest * LONGEST);
        let fill = if bar.name.starts_with("bare") {
            "#8a8f98"
        } else {
            "#2f6fab"
        };
        let (text, end) = (y + 14.0, LEFT + length + 8.0);
        // Writing to a String cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"18\" fill=\"{fill}\"/>\
             <text x=\"{end:.1}\" y=\"{text}\">{}</text>",
            LEFT - 10.0,
            escaped(&bar.name),
            escaped(&bar.label)
        );
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_proportional_to_their_values() {
        let bar = |name: &str, length: f64| Bar {
            name: name.into(),
            length,
            label: format!("{length}"),
        };
        let svg = bars("a < b", "µs", &[bar("bare", 20.0), bar("gated", 10.0)]);
        assert!(
            svg.contains("width=\"440.0\"") && svg.contains("width=\"220.0\""),
            "{svg}"
        );
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn a_file_is_named_after_its_table() {
        assert_eq!(
            file_name("Kafka, 4 partitions, 100 bytes, id in a header; does nothing"),
            "kafka-4-partitions-100-bytes-id-in-a-header-does-nothing"
        );
    }
}
