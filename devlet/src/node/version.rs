//! `devlet version`: the versions of this program and of a running devlet.

use devlet_client::v1;
use serde::Serialize;

use super::{ConnectArg, answer, no_answer};
use crate::Outcome;
use crate::output::{self, OutputArg, escape_control};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
struct Versions {
    client: &'static str,
    /// `None` if no devlet answers.
    daemon: Option<String>,
    #[serde(skip)]
    problem: String,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let daemon = match args.connect.connect().await {
        Ok(client) => {
            let status = client.status(v1::StatusRequest {}).await;
            status.map_err(|status| {
                no_answer(&status).unwrap_or_else(|| anyhow::Error::msg(answer(&status).to_owned()))
            })
        }
        Err(error) => Err(error),
    };
    let (daemon, problem) = match daemon {
        Ok(status) => (Some(status.version), String::new()),
        Err(error) => (None, output::chain(error.as_ref())),
    };
    let versions = Versions {
        client: env!("CARGO_PKG_VERSION"),
        daemon,
        problem,
    };
    output::print(args.output.output, &versions, Versions::text)?;
    Ok(Outcome::Fine)
}

impl Versions {
    fn text(&self) -> String {
        let daemon = match &self.daemon {
            Some(version) => escape_control(version).into_owned(),
            None => format!("- ({})", output::line(&self.problem)),
        };
        format!("Client:  {}\nDaemon:  {daemon}\n", self.client)
    }
}
