//! devlet's side: the binary as users run it, called over its API.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use devlet_client::Client;
use devlet_client::v1::admit_event::Event;
use devlet_client::v1::{AdmitRequest, ListResourcesRequest, RemovePodRequest};
use futures_util::stream::{StreamExt as _, TryStreamExt as _};
use tokio::process::{Child, Command};

use crate::process::append;
use crate::{clock, driver, kubelet};

/// Number of callers that fill a node.
const FILLERS: usize = 64;
/// Pause between two attempts. The thread sleeps: the runtime's timer is coarser than the measured times.
const PAUSE: Duration = Duration::from_micros(50);
const TIMEOUT: Duration = Duration::from_secs(60);

/// Paths of the binary and its log.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) log: PathBuf,
}

/// A running devlet. Killed when dropped.
pub(crate) struct Devlet {
    program: Program,
    root: PathBuf,
    resource: &'static str,
    child: Child,
    client: Client,
    next: usize,
}

impl Program {
    pub(crate) async fn start(&self, root: &Path, resource: &'static str) -> anyhow::Result<Devlet> {
        self.start_with(root, resource, &[]).await
    }

    /// Starts devlet between the kubelet of [`kubelet::directory`] and plugins. CDI specs are written into memory, as usual.
    pub(crate) async fn start_shield(&self, root: &Path, resource: &'static str) -> anyhow::Result<Devlet> {
        std::fs::create_dir_all(root)?;
        let kubelet = kubelet::directory()
            .parent()
            .context("the kubelet has no directory")?;
        let path = |name: &str| kubelet.join(name).display().to_string();
        let file = root.join("devlet.yaml");
        std::fs::write(
            &file,
            format!(
                "shield: {{cdiDir: {}, permanentCdiDir: {}}}",
                path("cdi"),
                path("etc-cdi")
            ),
        )?;
        let args = [
            "--shield",
            "--config",
            &file.display().to_string(),
            "--kubelet-dir",
            &kubelet.display().to_string(),
            "--runtime-endpoint",
            &format!("unix://{}", path("absent.sock")),
        ]
        .map(str::to_owned);
        self.start_with(root, resource, &args).await
    }

    async fn start_with(
        &self,
        root: &Path,
        resource: &'static str,
        args: &[String],
    ) -> anyhow::Result<Devlet> {
        std::fs::create_dir_all(root)?;
        let child = self.spawn(root, args)?;
        let client = connect(root).await?;
        Ok(Devlet {
            program: self.clone(),
            root: root.to_owned(),
            resource,
            child,
            client,
            next: 0,
        })
    }

    fn spawn(&self, root: &Path, args: &[String]) -> anyhow::Result<Child> {
        Command::new(&self.path)
            .arg("serve")
            .arg("--root-dir")
            .arg(root)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(append(&self.log)?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", self.path.display()))
    }
}

impl Devlet {
    /// Returns the directory in which plugins register.
    pub(crate) fn plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Admits `count` pods concurrently. They stay.
    pub(crate) async fn fill(&mut self, count: usize) -> anyhow::Result<()> {
        let numbers = self.next..self.next + count;
        self.next = numbers.end;
        let client = &self.client;
        let manifests = numbers.map(|number| manifest(number, self.resource));
        futures_util::stream::iter(manifests)
            .map(|manifest| async move { admit(client, manifest).await })
            .buffer_unordered(FILLERS)
            .try_collect::<Vec<Duration>>()
            .await?;
        Ok(())
    }

    /// Admits pods one by one, and removes them afterwards. Returns the duration of each admission.
    pub(crate) async fn admit(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let numbers = self.next..self.next + count;
        self.next = numbers.end;
        let mut took = Vec::with_capacity(count);
        for number in numbers.clone() {
            took.push(admit(&self.client, manifest(number, self.resource)).await?);
        }
        for number in numbers {
            remove(&self.client, number).await?;
        }
        Ok(took)
    }

    /// Removes one pod and admits one, `count` times.
    pub(crate) async fn churn(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let first = self.next;
        self.next += count + 1;
        admit(&self.client, manifest(first, self.resource)).await?;
        let mut took = Vec::with_capacity(count);
        for number in first..first + count {
            let manifest = manifest(number + 1, self.resource);
            let began = Instant::now();
            remove(&self.client, number).await?;
            admit(&self.client, manifest).await?;
            took.push(began.elapsed());
        }
        remove(&self.client, first + count).await?;
        Ok(took)
    }

    /// Returns the admissions with removals per second of many callers, each on its own connection.
    pub(crate) async fn pairs_per_second(&mut self, callers: usize, time: Duration) -> anyhow::Result<f64> {
        let manifests = (self.next..).map(|number| manifest(number, self.resource));
        let manifests: Vec<String> = manifests.take(callers).collect();
        self.many_callers(manifests, time).await
    }

    /// Runs one caller for each manifest. Their pods have the next numbers.
    async fn many_callers(&mut self, manifests: Vec<String>, time: Duration) -> anyhow::Result<f64> {
        let mut clients = Vec::with_capacity(manifests.len());
        for _ in &manifests {
            clients.push(connect(&self.root).await?);
        }
        let began = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for (client, manifest) in clients.into_iter().zip(manifests) {
            let number = self.next;
            self.next += 1;
            tasks.spawn(async move {
                let mut pairs = 0_u64;
                while began.elapsed() < time {
                    admit(&client, manifest.clone()).await?;
                    remove(&client, number).await?;
                    pairs += 1;
                }
                anyhow::Ok(pairs)
            });
        }
        let mut pairs = 0;
        while let Some(done) = tasks.join_next().await {
            pairs += done??;
        }
        Ok(pairs as f64 / began.elapsed().as_secs_f64())
    }

    /// Admits `count` pods with a claim of this driver concurrently. They stay.
    pub(crate) async fn fill_claims(&mut self, count: usize, driver: &str) -> anyhow::Result<()> {
        let numbers = self.next..self.next + count;
        self.next = numbers.end;
        let client = &self.client;
        let manifests = numbers.map(|number| manifest_with_claim(number, &[driver]));
        futures_util::stream::iter(manifests)
            .map(|manifest| async move { admit(client, manifest).await })
            .buffer_unordered(FILLERS)
            .try_collect::<Vec<Duration>>()
            .await?;
        Ok(())
    }

    /// Admits and removes pods with a claim of this driver. Returns the duration of each pair.
    pub(crate) async fn claim_pairs(&mut self, count: usize, driver: &str) -> anyhow::Result<Vec<Duration>> {
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let number = self.next;
            self.next += 1;
            let manifest = manifest_with_claim(number, &[driver]);
            let began = Instant::now();
            admit(&self.client, manifest).await?;
            remove(&self.client, number).await?;
            took.push(began.elapsed());
        }
        Ok(took)
    }

    /// Like [`Devlet::pairs_per_second`], each pod with a claim of all these drivers.
    pub(crate) async fn claim_pairs_per_second(
        &mut self,
        callers: usize,
        time: Duration,
        drivers: &[&str],
    ) -> anyhow::Result<f64> {
        let manifests = (self.next..).map(|number| manifest_with_claim(number, drivers));
        let manifests: Vec<String> = manifests.take(callers).collect();
        self.many_callers(manifests, time).await
    }

    /// Returns the time at which its capacity was first `count` devices. Polls, as for the kubelet: a watch waits after
    /// each change.
    pub(crate) async fn capacity(&self, count: usize) -> anyhow::Result<u64> {
        let started = Instant::now();
        while started.elapsed() < TIMEOUT {
            let list = self.client.list_resources(ListResourcesRequest {}).await?;
            let ours = list
                .resources
                .iter()
                .find(|resource| resource.name == self.resource);
            if ours.is_some_and(|resource| resource.capacity == count as u64) {
                return Ok(clock::now());
            }
            std::thread::sleep(PAUSE);
        }
        bail!("there are not {count} devices of {}", self.resource);
    }

    /// Crashes devlet and starts it again. Returns the duration from the start until the first pod is admitted again.
    pub(crate) async fn crash(&mut self) -> anyhow::Result<Duration> {
        self.child.kill().await?;
        let manifest = manifest(0, self.resource);
        let began = Instant::now();
        self.child = self.program.spawn(&self.root, &[])?;
        self.client = connect(&self.root).await?;
        admit(&self.client, manifest).await?;
        Ok(began.elapsed())
    }
}

async fn connect(root: &Path) -> anyhow::Result<Client> {
    let socket = root.join("devlet/devlet.sock");
    let started = Instant::now();
    loop {
        match Client::connect(&socket).await {
            Ok(client) => return Ok(client),
            Err(error) if started.elapsed() > TIMEOUT => {
                return Err(error).context("devlet does not start; see its log");
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn name(number: usize) -> String {
    format!("job-{number}")
}

pub(crate) fn manifest(number: usize, resource: &str) -> String {
    let limits = serde_json::json!({ "limits": { resource: "1" } });
    let pod = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name(number), "namespace": "default" },
        "spec": { "containers": [{ "name": "main", "image": "none", "resources": limits }] },
    });
    pod.to_string()
}

/// Returns the manifests of a pod and its claim, which has a device of each driver.
fn manifest_with_claim(number: usize, drivers: &[&str]) -> String {
    let (pod, claim) = (name(number), format!("claim-{number}"));
    let uid = |group: &str| format!("{number:08x}-{group}-4c1b-8a55-6a0f3b1d0000");
    let (pod_uid, claim_uid) = (uid("5b7c"), uid("2f53"));
    let results = drivers.iter().map(|driver| {
        serde_json::json!({ "request": "widget", "driver": driver, "pool": driver::POOL, "device": claim })
    });
    let pod_manifest = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": pod, "namespace": "default", "uid": pod_uid },
        "spec": {
            "resourceClaims": [{ "name": "claim", "resourceClaimName": claim }],
            "containers": [{ "name": "main", "image": "none", "resources": { "claims": [{ "name": "claim" }] } }],
        },
    });
    let claim_manifest = serde_json::json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "name": claim, "namespace": "default", "uid": claim_uid },
        "status": {
            "reservedFor": [{ "resource": "pods", "name": pod, "uid": pod_uid }],
            "allocation": { "devices": { "results": results.collect::<Vec<_>>() } },
        },
    });
    format!("{pod_manifest}\n---\n{claim_manifest}\n")
}

async fn admit(client: &Client, manifest: String) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let mut events = client
        .admit(AdmitRequest {
            manifest,
            ..Default::default()
        })
        .await?;
    while let Some(event) = events.message().await? {
        if let Some(Event::Admitted(_)) = event.event {
            return Ok(began.elapsed());
        }
    }
    bail!("the stream of the admission ended without a result");
}

async fn remove(client: &Client, number: usize) -> anyhow::Result<()> {
    let pod = format!("default/{}", name(number));
    client
        .remove_pod(RemovePodRequest {
            pod,
            ..Default::default()
        })
        .await?;
    Ok(())
}
