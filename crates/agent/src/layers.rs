//! Tests that the modules of this crate depend on each other in one direction only, and that few of them have locks.
//!
//! They read all sources, tests and comments excepted. Each row of `LAYERS` may use the rows below it and nothing else,
//! so that a cycle is impossible.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The top-level modules, from the public API down to the leaves. Modules of one row do not use each other.
const LAYERS: &[&[&str]] = &[
    &["api"],
    &["agent"],
    &["plugin_registry", "reconcile", "registration", "shield"],
    &["workflow"],
    &["device_plugin", "dra"],
    &["lease", "manifest", "run_options"],
    &["store"],
    &["grpc"],
    &["config", "metrics"],
    &["limits"],
    &["access"],
    &[
        "backoff",
        "cluster",
        "deadline",
        "display",
        "long_decode",
        "peer_text",
        "resource_name",
    ],
];

/// The modules that may have locks: `store` around state that tasks share, `metrics` around counters.
const WITH_LOCKS: [&str; 2] = ["store", "metrics"];

#[test]
fn modules_use_only_lower_layers() {
    let wrong: Vec<_> = edges()
        .iter()
        .filter(|((from, to), _)| layer(from) >= layer(to))
        .map(|((from, to), files)| format!("{from} must not use {to}: {files:?}"))
        .collect();

    assert!(
        wrong.is_empty(),
        "edges against the direction of LAYERS:\n{}",
        wrong.join("\n")
    );
}

fn layer(module: &str) -> usize {
    let row = LAYERS.iter().position(|row| row.contains(&module));
    row.unwrap_or_else(|| panic!("add the module {module} to LAYERS"))
}

#[test]
fn few_modules_have_locks() {
    let wrong: Vec<_> = modules()
        .into_iter()
        .filter(|(path, _)| !WITH_LOCKS.contains(&path[0].as_str()))
        .filter(|(_, code)| ["Mutex", "RwLock"].iter().any(|lock| code.contains(lock)))
        .map(|(path, _)| path.join("/"))
        .collect();

    assert!(wrong.is_empty(), "locks outside {WITH_LOCKS:?}: {wrong:?}");
}

/// Returns which module uses which other, and the files in which it does.
fn edges() -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut edges = BTreeMap::<_, BTreeSet<_>>::new();
    for (path, code) in modules() {
        for module in used(&code, path.len()) {
            if module != path[0] {
                let edge = edges.entry((path[0].clone(), module)).or_default();
                edge.insert(path.join("/"));
            }
        }
    }
    edges
}

/// Returns the paths and the code of all modules.
fn modules() -> Vec<(Vec<String>, String)> {
    let src = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
    let modules = sources(src).into_iter().map(|file| {
        let relative = file.strip_prefix(src).unwrap().with_extension("");
        let parts = relative.iter().map(|part| part.to_str().unwrap());
        let path: Vec<_> = parts.filter(|part| *part != "mod").map(str::to_owned).collect();
        (path, code(&std::fs::read_to_string(&file).unwrap()))
    });
    modules
        .filter(|(path, _)| {
            !["lib", "layers"].contains(&path[0].as_str()) && !path.contains(&"tests".to_owned())
        })
        .collect()
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let nested = entries.map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    nested
        .flatten()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// Returns `source` without its tests and comments.
fn code(source: &str) -> String {
    let code = source.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the top-level modules that `code`, a module `depth` levels below the crate, names.
fn used(code: &str, depth: usize) -> BTreeSet<String> {
    let code = code.replace(&"super::".repeat(depth), "crate::");
    let paths = code.split("crate::").skip(1);
    let names = paths.map(|path| {
        path.split(|c: char| c != '_' && !c.is_alphanumeric())
            .next()
            .unwrap_or_default()
    });
    names
        .inspect(|name| assert!(!name.is_empty(), "write one `use crate::module` for each module"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn paths_in_code_are_found() {
    let source = "use crate::api::Api;\n// crate::no\nfn f(x: &crate::limits::Limit) { super::super::store::g() }\n\
                  use super::sibling;\n#[cfg(test)]\nmod tests { use crate::agent; }";

    assert_eq!(
        used(&code(source), 2),
        ["api", "limits", "store"].map(str::to_owned).into()
    );
}
