//! Run options in the formats of container runtimes.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use devlet_cdi::annotations::{self, InvalidAnnotation};
use devlet_cdi::{ContainerEdits, Registry, Unresolvable};

use super::pods::{DeviceNode, Mount, RunOptions};
use crate::oci::Additions;

/// A container engine with a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    Podman,
    Docker,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
        })
    }
}

/// Why options cannot be written in a format.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnfitError {
    #[error("{engine} cannot name the device node {path}, because it contains a colon; use --format oci")]
    Colon { engine: Engine, path: String },
    #[error(
        "{engine} cannot name the annotation {key:?}, because it contains an equals sign; use --format oci"
    )]
    AnnotationKey { engine: Engine, key: String },
    #[error("no shell can set the environment variable {name:?}; use --format json")]
    Variable { name: String },
    #[error("the CDI devices of the container are unknown: {0}; use --format json")]
    Annotation(#[from] InvalidAnnotation),
    #[error(transparent)]
    Unresolvable(#[from] Unresolvable),
}

/// Returns the arguments for `podman run` or `docker run`, quoted for a shell where necessary.
pub(super) fn arguments(options: &RunOptions, engine: Engine) -> Result<String, UnfitError> {
    let mut arguments = Vec::new();
    for (name, value) in &options.envs {
        arguments.push(format!("--env={name}={value}"));
    }
    for node in &options.device_nodes {
        for path in [&node.host_path, &node.container_path] {
            if path.contains(':') {
                return Err(UnfitError::Colon {
                    engine,
                    path: path.clone(),
                });
            }
        }
        let permissions = if node.permissions.is_empty() {
            "rwm"
        } else {
            &node.permissions
        };
        let target = path_in_container(node);
        arguments.push(format!("--device={}:{target}:{permissions}", node.host_path));
    }
    for mount in &options.mounts {
        let source = field("source", &mount.host_path);
        let target = field("target", &mount.container_path);
        let read_only = if mount.read_only { ",readonly" } else { "" };
        arguments.push(format!("--mount=type=bind,{source},{target}{read_only}"));
    }
    for (key, value) in other_annotations(options) {
        if key.contains('=') {
            return Err(UnfitError::AnnotationKey {
                engine,
                key: key.clone(),
            });
        }
        arguments.push(format!("--annotation={key}={value}"));
    }
    for name in cdi_devices(options)? {
        arguments.push(format!("--device={name}"));
    }
    let quoted: Vec<Cow<'_, str>> = arguments.iter().map(|argument| quote(argument)).collect();
    Ok(if quoted.is_empty() {
        String::new()
    } else {
        quoted.join(" ") + "\n"
    })
}

/// Returns all CDI devices of the container, each once: those in the CDI field, then those in annotations. Device plugins
/// may use either. Claims use both, for the same devices.
fn cdi_devices(options: &RunOptions) -> Result<Vec<String>, InvalidAnnotation> {
    let asked_for = annotations::parse(&options.annotations)?;
    let asked_for = asked_for.into_iter().flat_map(|request| request.devices);
    let mut seen = BTreeSet::new();
    let all = options.cdi_devices.iter().cloned();
    let all = all.chain(asked_for.map(|name| name.to_string()));
    Ok(all.filter(|name| seen.insert(name.clone())).collect())
}

/// Returns the annotations without those of CDI devices, which [`cdi_devices`] returns. A runtime that reads both would add
/// the devices twice.
fn other_annotations(options: &RunOptions) -> impl Iterator<Item = (&String, &String)> {
    let all = options.annotations.iter();
    all.filter(|(key, _)| !key.starts_with(annotations::PREFIX))
}

/// Returns the path of a device node in the container. If the plugin omits it, that is the path on the host.
fn path_in_container(node: &DeviceNode) -> &str {
    match node.container_path.as_str() {
        "" => &node.host_path,
        path => path,
    }
}

/// Returns a field of a mount, which both engines read as CSV.
fn field(key: &str, value: &str) -> String {
    if value.contains([',', '"', '\n']) {
        format!("\"{key}={}\"", value.replace('"', "\"\""))
    } else {
        format!("{key}={value}")
    }
}

/// Returns `NAME=value` lines, quoted for a shell where necessary.
pub(super) fn variables(options: &RunOptions) -> Result<String, UnfitError> {
    let line = |(name, value): (&String, &String)| {
        let mut characters = name.chars();
        let is_first = |character: char| character.is_ascii_alphabetic() || character == '_';
        let is_name = characters.next().is_some_and(is_first)
            && characters.all(|character| is_first(character) || character.is_ascii_digit());
        // The shell would run any other name as a command.
        if is_name && !value.contains('\0') {
            Ok(format!("{name}={}\n", quote(value)))
        } else {
            Err(UnfitError::Variable { name: name.clone() })
        }
    };
    options.envs.iter().map(line).collect()
}

/// Quotes a text as one word of a shell.
fn quote(text: &str) -> Cow<'_, str> {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_@%+=:,./-".contains(character);
    if !text.is_empty() && text.chars().all(plain) {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(format!("'{}'", text.replace('\'', r"'\''")))
    }
}

/// Returns the changes to an OCI runtime spec. CDI devices come last, as in container runtimes.
pub(super) fn additions(options: &RunOptions, registry: &Registry) -> Result<Additions, UnfitError> {
    let mount = |mount: &Mount| {
        let mode = if mount.read_only { "ro" } else { "rw" };
        devlet_cdi::Mount {
            host_path: mount.host_path.clone(),
            container_path: mount.container_path.clone(),
            options: ["rbind", "rprivate", mode].map(str::to_owned).to_vec(),
            mount_type: "bind".to_owned(),
        }
    };
    let node = |node: &DeviceNode| devlet_cdi::DeviceNode {
        path: path_in_container(node).to_owned(),
        host_path: node.host_path.clone(),
        permissions: node.permissions.clone(),
        ..Default::default()
    };
    let mut edits = ContainerEdits {
        env: options
            .envs
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect(),
        device_nodes: options.device_nodes.iter().map(node).collect(),
        mounts: options.mounts.iter().map(mount).collect(),
        ..Default::default()
    };
    edits.append(&registry.resolve(&cdi_devices(options)?)?);
    Ok(Additions {
        edits,
        annotations: other_annotations(options)
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::node::pods::Admitted;
    use crate::node::samples;
    use crate::oci::Edited;

    fn options() -> RunOptions {
        let mut options = Admitted::from(samples::pod()).containers.remove(0).options;
        // Repeats the CDI device as an annotation, as claims do.
        let key = "cdi.k8s.io/gpu.acme.com_c-1".to_owned();
        options.annotations.insert(key, options.cdi_devices.join(","));
        options
    }

    #[test]
    fn engines_get_one_argument_for_each_option() {
        let expected = "--env=GPU=gpu-0 --device=/dev/null:/dev/gpu:rw \
                        --mount=type=bind,source=/opt/acme,target=/usr/acme,readonly --annotation=acme.com/slot=3 \
                        --device=acme.com/gpu=gpu-0\n";
        for engine in [Engine::Podman, Engine::Docker] {
            assert_eq!(arguments(&options(), engine).unwrap(), expected);
        }
        assert_eq!(arguments(&RunOptions::default(), Engine::Podman).unwrap(), "");
    }

    #[test]
    fn cdi_devices_that_only_an_annotation_asks_for_reach_the_container() {
        let mut options = options();
        let asked = "acme.com/gpu=gpu-0,acme.com/gpu=gpu-1".to_owned();
        options.annotations.insert("cdi.k8s.io/plugin_x".into(), asked);
        for engine in [Engine::Podman, Engine::Docker] {
            let text = arguments(&options, engine).unwrap();
            let devices =
                "--annotation=acme.com/slot=3 --device=acme.com/gpu=gpu-0 --device=acme.com/gpu=gpu-1\n";
            assert!(text.ends_with(devices), "{text}");
        }
        let unknown = additions(&options, &Registry::load(["/nonexistent"]));
        let unknown = unknown.unwrap_err().to_string();
        assert!(
            unknown.contains("gpu-0") && unknown.contains("gpu-1"),
            "{unknown}"
        );

        options
            .annotations
            .insert("cdi.k8s.io/plugin_y".into(), "nonsense".into());
        let refused = arguments(&options, Engine::Docker).unwrap_err().to_string();
        assert!(refused.contains("cdi.k8s.io/plugin_y"), "{refused}");
    }

    #[test]
    fn a_device_node_without_a_path_in_the_container_has_the_path_of_the_host() {
        let mut options = options();
        options.device_nodes[0].container_path = String::new();
        let text = arguments(&options, Engine::Podman).unwrap();
        assert!(text.contains("--device=/dev/null:/dev/null:rw"), "{text}");
    }

    #[test]
    fn values_with_shell_characters_are_quoted() {
        let mut options = RunOptions::default();
        options.envs.insert("A".into(), "it's $HOME; rm -rf /\n".into());
        options.envs.insert("B".into(), String::new());
        options.envs.insert("C".into(), "plain-1".into());
        assert_eq!(
            variables(&options).unwrap(),
            "A='it'\\''s $HOME; rm -rf /\n'\nB=''\nC=plain-1\n"
        );
        assert!(
            arguments(&options, Engine::Docker)
                .unwrap()
                .starts_with("'--env=A=it'\\''s ")
        );
    }

    #[test]
    fn a_variable_that_a_shell_would_run_is_refused() {
        for name in ["A;touch pwned #", "", "1A", "A=B", "A B", "A\n"] {
            let envs = [(name.to_owned(), "1".to_owned())];
            let options = RunOptions {
                envs: envs.into(),
                ..RunOptions::default()
            };
            assert!(variables(&options).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_comma_in_a_path_stays_in_the_path() {
        let mount = Mount {
            container_path: "/c".into(),
            host_path: "/a,b\"c".into(),
            read_only: false,
        };
        let options = RunOptions {
            mounts: vec![mount],
            ..Default::default()
        };
        let text = arguments(&options, Engine::Podman).unwrap();
        assert_eq!(text, "'--mount=type=bind,\"source=/a,b\"\"c\",target=/c'\n");
    }

    #[test]
    fn a_colon_in_a_device_node_is_refused_rather_than_misread() {
        let mut options = options();
        options.device_nodes[0].host_path = "/dev/disk/by-path/pci-0000:00".into();
        let refused = arguments(&options, Engine::Docker).unwrap_err().to_string();
        assert!(
            refused.contains("docker") && refused.contains("pci-0000:00"),
            "{refused}"
        );
    }

    #[test]
    fn an_equals_sign_in_the_key_of_an_annotation_is_refused_rather_than_misread() {
        let mut options = options();
        options.annotations.insert("a=b".into(), "c".into());
        let refused = arguments(&options, Engine::Podman).unwrap_err().to_string();
        assert!(refused.contains("podman") && refused.contains("a=b"), "{refused}");
    }

    #[test]
    fn an_oci_spec_gets_everything_cdi_devices_included() {
        let specs = tempfile::tempdir().unwrap();
        let spec = json!({
            "cdiVersion": "0.3.0",
            "kind": "acme.com/gpu",
            "devices": [{"name": "gpu-0", "containerEdits": {"env": ["FROM_CDI=1"]}}],
        });
        std::fs::write(specs.path().join("acme.json"), spec.to_string()).unwrap();
        let registry = Registry::load([specs.path()]);
        let oci = br#"{"ociVersion": "1.2.0", "process": {"env": ["PATH=/bin"]}, "future": 1}"#;

        let edited = Edited::new(oci, &additions(&options(), &registry).unwrap()).unwrap();

        let oci: Value = serde_json::from_str(&edited.to_json().unwrap()).unwrap();
        assert_eq!(
            oci["process"]["env"],
            json!(["PATH=/bin", "GPU=gpu-0", "FROM_CDI=1"])
        );
        assert_eq!(oci["linux"]["devices"][0]["path"], "/dev/gpu");
        assert_eq!(oci["mounts"][0]["destination"], "/usr/acme");
        assert_eq!(oci["mounts"][0]["options"], json!(["rbind", "rprivate", "ro"]));
        assert_eq!(oci["annotations"], json!({"acme.com/slot": "3"}));
        assert_eq!(oci["future"], 1);

        let unknown = additions(&options(), &Registry::load([specs.path().join("no")]));
        assert!(unknown.unwrap_err().to_string().contains("acme.com/gpu=gpu-0"));
    }
}
