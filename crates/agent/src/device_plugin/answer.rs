//! Rejects answers to `Allocate` that container runtimes cannot carry out.
//!
//! A kubelet passes answers on unchecked, and the runtime then fails to start the container. Rejected are answers that no
//! runtime can carry out, and relative paths on the host, which depend on the runtime's working directory.
//!
//! Runtimes accept the following, and so does devlet:
//! - device nodes without a path in the container, which means the path on the host;
//! - device nodes without permissions, which means all permissions;
//! - repeated permissions;
//! - relative paths in the container, which start at its root.

use devlet_cdi::annotations::{self, InvalidAnnotation};
use devlet_cdi::{InvalidName, QualifiedName};
use devlet_core::device_plugin::run_options::RunOptions;

use crate::limits::truncate_quoted;

/// Reason why a container runtime cannot carry out an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImpossibleAnswer {
    /// The name of an environment variable is invalid.
    #[error("environment variable {} is impossible: a name is not empty and contains neither \"=\" nor NUL", truncate_quoted(.0))]
    EnvName(String),
    /// The value of an environment variable is invalid.
    #[error("the value of environment variable {} is impossible: it contains NUL", truncate_quoted(.0))]
    EnvValue(String),
    /// A path is invalid.
    #[error("{subject} {} is impossible: a path is not empty and does not contain NUL", truncate_quoted(.path))]
    Path {
        /// The kind of path.
        subject: &'static str,
        /// The path.
        path: String,
    },
    /// A path on the host is relative.
    #[error("{subject} {} is impossible: a path on the host begins with \"/\"", truncate_quoted(.path))]
    Relative {
        /// The kind of path.
        subject: &'static str,
        /// The path.
        path: String,
    },
    /// The key of an annotation is invalid.
    #[error("annotation {} is impossible: a key is not empty and does not contain control characters", truncate_quoted(.0))]
    AnnotationKey(String),
    /// The value of an annotation is invalid.
    #[error("the value of annotation {} is impossible: it contains NUL", truncate_quoted(.0))]
    AnnotationValue(String),
    /// Permissions other than `r`, `w` and `m`.
    #[error(
        "device node {} has the impossible permissions {}: they consist of \"r\", \"w\" and \"m\"",
        truncate_quoted(.path),
        truncate_quoted(.permissions)
    )]
    Permissions {
        /// Path of the device node on the host.
        path: String,
        /// The permissions.
        permissions: String,
    },
    /// The name of a CDI device is invalid.
    #[error("CDI device is impossible: {0}")]
    CdiDevice(#[from] InvalidName),
    /// An annotation that lists CDI devices is invalid.
    #[error("CDI devices are impossible: {0}")]
    CdiAnnotation(#[from] InvalidAnnotation),
}

/// Checks that a container runtime can carry out an answer.
pub(crate) fn check(options: &RunOptions) -> Result<(), ImpossibleAnswer> {
    for (name, value) in &options.envs {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ImpossibleAnswer::EnvName(name.clone()));
        }
        if value.contains('\0') {
            return Err(ImpossibleAnswer::EnvValue(name.clone()));
        }
    }
    for mount in &options.mounts {
        check_host_path("the source of a mount,", &mount.host_path)?;
        check_path("the target of a mount,", &mount.container_path)?;
    }
    for node in &options.device_nodes {
        check_host_path("the path of a device node on the host,", &node.host_path)?;
        if !node.container_path.is_empty() {
            check_path(
                "the path of a device node in the container,",
                &node.container_path,
            )?;
        }
        if !node.permissions.bytes().all(|each| b"rwm".contains(&each)) {
            return Err(ImpossibleAnswer::Permissions {
                path: node.host_path.clone(),
                permissions: node.permissions.clone(),
            });
        }
    }
    for name in &options.cdi_devices {
        name.parse::<QualifiedName>()?;
    }
    for (key, value) in &options.annotations {
        if key.is_empty() || key.contains(char::is_control) {
            return Err(ImpossibleAnswer::AnnotationKey(key.clone()));
        }
        if value.contains('\0') {
            return Err(ImpossibleAnswer::AnnotationValue(key.clone()));
        }
    }
    annotations::parse(&options.annotations)?;
    Ok(())
}

fn check_host_path(subject: &'static str, path: &str) -> Result<(), ImpossibleAnswer> {
    check_path(subject, path)?;
    if !path.starts_with('/') {
        let path = path.to_owned();
        return Err(ImpossibleAnswer::Relative { subject, path });
    }
    Ok(())
}

fn check_path(subject: &'static str, path: &str) -> Result<(), ImpossibleAnswer> {
    if path.is_empty() || path.contains('\0') {
        let path = path.to_owned();
        return Err(ImpossibleAnswer::Path { subject, path });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use devlet_core::device_plugin::run_options::{DeviceNode, Mount};

    use super::*;

    fn env(name: &str, value: &str) -> RunOptions {
        RunOptions {
            envs: [(name.into(), value.into())].into(),
            ..RunOptions::default()
        }
    }

    fn mount(host_path: &str, container_path: &str) -> RunOptions {
        let mount = Mount {
            host_path: host_path.into(),
            container_path: container_path.into(),
            read_only: true,
        };
        RunOptions {
            mounts: vec![mount],
            ..RunOptions::default()
        }
    }

    fn node(host_path: &str, container_path: &str, permissions: &str) -> RunOptions {
        let node = DeviceNode {
            host_path: host_path.into(),
            container_path: container_path.into(),
            permissions: permissions.into(),
        };
        RunOptions {
            device_nodes: vec![node],
            ..RunOptions::default()
        }
    }

    fn cdi(name: &str) -> RunOptions {
        RunOptions {
            cdi_devices: vec![name.into()],
            ..RunOptions::default()
        }
    }

    fn annotation(key: &str, value: &str) -> RunOptions {
        RunOptions {
            annotations: [(key.into(), value.into())].into(),
            ..RunOptions::default()
        }
    }

    #[test]
    fn an_answer_that_no_runtime_can_carry_out_is_rejected() {
        for (options, reason) in [
            (env("", "x"), "environment variable \"\" is impossible"),
            (env("A=B", "x"), "environment variable \"A=B\" is impossible"),
            (env("A\0", "x"), "environment variable \"A\\0\" is impossible"),
            (
                env("A", "x\0"),
                "the value of environment variable \"A\" is impossible",
            ),
            (mount("", "/x"), "the source of a mount, \"\" is impossible"),
            (mount("/x", ""), "the target of a mount, \"\" is impossible"),
            (
                mount("/x", "/\0"),
                "the target of a mount, \"/\\0\" is impossible",
            ),
            (
                node("", "/dev/x", "rw"),
                "the path of a device node on the host, \"\"",
            ),
            (
                node("/dev/x", "/\0", "rw"),
                "the path of a device node in the container, \"/\\0\"",
            ),
            (
                node("/dev/x", "/dev/x", "zzz"),
                "device node \"/dev/x\" has the impossible permissions \"zzz\"",
            ),
            (node("/dev/x", "/dev/x", "RW"), "impossible permissions \"RW\""),
            (
                mount("relative", "/x"),
                "the source of a mount, \"relative\" is impossible: a path on the host begins with \"/\"",
            ),
            (
                node("dev/x", "/dev/x", "rw"),
                "the path of a device node on the host, \"dev/x\" is impossible",
            ),
            (annotation("", "x"), "annotation \"\" is impossible"),
            (annotation("a\0", "x"), "annotation \"a\\0\" is impossible"),
            (annotation("a\nb", "x"), "annotation \"a\\nb\" is impossible"),
            (
                annotation("a", "\0"),
                "the value of annotation \"a\" is impossible",
            ),
            (
                cdi("acme.com/gpu"),
                "CDI device is impossible: \"acme.com/gpu\" does not have a device name",
            ),
            (
                annotation("cdi.k8s.io/gpu", ""),
                "CDI devices are impossible: annotation \"cdi.k8s.io/gpu\"",
            ),
        ] {
            let error = check(&options).unwrap_err().to_string();
            assert!(error.starts_with(reason) || error.contains(reason), "{error}");
        }
    }

    #[test]
    fn an_answer_that_a_runtime_can_carry_out_is_accepted() {
        for options in [
            RunOptions::default(),
            env("with.dots-and spaces", ""),
            mount("/x", "relative"),
            annotation("a=b", "c=d\n"),
            node("/dev/x", "", ""),
            node("/dev/x", "/dev/y", "mrwr"),
            cdi("acme.com/gpu=0"),
            annotation("cdi.k8s.io/gpu", "acme.com/gpu=0,acme.com/gpu=1"),
            annotation("acme.com/slot", ""),
        ] {
            assert_eq!(check(&options), Ok(()), "{options:?}");
        }
    }
}
