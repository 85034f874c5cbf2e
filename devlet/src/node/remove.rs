//! `devlet remove`

use devlet_client::v1;

use super::progress::Progress;
use super::{ConnectArg, shown, time};
use crate::duration::Span;
use crate::{Outcome, output};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Its name, namespace/name or UID
    pod: String,
    /// How long to wait for an admission of the pod that is under way
    #[arg(long, value_name = "DURATION")]
    wait: Option<Span>,
    #[command(flatten)]
    connect: ConnectArg,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let client = args.connect.connect().await?;
    let wait_ms = args.wait.map(time::milliseconds);
    let request = v1::RemovePodRequest {
        pod: args.pod,
        wait_ms,
    };
    let removed = Progress::new().during(client.remove_pod(request)).await?;
    let id = shown::pod_text(&removed.pod.unwrap_or_default());
    output::out(&format!("removed {}\n", output::line(&id)))?;
    Ok(Outcome::Fine)
}
