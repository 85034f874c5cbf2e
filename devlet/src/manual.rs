//! `devlet completions` and `devlet man`: texts generated from the command line definition.

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::{Arg, ArgAction, Command, CommandFactory as _};

use crate::Outcome;
use crate::cli::Cli;

/// Prints the script through which a shell calls this program for completions.
pub(crate) fn completions(shell: clap_complete::Shell) -> anyhow::Result<Outcome> {
    let name = shell.to_string();
    let shells = clap_complete::env::Shells::builtins();
    let completer = shells
        .completer(&name)
        .with_context(|| format!("there is no completion script for {name}"))?;
    let mut script = Vec::new();
    completer.write_registration("COMPLETE", "devlet", "devlet", "devlet", &mut script)?;
    std::io::stdout().write_all(&script)?;
    Ok(Outcome::Fine)
}

pub(crate) fn man(directory: &Path) -> anyhow::Result<Outcome> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(directory)
        .and_then(|()| pages(with_synopsis(command), directory))
        .with_context(|| format!("cannot write manual pages to {}", directory.display()))?;
    Ok(Outcome::Fine)
}

/// Writes the page of a command and of each of its subcommands.
fn pages(command: Command, directory: &Path) -> std::io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages(below.clone(), directory)?;
    }
    let after = command.get_after_help().map(ToString::to_string);
    let mut command = command;
    let mut heading = "EXIT CODES";
    if let Some(after) = after {
        if after.starts_with("Examples:\n") {
            heading = "EXAMPLES";
        }
        let text = after.strip_prefix("Examples:\n");
        let text = text.or_else(|| after.strip_prefix("Exit codes: "));
        command = command.after_help(text.unwrap_or(&after).to_owned());
    }
    let page = clap_mangen::Man::new(command)
        .source(concat!("devlet ", env!("CARGO_PKG_VERSION")))
        .manual("devlet manual");
    let mut text = Vec::new();
    page.render(&mut text)?;
    // clap_mangen always writes EXTRA as the heading.
    let text = String::from_utf8_lossy(&text).replace("\n.SH EXTRA\n", &format!("\n.SH {heading}\n"));
    std::fs::write(directory.join(page.get_filename()), text)
}

/// Replaces clap_mangen's synopsis, which omits the values of options.
fn with_synopsis(command: Command) -> Command {
    let text = synopsis(&command);
    command.override_usage(text).mut_subcommands(with_synopsis)
}

fn synopsis(command: &Command) -> String {
    let shown = |argument: &&Arg| {
        let is_built_in = matches!(argument.get_id().as_str(), "help" | "version");
        !argument.is_hide_set() && !is_built_in
    };
    let groups = command.get_groups().filter(|group| group.is_required_set());
    let groups: Vec<Vec<&Arg>> = groups
        .map(|group| {
            let members = group.get_args();
            members
                .filter_map(|id| command.get_arguments().find(|argument| argument.get_id() == id))
                .collect()
        })
        .collect();
    let mut words = vec![
        command
            .get_bin_name()
            .unwrap_or_else(|| command.get_name())
            .to_owned(),
    ];
    for members in &groups {
        let members: Vec<String> = members.iter().map(|argument| word(argument)).collect();
        words.push(format!("({})", members.join(" | ")));
    }
    let in_group = |argument: &Arg| {
        let mut members = groups.iter().flatten();
        members.any(|member| member.get_id() == argument.get_id())
    };
    for argument in command
        .get_arguments()
        .filter(shown)
        .filter(|argument| !in_group(argument))
    {
        words.push(if argument.is_required_set() {
            word(argument)
        } else {
            format!("[{}]", word(argument))
        });
    }
    if command.has_subcommands() {
        words.push("COMMAND".to_owned());
    }
    words.join(" ")
}

/// Returns an argument with its value: `--wait DURATION`.
fn word(argument: &Arg) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
    let value = names.join(" ");
    let many = match argument.get_num_args() {
        Some(range) if range.max_values() > 1 => "...",
        _ if matches!(argument.get_action(), ArgAction::Append) => "...",
        _ => "",
    };
    let option = match (argument.get_short(), argument.get_long()) {
        (_, Some(long)) => format!("--{long}"),
        (Some(short), None) => format!("-{short}"),
        (None, None) => return format!("{value}{many}"),
    };
    if argument.get_action().takes_values() {
        format!("{option} {value}{many}")
    } else {
        option
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_pages_have_the_values_of_options_in_their_synopsis() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        let page = |name: &str| {
            let text = std::fs::read_to_string(directory.path().join(name)).unwrap();
            let synopsis = text.split(".SH SYNOPSIS\n").nth(1).unwrap();
            let synopsis = synopsis.split(".SH").next().unwrap();
            synopsis
                .replace("\\-", "-")
                .replace("\\fB", "")
                .replace("\\fI", "")
                .replace("\\fR", "")
        };
        let admit = page("devlet-admit.1");
        for expected in [
            "devlet admit (--filename FILE... | --name NAME)",
            "[--limit RESOURCE=COUNT...]",
            "[--wait DURATION]",
            "[--root-dir DIR]",
        ] {
            assert!(admit.contains(expected), "{expected}: {admit}");
        }
        let options = std::fs::read_to_string(directory.path().join("devlet-options.1")).unwrap();
        assert!(
            options.contains(".SH EXAMPLES\n  devlet options job1\n"),
            "{options}"
        );
        assert!(
            options.contains("\"devlet 0.") && !options.contains("EXTRA"),
            "{options}"
        );
        let group = std::fs::read_to_string(directory.path().join("devlet-cdi.1")).unwrap();
        assert!(!group.contains(".SH EX"), "no section is empty: {group}");
        assert!(page("devlet.1").contains("COMMAND"), "{}", page("devlet.1"));
        assert!(page("devlet-options.1").contains("devlet options POD [CONTAINER]"));
    }
}
