//! Questions to the container runtime and the kubelet about themselves.
//!
//! A runtime with CDI off starts containers without their devices, and reports no error. So its configuration is read
//! before anything is registered. containerd tells it in the verbose status of the CRI.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use devlet_kubelet_api::cri::v1 as cri;
use serde_json::Value;
use tokio::process::Command;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Status;

use super::report::{HOST_PIDS, Program, RuntimeState};
use crate::config::Shield;
use crate::lease::containers::{self, RuntimeSilent};
use crate::lease::spec::RuntimeCdi;

/// Time for the runtime to answer.
const ASK_TIME: Duration = Duration::from_secs(3);

/// Time for a kubelet to print its version.
const VERSION_TIME: Duration = Duration::from_secs(5);

/// The oldest kubelet that hands CDI devices on.
pub const OLDEST_KUBELET: (u32, u32) = (1, 29);

/// Asks the runtime whether it adds the devices of `shield.cdi`.
pub async fn ask(shield: &Shield) -> RuntimeState {
    match ask_config(shield).await {
        Ok(Told {
            name,
            is_visible: false,
            ..
        }) => RuntimeState::Unfit {
            name,
            problem: format!(
                "its process is not visible to devlet, so those of containers are not either; {HOST_PIDS}"
            ),
        },
        Ok(Told { name, config, .. }) => judge(name, config.as_ref(), &shield.cdi),
        Err(silent) => RuntimeState::Unknown {
            reason: silent.to_string(),
        },
    }
}

/// What a runtime tells.
struct Told {
    name: String,
    config: Option<Value>,
    /// `true` if devlet sees its process.
    is_visible: bool,
}

/// Returns the name and the configuration of the runtime.
async fn ask_config(shield: &Shield) -> Result<Told, RuntimeSilent> {
    let socket = containers::socket(shield)?;
    let deadline = Instant::now() + ASK_TIME;
    let asking = async {
        let (connection, mut client) = containers::connect(&socket, deadline).await?;
        let refused = |status: Status| {
            let (message, code) = (status.message(), status.code());
            containers::failed(&socket, format!("{message} ({code:?})"))
        };
        let version = client.version(cri::VersionRequest {}).await.map_err(refused)?;
        let status = client.status(cri::StatusRequest { verbose: true }).await;
        let info = status.map_err(refused)?.into_inner().info;
        let config = info
            .get("config")
            .and_then(|config| serde_json::from_str(config).ok());
        let cri::VersionResponse {
            runtime_name,
            runtime_version,
        } = version.into_inner();
        Ok(Told {
            name: format!("{runtime_name} {runtime_version}"),
            config,
            is_visible: connection.peer.pid.is_some(),
        })
    };
    let asked = timeout_at(deadline, asking).await;
    asked.unwrap_or_else(|_| {
        Err(containers::failed(
            &socket,
            format!("no answer within {ASK_TIME:?}"),
        ))
    })
}

/// Judges the configuration that a runtime tells.
fn judge(name: String, config: Option<&Value>, directory: &Path) -> RuntimeState {
    let setting = |key: &str| config.and_then(|config| find(config, key));
    let directories = setting("cdiSpecDirs").and_then(Value::as_array);
    // containerd 2.4 has the directories alone: CDI cannot be switched off.
    let enabled = setting("enableCDI").and_then(Value::as_bool);
    let Some(enabled) = enabled.or(directories.map(|_| true)) else {
        return RuntimeState::Unknown {
            reason: format!("{name} does not tell whether CDI is on"),
        };
    };
    if !enabled {
        let problem =
            "CDI is off, so containers would start without their devices; set enable_cdi = true in its \
                       configuration and restart it"
                .to_owned();
        return RuntimeState::Unfit { name, problem };
    }
    let directories: Vec<&str> = match directories {
        Some(directories) => directories.iter().filter_map(Value::as_str).collect(),
        None => devlet_cdi::DEFAULT_DIRECTORIES.to_vec(),
    };
    if !reads(&directories, directory) {
        let problem = format!(
            "it reads CDI specs from {}, not from {}; set shield.cdiDir to one of its directories",
            directories.join(", "),
            directory.display()
        );
        return RuntimeState::Unfit { name, problem };
    }
    let ownership = setting("device_ownership_from_security_context").and_then(Value::as_bool);
    let cdi = RuntimeCdi {
        directories: directories.into_iter().map(PathBuf::from).collect(),
        gives_to_user: ownership.unwrap_or_default(),
    };
    RuntimeState::Ready { name, cdi }
}

/// Returns `true` if a directory is among those that a runtime reads.
pub fn reads(directories: &[impl AsRef<Path>], directory: &Path) -> bool {
    let same = |one: &Path| one.canonicalize().unwrap_or_else(|_| one.to_owned());
    let mut directories = directories.iter();
    directories.any(|each| same(each.as_ref()) == same(directory))
}

/// Returns the value of a key at any depth.
fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(fields) => fields
            .get(key)
            .or_else(|| fields.values().find_map(|value| find(value, key))),
        Value::Array(values) => values.iter().find_map(|value| find(value, key)),
        _ => None,
    }
}

/// Returns the file of the program that a process runs.
pub fn program(pid: i32) -> Option<Program> {
    let file = std::fs::metadata(format!("/proc/{pid}/exe")).ok()?;
    Some((file.dev(), file.ino(), file.size(), file.mtime()))
}

/// Returns the version of a kubelet: its program prints it.
pub async fn kubelet_version(pid: i32) -> Option<String> {
    let program = PathBuf::from(format!("/proc/{pid}/exe"));
    let mut command = Command::new(program);
    command
        .arg("--version")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(VERSION_TIME, command.output()).await.ok()?.ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let version = text.trim().strip_prefix("Kubernetes ")?;
    Some(version.to_owned())
}

/// Returns `true` if a kubelet of this version hands CDI devices on.
pub fn is_new_enough(version: &str) -> bool {
    let mut parts = version.trim_start_matches('v').split('.');
    let mut number = || parts.next()?.parse::<u32>().ok();
    match (number(), number()) {
        (Some(major), Some(minor)) => (major, minor) >= OLDEST_KUBELET,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judged(config: &Value) -> RuntimeState {
        judge("containerd v2".into(), Some(config), Path::new("/var/run/cdi"))
    }

    #[test]
    fn a_runtime_with_cdi_on_in_our_directory_is_ready() {
        for config in [
            json!({ "enableCDI": true, "cdiSpecDirs": ["/etc/cdi", "/var/run/cdi"] }),
            json!({ "runtime": { "enableCDI": true } }),
            json!({ "cdiSpecDirs": ["/var/run/cdi"] }),
        ] {
            assert!(matches!(judged(&config), RuntimeState::Ready { .. }), "{config}");
        }
    }

    #[test]
    fn a_runtime_tells_where_it_looks_and_whose_devices_are() {
        let config = json!({
            "cdiSpecDirs": ["/var/run/cdi", "/opt/cdi"],
            "device_ownership_from_security_context": true,
        });
        let cdi = RuntimeCdi {
            directories: vec!["/var/run/cdi".into(), "/opt/cdi".into()],
            gives_to_user: true,
        };
        let name = "containerd v2".into();
        assert_eq!(judged(&config), RuntimeState::Ready { name, cdi });
    }

    #[test]
    fn a_runtime_that_would_drop_devices_is_unfit() {
        for (config, reason) in [
            (json!({ "enableCDI": false }), "CDI is off"),
            (
                json!({ "enableCDI": true, "cdiSpecDirs": ["/etc/cdi"] }),
                "it reads CDI specs from /etc/cdi, not from /var/run/cdi",
            ),
            (
                json!({ "cdiSpecDirs": ["/nowhere"] }),
                "it reads CDI specs from /nowhere, not from /var/run/cdi",
            ),
        ] {
            let RuntimeState::Unfit { problem, .. } = judged(&config) else {
                panic!("{config} is accepted");
            };
            assert!(problem.contains(reason), "{problem}");
        }
    }

    #[test]
    fn a_runtime_that_does_not_tell_is_unknown() {
        let judged = judge("x".into(), None, Path::new("/var/run/cdi"));
        assert!(matches!(judged, RuntimeState::Unknown { .. }), "{judged:?}");
    }

    #[test]
    fn kubelets_without_cdi_devices_are_too_old() {
        for (version, expected) in [
            ("v1.28.15", false),
            ("v1.29.0", true),
            ("v1.37.1", true),
            ("v2.0.0-rc.1", true),
        ] {
            assert_eq!(is_new_enough(version), expected, "{version}");
        }
    }
}
