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

/// Time after which the runtime gives up a hook, in seconds.
const HOOK_TIMEOUT: i64 = 5;

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
        device_nodes: owned(
            options.device_nodes.iter().flat_map(device_nodes).collect(),
            runtime,
        ),
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

/// Returns the device nodes of a path on the host. As runtimes do for plugins, a directory stands for the nodes in it.
fn device_nodes(node: &run_options::DeviceNode) -> Vec<DeviceNode> {
    let one = |path: String, host_path: String| DeviceNode {
        host_path: if host_path == path {
            String::new()
        } else {
            host_path
        },
        path,
        permissions: node.permissions.clone(),
        ..DeviceNode::default()
    };
    // A symbolic link is resolved here: not every runtime does it for CDI devices.
    let host = std::fs::canonicalize(&node.host_path).unwrap_or_else(|_| node.host_path.clone().into());
    let Ok(entries) = std::fs::read_dir(&host) else {
        return vec![one(node.container_path.clone(), host.display().to_string())];
    };
    let mut names: Vec<_> = entries.flatten().collect();
    names.sort_by_key(std::fs::DirEntry::file_name);
    let nodes = names.iter().filter(|entry| {
        use std::os::unix::fs::FileTypeExt as _;
        let kind = entry.file_type();
        kind.is_ok_and(|kind| kind.is_char_device() || kind.is_block_device())
    });
    nodes
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = Path::new(&node.container_path).join(&name).display().to_string();
            one(path, entry.path().display().to_string())
        })
        .collect()
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
