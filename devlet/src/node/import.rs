//! `devlet import` and `devlet forget`: an operator's decisions about a kubelet's file or a claim.

use std::path::PathBuf;

use anyhow::Context as _;
use devlet_client::{Client, Code, v1};
use serde::Serialize;

use super::ConnectArg;
use super::claims::ClaimId;
use super::kind::{Kind, name};
use super::pods::{PodId, id_text};
use crate::output::{self, OutputArg, count};
use crate::{Outcome, files};

#[derive(Debug, clap::Args)]
pub(crate) struct ImportArgs {
    /// State file to import, - for standard input
    file: PathBuf,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ForgetArgs {
    /// File to forget, as named by `devlet status`
    #[arg(required_unless_present_any = ["claim", "pod"])]
    file: Option<PathBuf>,
    /// Forget an abandoned claim, if its drivers never come back
    #[arg(long, value_name = "CLAIM", value_parser = Kind::Claims.name_parser(), conflicts_with = "file")]
    claim: Option<String>,
    /// Forget an unknown pod of a repaired file, and release its devices
    #[arg(long, value_name = "UID", value_parser = name, conflicts_with_all = ["file", "claim"])]
    pod: Option<String>,
    #[command(flatten)]
    connect: ConnectArg,
}

pub(super) async fn import(args: ImportArgs) -> anyhow::Result<Outcome> {
    let content = files::read(&args.file)?;
    let client = args.connect.connect().await?;
    let name = args.file.display().to_string();
    let request = v1::ImportRequest {
        content,
        name: name.clone(),
    };
    let imported = match client.import(request).await {
        Err(bad) if bad.code() == Code::InvalidArgument => {
            output::warn(&format!("error: {name}: {}", bad.message()));
            output::warn(&format!(
                "hint: devlet checkpoint repair {name} --out REPAIRED saves the intact parts"
            ));
            return Ok(Outcome::Bad);
        }
        answer => answer?,
    };
    let texts = |pods: &[v1::PodId]| pods.iter().map(id_text).collect();
    let report = Report {
        added_texts: texts(&imported.added),
        changed_texts: texts(&imported.changed),
        added: imported.added.into_iter().map(PodId::from).collect(),
        changed: imported.changed.into_iter().map(PodId::from).collect(),
        notes: imported.notes,
        blocked_by: imported.blocked_by,
    };
    output::print(args.output.output, &report, Report::table)?;
    Ok(Outcome::Fine)
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    added: Vec<PodId>,
    changed: Vec<PodId>,
    notes: Vec<String>,
    blocked_by: Vec<String>,
    #[serde(skip)]
    added_texts: Vec<String>,
    #[serde(skip)]
    changed_texts: Vec<String>,
}

impl Report {
    fn table(&self) -> String {
        let mut text = format!(
            "imported: {} new, {} changed\n",
            count(self.added.len(), "pod"),
            self.changed.len()
        );
        for (what, pods) in [("added", &self.added_texts), ("changed", &self.changed_texts)] {
            for pod in pods {
                text.push_str(&format!("{what:<9}{}\n", output::line(pod)));
            }
        }
        for note in &self.notes {
            text.push_str(&format!("note:    {}\n", output::line(note)));
        }
        if let Some(blocked) = still_blocked(&self.blocked_by) {
            text.push_str(&format!("blocked: {blocked}\n"));
        }
        text
    }
}

pub(super) async fn forget(args: ForgetArgs) -> anyhow::Result<Outcome> {
    if let Some(claim) = args.claim {
        let client = args.connect.connect().await?;
        return forget_claim(&client, claim).await;
    }
    if let Some(pod) = args.pod {
        let client = args.connect.connect().await?;
        let text = format!("forgotten: {pod}; its devices are free");
        let file = String::new();
        let forgotten = client.forget(v1::ForgetRequest { file, pod }).await?;
        let blocked =
            still_blocked(&forgotten.blocked_by).map_or_else(String::new, |text| format!("; {text}"));
        output::out(&format!("{}{blocked}\n", output::line(&text)))?;
        return Ok(Outcome::Fine);
    }
    // Relative paths depend on the current directory, which devlet does not share.
    let file = args.file.unwrap_or_default();
    let file = std::path::absolute(file).context("cannot determine the current directory")?;
    let client = args.connect.connect().await?;
    let forgotten = client
        .forget(v1::ForgetRequest {
            file: file.display().to_string(),
            pod: String::new(),
        })
        .await?;
    output::out(&forgotten_text(&forgotten))?;
    Ok(Outcome::Fine)
}

fn forgotten_text(forgotten: &v1::ForgetResponse) -> String {
    let mut text = String::new();
    for pod in &forgotten.removed {
        let name = match pod.name.as_str() {
            "" => String::new(),
            name => format!(" ({}/{name})", pod.namespace),
        };
        text.push_str(&output::line(&format!(
            "removed: pod {}{name}, which was only in the file",
            pod.uid
        )));
        text.push('\n');
    }
    match still_blocked(&forgotten.blocked_by) {
        None => text.push_str("forgotten: pods are admitted again\n"),
        Some(blocked) => text.push_str(&format!("forgotten: the file; {blocked}\n")),
    }
    text
}

/// Returns the files that still block admission.
fn still_blocked(files: &[String]) -> Option<String> {
    if files.is_empty() {
        return None;
    }
    let text = format!(
        "pods are still not admitted because of {}: see devlet status",
        files.join(" and ")
    );
    Some(output::line(&text).into_owned())
}

async fn forget_claim(client: &Client, claim: String) -> anyhow::Result<Outcome> {
    let forgotten = client.forget_claim(v1::ForgetClaimRequest { claim }).await?;
    for id in forgotten.claims.into_iter().map(ClaimId::from) {
        let text = format!(
            "forgotten: claim {} ({}); drivers are no longer called to unprepare it",
            id.short(),
            id.uid
        );
        output::out(&format!("{}\n", output::line(&text)))?;
    }
    Ok(Outcome::Fine)
}
