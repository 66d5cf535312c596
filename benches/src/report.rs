//! Tables, ratios and JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::rounds::SideRounds;
use crate::side::{Measurement, ThreadTime};
use crate::suites::{AT_MOST, REACH};

/// A run: its machine and all tables.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchReport {
    /// The name of its file.
    pub run: String,
    /// The arguments of the program.
    pub arguments: Vec<String>,
    /// The duration, in seconds.
    pub seconds: f64,
    /// The machine.
    pub machine: Machine,
    /// The target of each ratio.
    pub reach: BTreeMap<String, f64>,
    /// The median ratio of each pair.
    pub ratios: BTreeMap<String, f64>,
    /// All tables.
    pub tables: Vec<BenchTable>,
}

/// The sides of a comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchTable {
    /// The title.
    pub title: String,
    /// One for each side.
    pub lines: Vec<BenchLine>,
    /// The ratios of pairs of sides.
    pub ratios: Vec<Ratio>,
}

/// The measurements of a side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchLine {
    /// The side.
    pub name: String,
    /// Messages or commands per second, one value for each round.
    pub rates: Vec<f64>,
    /// CPU time of the client process per message, in microseconds: the median of the rounds.
    pub client_micros: Option<f64>,
    /// CPU time of the servers per message, in microseconds: the median of the rounds.
    pub server_micros: Option<f64>,
    /// The maximum memory of the client in all rounds, in KiB.
    pub peak_kib: Option<u64>,
    /// Latencies in microseconds by percentile: the median of the rounds.
    pub latencies: Vec<(f64, u64)>,
    /// The fractions of the time in which the handling thread ran and in which it waited for a
    /// core: the medians of the rounds. In the remaining time it waited for other threads.
    pub thread: Option<(f64, f64)>,
    /// CPU time per message of each client thread and server, in microseconds, in descending order:
    /// the medians of the rounds.
    #[serde(default)]
    pub by_place: Vec<(String, f64)>,
    /// All measurements of the client, one for each round.
    #[serde(default)]
    pub took: Vec<Measurement>,
}

/// The ratio of the rates of two sides.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ratio {
    /// Its name in `ratios`.
    pub name: String,
    /// The names of the two sides.
    pub meaning: String,
    /// One value for each round.
    pub rounds: Vec<f64>,
}

impl BenchTable {
    /// A table of these sides.
    pub fn new(title: impl Into<String>, rows: &[SideRounds]) -> Self {
        Self {
            title: title.into(),
            lines: rows.iter().map(BenchLine::new).collect(),
            ratios: Vec::new(),
        }
    }

    /// Adds a ratio: the rate of one side by `factor` times the rate of another, round by round.
    ///
    /// # Panics
    /// If the table has no such side: a mistake in the suite.
    pub fn ratio(mut self, name: &str, side: &str, factor: f64, base: &str) -> Self {
        let rates = |name: &str| {
            &self
                .lines
                .iter()
                .find(|line| line.name == name)
                .expect("a side of this table")
                .rates
        };
        let rounds = rates(side)
            .iter()
            .zip(rates(base))
            .map(|(rate, base)| rate / (base * factor))
            .collect();
        let of = if factor == 1.0 {
            base.to_owned()
        } else {
            format!("{factor} × {base}")
        };
        self.ratios.push(Ratio {
            name: name.to_owned(),
            meaning: format!("{side} / {of}"),
            rounds,
        });
        self
    }

    /// Adds the difference between the p99 of a side and the sum of those of the plain client and
    /// of a round trip to the store, in milliseconds, round by round. May be negative.
    ///
    /// # Panics
    /// As [`ratio`](Self::ratio).
    pub fn added_p99(mut self, name: &str, side: &str, bare: &str, trip: &str) -> Self {
        let p99 = |name: &str| {
            let line = self
                .lines
                .iter()
                .find(|line| line.name == name)
                .expect("a side of this table");
            line.took
                .iter()
                .map(|took| {
                    took.latency(99.0).expect("a side that notes latencies") as f64 / 1000.0
                })
                .collect::<Vec<_>>()
        };
        let (bare_p99, trip_p99) = (p99(bare), p99(trip));
        let rounds = p99(side)
            .iter()
            .zip(bare_p99)
            .zip(trip_p99)
            .map(|((side, bare), trip)| side - bare - trip)
            .collect();
        self.ratios.push(Ratio {
            name: name.to_owned(),
            meaning: format!("p99 in ms, {side} − {bare} − {trip}"),
            rounds,
        });
        self
    }

    /// The table as Markdown.
    fn markdown(&self) -> String {
        let mut text = format!("### {}\n\n", self.title);
        let latencies = self.lines.iter().any(|line| !line.latencies.is_empty());
        text += match latencies {
            true => {
                "| | p50 µs | p90 µs | p99 µs | p99.9 µs |\n| --- | ---: | ---: | ---: | ---: |\n"
            }
            false => {
                "| | median/s | min | max | client µs | server µs | peak MiB | ran | queued |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
            }
        };
        for line in &self.lines {
            let [middle, least, most] = spread(&line.rates);
            let micros = |micros: Option<f64>| {
                micros.map_or_else(String::new, |micros| format!("{micros:.2}"))
            };
            let peak = line
                .peak_kib
                .map_or_else(String::new, |kib| format!("{:.0}", kib as f64 / 1024.0));
            let at = |percentile: f64| {
                line.latencies
                    .iter()
                    .find(|(at, _)| *at == percentile)
                    .map_or(0, |(_, micros)| *micros)
            };
            text += &match latencies {
                true => format!(
                    "| {} | {} | {} | {} | {} |\n",
                    line.name,
                    at(50.0),
                    at(90.0),
                    at(99.0),
                    at(99.9)
                ),
                false => format!(
                    "| {} | {middle:.0} | {least:.0} | {most:.0} | {} | {} | {peak} | {} | {} |\n",
                    line.name,
                    micros(line.client_micros),
                    micros(line.server_micros),
                    share(line.thread.map(|it| it.0)),
                    share(line.thread.map(|it| it.1)),
                ),
            };
        }
        if self.lines.iter().any(|line| !line.by_place.is_empty()) {
            text += "\n| | CPU time a message by thread and server, µs |\n| --- | --- |\n";
        }
        for line in self.lines.iter().filter(|line| !line.by_place.is_empty()) {
            text += &format!("| {} | {} |\n", line.name, by_place_text(&line.by_place));
        }
        if !self.ratios.is_empty() {
            text += "\n| ratio | | median | min | max |\n| --- | --- | ---: | ---: | ---: |\n";
        }
        for ratio in &self.ratios {
            let [middle, least, most] = spread(&ratio.rounds);
            text += &format!(
                "| `{}` | {} | {middle:.2} | {least:.2} | {most:.2} |\n",
                ratio.name, ratio.meaning
            );
        }
        text
    }

    /// Adds the ratio of the maximum memory of two sides.
    ///
    /// # Panics
    /// As [`ratio`](Self::ratio).
    pub fn peak_ratio(mut self, name: &str, side: &str, base: &str) -> Self {
        let peak = |name: &str| {
            let line = self
                .lines
                .iter()
                .find(|line| line.name == name)
                .expect("a side of this table");
            line.peak_kib.unwrap_or(0) as f64
        };
        let rounds = vec![peak(side) / peak(base)];
        self.ratios.push(Ratio {
            name: name.to_owned(),
            meaning: format!("peak memory, {side} / {base}"),
            rounds,
        });
        self
    }
}

impl BenchLine {
    fn new(row: &SideRounds) -> Self {
        let took: Vec<_> = row
            .rounds
            .iter()
            .filter_map(|once| once.took.as_ref())
            .collect();
        let per_message = |seconds: fn(&Measurement) -> f64| {
            let micros: Vec<f64> = took
                .iter()
                .map(|took| seconds(took) * 1e6 / took.messages as f64)
                .collect();
            (!micros.is_empty()).then(|| median(&micros))
        };
        let percentiles: Vec<f64> = took
            .first()
            .map(|took| took.latencies.iter().map(|(at, _)| *at).collect())
            .unwrap_or_default();
        let latency = |at: f64| {
            median(
                &took
                    .iter()
                    .filter_map(|took| took.latency(at))
                    .map(|it| it as f64)
                    .collect::<Vec<_>>(),
            )
        };
        let shares = |part: fn(&ThreadTime) -> f64| {
            let shares: Vec<f64> = took
                .iter()
                .filter_map(|took| Some(part(took.thread.as_ref()?) / took.seconds))
                .collect();
            (!shares.is_empty()).then(|| median(&shares))
        };
        Self {
            name: row.name.clone(),
            took: took.iter().copied().cloned().collect(),
            thread: shares(|thread| thread.ran).zip(shares(|thread| thread.queued)),
            rates: row.rounds.iter().map(|once| once.rate).collect(),
            client_micros: per_message(|took| took.cpu),
            server_micros: per_message(|took| took.servers_cpu),
            peak_kib: took.iter().map(|took| took.peak_kib).max(),
            latencies: percentiles
                .into_iter()
                .map(|at| (at, latency(at) as u64))
                .collect(),
            by_place: by_place(&took),
        }
    }
}

fn by_place(took: &[&Measurement]) -> Vec<(String, f64)> {
    let names: BTreeSet<&String> = took.iter().flat_map(|took| took.by_place.keys()).collect();
    let micros = |name: &String| {
        let of = |took: &&Measurement| {
            took.by_place.get(name).copied().unwrap_or(0.0) * 1e6 / took.messages as f64
        };
        median(&took.iter().map(of).collect::<Vec<_>>())
    };
    let mut places: Vec<(String, f64)> = names
        .into_iter()
        .map(|name| (name.clone(), micros(name)))
        .collect();
    places.retain(|(_, micros)| *micros >= 0.01);
    places.sort_by(|one, other| other.1.total_cmp(&one.1));
    places
}

/// The CPU times of threads and servers in one line.
fn by_place_text(places: &[(String, f64)]) -> String {
    places
        .iter()
        .map(|(name, micros)| format!("{name} {micros:.2}"))
        .collect::<Vec<_>>()
        .join(", ")
}

impl fmt::Display for BenchTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{}", self.title)?;
        writeln!(
            f,
            "  {:<34} {:>11} {:>11} {:>11} {:>10} {:>10} {:>9} {:>6} {:>6}",
            "", "median/s", "min/s", "max/s", "client µs", "server µs", "peak MiB", "ran", "queued"
        )?;
        for line in &self.lines {
            let [middle, least, most] = spread(&line.rates);
            let micros = |micros: Option<f64>| {
                micros.map_or_else(String::new, |micros| format!("{micros:.2}"))
            };
            let peak = line
                .peak_kib
                .map_or_else(String::new, |kib| format!("{:.0}", kib as f64 / 1024.0));
            writeln!(
                f,
                "  {:<34} {middle:>11.0} {least:>11.0} {most:>11.0} {:>10} {:>10} {peak:>9} {:>6} {:>6}",
                line.name,
                micros(line.client_micros),
                micros(line.server_micros),
                share(line.thread.map(|it| it.0)),
                share(line.thread.map(|it| it.1)),
            )?;
        }
        for line in self.lines.iter().filter(|line| !line.latencies.is_empty()) {
            let at = |percentile: f64| {
                line.latencies
                    .iter()
                    .find(|(at, _)| *at == percentile)
                    .map_or(0, |(_, micros)| *micros)
            };
            writeln!(
                f,
                "  {:<34} p50 {} µs, p99 {} µs, p99.9 {} µs",
                line.name,
                at(50.0),
                at(99.0),
                at(99.9)
            )?;
        }
        for line in self.lines.iter().filter(|line| !line.by_place.is_empty()) {
            writeln!(
                f,
                "  {:<34} µs by thread and server: {}",
                line.name,
                by_place_text(&line.by_place)
            )?;
        }
        for ratio in &self.ratios {
            let [middle, least, most] = spread(&ratio.rounds);
            writeln!(
                f,
                "  {:<34} {middle:>11.3} {least:>11.3} {most:>11.3}   {}",
                ratio.name, ratio.meaning
            )?;
        }
        Ok(())
    }
}

impl BenchReport {
    /// A run without tables.
    pub fn new(run: String, arguments: Vec<String>, machine: Machine) -> Self {
        let (reach, ratios) = (BTreeMap::new(), BTreeMap::new());
        Self {
            run,
            arguments,
            seconds: 0.0,
            machine,
            reach,
            ratios,
            tables: Vec::new(),
        }
    }

    /// Adds a table and sets the duration.
    pub fn add(&mut self, table: BenchTable, after: Duration) {
        for ratio in &table.ratios {
            self.ratios
                .insert(ratio.name.clone(), median(&ratio.rounds));
            if let Some((name, reach)) = REACH
                .iter()
                .chain(&AT_MOST)
                .find(|(name, _)| *name == ratio.name)
            {
                self.reach.insert((*name).to_owned(), *reach);
            }
        }
        self.seconds = after.as_secs_f64();
        self.tables.push(table);
    }

    /// All tables as Markdown, for the book.
    pub fn markdown(&self) -> String {
        self.tables
            .iter()
            .map(BenchTable::markdown)
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// The ratios and their targets.
    pub fn summary(&self) -> String {
        let mut text = format!("\n{:<36} {:>8} {:>8}\n", "ratio", "median", "target");
        for (name, ratio) in &self.ratios {
            let reach = self
                .reach
                .get(name)
                .map_or_else(String::new, |reach| format!("{reach:.2}"));
            let at_most = AT_MOST.iter().any(|(other, _)| name == other);
            let missed = self.reach.get(name).is_some_and(|reach| {
                if at_most {
                    ratio > reach
                } else {
                    ratio < reach
                }
            });
            let note = match (missed, at_most) {
                (false, _) => "",
                (true, false) => "  below the target",
                (true, true) => "  above the limit",
            };
            text += &format!("{name:<36} {ratio:>8.3} {reach:>8}{note}\n");
        }
        text
    }
}

/// A fraction as a percentage.
fn share(part: Option<f64>) -> String {
    part.map_or_else(String::new, |part| format!("{:.0} %", part * 100.0))
}

/// The median; the lower one of an even number of values; 0 without values.
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(sorted.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0.0)
}

/// Median, minimum and maximum.
pub fn spread(numbers: &[f64]) -> [f64; 3] {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    [median(numbers), least, most]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::RoundResult;

    fn row(name: &str, rates: &[f64]) -> SideRounds {
        SideRounds {
            name: name.to_owned(),
            rounds: rates
                .iter()
                .map(|rate| RoundResult {
                    rate: *rate,
                    took: None,
                })
                .collect(),
        }
    }

    #[test]
    fn a_ratio_is_the_median_of_the_ratios_by_round() {
        let rows = [
            row("bare", &[100.0, 50.0, 80.0]),
            row("gated", &[90.0, 25.0, 80.0]),
        ];
        let table = BenchTable::new("a table", &rows)
            .ratio("gated", "gated", 1.0, "bare")
            .ratio("half", "gated", 0.5, "bare");
        assert_eq!(table.ratios[0].rounds, [0.9, 0.5, 1.0]);
        assert_eq!(table.ratios[1].rounds, [1.8, 1.0, 2.0]);
        assert_eq!(spread(&table.ratios[0].rounds), [0.9, 0.5, 1.0]);
        let shown = table.to_string();
        assert!(
            shown.contains("gated / 0.5 × bare") && shown.contains("0.900"),
            "{shown}"
        );
        let markdown = table.markdown();
        assert!(
            markdown.contains("| bare | 80 | 50 | 100 |  |  |  |  |  |"),
            "{markdown}"
        );
        assert!(
            markdown.contains("| `half` | gated / 0.5 × bare | 1.80 | 1.00 | 2.00 |"),
            "{markdown}"
        );
    }

    #[test]
    fn a_ratio_below_its_target_is_marked() {
        let shown = |rate: f64| {
            let rows = [row("bare", &[100.0]), row("memory", &[rate])];
            let table =
                BenchTable::new("a table", &rows).ratio("kafka_memory", "memory", 1.0, "bare");
            let mut report = BenchReport::new("a run".into(), Vec::new(), Machine::default());
            report.add(table, Duration::from_secs(1));
            report.summary()
        };
        assert!(
            shown(80.0).contains("0.800     0.85  below the target"),
            "{}",
            shown(80.0)
        );
        assert!(!shown(90.0).contains("below"), "{}", shown(90.0));
    }

    #[test]
    fn an_added_latency_above_its_limit_is_marked() {
        let side = |name: &str, micros: &[u64]| {
            let took = |micros: &u64| Measurement {
                latencies: vec![(99.0, *micros)],
                ..Measurement::default()
            };
            SideRounds {
                name: name.to_owned(),
                rounds: micros
                    .iter()
                    .map(|micros| RoundResult {
                        rate: 1.0,
                        took: Some(took(micros)),
                    })
                    .collect(),
            }
        };
        let shown = |gated: u64| {
            let rows = [
                side("bare", &[500, 700]),
                side("gated", &[gated, gated]),
                side("trip", &[100, 200]),
            ];
            let table = BenchTable::new("a table", &rows).added_p99(
                "latency_kafka_added_p99_ms",
                "gated",
                "bare",
                "trip",
            );
            assert_eq!(table.ratios[0].rounds.len(), 2);
            let mut report = BenchReport::new("a run".into(), Vec::new(), Machine::default());
            report.add(table, Duration::from_secs(1));
            report.summary()
        };
        assert!(
            shown(1_890).contains("0.990     1.00\n"),
            "{}",
            shown(1_890)
        );
        assert!(
            shown(1_950).contains("1.050     1.00  above the limit"),
            "{}",
            shown(1_950)
        );
    }

    #[test]
    fn the_median_of_an_even_count_is_one_of_the_values() {
        assert_eq!(
            [
                median(&[]),
                median(&[4.0]),
                median(&[4.0, 1.0]),
                median(&[3.0, 9.0, 1.0])
            ],
            [0.0, 4.0, 1.0, 3.0]
        );
    }
}
