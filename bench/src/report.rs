//! Results of a run: rows with bars, as a table and as JSON.

use serde::Serialize;

use crate::clock::Summary;
use crate::noise::Noise;

/// The required value of a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// At most these milliseconds above the other value, instead of a ratio.
    Adds(f64),
}

impl Bar {
    fn met_by(self, ratio: f64, more: f64) -> bool {
        match self {
            Self::AtLeast(bar) => ratio >= bar,
            Self::AtMost(bar) => ratio <= bar,
            Self::Adds(bar) => more <= bar,
        }
    }
}

/// The unit of compared values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    Milliseconds,
    PairsPerSecond,
    Mebibytes,
}

/// The result of one case.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    /// The other side of the comparison.
    pub(crate) with: &'static str,
    pub(crate) unit: Unit,
    pub(crate) devlet: f64,
    pub(crate) other: f64,
    /// Speedup; for bars with a maximum, the value as a multiple of the other one.
    pub(crate) ratio: f64,
    pub(crate) bar: Option<Bar>,
    pub(crate) met: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) devlet_spread: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) other_spread: Option<Summary>,
}

impl Row {
    /// Creates a row of two values. `bar` is the required ratio, or `None` without a requirement.
    pub(crate) fn new(
        case: impl Into<String>,
        unit: Unit,
        devlet: f64,
        with: &'static str,
        other: f64,
        bar: Option<Bar>,
    ) -> Self {
        let ratio = match (bar, unit) {
            (Some(Bar::AtMost(_) | Bar::Adds(_)), _) | (_, Unit::PairsPerSecond) => devlet / other,
            _ => other / devlet,
        };
        Self {
            case: case.into(),
            with,
            unit,
            devlet,
            other,
            ratio,
            bar,
            met: bar.map(|bar| bar.met_by(ratio, devlet - other)),
            devlet_spread: None,
            other_spread: None,
        }
    }

    /// Creates a row of two medians.
    pub(crate) fn medians(
        case: impl Into<String>,
        devlet: Summary,
        with: &'static str,
        other: Summary,
        bar: Option<Bar>,
    ) -> Self {
        Self {
            devlet_spread: Some(devlet),
            other_spread: Some(other),
            ..Self::new(case, Unit::Milliseconds, devlet.p50_ms, with, other.p50_ms, bar)
        }
    }
}

/// The results of a run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) devlet: String,
    pub(crate) kubelet: String,
    pub(crate) machine: String,
    pub(crate) mode: &'static str,
    pub(crate) took_seconds: u64,
    pub(crate) noise: Noise,
    /// Why the run is inconclusive.
    pub(crate) inconclusive: Option<String>,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    pub(crate) fn missed(&self) -> usize {
        self.rows.iter().filter(|row| row.met == Some(false)).count()
    }

    /// Returns the table and its legend, as Markdown that is readable in a terminal.
    pub(crate) fn table(&self) -> String {
        let header = ["case", "devlet", "compared with", "ratio", "bar", "verdict"].map(str::to_owned);
        let mut lines = vec![header];
        lines.extend(self.rows.iter().map(|row| self.line(row)));
        let width = |column: usize| {
            lines
                .iter()
                .map(|line| line[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; 6] = std::array::from_fn(width);
        let mut text = String::new();
        for (place, line) in lines.iter().enumerate() {
            let cell = |column: usize| {
                let padding = widths[column] - line[column].chars().count();
                format!("{}{}", line[column], " ".repeat(padding))
            };
            let cells: [String; 6] = std::array::from_fn(cell);
            text += &format!("| {} |\n", cells.join(" | "));
            if place == 0 {
                let rules = widths.map(|width| "-".repeat(width.max(3)));
                text += &format!("| {} |\n", rules.join(" | "));
            }
        }
        text += &format!(
            "\n{}; {}; {}; a {} run of {} s. Noise: others took {:.1} % of the processors; medians of bare round \
             trips with a sync differed by a factor of {:.2} from round to round ({:.2} if the extremes count).\n",
            self.devlet,
            self.kubelet,
            self.machine,
            self.mode,
            self.took_seconds,
            self.noise.other_load * 100.0,
            self.noise.spread,
            self.noise.extremes,
        );
        if let Some(why) = &self.inconclusive {
            text += &format!("\n**No conclusion**: {why}.\n");
        }
        text
    }

    fn line(&self, row: &Row) -> [String; 6] {
        let verdict = match row.met {
            _ if self.inconclusive.is_some() => "",
            Some(true) => "met",
            Some(false) => "**missed**",
            None => "",
        };
        let bar = match row.bar {
            Some(Bar::AtLeast(bar)) => format!("≥ {}×", number(bar)),
            Some(Bar::AtMost(bar)) => format!("≤ {}×", number(bar)),
            Some(Bar::Adds(bar)) => format!("≤ {} ms more", number(bar)),
            None => String::new(),
        };
        [
            row.case.clone(),
            amount(row.devlet, row.unit),
            format!("{} {}", row.with, amount(row.other, row.unit)),
            format!("{}×", number(row.ratio)),
            bar,
            verdict.to_owned(),
        ]
    }
}

fn amount(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Milliseconds if value >= 1000.0 => format!("{} s", number(value / 1000.0)),
        Unit::Milliseconds => format!("{} ms", number(value)),
        Unit::PairsPerSecond => format!("{}/s", number(value)),
        Unit::Mebibytes => format!("{} MiB", number(value)),
    }
}

/// Formats three significant digits, with thousands separators.
pub(crate) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "?".to_owned();
    }
    if value >= 1000.0 {
        let digits = format!("{value:.0}");
        let mut text = String::new();
        for (place, digit) in digits.chars().enumerate() {
            if place > 0 && (digits.len() - place) % 3 == 0 {
                text.push(',');
            }
            text.push(digit);
        }
        return text;
    }
    let decimals = match value {
        _ if value >= 100.0 => 0,
        _ if value >= 10.0 => 1,
        _ if value >= 0.1 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report(rows: Vec<Row>) -> Report {
        Report {
            devlet: "devlet 1".to_owned(),
            kubelet: "kubelet 2".to_owned(),
            machine: "a machine".to_owned(),
            mode: "full",
            took_seconds: 1,
            noise: Noise::new(0.01, vec![1.0, 1.1]),
            inconclusive: None,
            rows,
        }
    }

    pub(crate) fn faster(bar: f64) -> Row {
        Row::new(
            "admit",
            Unit::Milliseconds,
            0.5,
            "kubelet",
            100.0,
            Some(Bar::AtLeast(bar)),
        )
    }

    #[test]
    fn a_bar_is_met_or_missed() {
        assert_eq!((faster(200.0).ratio, faster(200.0).met), (200.0, Some(true)));
        assert_eq!(faster(201.0).met, Some(false));
        let at_most = |bar| {
            Row::new(
                "list",
                Unit::Milliseconds,
                3.0,
                "bare",
                2.0,
                Some(Bar::AtMost(bar)),
            )
        };
        assert_eq!((at_most(1.5).met, at_most(1.4).met), (Some(true), Some(false)));
        let more = |bar| Row::new("start", Unit::Milliseconds, 3.0, "bare", 0.5, Some(bar));
        assert_eq!(
            (more(Bar::Adds(2.5)).met, more(Bar::Adds(2.4)).met),
            (Some(true), Some(false))
        );
        let pairs = Row::new(
            "pairs",
            Unit::PairsPerSecond,
            500.0,
            "kubelet",
            10.0,
            Some(Bar::AtLeast(50.0)),
        );
        assert_eq!((pairs.ratio, pairs.met), (50.0, Some(true)));
    }

    #[test]
    fn a_missing_measurement_does_not_meet_a_bar() {
        let row = Row::new(
            "admit",
            Unit::Milliseconds,
            f64::NAN,
            "kubelet",
            1.0,
            Some(Bar::AtLeast(1.0)),
        );
        assert_eq!(row.met, Some(false));
    }

    #[test]
    fn an_inconclusive_table_does_not_judge() {
        let mut report = report(vec![faster(200.0), faster(201.0)]);
        let table = report.table();
        assert!(
            table.contains("| met ") && table.contains("**missed**"),
            "{table}"
        );
        assert_eq!(report.missed(), 1);
        report.inconclusive = Some("too busy".to_owned());
        let table = report.table();
        assert!(
            !table.contains("missed") && table.contains("**No conclusion**: too busy."),
            "{table}"
        );
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0456, 0.5, 1.0, 12.34, 144.4, 1234.5, 5_200_000.0].map(number);
        assert_eq!(shown, ["0.046", "0.5", "1", "12.3", "144", "1,234", "5,200,000"]);
    }
}
