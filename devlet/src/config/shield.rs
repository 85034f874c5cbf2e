//! Settings of a devlet beside a kubelet.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use devlet_agent::config::Shield;
use serde::{Deserialize, Serialize};

use crate::duration::Span;

/// The keys below `shield`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct ShieldSettings {
    pub(crate) enabled: bool,
    pub(crate) kubelet_dir: PathBuf,
    static_pod_dir: PathBuf,
    cdi_dir: PathBuf,
    permanent_cdi_dir: PathBuf,
    away: Span,
    pub(crate) runtime_endpoint: Option<PathBuf>,
    require_runtime: bool,
}

impl Default for ShieldSettings {
    fn default() -> Self {
        let Shield {
            kubelet,
            static_pods,
            cdi,
            permanent_cdi,
            away,
            require_runtime,
            ..
        } = Shield::new("/var/lib/kubelet", "");
        Self {
            enabled: false,
            kubelet_dir: kubelet,
            static_pod_dir: static_pods,
            cdi_dir: cdi,
            permanent_cdi_dir: permanent_cdi,
            away: Span(away),
            runtime_endpoint: None,
            require_runtime,
        }
    }
}

impl ShieldSettings {
    /// Returns the configuration of a node; `None` if there is no kubelet beside it.
    pub(super) fn node(&self) -> Option<Shield> {
        self.enabled.then(|| Shield {
            static_pods: self.static_pod_dir.clone(),
            cdi: self.cdi_dir.clone(),
            permanent_cdi: self.permanent_cdi_dir.clone(),
            away: self.away.0,
            runtime: self.runtime_endpoint.as_deref().map(runtime_socket),
            require_runtime: self.require_runtime,
            // The path of the program itself: the runtime runs it on the host.
            ..Shield::new(
                &self.kubelet_dir,
                std::env::current_exe().unwrap_or_else(|_| "devlet".into()),
            )
        })
    }

    /// Refuses a root directory that is the kubelet's: plugins would register with both.
    pub(crate) fn check_root(&self, root: &Path) -> anyhow::Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let kubelet =
            std::path::absolute(&self.kubelet_dir).context("cannot make the kubelet's directory absolute")?;
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        anyhow::ensure!(
            real(&kubelet) != real(root),
            "{} is the kubelet's root directory; choose another one for devlet with --root-dir",
            root.display()
        );
        Ok(())
    }
}

/// Returns the socket of a runtime endpoint, which may be written as a kubelet's configuration has it.
pub(crate) fn runtime_socket(endpoint: &Path) -> PathBuf {
    let text = endpoint.to_string_lossy();
    match text.strip_prefix("unix://") {
        Some(path) => path.into(),
        None => endpoint.to_owned(),
    }
}
