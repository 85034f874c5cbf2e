//! The chart for the README: speedups on a logarithmic scale. Readable on a light and on a dark background.

use crate::report::{Bar, Report, Row, number};

const ROW: f64 = 26.0;
const LEFT: f64 = 330.0;
const WIDTH: f64 = 860.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 58.0;

/// Draws the rows that compare devlet with the kubelet.
pub(crate) fn svg(report: &Report) -> String {
    let rows: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| row.with == "kubelet" && row.ratio.is_finite())
        .collect();
    let most = rows.iter().map(|row| times(row)).fold(10.0, f64::max);
    let decades = most.log10().ceil().max(1.0);
    let scale = (WIDTH - LEFT - RIGHT) / decades;
    let x = |ratio: f64| LEFT + ratio.max(1.0).log10() * scale;
    let bottom = TOP + rows.len() as f64 * ROW;
    let height = bottom + 44.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-label=\"How many times faster devlet is than the kubelet\">\n\
         <style>\n\
         text {{ font: 13px system-ui, sans-serif; fill: #24292f; }}\n\
         .title {{ font-weight: 600; font-size: 15px; }}\n\
         .small {{ font-size: 11px; fill: #57606a; }}\n\
         .grid {{ stroke: #8c959f; stroke-opacity: 0.35; }}\n\
         .value {{ fill: #bf5b17; }}\n\
         .bar {{ stroke: #24292f; stroke-width: 2; }}\n\
         @media (prefers-color-scheme: dark) {{\n\
         text {{ fill: #e6edf3; }} .small {{ fill: #9198a1; }} .bar {{ stroke: #e6edf3; }} .value {{ fill: #e8843c; }}\n\
         }}\n\
         </style>\n\
         <text class=\"title\" x=\"12\" y=\"22\">Times faster than the kubelet's managers, same machine, same run</text>\n"
    );
    for decade in 0..=decades as i32 {
        let ratio = 10_f64.powi(decade);
        let at = x(ratio);
        text += &format!(
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\"/>\n\
             <text class=\"small\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}×</text>\n",
            TOP - 4.0,
            TOP - 10.0,
            number(ratio)
        );
    }
    for (place, row) in rows.iter().enumerate() {
        let top = TOP + place as f64 * ROW;
        let end = x(times(row));
        text += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n\
             <rect class=\"value\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{}×</text>\n",
            LEFT - 10.0,
            top + 17.0,
            escaped(&row.case),
            top + 5.0,
            (end - LEFT).max(1.0),
            ROW - 10.0,
            end + 8.0,
            top + 17.0,
            number(times(row))
        );
        if let Some(bar) = row.bar.and_then(goal) {
            let at = x(bar);
            text += &format!(
                "<line class=\"bar\" x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{:.1}\"/>\n",
                top + 2.0,
                top + ROW - 2.0
            );
        }
    }
    text += &format!(
        "<text class=\"small\" x=\"12\" y=\"{:.1}\">{}; {}. The upright marks are what devlet must \
         reach.</text>\n</svg>\n",
        bottom + 26.0,
        escaped(&report.devlet),
        escaped(&report.kubelet)
    );
    text
}

/// Returns the factor by which devlet is faster or smaller, also for rows with the inverse ratio.
fn times(row: &Row) -> f64 {
    match row.bar {
        Some(Bar::AtMost(_) | Bar::Adds(_)) => 1.0 / row.ratio,
        _ => row.ratio,
    }
}

fn goal(bar: Bar) -> Option<f64> {
    match bar {
        Bar::AtLeast(bar) => Some(bar),
        Bar::AtMost(bar) => Some(1.0 / bar),
        // The chart shows ratios.
        Bar::Adds(_) => None,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;
    use crate::report::tests::{faster, report};

    #[test]
    fn a_chart_has_a_bar_for_each_row_against_the_kubelet() {
        let mut rows = vec![faster(100.0), faster(3.0)];
        rows.push(Row::new(
            "list",
            Unit::Milliseconds,
            3.0,
            "bare",
            2.0,
            Some(Bar::AtMost(2.0)),
        ));
        let chart = svg(&report(rows));
        assert_eq!(chart.matches("<rect class=\"value\"").count(), 2, "{chart}");
        assert_eq!(chart.matches("<line class=\"bar\"").count(), 2, "{chart}");
        assert!(
            chart.starts_with("<svg") && chart.trim_end().ends_with("</svg>"),
            "{chart}"
        );
    }

    #[test]
    fn text_in_a_chart_is_escaped() {
        let mut row = faster(3.0);
        row.case = "a < b & c".to_owned();
        assert!(svg(&report(vec![row])).contains(">a &lt; b &amp; c<"));
    }

    #[test]
    fn less_memory_extends_to_the_right_too() {
        let row = Row::new(
            "memory",
            Unit::Mebibytes,
            20.0,
            "kubelet",
            100.0,
            Some(Bar::AtMost(0.25)),
        );
        assert_eq!((times(&row), row.bar.and_then(goal)), (5.0, Some(4.0)));
    }
}
