//! Compares the readers and writers of `devlet-kubelet-files` with those of real kubelets, file by file.
//!
//! The files are made from the vectors by random mutations; the same seed makes the same files. Every file goes to
//! every oracle (see `interop/checkpoints`) as every kind of file, and to our readers. All visible results are
//! compared: errors and their texts, checksums, content, rewritten files, and the result of `verify`.
//!
//! Excluded, because the difference is intended or irrelevant:
//! - a file with entries of V1 and of V2, which is mixed for us and a type error for Go;
//! - the same list three times under one key, where Go brings back values of the first;
//! - the text about a bad time;
//! - the content of an envelope with a wrong checksum.
//!
//! Each exclusion is marked in `compare.rs` or here.

mod compare;
mod mutate;
mod oracle;
mod protobuf;
mod random;
mod tree;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use serde::de::DeserializeOwned;

use crate::compare::{Answers, Difference, Differences};
use crate::mutate::Seeds;
use crate::oracle::{Oracle, Request};
use crate::random::Random;
use crate::tree::Node;

/// Compare our readers of kubelet state files with real kubelets.
#[derive(Debug, Parser)]
struct Arguments {
    /// The directory with oracle-current, oracle-v1_30, oracle-v1_28, oracle-v1_27 and oracle-v1_19.
    #[arg(long)]
    oracles: PathBuf,
    /// Seed of the random mutations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of files to compare.
    #[arg(long, default_value_t = 20_000)]
    files: usize,
    /// Directory of the vectors to start from.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/kubelet-files/testdata"))]
    testdata: PathBuf,
    /// Compare only these files, unchanged.
    only: Vec<PathBuf>,
}

/// Number of files in one batch of requests.
const BATCH: usize = 500;
/// Number of examples shown for each kind of difference.
const SHOWN: usize = 3;

struct Oracles {
    current: Oracle,
    v1_30: Oracle,
    v1_28: Oracle,
    v1_27: Oracle,
    v1_19: Oracle,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Case {
    File(Vec<u8>),
    Response(Vec<u8>),
}

impl Case {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::File(bytes) | Self::Response(bytes) => bytes,
        }
    }

    fn with(&self, bytes: Vec<u8>) -> Self {
        match self {
            Self::File(_) => Self::File(bytes),
            Self::Response(_) => Self::Response(bytes),
        }
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut oracles = Oracles::start(&arguments.oracles)?;
    let seeds = seeds(&arguments.testdata)?;
    let mut report = Report::default();
    if !arguments.only.is_empty() {
        let read = |path: &PathBuf| std::fs::read(path).with_context(|| path.display().to_string());
        let files = arguments
            .only
            .iter()
            .map(read)
            .collect::<anyhow::Result<Vec<_>>>()?;
        let cases: Vec<Case> = files.into_iter().map(Case::File).collect();
        report.compare(&cases, &mut oracles)?;
        return Ok(report.end());
    }
    // Truncated at every byte, and unchanged.
    let mut cases: Vec<Case> = seeds.raw.iter().cloned().map(Case::File).collect();
    for seed in seeds.raw.iter().filter(|seed| seed.len() < 1_000) {
        cases.extend((0..seed.len()).map(|end| Case::File(seed[..end].to_vec())));
    }
    cases.truncate(arguments.files / 4);
    report.compare(&cases, &mut oracles)?;
    let mut random = Random::new(arguments.seed);
    while report.compared < arguments.files {
        let batch = BATCH.min(arguments.files - report.compared);
        let case = |random: &mut Random| {
            if random.once_in(8) {
                Case::Response(protobuf::message(random))
            } else {
                Case::File(mutate::file(random, &seeds))
            }
        };
        let cases: Vec<Case> = (0..batch).map(|_| case(&mut random)).collect();
        report.compare(&cases, &mut oracles)?;
    }
    Ok(report.end())
}

fn seeds(directory: &Path) -> anyhow::Result<Seeds> {
    let mut paths = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = std::fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "json") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    let mut seeds = Seeds::default();
    for path in paths {
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        // Expected results, not files of a kubelet.
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name.starts_with("manifest") || name.starts_with("load-results") {
            continue;
        }
        seeds.trees.extend(Node::parse(&bytes));
        seeds.raw.push(bytes);
    }
    anyhow::ensure!(!seeds.trees.is_empty(), "no vectors in {}", directory.display());
    Ok(seeds)
}

/// Returns bytes as Go reads them in a string: one U+FFFD for each byte that is not UTF-8.
fn go_text(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Err(error) = std::str::from_utf8(bytes) {
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        out.extend_from_slice(valid);
        out.extend_from_slice("\u{fffd}".as_bytes());
        bytes = &rest[1..];
    }
    out.extend_from_slice(bytes);
    out
}

impl Oracles {
    fn start(directory: &Path) -> anyhow::Result<Self> {
        let start = |name: &str| Oracle::start(&directory.join(format!("oracle-{name}")));
        Ok(Self {
            current: start("current")?,
            v1_30: start("v1_30")?,
            v1_28: start("v1_28")?,
            v1_27: start("v1_27")?,
            v1_19: start("v1_19")?,
        })
    }

    fn compare(&mut self, cases: &[Case]) -> anyhow::Result<Vec<Differences>> {
        let of_kinds = |kinds: &[u8]| -> Vec<Request<'_>> {
            let files = cases.iter().filter(|case| matches!(case, Case::File(_)));
            files
                .flat_map(|case| kinds.iter().map(|&kind| (kind, case.bytes())))
                .collect()
        };
        let mut of_current = of_kinds(b"dmh");
        of_current.extend(
            cases
                .iter()
                .filter(|case| matches!(case, Case::Response(_)))
                .map(|case| (b'p', case.bytes())),
        );
        let (both, claims, devices) = (of_kinds(b"dm"), of_kinds(b"m"), of_kinds(b"d"));
        let Self {
            current,
            v1_30,
            v1_28,
            v1_27,
            v1_19,
        } = self;
        let answers = std::thread::scope(|scope| {
            let asked = [
                scope.spawn(|| current.ask(&of_current)),
                scope.spawn(|| v1_30.ask(&both)),
                scope.spawn(|| v1_28.ask(&claims)),
                scope.spawn(|| v1_27.ask(&claims)),
                scope.spawn(|| v1_19.ask(&devices)),
            ];
            asked.map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| anyhow::bail!("a reader thread panicked"))
            })
        });
        let [current, v1_30, v1_28, v1_27, v1_19] = answers;
        let [mut current, mut v1_30, mut v1_28, mut v1_27, mut v1_19] =
            [current?, v1_30?, v1_28?, v1_27?, v1_19?].map(Vec::into_iter);
        let files = cases.iter().filter(|case| matches!(case, Case::File(_))).count();
        let responses = current.as_slice()[3 * files..].to_vec();
        let mut responses = responses.iter();
        let mut found = Vec::with_capacity(cases.len());
        for case in cases {
            let bytes = case.bytes();
            found.push(match case {
                Case::Response(_) => {
                    let answer = parse(responses.next().map(Vec::as_slice))?;
                    guarded(|| compare::response(bytes, &answer))
                }
                Case::File(_) => {
                    let answers = Answers {
                        devices: parse(current.next().as_deref())?,
                        claims: parse(current.next().as_deref())?,
                        health: parse(current.next().as_deref())?,
                        devices_1_30: parse(v1_30.next().as_deref())?,
                        claims_1_30: parse(v1_30.next().as_deref())?,
                        claims_1_28: parse(v1_28.next().as_deref())?,
                        claims_1_27: parse(v1_27.next().as_deref())?,
                        devices_1_19: parse(v1_19.next().as_deref())?,
                    };
                    guarded(|| compare::files(bytes, &answers))
                }
            });
        }
        Ok(found)
    }
}

fn parse<T: DeserializeOwned>(line: Option<&[u8]>) -> anyhow::Result<T> {
    let line = without_surrogates(line.context("an answer is missing")?);
    serde_json::from_slice(&line).with_context(|| {
        let shown = &line[..line.len().min(400)];
        format!("the answer does not parse: {}", String::from_utf8_lossy(shown))
    })
}

/// Replaces bytes and halves of surrogate pairs that our reader of answers rejects. Go prints raw parameters
/// unchanged, and they are not compared here.
fn without_surrogates(line: &[u8]) -> Vec<u8> {
    let mut line = go_text(line);
    let mut at = 0;
    while at + 1 < line.len() {
        if line[at] != b'\\' {
            at += 1;
            continue;
        }
        let is_surrogate = line[at + 1] == b'u'
            && matches!(
                line.get(at + 2..at + 4),
                Some([b'd' | b'D', b'8'..=b'9' | b'a'..=b'f' | b'A'..=b'F'])
            );
        if is_surrogate {
            line[at + 2..at + 6].copy_from_slice(b"fffd");
        }
        at += 2;
    }
    line
}

/// Reports a panic of our readers as a difference.
fn guarded(compare: impl FnOnce() -> Differences) -> Differences {
    catch_unwind(AssertUnwindSafe(compare)).unwrap_or_else(|_| {
        Differences(vec![Difference {
            what: "we panic",
            detail: String::new(),
        }])
    })
}

#[derive(Debug, Default)]
struct Report {
    compared: usize,
    failed: usize,
    /// Number of excluded differences.
    meant: usize,
    kinds: BTreeMap<&'static str, usize>,
}

impl Report {
    fn compare(&mut self, cases: &[Case], oracles: &mut Oracles) -> anyhow::Result<()> {
        for cases in cases.chunks(BATCH) {
            let batch = oracles.compare(cases)?;
            let mut to_show = Vec::new();
            for (case, differences) in cases.iter().zip(batch) {
                self.compared += 1;
                let Some(first) = differences.0.first() else {
                    continue;
                };
                if matches!(case, Case::File(bytes) if lists_three_times(bytes)) {
                    self.meant += 1;
                    continue;
                }
                self.failed += 1;
                let seen = self.kinds.entry(first.what).or_default();
                *seen += 1;
                if *seen <= SHOWN {
                    to_show.push((case, first.clone()));
                }
            }
            for (case, difference) in to_show {
                println!("{}\n    {}", difference.what, clipped(&difference.detail));
                println!("    file: {}", shown(case.bytes()));
                let mut again = |smaller: &Case| -> Option<Difference> {
                    let found = oracles.compare(std::slice::from_ref(smaller)).ok()?.pop()?;
                    found.0.into_iter().find(|other| other.what == difference.what)
                };
                let (smaller, detail) = minimized(case, difference.clone(), &mut again);
                if smaller != *case {
                    println!(
                        "    small: {}\n    {}",
                        shown(smaller.bytes()),
                        clipped(&detail.detail)
                    );
                }
            }
        }
        Ok(())
    }

    fn end(&self) -> ExitCode {
        for (what, count) in &self.kinds {
            println!("{count:>8}  {what}");
        }
        println!(
            "{:>8}  excluded: the same list three times under one key",
            self.meant
        );
        println!("{} passed, {} failed", self.compared - self.failed, self.failed);
        ExitCode::from(u8::from(self.failed > 0))
    }
}

/// Returns `true` if a key with a list occurs three times in one object. There Go brings back values of the first
/// list in the third, and we do not.
fn lists_three_times(bytes: &[u8]) -> bool {
    fn found(node: &Node) -> bool {
        match node {
            Node::Token(token) => {
                // A document inside a string.
                let inner = serde_json::from_slice::<String>(token).ok();
                inner
                    .and_then(|text| Node::parse(text.as_bytes()))
                    .is_some_and(|node| found(&node))
            }
            Node::List(items) => items.iter().any(found),
            Node::Object(entries) => {
                let mut keys = BTreeMap::new();
                for (key, value) in entries {
                    let name: String =
                        serde_json::from_slice(key).unwrap_or_else(|_| String::from_utf8_lossy(key).into());
                    let name = name.to_lowercase().replace('\u{17f}', "s");
                    let holds_list =
                        matches!(value, Node::List(_) | Node::Object(_)) || value.compact().len() > 2;
                    *keys.entry(name).or_insert(0) += usize::from(holds_list);
                }
                keys.values().any(|&count| count >= 3) || entries.iter().any(|(_, value)| found(value))
            }
        }
    }
    Node::parse(bytes).is_some_and(|node| found(&node))
}

/// Removes parts of the file while the difference remains.
fn minimized(
    case: &Case,
    difference: Difference,
    again: &mut impl FnMut(&Case) -> Option<Difference>,
) -> (Case, Difference) {
    let (mut best, mut detail) = (case.clone(), difference);
    let mut asks = 300;
    let mut length = best.bytes().len() / 2;
    while length > 0 {
        let mut at = 0;
        while at < best.bytes().len() && asks > 0 {
            asks -= 1;
            let mut bytes = best.bytes().to_vec();
            let end = (at + length).min(bytes.len());
            bytes.drain(at..end);
            let smaller = best.with(bytes);
            match again(&smaller) {
                Some(difference) => (best, detail) = (smaller, difference),
                None => at += length,
            }
        }
        length /= 2;
    }
    (best, detail)
}

fn shown(bytes: &[u8]) -> String {
    clipped(&bytes.escape_ascii().to_string().replace("\\\"", "\""))
}

fn clipped(text: &str) -> String {
    match text.char_indices().nth(1_500) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes)", &text[..end], text.len()),
    }
}
