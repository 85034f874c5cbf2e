//! The connection of `devlet serve` to a cluster: flags, settings, and their checks.

use std::path::PathBuf;

#[cfg(feature = "kubernetes")]
use anyhow::Context as _;
use anyhow::bail;
use devlet_agent::agent::Agent;

use crate::config::{KubernetesSettings, ModeSetting, SliceSettings};

#[derive(Debug, clap::Args)]
pub(super) struct ClusterArgs {
    /// Kubeconfig file of a cluster: devlet becomes the device part of one of its nodes
    #[arg(long, value_name = "FILE", conflicts_with = "in_cluster")]
    kubeconfig: Option<PathBuf>,
    /// Use the ServiceAccount of the pod that devlet runs in, instead of a kubeconfig file
    #[arg(long)]
    in_cluster: bool,
    /// Name of the Node object [default: the host name in lower case]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// What devlet does for the node [default: agent]
    #[arg(long, value_name = "MODE")]
    mode: Option<ModeSetting>,
}

impl ClusterArgs {
    /// Overrides settings of the configuration file.
    pub(super) fn apply(self, settings: &mut KubernetesSettings) {
        if self.kubeconfig.is_some() {
            settings.kubeconfig = self.kubeconfig;
            settings.in_cluster = false;
        }
        if self.in_cluster {
            settings.kubeconfig = None;
            settings.in_cluster = true;
        }
        settings.node_name = self.node_name.or(settings.node_name.take());
        settings.mode = self.mode.or(settings.mode);
    }
}

/// Refuses a cluster beside the shield, where pods, claims and slices of the node are the kubelet's.
pub(super) fn check_without_shield(settings: &KubernetesSettings) -> anyhow::Result<()> {
    if settings.kubeconfig.is_some() || settings.in_cluster {
        bail!(
            "--shield and a cluster exclude each other, because the kubelet is the part of the cluster; leave --shield, or \
             --kubeconfig and --in-cluster out"
        );
    }
    Ok(())
}

/// Checks the settings, before anything is started.
pub(super) fn check(settings: &KubernetesSettings) -> anyhow::Result<()> {
    let KubernetesSettings {
        kubeconfig,
        in_cluster,
        node_name,
        mode,
        final_delete,
        abandon_after,
        beside_kubelet,
        heartbeat,
        slices,
        on_unhealthy,
    } = settings;
    if kubeconfig.is_some() && *in_cluster {
        bail!("kubernetes: kubeconfig and inCluster exclude each other; leave one of them out");
    }
    if kubeconfig.is_none() && !in_cluster {
        let unused = [
            ("--node-name", node_name.is_some()),
            ("--mode", mode.is_some()),
            ("kubernetes.finalDelete", *final_delete),
            ("kubernetes.abandonAfter", !abandon_after.is_empty()),
            ("kubernetes.besideKubelet", *beside_kubelet),
            ("kubernetes.heartbeat", *heartbeat),
            ("kubernetes.slices", *slices != SliceSettings::default()),
            ("kubernetes.onUnhealthy", !on_unhealthy.is_empty()),
        ];
        if let Some((unused, _)) = unused.into_iter().find(|(_, is_set)| *is_set) {
            bail!("{unused} has no effect without a cluster; add --kubeconfig FILE or --in-cluster");
        }
        return Ok(());
    }
    if cfg!(not(feature = "kubernetes")) {
        bail!(
            "this devlet is built without the feature kubernetes, so it cannot connect to a cluster; leave --kubeconfig \
             and --in-cluster out, or build it with the feature"
        );
    }
    check_combinations(settings)?;
    let node = node(settings);
    if !is_name(&node) {
        bail!("{node:?} is not the name of a node; write a lower-case DNS name: --node-name NAME");
    }
    Ok(())
}

/// Refuses settings that exclude each other, and those without an effect in their mode.
fn check_combinations(settings: &KubernetesSettings) -> anyhow::Result<()> {
    let has_slices = settings.slices != SliceSettings::default();
    let writing = [
        ("finalDelete", settings.final_delete),
        ("abandonAfter", !settings.abandon_after.is_empty()),
        ("heartbeat", settings.heartbeat),
        ("slices", has_slices),
        ("onUnhealthy", !settings.on_unhealthy.is_empty()),
    ];
    if settings.mode == Some(ModeSetting::Observe)
        && let Some((name, _)) = writing.into_iter().find(|(_, is_set)| *is_set)
    {
        bail!("kubernetes.{name} needs the mode agent: in the mode observe, nothing is written");
    }
    let of_kubelet = [
        ("heartbeat", settings.heartbeat, "has a heartbeat"),
        ("finalDelete", settings.final_delete, "deletes its pods"),
        ("slices", has_slices, "deletes the slices of its drivers"),
    ];
    if settings.beside_kubelet
        && let Some((name, _, reason)) = of_kubelet.into_iter().find(|(_, is_set, _)| *is_set)
    {
        bail!("kubernetes: {name} and besideKubelet exclude each other, because a kubelet {reason}");
    }
    let mut resources = settings.on_unhealthy.keys();
    if settings.beside_kubelet
        && let Some(driver) = resources.find(|name| !name.contains('/'))
    {
        bail!(
            "kubernetes.onUnhealthy: {driver} is a DRA driver, and beside a kubelet devlet knows no claims of pods; name a \
             resource, such as acme.com/gpu"
        );
    }
    Ok(())
}

/// Does nothing: [`check`] has refused settings of a cluster.
#[cfg(not(feature = "kubernetes"))]
pub(super) async fn join(_: &Agent, _: &KubernetesSettings) -> anyhow::Result<()> {
    Ok(())
}

/// Starts the integration with the cluster, if there is one. Does not wait for the API server.
#[cfg(feature = "kubernetes")]
pub(super) async fn join(agent: &Agent, settings: &KubernetesSettings) -> anyhow::Result<()> {
    use devlet_kube::{Access, HealthSettings, Mode, NodeSettings, OnUnhealthy};
    use devlet_kube::{Settings, SlicesSettings, WipeAtStart};

    use crate::config::{UnhealthySetting, WipeSetting};

    let access = match (&settings.kubeconfig, settings.in_cluster) {
        (Some(path), _) => Access::Kubeconfig(path.clone()),
        (None, true) => Access::InCluster,
        (None, false) => return Ok(()),
    };
    let after = settings.abandon_after.iter();
    let on_unhealthy = settings.on_unhealthy.iter().map(|(name, how)| {
        let how = match how {
            UnhealthySetting::Evict => OnUnhealthy::Evict,
            UnhealthySetting::Delete => OnUnhealthy::Delete,
        };
        (name.clone(), how)
    });
    let settings = Settings {
        access,
        node: node(settings),
        mode: match settings.mode {
            Some(ModeSetting::Observe) => Mode::Observe,
            Some(ModeSetting::Agent) | None => Mode::Agent,
        },
        final_delete: settings.final_delete,
        abandon_after: after
            .map(|(driver, time)| (driver.as_str().into(), time.0))
            .collect(),
        node_object: NodeSettings {
            beside_kubelet: settings.beside_kubelet,
            heartbeat: settings.heartbeat,
        },
        slices: SlicesSettings {
            wipe_at_start: match settings.slices.wipe_at_start {
                WipeSetting::Absent => WipeAtStart::Absent,
                WipeSetting::All => WipeAtStart::All,
            },
        },
        health: HealthSettings {
            on_unhealthy: on_unhealthy.collect(),
        },
    };
    devlet_kube::start(agent, settings)
        .await
        .context("cannot connect to the cluster")
}

/// Returns the name of the Node object: by default the one that a kubelet gives its node.
fn node(settings: &KubernetesSettings) -> String {
    settings.node_name.clone().unwrap_or_else(|| {
        let name = rustix::system::uname();
        name.nodename().to_string_lossy().trim().to_lowercase()
    })
}

/// Returns `true` for a lower-case DNS name.
fn is_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let is_edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= 253 && text.bytes().all(is_inner) && is_edge(bytes.first()) && is_edge(bytes.last())
}
