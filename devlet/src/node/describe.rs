//! `devlet describe`: the details of one object, in one module per kind.

mod claim;
mod device;
mod driver;
mod plugin;
mod pod;
mod resource;
mod slice;

use super::claims::Wait;
use super::kind::{self, Kind, Target, TargetParser};
use super::select::{NamespaceArg, NoMatch, near};
use super::{ConnectArg, complete};
use crate::Outcome;
use crate::output::{self, Output, OutputArg};
use crate::table::{Screen, hanging};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Kind of the object; KIND/NAME includes its name
    #[arg(value_name = "pod|resource|device|plugin|driver|claim|slice", value_parser = TargetParser)]
    #[arg(add = complete::kinds())]
    kind: Target,
    /// Name of the object; several of one kind may be given
    #[arg(value_name = "NAME", value_parser = kind::name, add = complete::names())]
    names: Vec<String>,
    #[command(flatten)]
    namespace: NamespaceArg,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let (kind, names) = args.kind.names(args.names)?;
    if names.is_empty() {
        anyhow::bail!("name the {0}: devlet describe {0} NAME", kind.one());
    }
    args.namespace.of(kind)?;
    let client = args.connect.connect().await?;
    let mut outcome = Outcome::Fine;
    for (place, name) in names.iter().enumerate() {
        let output = args.output.output.clone();
        if place > 0 && matches!(output, Output::Table | Output::Wide) {
            output::out("\n")?;
        }
        if place > 0 && output == Output::Yaml {
            output::out("---\n")?;
        }
        let name = args.namespace.qualified(name);
        let one = match kind {
            Kind::Pods => pod::run(&client, name, output).await?,
            Kind::Resources => resource::run(&client, name, output).await?,
            Kind::Devices => device::run(&client, &name, output).await?,
            Kind::Plugins => plugin::run(&client, &name, output).await?,
            Kind::Drivers => driver::run(&client, name, output).await?,
            Kind::Claims => claim::run(&client, name, output).await?,
            Kind::Slices => slice::run(&client, &name, output).await?,
        };
        if one == Outcome::Bad {
            outcome = one;
        }
    }
    Ok(outcome)
}

/// Returns a line `LABEL TEXT`, wrapped between words on a terminal.
fn field(label: &str, text: &str) -> String {
    hanging(label, text, Screen::stdout())
}

fn no_such(kind: Kind, name: &str, known: impl Iterator<Item = String>) -> Outcome {
    let problem = NoMatch::Unknown {
        name: name.to_owned(),
        near: near(name, known),
    };
    output::warn(&format!("error: {}", problem.text(kind)));
    Outcome::Bad
}

/// Returns the operations that a pod or claim waits for, line by line.
fn waits_text(waits: &[Wait]) -> String {
    let line = |wait: &Wait| {
        let retry = wait.retry_at.as_ref();
        let retry = retry.map_or_else(String::new, |at| format!(", called again at {at}"));
        let text = field("Waiting for:  ", &format!("{}{retry}", wait.text));
        match wait
            .failure
            .as_ref()
            .filter(|failure| !wait.text.contains(*failure))
        {
            Some(failure) => text + &field("Last failure: ", failure),
            None => text,
        }
    };
    waits.iter().map(line).collect()
}
