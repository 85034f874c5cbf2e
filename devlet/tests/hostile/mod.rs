//! A daemon with a good plugin and its pods, which must not be affected by a hostile peer.

// Clippy does not treat helper functions as tests, and a benchmark uses only some of them.
#![allow(clippy::unwrap_used, clippy::panic, dead_code)]

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use devlet_client::{Client, Status, v1};
use devlet_testkit::{Device, PATIENCE, Plugin, Script};
use rustix::process::{Pid, Resource, Rlimit};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::common::{Daemon, http_get, root};

/// The resource of the good plugin.
pub(crate) const GOOD: &str = "acme.com/good";
const GOOD_DEVICES: usize = 4;

/// The resource of the hostile plugin.
pub(crate) const BAD: &str = "evil.example/device";

/// The number of pods that [`Neighbourhood::pods_go_on`] admits and removes.
const PODS: usize = 10;

/// The memory in MiB that the daemon may have gained in the end.
pub(crate) const ROOM_MIB: u64 = 64;

/// Configuration with deadlines that a test can wait for. The good plugin has more time, for busy machines.
pub(crate) const IMPATIENT: &str = "deadlines: {dial: 300ms, options: 300ms, preferred: 300ms, allocate: 300ms, \
     allocateByResource: {acme.com/good: 1m}, preStart: 300ms, info: 300ms, notify: 300ms}\nwait: 300ms\n";

pub(crate) struct Neighbourhood {
    pub(crate) daemon: Daemon,
    good: Plugin,
    caller: Caller,
    kept: String,
    next: usize,
    address: String,
    before: Usage,
    root: TempDir,
}

/// The memory, descriptors and processor time of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) mib: u64,
    pub(crate) descriptors: usize,
    /// Processor time so far.
    pub(crate) busy: Duration,
}

impl Neighbourhood {
    pub(crate) fn new() -> Self {
        Self::configured("")
    }

    /// Starts the daemon with these lines of configuration.
    pub(crate) fn configured(config: &str) -> Self {
        let root = root();
        let daemon = Daemon::configured(root.path(), &format!("http: 127.0.0.1:0\n{config}"));
        Self::around(root, daemon)
    }

    /// Starts the daemon with a limit of file descriptors.
    pub(crate) fn with_descriptors(most: usize) -> Self {
        let root = root();
        let mut command = std::process::Command::new("sh");
        command
            .args(["-c", &format!("ulimit -n {most}; exec \"$@\""), "sh"])
            .arg(env!("CARGO_BIN_EXE_devlet"))
            .args(["serve", "--http", "127.0.0.1:0", "--root-dir"])
            .arg(root.path())
            .env_remove("NOTIFY_SOCKET");
        let daemon = Daemon::started(command, root.path());
        Self::around(root, daemon)
    }

    fn around(root: TempDir, daemon: Daemon) -> Self {
        let devices = (0..GOOD_DEVICES).map(|number| Device::new(&number.to_string()));
        let good = Plugin::registered(&Script::new(root.path(), GOOD, devices.collect()));
        daemon.until_capacity(GOOD, GOOD_DEVICES as u64);
        let caller = Caller::of(root.path());
        let address = daemon.banner.split("http://").nth(1).unwrap();
        let address = address.split('/').next().unwrap().trim().to_owned();
        let mut all = Self {
            before: usage(daemon.child.id()),
            daemon,
            good,
            caller,
            kept: String::new(),
            next: 0,
            address,
            root,
        };
        all.kept = all.admit("kept", GOOD).unwrap();
        // After a while every daemon has filled its buffers and caches.
        all.pods_go_on();
        all.before = all.usage();
        all
    }

    /// Limits the file descriptors of the daemon from now on.
    pub(crate) fn limit_descriptors(&self, most: u64) {
        let pid = Pid::from_raw(self.daemon.child.id() as i32).unwrap();
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        rustix::process::prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn kubelet_socket(&self) -> PathBuf {
        self.root().join("device-plugins/kubelet.sock")
    }

    pub(crate) fn sockets(&self) -> [PathBuf; 2] {
        [self.kubelet_socket(), self.root().join("devlet/devlet.sock")]
    }

    /// Returns a script of a plugin with `count` devices of [`BAD`].
    pub(crate) fn bad(&self, count: usize) -> Script {
        let devices = (0..count).map(|number| Device::new(&format!("bad-{number}")));
        Script::new(self.root(), BAD, devices.collect())
    }

    /// Returns a caller with another connection.
    pub(crate) fn caller(&self) -> Caller {
        Caller::of(self.root())
    }

    /// Admits a pod with one device, and returns the device or the refusal.
    pub(crate) fn admit(&self, name: &str, resource: &str) -> Result<String, String> {
        self.caller.admit(name, resource)
    }

    pub(crate) fn remove(&self, name: &str) {
        let request = v1::RemovePodRequest {
            pod: name.to_owned(),
            ..Default::default()
        };
        self.caller
            .runtime
            .block_on(self.caller.client.remove_pod(request))
            .unwrap();
    }

    /// Admits and removes pods of the good plugin.
    pub(crate) fn pods_go_on(&mut self) {
        for _ in 0..PODS {
            self.one_pod_goes_on();
        }
    }

    /// Admits and removes a pod, and returns the duration of the admission.
    pub(crate) fn one_pod_goes_on(&mut self) -> Duration {
        let name = format!("good-{}", self.next);
        self.next += 1;
        let began = Instant::now();
        let got = self.admit(&name, GOOD).unwrap();
        let took = began.elapsed();
        assert_ne!(got, self.kept, "{name} got what another pod holds");
        self.remove(&name);
        took
    }

    pub(crate) fn usage(&self) -> Usage {
        usage(self.daemon.child.id())
    }

    /// Returns a resource as the daemon lists it.
    pub(crate) fn resource(&self, name: &str) -> Option<v1::Resource> {
        let list = self.caller.client.list_resources(v1::ListResourcesRequest {});
        let list = self.caller.runtime.block_on(list).unwrap();
        list.resources.into_iter().find(|each| each.name == name)
    }

    /// Waits until a resource is as wanted.
    pub(crate) fn until_resource(&self, name: &str, wanted: impl Fn(&v1::Resource) -> bool) -> v1::Resource {
        self.caller.runtime.block_on(async {
            let mut lists = self
                .caller
                .client
                .watch_resources(v1::ListResourcesRequest {})
                .await
                .unwrap();
            let found = async {
                loop {
                    let list = lists.message().await.unwrap().unwrap();
                    let found = list.resources.into_iter().find(|each| each.name == name);
                    if let Some(found) = found.filter(&wanted) {
                        return found;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, found).await.unwrap()
        })
    }

    pub(crate) fn until_capacity(&self, name: &str, capacity: u64) {
        self.until_resource(name, |each| {
            each.capacity == capacity && each.allocatable == capacity
        });
    }

    pub(crate) fn metrics(&self) -> String {
        http_get(&self.address, "/metrics")
    }

    /// Returns the metric that counts the hits of a limit.
    pub(crate) fn hits(&self, limit: &str) -> u64 {
        let metrics = self.metrics();
        let line = format!("devlet_limit_hits_total{{limit=\"{limit}\"}} ");
        let number = metrics.lines().find_map(|each| each.strip_prefix(&line));
        number.map_or(0, |number| number.parse().unwrap())
    }

    /// Returns the checks of the daemon.
    pub(crate) fn ready(&self) -> String {
        http_get(&self.address, "/readyz?verbose")
    }

    /// Checks that the daemon is ready, and has lost, duplicated or leaked nothing.
    pub(crate) fn unharmed(mut self) {
        self.unharmed_within(ROOM_MIB);
    }

    /// Like [`Neighbourhood::unharmed`], with another limit of memory in MiB.
    pub(crate) fn unharmed_within(&mut self, mib: u64) {
        self.intact();
        let (before, grown) = (self.before, self.grown_mib());
        assert!(
            grown < mib,
            "memory grew by {grown} MiB from {before:?} to {:?}",
            self.usage()
        );
    }

    /// Returns the growth of the daemon's memory.
    pub(crate) fn grown_mib(&self) -> u64 {
        self.usage().mib.saturating_sub(self.before.mib)
    }

    /// Checks that the daemon is ready, has lost and duplicated nothing, and has closed its descriptors.
    pub(crate) fn intact(&mut self) {
        self.pods_go_on();
        assert!(
            http_get(&self.address, "/readyz").ends_with("\r\n\r\nok"),
            "{}",
            self.ready()
        );
        assert_eq!(self.admit("kept", GOOD).unwrap(), self.kept);
        let good = self.resource(GOOD).unwrap();
        let devices = GOOD_DEVICES as u64;
        assert_eq!(
            (good.capacity, good.allocatable, good.held),
            (devices, devices, 1)
        );
        // The daemon closes connections when it notices their end.
        let deadline = Instant::now() + PATIENCE;
        while self.usage().descriptors > self.before.descriptors + 4 {
            assert!(
                Instant::now() < deadline,
                "descriptors leak: {:?}, then {:?}",
                self.before,
                self.usage()
            );
            self.one_pod_goes_on();
        }
    }
}

/// A client that admits pods.
pub(crate) struct Caller {
    runtime: Runtime,
    client: Client,
}

impl Caller {
    fn of(root: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let socket = root.join("devlet/devlet.sock");
        let client = runtime.block_on(Client::connect(socket)).unwrap();
        Self { runtime, client }
    }

    pub(crate) fn admit(&self, name: &str, resource: &str) -> Result<String, String> {
        let pod = self.admit_manifest(pod_with_device(name, resource), None)?;
        Ok(pod.containers[0].devices[0].ids[0].clone())
    }

    /// Admits a pod from a manifest. The pod waits for at most `wait`.
    pub(crate) fn admit_manifest(&self, manifest: String, wait: Option<Duration>) -> Result<v1::Pod, String> {
        let request = v1::AdmitRequest {
            manifest,
            wait_ms: wait.map(|wait| wait.as_millis() as u64),
            ..Default::default()
        };
        let admitted = self.runtime.block_on(admitted(&self.client, request));
        admitted.map_err(|status| status.message().to_owned())
    }

    /// Removes a pod. The call waits for at most `wait`.
    pub(crate) fn remove(&self, name: &str, wait: Duration) -> Result<(), String> {
        let request = v1::RemovePodRequest {
            pod: name.to_owned(),
            wait_ms: Some(wait.as_millis() as u64),
            ..Default::default()
        };
        let removed = self.runtime.block_on(self.client.remove_pod(request));
        removed.map(drop).map_err(|status| status.message().to_owned())
    }

    /// Waits until the drivers are as wanted.
    pub(crate) fn until_drivers<T>(&self, wanted: impl Fn(&[v1::Driver]) -> Option<T>) -> T {
        self.runtime.block_on(async {
            let request = v1::ListDriversRequest::default();
            let mut lists = self.client.watch_drivers(request).await.unwrap();
            let found = async {
                loop {
                    let list = lists.message().await.unwrap().unwrap();
                    if let Some(found) = wanted(&list.drivers) {
                        return found;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, found).await.unwrap()
        })
    }
}

/// Admits a pod, and returns it once it is admitted.
pub(crate) async fn admitted(client: &Client, request: v1::AdmitRequest) -> Result<v1::Pod, Status> {
    let mut events = client.admit(request).await?;
    while let Some(event) = events.message().await? {
        if let Some(v1::admit_event::Event::Admitted(pod)) = event.event {
            return Ok(pod);
        }
    }
    panic!("the admission ended without an answer");
}

/// Returns the manifest of a pod with one device of a resource.
pub(crate) fn pod_with_device(name: &str, resource: &str) -> String {
    format!(
        "{{metadata: {{name: {name}}}, spec: {{containers: [{{name: main, resources: {{limits: {{{resource}: 1}}}}}}]}}}}"
    )
}

/// Returns the manifests of a pod and of its claim, which has a device with the name of the pod.
pub(crate) fn pod_with_claim(name: &str, driver: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, uid: {name}}}, spec: {{resourceClaims: [{{name: mine, \
         resourceClaimName: {name}}}], containers: [{{name: main, resources: {{claims: [{{name: mine}}]}}}}]}}}}\n---\n\
         {{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: {name}, uid: uid-{name}}}, spec: \
         {{devices: {{requests: [{{name: one}}]}}}}, status: {{reservedFor: [{{resource: pods, name: {name}, uid: {name}}}], \
         allocation: {{devices: {{results: [{{request: one, driver: {driver}, pool: pool, device: {name}}}]}}}}}}}}\n"
    )
}

/// A file that replaces a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Instead {
    File,
    Directory,
    /// A link to another socket.
    Link,
}

impl Instead {
    pub(crate) const ALL: [Self; 3] = [Self::File, Self::Directory, Self::Link];

    /// Creates the file. The path must be free.
    pub(crate) fn put(self, path: &Path, other_socket: &Path) {
        match self {
            Self::File => std::fs::write(path, "").unwrap(),
            Self::Directory => std::fs::create_dir(path).unwrap(),
            Self::Link => std::os::unix::fs::symlink(other_socket, path).unwrap(),
        }
    }

    pub(crate) fn take_away(self, path: &Path) {
        match self {
            Self::Directory => std::fs::remove_dir(path).unwrap(),
            Self::File | Self::Link => std::fs::remove_file(path).unwrap(),
        }
    }
}

fn usage(pid: u32) -> Usage {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, after_name) = stat.rsplit_once(')').unwrap();
    // User and system time, in ticks of 10 ms.
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.map(|each| each.parse::<u64>().unwrap()).sum();
    Usage {
        busy: Duration::from_millis(ticks * 10),
        mib: kib / 1024,
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
    }
}

/// Connects and sends, until the peer closes the connection or stops to read.
pub(crate) fn throw(socket: &Path, bytes: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream
        .set_write_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    // The peer may close the connection before the end.
    let _ = stream.write_all(bytes);
    stream
}
