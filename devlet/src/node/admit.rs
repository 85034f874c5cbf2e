//! `devlet admit`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use devlet_client::v1::{self, admit_event::Event};
use serde_json::json;

use super::progress::Progress;
use super::shown::{Admitted, conflict_texts, or_dash};
use super::{ConnectArg, time};
use crate::duration::Span;
use crate::output::{self, OutputArg, shown, table};
use crate::{Outcome, files};

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("pod").args(["file", "name"]).required(true))]
pub(crate) struct Args {
    /// A Kubernetes Pod, and the ResourceClaims that it uses, with their status: YAML or JSON, in any order, in one or more
    /// files; - for standard input
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = ["namespace", "container", "limits"])]
    file: Vec<PathBuf>,
    /// Without a manifest: the pod's name
    #[arg(long)]
    name: Option<String>,
    /// Without a manifest: the pod's namespace
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Without a manifest: the name of its only container
    #[arg(long, value_name = "NAME", default_value = "main")]
    container: String,
    /// Without a manifest: how many devices of a resource the container gets; may be repeated
    #[arg(long = "limit", value_name = "RESOURCE=COUNT", value_parser = limit)]
    limits: Vec<(String, String)>,
    /// How long it may take, plugins that are not there yet included [default: as configured, 60s]
    #[arg(long, value_name = "DURATION")]
    wait: Option<Span>,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

fn limit(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((resource, count)) if !resource.is_empty() && !count.is_empty() => {
            Ok((resource.to_owned(), count.to_owned()))
        }
        _ => Err("write RESOURCE=COUNT, as in acme.com/gpu=2".to_owned()),
    }
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let manifests = match (&args.file[..], &args.name) {
        ([], Some(name)) => vec![short_form(name, &args)?],
        ([], None) => bail!("name a manifest with -f FILE, or a pod with --name NAME"),
        (files, _) => files
            .iter()
            .map(|file| read(file))
            .collect::<anyhow::Result<_>>()?,
    };
    for (resource, _) in args.limits.iter().filter(|(resource, _)| !resource.contains('/')) {
        output::warn(&format!(
            "warning: {resource} is no device: their names have a domain, as in acme.com/gpu; it is passed over"
        ));
    }
    let client = args.connect.connect().await?;
    let wait_ms = args.wait.map(time::milliseconds);
    let pod = {
        let mut progress = Progress::new();
        let request = v1::AdmitRequest {
            manifest: String::new(),
            wait_ms,
            manifests,
        };
        let mut events = progress.during(client.admit(request)).await?;
        loop {
            let event = progress.during(events.message()).await?;
            match event.map(|event| event.event) {
                Some(Some(Event::Waiting(waiting))) => progress.waiting_for(&waiting.awaited),
                Some(Some(Event::Admitted(pod))) => break pod,
                // Something that a later devlet says on the way.
                Some(None) => {}
                None => bail!("devlet did not say what became of the pod; look with `devlet get pods`"),
            }
        }
    };
    for conflict in pod.containers.iter().flat_map(conflict_texts) {
        output::warn(&format!("warning: {conflict}"));
    }
    output::print(args.output.output, &Admitted::from(pod), text)?;
    Ok(Outcome::Fine)
}

fn read(file: &Path) -> anyhow::Result<String> {
    let bytes = files::read(file)?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", file.display()))
}

/// A manifest of a pod with one container.
fn short_form(name: &str, args: &Args) -> anyhow::Result<String> {
    let mut limits = BTreeMap::new();
    for (resource, count) in &args.limits {
        if limits.insert(resource, count).is_some() {
            bail!("--limit names {resource} twice");
        }
    }
    let container = json!({ "name": args.container, "resources": { "limits": limits } });
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "namespace": args.namespace, "name": name },
        "spec": { "containers": [container] },
    });
    Ok(manifest.to_string())
}

/// For people.
pub(super) fn text(admitted: &Admitted) -> String {
    let pod = &admitted.pod;
    let mut text = format!("pod {} ({})\n", shown(&pod.short()), shown(&pod.uid));
    let devices = admitted.containers.iter().flat_map(|container| {
        let row = |resource: &str, ids: String| [container.name.clone(), resource.to_owned(), ids];
        let rows = container
            .devices
            .iter()
            .map(move |held| row(&held.resource, held.ids.join(",")));
        let none = container.devices.is_empty().then(|| row("-", "-".to_owned()));
        rows.chain(none).collect::<Vec<_>>()
    });
    text.push_str(&format!(
        "\n{}",
        table(["CONTAINER", "RESOURCE", "DEVICES"], devices)
    ));
    let claims: Vec<[String; 4]> = admitted
        .claims
        .iter()
        .flat_map(|claim| {
            let name = format!("{}/{}", claim.namespace, claim.name);
            let row =
                |driver: &str, devices: String| [name.clone(), driver.to_owned(), devices, claim.uid.clone()];
            let drivers = claim.drivers.iter().map(|driver| {
                let devices = driver.devices.iter();
                let devices: Vec<String> = devices
                    .map(|each| format!("{}/{}", each.pool, each.device))
                    .collect();
                row(&driver.name, or_dash(devices.join(",")))
            });
            let none = claim.drivers.is_empty().then(|| row("-", "-".to_owned()));
            drivers.chain(none).collect::<Vec<_>>()
        })
        .collect();
    if !claims.is_empty() {
        let header = ["CLAIM", "DRIVER", "DEVICES", "UID"];
        text.push_str(&format!("\n{}", table(header, claims)));
    }
    let options: Vec<[String; 3]> = admitted
        .containers
        .iter()
        .flat_map(|container| {
            let lines = container.options.lines().into_iter();
            lines.map(|[what, value]| [container.name.clone(), what, value])
        })
        .collect();
    if !options.is_empty() {
        text.push_str(&format!("\n{}", table(["CONTAINER", "OPTION", "VALUE"], options)));
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::node::shown::samples;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(arguments: &[&str]) -> Result<Args, String> {
        let line = Line::try_parse_from([&["admit"], arguments].concat());
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn the_short_form_is_a_manifest_of_one_container() {
        let args = parsed(&[
            "--name",
            "job1",
            "--limit",
            "acme.com/gpu=2",
            "--limit",
            "acme.com/nic=1",
        ])
        .unwrap();
        let manifest: serde_json::Value = serde_json::from_str(&short_form("job1", &args).unwrap()).unwrap();
        let expected = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "default", "name": "job1"},
            "spec": {"containers": [
                {"name": "main", "resources": {"limits": {"acme.com/gpu": "2", "acme.com/nic": "1"}}},
            ]},
        });
        assert_eq!(manifest, expected);
    }

    #[test]
    fn a_manifest_and_the_short_form_exclude_each_other() {
        assert!(parsed(&["-f", "pod.yaml"]).is_ok());
        assert_eq!(
            parsed(&["-f", "pod.yaml", "-f", "claim.yaml"])
                .unwrap()
                .file
                .len(),
            2
        );
        assert!(parsed(&["-f", "pod.yaml", "--wait", "90s"]).is_ok());
        for wrong in [
            &["-f", "pod.yaml", "--name", "job1"][..],
            &["-f", "pod.yaml", "--limit", "a/b=1"],
            &["--limit", "a/b=1"],
            &[],
            &["--name", "job1", "--limit", "gpu"],
            &["--name", "job1", "--limit", "=2"],
            &["--name", "job1", "--wait", "soon"],
        ] {
            assert!(parsed(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_resource_that_is_named_twice_is_refused() {
        let args = parsed(&["--name", "job1", "--limit", "a/b=1", "--limit", "a/b=2"]).unwrap();
        assert!(
            short_form("job1", &args)
                .unwrap_err()
                .to_string()
                .contains("a/b twice")
        );
    }

    #[test]
    fn people_see_devices_and_options_of_each_container() {
        let mut pod = samples::pod();
        pod.containers.push(v1::Container {
            name: "log".into(),
            ..Default::default()
        });
        let text = text(&Admitted::from(pod));
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[0], ["pod", "default/job1", "(u-1)"]);
        assert_eq!(lines[3], ["main", "acme.com/gpu", "gpu-0"]);
        assert_eq!(lines[4], ["log", "-", "-"]);
        assert!(text.contains("GPU=gpu-0"), "{text}");
        let claim = ["default/gpu", "gpu.acme.com", "node-1/gpu-0", "c-1"];
        assert!(lines.iter().any(|line| *line == claim), "{text}");
    }
}
