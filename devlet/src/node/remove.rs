//! `devlet remove`

use std::time::Duration;

use devlet_client::{Client, Code, Status, v1};

use super::claims::{Claim, ClaimDriver, ClaimId, Wait};
use super::progress::Progress;
use super::{ConnectArg, refused, shown, time};
use crate::duration::Span;
use crate::{Outcome, output};

/// How often it is asked what is waited for.
const TICK: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Its name, namespace/name or UID
    #[arg(required_unless_present = "claim")]
    pod: Option<String>,
    /// Instead of a pod: a claim that no pod wants any longer, and whose drivers are gone, such as one of a kubelet's file
    #[arg(long, value_name = "CLAIM", conflicts_with_all = ["pod", "wait"], requires = "abandon_driver")]
    claim: Option<String>,
    /// How long to wait for drivers to unprepare its claims, and for an admission of the pod that is under way [default: as
    /// configured, 60s]
    #[arg(long, value_name = "DURATION")]
    wait: Option<Span>,
    /// Do not wait for this DRA driver, which is gone for good: what it prepared for the pod, or the claim, is abandoned; may
    /// be repeated
    #[arg(long, value_name = "NAME")]
    abandon_driver: Vec<String>,
    /// Succeed if there is no such pod, or claim: it may be gone already, as when a removal is repeated
    #[arg(long)]
    ignore_not_found: bool,
    #[command(flatten)]
    connect: ConnectArg,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let client = args.connect.connect().await?;
    let ignore = args.ignore_not_found;
    let ended = match args.claim {
        Some(claim) => abandon(&client, claim, args.abandon_driver).await,
        None => remove(&client, args).await,
    };
    match ended.map_err(anyhow::Error::downcast::<Status>) {
        Ok(outcome) => Ok(outcome),
        Err(Ok(status)) if status.code() == Code::NotFound => not_found(&status, ignore),
        Err(Ok(status)) => Err(status.into()),
        Err(Err(error)) => Err(error),
    }
}

fn not_found(status: &Status, ignore: bool) -> anyhow::Result<Outcome> {
    if ignore {
        let text = format!("nothing to remove: {}", status.message());
        output::out(&format!("{}\n", output::line(&text)))?;
        return Ok(Outcome::Fine);
    }
    let outcome = refused(status)?;
    output::warn("hint: with --ignore-not-found, what is gone already is no error");
    Ok(outcome)
}

async fn remove(client: &Client, args: Args) -> anyhow::Result<Outcome> {
    let wait_ms = args.wait.map(time::milliseconds);
    let pod = args.pod.unwrap_or_default();
    let request = v1::RemovePodRequest {
        pod: pod.clone(),
        wait_ms,
        abandon_drivers: args.abandon_driver,
    };
    let removed = match removal(client, &pod, request).await {
        Err(status) if status.code() == Code::DeadlineExceeded => {
            let outcome = refused(&status)?;
            give_up_hint(client, &pod).await;
            return Ok(outcome);
        }
        removed => removed?,
    };
    for claim in removed.abandoned {
        output::warn(&abandoned_text(&ClaimId::from(claim)));
    }
    let id = shown::pod_text(&removed.pod.unwrap_or_default());
    output::out(&format!("removed {}\n", output::line(&id)))?;
    Ok(Outcome::Fine)
}

fn abandoned_text(claim: &ClaimId) -> String {
    let (name, uid) = (claim.short(), &claim.uid);
    format!("abandoned claim {name} ({uid}): should the driver come back, it is asked to unprepare it")
}

fn done_text(claim: &ClaimId, driver: &ClaimDriver) -> String {
    let (name, uid, driver) = (claim.short(), &claim.uid, &driver.name);
    format!("nothing is abandoned at driver {driver}: it has nothing left to do for claim {name} ({uid})")
}

/// Gives up on drivers of a claim that no pod wants, and says who is still waited for.
async fn abandon(client: &Client, claim: String, drivers: Vec<String>) -> anyhow::Result<Outcome> {
    let request = v1::AbandonClaimRequest {
        claim,
        drivers: drivers.clone(),
    };
    let left = client.abandon_claim(request).await?.claims;
    if left.is_empty() {
        output::out("nothing is abandoned: the claim is unprepared\n")?;
    }
    for claim in left {
        let claim = Claim::from(claim);
        let (abandoned, done): (Vec<&ClaimDriver>, Vec<&ClaimDriver>) = claim
            .drivers
            .iter()
            .filter(|driver| drivers.contains(&driver.name))
            .partition(|driver| driver.state == "abandoned");
        let mut texts: Vec<String> = done
            .into_iter()
            .map(|driver| done_text(&claim.id, driver))
            .collect();
        if !abandoned.is_empty() {
            texts.push(abandoned_text(&claim.id));
        }
        for text in texts {
            output::out(&format!("{}\n", output::line(&text)))?;
        }
        for wait in &claim.waits {
            output::warn(&format!("still waiting for: {}", wait.text));
        }
    }
    Ok(Outcome::Fine)
}

/// Removes the pod, and says what is waited for if that takes a while.
async fn removal(
    client: &Client,
    pod: &str,
    request: v1::RemovePodRequest,
) -> Result<v1::RemovePodResponse, Status> {
    let mut progress = Progress::new();
    let mut removal = std::pin::pin!(client.remove_pod(request));
    loop {
        match tokio::time::timeout(TICK, progress.during(&mut removal)).await {
            Ok(removed) => return removed,
            Err(_) => {
                let waits = waits(client, pod).await;
                if let [first, others @ ..] = &waits[..] {
                    let more = match others.len() {
                        0 => String::new(),
                        more => format!(", and {more} more"),
                    };
                    progress.waiting_for(&format!("drivers: {}{more}", first.text));
                }
            }
        }
    }
}

async fn waits(client: &Client, pod: &str) -> Vec<Wait> {
    let request = v1::MightNeedUnprepareRequest { pod: pod.to_owned() };
    let answer = client.might_need_unprepare(request).await.unwrap_or_default();
    answer.waits.into_iter().map(Wait::from).collect()
}

/// How to go on without the drivers that are waited for.
async fn give_up_hint(client: &Client, pod: &str) {
    let waits = waits(client, pod).await;
    let mut drivers: Vec<&str> = waits.iter().map(|wait| wait.driver.as_str()).collect();
    drivers.sort_unstable();
    drivers.dedup();
    if !drivers.is_empty() {
        let flags: Vec<String> = drivers
            .iter()
            .map(|driver| format!("--abandon-driver {driver}"))
            .collect();
        output::warn(&format!(
            "hint: to do without: devlet remove {pod} {}",
            flags.join(" ")
        ));
    }
}
