//! The CDI spec of a lease: what the plugin's answer adds to the container, and the hooks that tell devlet of its start
//! and end.

use std::io;
use std::path::{Path, PathBuf};

use devlet_cdi::annotations::{self, InvalidAnnotation};
use devlet_cdi::{ContainerEdits, Device, DeviceNode, Hook, Mount, Registry, Spec, Unresolvable};
use devlet_core::LeaseName;
use devlet_core::device_plugin::run_options::{self, RunOptions};

use super::KIND;

/// The stages at which a runtime calls the hook, and the word that the hook gets.
const HOOKS: [(&str, &str); 2] = [("createRuntime", "start"), ("poststop", "stop")];

/// The name of a spec file, before and after the name of the lease.
const PREFIX: &str = "devlet.dev-lease-";
const SUFFIX: &str = ".json";

/// Time for which the start of a container waits for devlet and for the end of an earlier container, in seconds. A kubelet
/// gives up a start after two minutes (`runtimeRequestTimeout`).
const START_WAIT: u32 = 90;

/// Time after which the runtime gives up a hook, in seconds.
const HOOK_TIMEOUT: i64 = 100;

/// The most entries in all directories of one answer.
const MAX_ENTRIES: usize = 16_384;

/// Directories below one of devices that runtimes leave out.
const NO_DEVICES: [&str; 7] = ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"];

/// The variable of a container whose plugin answered nothing, if it has no hooks either.
const NO_EDITS: &str = "DEVLET_LEASE=empty";

/// How the runtime calls devlet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookCommand {
    /// The program.
    pub path: PathBuf,
    /// The socket of devlet's API.
    pub socket: PathBuf,
}

/// How the runtime treats CDI devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeCdi {
    /// The directories that it reads.
    pub directories: Vec<PathBuf>,
    /// `true` if the container's user owns the nodes of a plugin's devices; otherwise they keep the owner on the host.
    pub gives_to_user: bool,
}

impl Default for RuntimeCdi {
    fn default() -> Self {
        Self {
            directories: devlet_cdi::DEFAULT_DIRECTORIES.map(PathBuf::from).to_vec(),
            gives_to_user: false,
        }
    }
}

/// Why a spec cannot be written. The text reaches `kubectl describe pod`.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The plugin's answer names CDI devices that are not defined.
    #[error("the plugin's answer has {0}")]
    Undefined(#[from] Unresolvable),
    /// An annotation of the plugin's answer does not name CDI devices.
    #[error("the plugin's answer is impossible: {0}")]
    Annotation(#[from] InvalidAnnotation),
    /// The source of a mount does not exist, and cannot be created.
    #[error("the plugin's answer has a mount of {}, which does not exist and cannot be created: {problem}", path.display())]
    Source { path: PathBuf, problem: io::Error },
    /// A directory among the devices contains too much.
    #[error("the plugin's answer has the directory {}, with more than {MAX_ENTRIES} entries", path.display())]
    LongDirectory { path: PathBuf },
    /// The runtime could not run the hook.
    #[error("{} does not exist, and the container cannot start without it; install devlet again", path.display())]
    NoHook { path: PathBuf },
    /// The spec cannot be written.
    #[error("the CDI spec cannot be written: {0}")]
    Write(#[from] devlet_cdi::WriteError),
    /// The thread that writes it has failed.
    #[error("the CDI spec cannot be written: internal error")]
    Internal,
}

/// Returns the name of the spec file of a lease.
pub fn file_name(name: &LeaseName) -> String {
    format!("{PREFIX}{name}{SUFFIX}")
}

/// Returns the leases that have a spec in a directory.
pub fn names(directory: &Path) -> Vec<LeaseName> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
    files
        .filter_map(|file| {
            let name = file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
            let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric());
            is_plain.then(|| name.into())
        })
        .collect()
}

/// Writes the spec of a lease to `directory`, unless it is there. Without a hook, devlet is not told of containers.
pub fn write(
    directory: &Path,
    runtime: &RuntimeCdi,
    name: &LeaseName,
    options: &RunOptions,
    hook: Option<&HookCommand>,
) -> Result<(), SpecError> {
    create_sources(options)?;
    let spec = spec(runtime, name, options, hook)?;
    let file = file_name(name);
    let text = spec.to_text(&file)?;
    if std::fs::read_to_string(directory.join(&file)).is_ok_and(|present| present == text) {
        return Ok(());
    }
    spec.write(directory, &file)?;
    Ok(())
}

/// Removes the spec of a lease.
pub fn remove(directory: &Path, name: &LeaseName) {
    if let Err(error) = Spec::remove(directory, &file_name(name)) {
        tracing::warn!(%error, "CDI spec of an ended lease not removed");
    }
}

/// Returns the spec of a lease.
fn spec(
    runtime: &RuntimeCdi,
    name: &LeaseName,
    options: &RunOptions,
    hook: Option<&HookCommand>,
) -> Result<Spec, SpecError> {
    let mut edits = ContainerEdits {
        env: options
            .envs
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect(),
        device_nodes: owned(device_nodes(&options.device_nodes)?, runtime),
        mounts: options.mounts.iter().map(mount).collect(),
        ..ContainerEdits::default()
    };
    edits.append(&resolve(&runtime.directories, options)?);
    let hooks = hook
        .into_iter()
        .flat_map(|hook| HOOKS.map(|(stage, word)| (hook, stage, word)));
    edits.hooks.extend(hooks.map(|(hook, stage, word)| Hook {
        hook_name: stage.into(),
        path: hook.path.display().to_string(),
        args: vec![
            "devlet".into(),
            "lease-hook".into(),
            "--socket".into(),
            hook.socket.display().to_string(),
            "--wait".into(),
            START_WAIT.to_string(),
            word.into(),
            name.to_string(),
        ],
        timeout: Some(HOOK_TIMEOUT),
        ..Hook::default()
    }));
    if edits.is_empty() {
        // CDI does not allow a device without edits.
        edits.env.push(NO_EDITS.into());
    }
    Ok(Spec {
        kind: KIND.into(),
        devices: vec![Device {
            name: name.to_string(),
            container_edits: edits,
            ..Device::default()
        }],
        ..Spec::default()
    })
}

/// Returns the edits of the CDI devices that an answer names: the runtime gets only the name of the lease.
fn resolve(directories: &[PathBuf], options: &RunOptions) -> Result<ContainerEdits, SpecError> {
    let annotated = annotations::parse(&options.annotations)?;
    let annotated = annotated
        .into_iter()
        .flat_map(|request| request.devices)
        .map(|name| name.to_string());
    let names: Vec<String> = options.cdi_devices.iter().cloned().chain(annotated).collect();
    if names.is_empty() {
        return Ok(ContainerEdits::default());
    }
    Ok(Registry::load(directories).resolve(names)?)
}

/// Returns the device nodes of an answer. As containerd does for plugins, a directory stands for the nodes in it and in
/// the directories below.
fn device_nodes(nodes: &[run_options::DeviceNode]) -> Result<Vec<DeviceNode>, SpecError> {
    let mut found = FoundNodes {
        nodes: Vec::new(),
        entries_left: MAX_ENTRIES,
    };
    for node in nodes {
        // A symbolic link is resolved here: not every runtime does it for CDI devices.
        let host = std::fs::canonicalize(&node.host_path).unwrap_or_else(|_| node.host_path.clone().into());
        match host.is_dir() {
            true => found.add_directory(&host, Path::new(&node.container_path), &node.permissions)?,
            false => found.add(&host, Path::new(&node.container_path), &node.permissions),
        }
    }
    Ok(found.nodes)
}

struct FoundNodes {
    nodes: Vec<DeviceNode>,
    entries_left: usize,
}

impl FoundNodes {
    fn add(&mut self, host: &Path, container: &Path, permissions: &str) {
        let (path, host_path) = (container.display().to_string(), host.display().to_string());
        self.nodes.push(DeviceNode {
            host_path: if host_path == path {
                String::new()
            } else {
                host_path
            },
            path,
            permissions: permissions.to_owned(),
            ..DeviceNode::default()
        });
    }

    /// Adds the nodes in a directory and below. Symbolic links in it are left out: they are other names of nodes.
    fn add_directory(&mut self, top: &Path, container: &Path, permissions: &str) -> Result<(), SpecError> {
        let mut directories = vec![(top.to_owned(), container.to_owned())];
        while let Some((host, container)) = directories.pop() {
            let mut entries = Vec::new();
            // A directory that vanishes has no devices.
            for entry in std::fs::read_dir(&host).into_iter().flatten().flatten() {
                let left = self.entries_left.checked_sub(1);
                self.entries_left = left.ok_or_else(|| SpecError::LongDirectory { path: top.to_owned() })?;
                entries.push(entry);
            }
            entries.sort_by_key(std::fs::DirEntry::file_name);
            for entry in entries {
                use std::os::unix::fs::FileTypeExt as _;
                let Ok(kind) = entry.file_type() else { continue };
                let name = entry.file_name();
                let container = container.join(&name);
                if kind.is_dir() && !NO_DEVICES.iter().any(|each| name == *each) {
                    directories.push((entry.path(), container));
                } else if (kind.is_char_device() || kind.is_block_device()) && name != "console" {
                    self.add(&entry.path(), &container, permissions);
                }
            }
        }
        Ok(())
    }
}

/// Gives nodes the owner that they have on the host. Without one, CDI gives them to the container's user.
fn owned(mut nodes: Vec<DeviceNode>, runtime: &RuntimeCdi) -> Vec<DeviceNode> {
    use std::os::unix::fs::MetadataExt as _;
    if runtime.gives_to_user {
        return nodes;
    }
    for node in &mut nodes {
        let path = if node.host_path.is_empty() {
            &node.path
        } else {
            &node.host_path
        };
        // The runtime reports a node that is absent.
        if let Ok(about) = std::fs::metadata(path) {
            (node.uid, node.gid) = (Some(about.uid()), Some(about.gid()));
        }
    }
    nodes
}

/// Creates the sources of mounts that do not exist, as containerd does without CDI.
fn create_sources(options: &RunOptions) -> Result<(), SpecError> {
    let paths = options.mounts.iter().map(|mount| Path::new(&mount.host_path));
    for path in paths.filter(|path| path.is_absolute()) {
        let is_absent = std::fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if is_absent {
            std::fs::create_dir_all(path).map_err(|problem| SpecError::Source {
                path: path.to_owned(),
                problem,
            })?;
        }
    }
    Ok(())
}

fn mount(mount: &run_options::Mount) -> Mount {
    let access = if mount.read_only { "ro" } else { "rw" };
    Mount {
        host_path: mount.host_path.clone(),
        container_path: mount.container_path.clone(),
        options: ["rbind", "rprivate", access].map(String::from).to_vec(),
        mount_type: "bind".into(),
    }
}

/// Returns the annotations of an answer that a CDI spec cannot hand on.
pub fn lost_annotations(options: &RunOptions) -> Vec<&str> {
    let keys = options.annotations.keys().map(String::as_str);
    keys.filter(|key| !key.starts_with("cdi.k8s.io/")).collect()
}

#[cfg(test)]
mod tests;
