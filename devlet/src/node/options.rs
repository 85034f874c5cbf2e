//! `devlet options`: the options that a container needs for its devices, in the format of its runtime.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use devlet_client::{Client, v1};

use super::claims::admitted;
use super::kind::{Kind, name};
use super::pods::{Admitted, Container, RunOptions, conflict_texts, id_text};
use super::progress::Progress;
use super::runtime::{self, Engine};
use super::{ConnectArg, time};
use crate::cdi::Directories;
use crate::duration::Span;
use crate::oci::Edited;
use crate::output::{self, Output};
use crate::{Outcome, files};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Pod: name, namespace/name or UID
    #[arg(value_parser = Kind::Pods.name_parser(), add = super::complete::of(Kind::Pods))]
    pod: String,
    /// Container [default: all containers, or the only one]
    #[arg(value_parser = name, add = super::complete::containers())]
    container: Option<String>,
    /// Output format
    #[arg(long, value_name = "FORMAT", default_value = "json")]
    format: Format,
    /// OCI runtime spec to change with --format oci, - for standard input
    #[arg(long, value_name = "FILE")]
    oci_spec: Option<PathBuf>,
    /// Do not call PreStartContainer of plugins
    #[arg(long)]
    no_start: bool,
    /// Maximum wait for plugins that PreStartContainer needs and that are not connected [default: as configured, 60s]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    wait: Option<Span>,
    #[command(flatten)]
    directories: Directories,
    #[command(flatten)]
    connect: ConnectArg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The JSON of `devlet admit -o json`
    Json,
    /// Arguments for `podman run`
    Podman,
    /// Arguments for `docker run`
    Docker,
    /// An OCI runtime spec with CDI devices resolved
    Oci,
    /// The environment variables only, as NAME=value lines for a shell
    Env,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    if args.oci_spec.is_some() && args.format != Format::Oci {
        anyhow::bail!("--oci-spec is for --format oci");
    }
    let client = args.connect.connect().await?;
    let listed = client
        .list_pods(v1::ListPodsRequest {
            pod: args.pod.clone(),
        })
        .await?;
    let Some(pod) = listed.pods.into_iter().next() else {
        output::warn(&format!("error: no such pod: {}", args.pod));
        return Ok(Outcome::Bad);
    };
    if let (Some(waiting), 0) = (&pod.waiting, pod.admitted_at_ms) {
        let reason = &waiting.reason;
        output::warn(&format!("error: pod {} is not admitted: {reason}", args.pod));
        return Ok(Outcome::Bad);
    }
    let containers = match chosen(&pod, args.container.as_deref(), args.format) {
        Ok(containers) => containers,
        // The container name is missing on the command line.
        Err(problem) if args.container.is_none() => anyhow::bail!(problem),
        Err(problem) => {
            output::warn(&format!("error: {problem}"));
            return Ok(Outcome::Bad);
        }
    };
    let containers = if args.no_start {
        containers
    } else {
        let wait_ms = args.wait.map(time::milliseconds);
        start(&client, &pod, containers, wait_ms).await?
    };
    for conflict in containers.iter().flat_map(conflict_texts) {
        output::warn(&format!("warning: {conflict}"));
    }
    let shown = Admitted {
        pod: pod.id.unwrap_or_default().into(),
        claims: admitted(pod.claims),
        containers: containers.into_iter().map(Container::from).collect(),
    };
    print(&args, &shown)
}

/// Returns the containers to show. Only the JSON format allows several.
fn chosen(pod: &v1::Pod, name: Option<&str>, format: Format) -> Result<Vec<v1::Container>, String> {
    if let Some(name) = name {
        let known = pod.containers.iter().find(|container| container.name == name);
        let names = &pod.container_names;
        if known.is_none() && !names.is_empty() && !names.iter().any(|each| each == name) {
            let names = names.join(", ");
            return Err(format!(
                "the pod does not have a container {name:?}; it has {names}"
            ));
        }
        // A container without devices does not need options.
        let container = known.cloned().unwrap_or_else(|| v1::Container {
            name: name.to_owned(),
            ..Default::default()
        });
        return Ok(vec![container]);
    }
    if pod.containers.len() > 1 && format != Format::Json {
        let names: Vec<&str> = pod
            .containers
            .iter()
            .map(|container| container.name.as_str())
            .collect();
        return Err(format!(
            "the pod has several containers: name one of {}",
            names.join(", ")
        ));
    }
    Ok(pod.containers.clone())
}

async fn start(
    client: &Client,
    pod: &v1::Pod,
    containers: Vec<v1::Container>,
    wait_ms: Option<u64>,
) -> anyhow::Result<Vec<v1::Container>> {
    let id = pod.id.clone().unwrap_or_default();
    let mut started = Vec::new();
    for container in containers {
        let mut progress = Progress::new();
        if container.devices.iter().any(|held| held.pre_start_required) {
            progress.waiting_for(&format!(
                "the plugins of container {} of {}",
                container.name,
                id_text(&id)
            ));
        }
        let request = v1::StartContainerRequest {
            // By UID, which is unique.
            pod: format!("uid:{}", id.uid),
            container: container.name,
            wait_ms,
        };
        let answer = progress.during(client.start_container(request)).await?;
        started.extend(answer.container);
    }
    Ok(started)
}

fn print(args: &Args, shown: &Admitted) -> anyhow::Result<Outcome> {
    if args.format == Format::Json {
        output::print(Output::Json, shown, |_| String::new())?;
        return Ok(Outcome::Fine);
    }
    let none = RunOptions::default();
    let options = shown
        .containers
        .first()
        .map_or(&none, |container| &container.options);
    let text = match args.format {
        Format::Podman => runtime::arguments(options, Engine::Podman),
        Format::Docker => runtime::arguments(options, Engine::Docker),
        Format::Env => runtime::variables(options),
        Format::Json | Format::Oci => {
            let additions = match runtime::additions(options, &args.directories.open()?) {
                Ok(additions) => additions,
                Err(problem) => {
                    output::warn(&format!("error: {problem}"));
                    output::warn(&args.directories.hint());
                    return Ok(Outcome::Bad);
                }
            };
            let (path, oci) = match &args.oci_spec {
                Some(path) => (path.as_path(), files::read(path)?),
                None => (Path::new("the spec"), b"{}".to_vec()),
            };
            match Edited::new(&oci, &additions) {
                Ok(edited) => Ok(edited.to_json()? + "\n"),
                Err(error) => {
                    error.print(path);
                    return Ok(Outcome::Bad);
                }
            }
        }
    };
    match text {
        Ok(text) => {
            output::out(&text)?;
            Ok(Outcome::Fine)
        }
        Err(problem) => {
            output::warn(&format!("error: {problem}"));
            Ok(Outcome::Bad)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::samples;

    #[test]
    fn an_unknown_container_name_is_refused() {
        let mut pod = samples::pod();
        let name = |pod: &v1::Pod, name| Some(chosen(pod, Some(name), Format::Env).ok()?[0].name.clone());
        assert_eq!(
            name(&pod, "typo").as_deref(),
            Some("typo"),
            "the names are unknown"
        );
        pod.container_names = vec!["main".into(), "log".into()];
        assert_eq!(name(&pod, "log").as_deref(), Some("log"));
        let refused = chosen(&pod, Some("typo"), Format::Env).unwrap_err();
        assert_eq!(
            refused,
            "the pod does not have a container \"typo\"; it has main, log"
        );
    }

    #[test]
    fn without_a_name_the_only_container_is_chosen() {
        let chosen_names = |pod: &v1::Pod, name, format| {
            let containers = chosen(pod, name, format)?;
            Ok::<_, String>(
                containers
                    .into_iter()
                    .map(|container| container.name)
                    .collect::<Vec<_>>(),
            )
        };
        let mut pod = samples::pod();
        assert_eq!(chosen_names(&pod, None, Format::Podman).unwrap(), ["main"]);
        pod.containers.push(v1::Container {
            name: "side".into(),
            ..Default::default()
        });
        assert_eq!(chosen_names(&pod, None, Format::Json).unwrap(), ["main", "side"]);
        assert_eq!(
            chosen_names(&pod, Some("side"), Format::Docker).unwrap(),
            ["side"]
        );
        assert!(
            chosen_names(&pod, None, Format::Env)
                .unwrap_err()
                .contains("main, side")
        );
        assert_eq!(chosen_names(&pod, Some("bare"), Format::Env).unwrap(), ["bare"]);
    }
}
