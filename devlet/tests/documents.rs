//! What the documents say about tests is true.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

/// Names of all functions in the Rust files below a directory.
fn functions(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            functions(&path, found);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let names = text.split("fn ").skip(1);
            found.extend(names.filter_map(|rest| rest.split(['(', '<']).next().map(str::to_owned)));
        }
    }
}

/// What stands in backticks and looks like the name of a test.
fn cited(cell: &str) -> impl Iterator<Item = &str> {
    let is_name = |text: &&str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '…';
        text.matches('_').count() > 1 && text.chars().all(plain)
    };
    cell.split('`').skip(1).step_by(2).filter(is_name)
}

#[test]
fn every_test_that_the_compatibility_tables_cite_exists() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut known = BTreeSet::new();
    functions(repository, &mut known);
    let text = std::fs::read_to_string(repository.join("docs/compatibility.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with('|'));
    let last = rows.filter_map(|row| row.trim_end().trim_end_matches('|').rsplit_once(" | "));
    let names: Vec<&str> = last.flat_map(|(_, cell)| cited(cell)).collect();
    assert!(names.len() > 100, "the tables are not read: {names:?}");
    let unknown: Vec<&&str> = names.iter().filter(|name| !known.contains(**name)).collect();
    assert!(
        unknown.is_empty(),
        "docs/compatibility.md cites tests that do not exist: {unknown:?}"
    );
}
