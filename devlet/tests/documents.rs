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

/// What a command says of itself.
fn help(command: &[&str]) -> String {
    let mut devlet = std::process::Command::new(env!("CARGO_BIN_EXE_devlet"));
    let said = devlet.args(command).arg("--help").output().unwrap();
    assert!(said.status.success(), "{command:?}");
    String::from_utf8(said.stdout).unwrap()
}

/// The commands that a help text lists.
fn commands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn the_reference_knows_every_command_and_which_have_an_output_flag() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(repository.join("docs/cli.md")).unwrap();
    let (_, about) = text
        .split_once("**`-o, --output table|wide|json|yaml|jsonpath=TEMPLATE`** on ")
        .unwrap();
    let (with, _) = about.split_once(';').unwrap();
    let (with, without) = with.split_once("(without ").unwrap();
    let (without, rest) = without.split_once(')').unwrap();
    let with = format!("{with}{rest}");
    let headings: Vec<&str> = text.lines().filter(|line| line.starts_with('#')).collect();
    for command in commands(&help(&[])) {
        let inner = commands(&help(&[&command]));
        let leaves: Vec<Vec<&str>> = match inner.is_empty() {
            true => vec![vec![&command]],
            false => inner.iter().map(|inner| vec![command.as_str(), inner]).collect(),
        };
        for leaf in leaves {
            let last = leaf.last().unwrap();
            let told = with.contains(&format!("`{command}`")) && !without.contains(&format!("`{last}`"));
            assert_eq!(help(&leaf).contains("--output"), told, "{leaf:?}");
            let is_known = headings.iter().any(|line| line.contains(&leaf.join(" ")));
            let elsewhere =
                ["completions", "man"].contains(last) && text.contains(&format!("devlet {last} "));
            assert!(is_known || elsewhere, "{leaf:?} is not in docs/cli.md");
        }
    }
}

#[test]
fn every_test_that_the_compatibility_tables_cite_exists() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut known = BTreeSet::new();
    functions(repository, &mut known);
    let documents = ["compatibility.md", "kubelet-defects.md", "conformance.md"];
    let read = |name| std::fs::read_to_string(repository.join("docs").join(name)).unwrap();
    let text = documents.map(read).concat();
    let rows = text.lines().filter(|line| line.starts_with('|'));
    let last = rows.filter_map(|row| row.trim_end().trim_end_matches('|').rsplit_once(" | "));
    let names: Vec<&str> = last.flat_map(|(_, cell)| cited(cell)).collect();
    assert!(names.len() > 100, "the tables are not read: {names:?}");
    let unknown: Vec<&&str> = names.iter().filter(|name| !known.contains(**name)).collect();
    assert!(
        unknown.is_empty(),
        "{documents:?} cite tests that do not exist: {unknown:?}"
    );
}
