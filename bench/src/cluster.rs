//! Admissions from the watch of a real API server, as `interop/kubernetes/run --latency` measured them.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;

use crate::clock::{Samples, Summary};
use crate::report::Row;

/// Times of pods, by kind.
#[derive(Debug, Deserialize)]
struct Latencies {
    devices: Vec<Latency>,
    claims: Vec<Latency>,
}

/// Times of one pod, in nanoseconds.
#[derive(Debug, Deserialize)]
struct Latency {
    admitted: u64,
    seen: u64,
    patched: u64,
}

/// Returns a row for each kind of pod, and one for a call to the API server.
pub(crate) fn rows(file: &Path) -> anyhow::Result<Vec<Row>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let Latencies { devices, claims } = serde_json::from_str(&text)?;
    let shown = "a plain watch shows it after";
    let row = |case: &str, pods: &[Latency], with, other: fn(&Latency) -> u64| {
        Row::medians(
            case,
            summary(pods, |pod| pod.admitted),
            with,
            summary(pods, other),
            None,
        )
    };
    Ok(vec![
        row(
            "pod bound at an API server until admitted",
            &devices,
            shown,
            |pod| pod.seen,
        ),
        row("with a claim, until prepared", &claims, shown, |pod| pod.seen),
        row(
            "with a claim, until prepared",
            &claims,
            "a patch of the pod",
            |pod| pod.patched,
        ),
    ])
}

fn summary(pods: &[Latency], time: impl Fn(&Latency) -> u64) -> Summary {
    let mut samples = Samples::default();
    samples.extend(pods.iter().map(|pod| Duration::from_nanos(time(pod))));
    samples.summary()
}
