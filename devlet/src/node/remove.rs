//! `devlet remove`: removes pods, and abandons drivers that are gone.

use std::time::Duration;

use devlet_client::{Client, Code, Status, v1};

use super::claims::{Claim, ClaimDriver, ClaimId, Wait};
use super::kind::{Kind, name};
use super::listing::Item as _;
use super::pods::{Pod, id_text};
use super::progress::Progress;
use super::select::{Filter, NamespaceArg, near};
use super::selector::Selector;
use super::{ConnectArg, answer, complete, refused, time};
use crate::duration::Span;
use crate::{Outcome, output};

/// Interval between queries of the operations that a removal waits for.
const TICK: Duration = Duration::from_secs(1);

const CLAIM_HINT: &str = "to remove a claim that no pod uses and whose driver is gone: \
                          devlet remove --claim CLAIM --abandon-driver DRIVER";

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").args(["pods", "all", "selector", "claim"]).required(true).multiple(true))]
pub(crate) struct Args {
    /// Pods to remove: NAME, NAMESPACE/NAME, pod/NAME or a UID
    #[arg(value_name = "POD", value_parser = name, conflicts_with = "claim", add = complete::pods())]
    pods: Vec<String>,
    /// Remove all pods, or all pods of the namespace
    #[arg(long, conflicts_with_all = ["selector", "claim"])]
    all: bool,
    /// Remove the pods with these labels: KEY=VALUE, KEY!=VALUE, KEY, !KEY, KEY in (VALUE, ...), separated by commas
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "claim")]
    selector: Option<Selector>,
    #[command(flatten)]
    namespace: NamespaceArg,
    /// Print the pods that would be removed, without removing them
    #[arg(long, conflicts_with = "claim")]
    dry_run: bool,
    /// Claim to remove instead of a pod: no pod uses it any longer, and its drivers are gone
    #[arg(
        long,
        value_name = "CLAIM",
        value_parser = Kind::Claims.name_parser(),
        conflicts_with = "wait",
        requires = "abandon_driver"
    )]
    #[arg(add = complete::of(Kind::Claims))]
    claim: Option<String>,
    /// Maximum wait for drivers to unprepare claims, and for an admission of the pod in progress [default: as configured,
    /// 60s]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    wait: Option<Span>,
    /// Abandon the claims at this DRA driver without waiting, because it is gone permanently; may be repeated
    #[arg(long, value_name = "NAME", value_parser = name)]
    #[arg(add = complete::of(Kind::Drivers))]
    abandon_driver: Vec<String>,
    /// Succeed if the pod or claim does not exist, as when a removal is repeated
    #[arg(long)]
    ignore_not_found: bool,
    #[command(flatten)]
    connect: ConnectArg,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    if let Some(claim) = &args.claim {
        let claim = args.namespace.qualified(claim);
        let client = args.connect.connect().await?;
        let known = RemovalTarget {
            client: &client,
            kind: Kind::Claims,
            name: claim.clone(),
        };
        let ended = abandon(&client, claim, args.abandon_driver).await;
        return reported(ended, args.ignore_not_found, known).await;
    }
    let names = names(&args.pods)?;
    if !names.is_empty() && (args.all || args.selector.is_some()) {
        anyhow::bail!("name pods, or choose them with --all or --selector, not both");
    }
    if names.is_empty() && !args.all && args.selector.is_none() {
        anyhow::bail!("name the pods to remove, or give --all or --selector");
    }
    let client = args.connect.connect().await?;
    let pods = if names.is_empty() {
        chosen(&client, &args).await?
    } else {
        names.iter().map(|name| args.namespace.qualified(name)).collect()
    };
    let mut outcome = Outcome::Fine;
    for pod in pods {
        let known = RemovalTarget {
            client: &client,
            kind: Kind::Pods,
            name: pod.clone(),
        };
        let ended = match args.dry_run {
            true => dry_run(&client, pod).await,
            false => remove(&client, pod, &args).await,
        };
        // A failed removal does not stop the others.
        match reported(ended, args.ignore_not_found, known).await? {
            Outcome::Fine => {}
            bad => outcome = bad,
        }
    }
    Ok(outcome)
}

/// Returns the pod names of `NAME...`, `pod/NAME...` or `pod NAME...`. The last form is kubectl's; a pod named `pod` is
/// written `pod/pod` or `NAMESPACE/pod`.
fn names(words: &[String]) -> anyhow::Result<Vec<String>> {
    let words = match words {
        [kind, names @ ..] if Kind::parse(kind) == Some(Kind::Pods) => names,
        [kind, _, ..] if Kind::parse(kind).is_some() => {
            anyhow::bail!("{kind} cannot be removed: only pods can, together with their claims; {CLAIM_HINT}")
        }
        words => words,
    };
    let mut names = Vec::new();
    for word in words {
        match word.split_once('/') {
            Some(("pod" | "pods" | "po", name)) if !name.is_empty() => names.push(name.to_owned()),
            _ => names.push(word.clone()),
        }
    }
    Kind::Pods.check_names(&names)?;
    Ok(names)
}

/// Returns the UIDs of the pods of `--all` or `--selector`.
async fn chosen(client: &Client, args: &Args) -> anyhow::Result<Vec<String>> {
    let pods = client.list_pods(v1::ListPodsRequest::default()).await?.pods;
    let filter = Filter {
        namespace: args.namespace.of(Kind::Pods)?,
        selector: args.selector.as_ref(),
        ..Filter::default()
    };
    let pods = pods.into_iter().map(Pod::from);
    let chosen = pods.filter(|pod| pod.is_recorded() && filter.admits(pod));
    let chosen: Vec<String> = chosen.map(|pod| format!("uid:{}", pod.id.uid)).collect();
    if chosen.is_empty() {
        output::warn(&filter.none(Kind::Pods));
    }
    Ok(chosen)
}

async fn dry_run(client: &Client, pod: String) -> anyhow::Result<Outcome> {
    for pod in client.list_pods(v1::ListPodsRequest { pod }).await?.pods {
        let id = id_text(&pod.id.unwrap_or_default());
        output::out(&format!("would remove {}\n", output::line(&id)))?;
    }
    Ok(Outcome::Fine)
}

/// Prints why a pod was not removed, if devlet refused it.
async fn reported(
    ended: anyhow::Result<Outcome>,
    ignore_not_found: bool,
    known: RemovalTarget<'_>,
) -> anyhow::Result<Outcome> {
    match ended.map_err(anyhow::Error::downcast::<Status>) {
        Ok(outcome) => Ok(outcome),
        Err(Ok(status)) if status.code() == Code::NotFound => {
            not_found(&status, ignore_not_found, known).await
        }
        Err(Ok(status)) => refused(&status),
        Err(Err(error)) => Err(error),
    }
}

/// The name of an object to remove, and the devlet to ask for similar names.
struct RemovalTarget<'a> {
    client: &'a Client,
    kind: Kind,
    name: String,
}

impl RemovalTarget<'_> {
    /// Returns the most similar name. It is only for a hint, so errors are ignored.
    async fn near(&self) -> Option<String> {
        let names: Vec<String> = match self.kind {
            Kind::Claims => {
                let list = self.client.list_claims(v1::ListClaimsRequest::default()).await;
                let claims = list.ok()?.claims.into_iter().map(Claim::from);
                claims.map(|claim| claim.name()).collect()
            }
            _ => {
                let list = self.client.list_pods(v1::ListPodsRequest::default()).await;
                let pods = list.ok()?.pods.into_iter().map(Pod::from);
                pods.map(|pod| pod.name()).collect()
            }
        };
        near(&self.name, names.into_iter())
    }

    /// Returns `true` if the name has the form `claim/NAME`.
    fn is_claim(&self) -> bool {
        let kind = self.name.split_once('/').and_then(|(kind, _)| Kind::parse(kind));
        self.kind == Kind::Pods && kind == Some(Kind::Claims)
    }
}

async fn not_found(status: &Status, ignore: bool, known: RemovalTarget<'_>) -> anyhow::Result<Outcome> {
    if ignore {
        let text = format!("nothing to remove: {}", status.message());
        output::out(&format!("{}\n", output::line(&text)))?;
        return Ok(Outcome::Fine);
    }
    let outcome = match known.near().await {
        Some(near) => {
            output::warn(&format!("error: {}; did you mean {near}?", answer(status)));
            Outcome::Bad
        }
        None => refused(status)?,
    };
    if known.is_claim() {
        output::warn(&format!("hint: claims are removed with their pods; {CLAIM_HINT}"));
        return Ok(outcome);
    }
    output::warn("hint: with --ignore-not-found, a pod or claim that does not exist is not an error");
    Ok(outcome)
}

async fn remove(client: &Client, pod: String, args: &Args) -> anyhow::Result<Outcome> {
    let request = v1::RemovePodRequest {
        pod: pod.clone(),
        wait_ms: args.wait.map(time::milliseconds),
        abandon_drivers: args.abandon_driver.clone(),
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
    let id = id_text(&removed.pod.unwrap_or_default());
    output::out(&format!("removed {}\n", output::line(&id)))?;
    Ok(Outcome::Fine)
}

fn abandoned_text(claim: &ClaimId) -> String {
    let (name, uid) = (claim.short(), &claim.uid);
    format!("abandoned claim {name} ({uid}): if the driver comes back, it is called to unprepare it")
}

fn done_text(claim: &ClaimId, driver: &ClaimDriver) -> String {
    let (name, uid, driver) = (claim.short(), &claim.uid, &driver.name);
    format!("nothing to abandon at driver {driver}: it has completed claim {name} ({uid})")
}

/// Abandons drivers of a claim that no pod uses, and prints the operations that it still waits for.
async fn abandon(client: &Client, claim: String, drivers: Vec<String>) -> anyhow::Result<Outcome> {
    let request = v1::AbandonClaimRequest {
        claim,
        drivers: drivers.clone(),
    };
    let left = client.abandon_claim(request).await?.claims;
    if left.is_empty() {
        output::out("nothing to abandon: the claim is unprepared\n")?;
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

/// Removes the pod, and shows what the removal waits for.
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

/// Prints the command that removes a pod without waiting for its drivers.
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
        let them = match drivers.len() {
            1 => "this driver is gone",
            _ => "these drivers are gone",
        };
        output::warn(&format!(
            "hint: if {them} permanently, remove the pod without waiting: devlet remove {pod} {}",
            flags.join(" ")
        ));
    }
}
