//! `devlet admit`: allocates devices to a pod, and prepares its claims.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use devlet_client::v1::{self, admit_event::Event};
use devlet_client::{Client, Code, Status};
use serde_json::json;

use super::kind::name;
use super::pods::{Admitted, conflict_texts, id_text};
use super::progress::Progress;
use super::{ConnectArg, complete, select, time};
use crate::duration::Span;
use crate::output::{self, Output, OutputArg, escape_control, or_dash, table_on};
use crate::table::Screen;
use crate::{Outcome, files};

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("pod").args(["file", "name"]).required(true))]
pub(crate) struct Args {
    /// Kubernetes Pod, and the ResourceClaims that it uses, with their status: YAML or JSON, in any order, in one or more
    /// files; - for standard input
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = ["namespace", "container", "limits"])]
    file: Vec<PathBuf>,
    /// Name of the pod, without a manifest
    #[arg(long, requires = "limits", value_parser = name)]
    name: Option<String>,
    /// Namespace of the pod, without a manifest
    #[arg(long, default_value = "default", value_parser = name, add = complete::namespaces())]
    namespace: String,
    /// Name of the only container, without a manifest
    #[arg(long, value_name = "NAME", default_value = "main", value_parser = name)]
    container: String,
    /// Number of devices of a resource for the container, without a manifest; may be repeated
    #[arg(long = "limit", value_name = "RESOURCE=COUNT", value_parser = limit, add = complete::limits())]
    limits: Vec<(String, u64)>,
    /// Maximum time, including the wait for plugins that are not connected [default: as configured, 60s]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    wait: Option<Span>,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

fn limit(text: &str) -> Result<(String, u64), String> {
    let Some((resource, count)) = text.split_once('=').filter(|(resource, _)| !resource.is_empty()) else {
        return Err("write RESOURCE=COUNT, as in acme.com/gpu=2".to_owned());
    };
    let is_kubernetes = match resource.split_once('/') {
        None => {
            matches!(resource, "cpu" | "memory" | "ephemeral-storage") || resource.starts_with("hugepages-")
        }
        Some((domain, _)) => domain == "kubernetes.io" || domain.ends_with(".kubernetes.io"),
    };
    if is_kubernetes {
        return Err(format!(
            "{resource} is not a device: omit it, devlet allocates only devices"
        ));
    }
    match count.parse() {
        Ok(0) => Err("the count is 0: omit a resource that the pod does not need".to_owned()),
        Ok(count) => Ok((resource.to_owned(), count)),
        Err(_) => Err(format!("{count:?} is not a number of devices")),
    }
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let (manifests, names) = match (&args.file[..], &args.name) {
        ([], Some(name)) => (vec![short_form(name, &args)?], Vec::new()),
        ([], None) => bail!("name a manifest with -f FILE, or a pod with --name NAME"),
        (files, _) => {
            check_files(files)?;
            let texts = files
                .iter()
                .map(|file| read(file))
                .collect::<anyhow::Result<_>>()?;
            (
                texts,
                files.iter().map(|file| file.display().to_string()).collect(),
            )
        }
    };
    let client = args.connect.connect().await?;
    if let Some((resource, _)) = args.limits.iter().find(|(name, _)| !name.contains('/')) {
        // Only for a hint, so errors are ignored.
        let drivers = client.list_drivers(v1::ListDriversRequest::default()).await;
        let drivers = drivers.unwrap_or_default().drivers;
        if drivers.iter().any(|driver| driver.name == *resource) {
            bail!(
                "--limit {resource}: {resource} is a DRA driver, and its devices are allocated by a claim: \
                 devlet admit -f pod.yaml -f claim.yaml"
            );
        }
        let near = near_match(&client, resource).await;
        bail!("--limit {resource}: the name of a resource has a domain, as in acme.com/{resource}{near}");
    }
    let wait_ms = args.wait.map(time::milliseconds);
    let request = v1::AdmitRequest {
        manifest: String::new(),
        wait_ms,
        manifests,
        names,
    };
    let pod = match admitted(&client, request).await {
        Err(error) if args.name.is_some() => return Err(wrong_usage(error)),
        admitted => admitted?,
    };
    for conflict in pod.containers.iter().flat_map(conflict_texts) {
        output::warn(&format!("warning: {conflict}"));
    }
    let missing = missing(&args.limits, &pod);
    let holds_nothing = pod.claims.is_empty() && pod.containers.iter().all(|each| each.devices.is_empty());
    let id = id_text(&pod.id.clone().unwrap_or_default());
    let screen = Screen::for_list(args.output.output == Output::Wide);
    output::print(args.output.output, &Admitted::from(pod), |pod| text(pod, screen))?;
    if !missing.is_empty() {
        output::warn(&format!(
            "note: pod {id} gets no {} from devlet: it is `foreign` in the configuration, so other software serves it",
            missing.join(", ")
        ));
    } else if holds_nothing {
        output::warn(&format!("note: pod {id} requests no device and no claim"));
    }
    Ok(Outcome::Fine)
}

async fn admitted(client: &Client, request: v1::AdmitRequest) -> anyhow::Result<v1::Pod> {
    let mut progress = Progress::new();
    let mut events = progress.during(client.admit(request)).await?;
    let mut checked = BTreeSet::new();
    loop {
        let event = progress.during(events.message()).await?;
        match event.map(|event| event.event) {
            Some(Some(Event::Waiting(waiting))) => {
                progress.waiting_for(&waiting.awaited);
                let resource = waiting.resource;
                if !resource.is_empty() && checked.insert(resource.clone()) {
                    let near = progress.during(near_match(client, &resource)).await;
                    if !near.is_empty() {
                        progress.note(&format!("note: no plugin offers {resource}{near}"));
                    }
                }
            }
            Some(Some(Event::Admitted(pod))) => return Ok(pod),
            // An event of a newer version.
            Some(None) => {}
            None => bail!("devlet did not answer whether the pod is admitted; see `devlet get pods`"),
        }
    }
}

/// Turns an invalid request without a manifest into wrong usage. Positions in the generated manifest are removed.
fn wrong_usage(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Status>() {
        Some(status) if status.code() == Code::InvalidArgument => {
            let message = status.message();
            let place = message
                .strip_prefix("line ")
                .and_then(|rest| rest.split_once(": "));
            anyhow::anyhow!("{}", place.map_or(message, |(_, problem)| problem))
        }
        _ => error,
    }
}

/// Returns the resources of `--limit` that the pod did not get.
fn missing(limits: &[(String, u64)], pod: &v1::Pod) -> Vec<String> {
    let is_held = |resource: &str| {
        let mut held = pod.containers.iter().flat_map(|each| &each.devices);
        held.any(|held| held.resource == resource)
    };
    let names = limits.iter().map(|(resource, _)| resource);
    names.filter(|resource| !is_held(resource)).cloned().collect()
}

/// Returns `; did you mean NAME?` with the node's resource that is most similar to an unknown one.
async fn near_match(client: &Client, resource: &str) -> String {
    // Only a hint, so errors are ignored.
    let listed = client.list_resources(v1::ListResourcesRequest {}).await;
    let known = listed.unwrap_or_default().resources.into_iter();
    let known: Vec<String> = known.map(|each| each.name).collect();
    if known.iter().any(|name| name == resource) {
        return String::new();
    }
    let near = select::near(resource, known.into_iter());
    near.map_or_else(String::new, |near| format!("; did you mean {near}?"))
}

/// Refuses a file that is named twice: standard input can be read only once, and a pod is admitted once.
fn check_files(files: &[PathBuf]) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    for file in files {
        // An unreadable file is reported when it is read.
        let path = match file.as_os_str() == "-" {
            true => file.clone(),
            false => std::fs::canonicalize(file).unwrap_or_else(|_| file.clone()),
        };
        if !seen.insert(path) {
            match file.as_os_str() == "-" {
                true => bail!("-f names standard input twice"),
                false => bail!("-f names {} twice", file.display()),
            }
        }
    }
    Ok(())
}

fn read(file: &Path) -> anyhow::Result<String> {
    let bytes = files::read(file)?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", file.display()))
}

/// Returns the manifest of a pod with one container.
fn short_form(name: &str, args: &Args) -> anyhow::Result<String> {
    let mut limits = BTreeMap::new();
    for (resource, count) in &args.limits {
        if limits.insert(resource, count.to_string()).is_some() {
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

/// Returns the result for people, in tables as those of `get`.
fn text(admitted: &Admitted, screen: Screen) -> String {
    let pod = &admitted.pod;
    let mut text = format!(
        "pod {} ({})\n",
        escape_control(&pod.short()),
        escape_control(&pod.uid)
    );
    let devices = admitted.containers.iter().flat_map(|container| {
        let row = |resource: &str, ids: String| [container.name.clone(), resource.to_owned(), ids];
        let rows = container
            .devices
            .iter()
            .map(move |held| row(&held.resource, held.ids.join(",")));
        let none = container.devices.is_empty().then(|| row("-", "-".to_owned()));
        rows.chain(none).collect::<Vec<_>>()
    });
    // A pod may have claims only.
    if admitted.containers.iter().any(|each| !each.devices.is_empty()) {
        let header = ["CONTAINER", "RESOURCE", "DEVICES"];
        text.push_str(&format!("\n{}", table_on(screen, header, devices)));
    }
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
        text.push_str(&format!("\n{}", table_on(screen, header, claims)));
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
        let header = ["CONTAINER", "OPTION", "VALUE"];
        text.push_str(&format!("\n{}", table_on(screen, header, options)));
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::node::samples;

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
            &["--name", "job1"],
            &["--name", "job1", "--limit", "gpu"],
            &["--name", "job1", "--limit", "=2"],
            &["--name", "job1", "--limit", "=0"],
            &["--name", "job1", "--limit", "acme.com/gpu=0"],
            &["--name", "job1", "--limit", "acme.com/gpu=two"],
            &["--name", "job1", "--limit", "acme.com/gpu=-1"],
            &["--name", "job1", "--limit", "cpu=1"],
            &["--name", "job1", "--limit", "hugepages-2Mi=1"],
            &[
                "--name",
                "job1",
                "--limit",
                "deviceclass.resource.kubernetes.io/gpu=1",
            ],
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
    fn a_terminal_of_80_columns_shows_long_values_cut() {
        let mut pod = samples::pod();
        let long = format!("cdi.k8s.io/{}", "x".repeat(200));
        let options = pod.containers[0].options.get_or_insert_default();
        options.annotations.insert(long.clone(), long.clone());
        let admitted = Admitted::from(pod);
        let mut screen = Screen {
            width: Some(80),
            cut: true,
            colour: false,
        };
        let lines = |screen| {
            text(&admitted, screen)
                .lines()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        for line in lines(screen) {
            assert!(line.chars().count() <= 80, "{line}");
        }
        screen.width = None;
        let value = format!("{long}={long}");
        assert!(lines(screen).iter().any(|line| line.contains(&value)));
    }

    #[test]
    fn the_table_has_devices_and_options_of_each_container() {
        let mut pod = samples::pod();
        pod.containers.push(v1::Container {
            name: "log".into(),
            ..Default::default()
        });
        let screen = Screen {
            width: None,
            cut: false,
            colour: false,
        };
        let text = text(&Admitted::from(pod), screen);
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
