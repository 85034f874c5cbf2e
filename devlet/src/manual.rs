//! `devlet completions` and `devlet man`: what the command line knows about itself.

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::Outcome;
use crate::cli::Cli;

pub(crate) fn completions(shell: clap_complete::Shell) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "devlet", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(Outcome::Fine)
}

pub(crate) fn man(directory: &Path) -> anyhow::Result<Outcome> {
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), directory))
        .with_context(|| format!("cannot write manual pages to {}", directory.display()))?;
    Ok(Outcome::Fine)
}
