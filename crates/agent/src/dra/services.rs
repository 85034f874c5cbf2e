//! The services of a driver: the newest that it lists is used, in whatever order it lists them.
//!
//! Drivers for Kubernetes 1.31 to 1.33 list the alpha service under a name of their own, or only as `1.0.0`. A driver that
//! does not list a known service is therefore called to find out whether it implements the alpha service.

use devlet_kubelet_api::{dra, dra_health};

use crate::limits::truncate_quoted;

/// The service that prepares claims. The three versions differ on the wire only in the share of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeService {
    /// Kubernetes 1.34 and later.
    V1,
    /// Kubernetes 1.32 and later.
    V1beta1,
    /// Kubernetes 1.31 to 1.33.
    V1alpha3,
}

impl NodeService {
    /// Returns the name that drivers list; for the alpha service, its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1 => dra::v1::SERVICE,
            Self::V1beta1 => dra::v1beta1::SERVICE,
            Self::V1alpha3 => dra::v1alpha3::WIRE_SERVICE,
        }
    }

    /// Returns the path of `NodePrepareResources`.
    pub fn prepare(self) -> &'static str {
        match self {
            Self::V1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            Self::V1beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
            Self::V1alpha3 => "/v1alpha3.Node/NodePrepareResources",
        }
    }

    /// Returns the path of `NodeUnprepareResources`.
    pub fn unprepare(self) -> &'static str {
        match self {
            Self::V1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            Self::V1beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
            Self::V1alpha3 => "/v1alpha3.Node/NodeUnprepareResources",
        }
    }

    /// Returns `true` if an answer can name the share of a device that was prepared.
    pub fn has_shares(self) -> bool {
        self == Self::V1
    }
}

/// The service that reports the health of devices. Both versions are the same on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthService {
    /// Kubernetes 1.37 and later.
    V1,
    /// Kubernetes 1.34 and later.
    V1alpha1,
}

impl HealthService {
    /// Returns the name that drivers list.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1 => dra_health::v1::SERVICE,
            Self::V1alpha1 => dra_health::v1alpha1::SERVICE,
        }
    }

    /// Returns the path of `NodeWatchResources`.
    pub fn watch(self) -> &'static str {
        match self {
            Self::V1 => "/v1.DRAResourceHealth/NodeWatchResources",
            Self::V1alpha1 => "/v1alpha1.DRAResourceHealth/NodeWatchResources",
        }
    }
}

/// The services of a driver that devlet calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Services {
    /// The service that prepares claims.
    pub node: NodeService,
    /// The reason for that service, as text for people.
    pub why: String,
    /// The service that reports health, if the driver lists one.
    pub health: Option<HealthService>,
}

/// The services that a driver lists cannot be used. The texts are the kubelet's, which authors of drivers know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedServices {
    /// The list is empty.
    #[error("empty list of supported gRPC services (aka supported versions)")]
    Empty,
    /// None of the listed services is known, and the driver does not implement the alpha service.
    #[error(
        "none of services supported by the plugin ([{listed}]) are supported by the kubelet ([\"{}\" \"{}\" \"{}\"])",
        NodeService::V1.name(), NodeService::V1beta1.name(), NodeService::V1alpha3.name()
    )]
    Unknown {
        /// The listed services.
        listed: String,
    },
}

/// Chooses among the services that a driver lists. The caller must check that the driver implements the alpha service.
pub fn choose(listed: &[String]) -> Result<Services, UnsupportedServices> {
    if listed.is_empty() {
        return Err(UnsupportedServices::Empty);
    }
    let lists = |name: &str| listed.iter().any(|each| each == name);
    let newest = [NodeService::V1, NodeService::V1beta1];
    let (node, why) = match newest.into_iter().find(|service| lists(service.name())) {
        Some(service) => (service, format!("the newest of {}", names(listed))),
        None => {
            let why = format!("because the driver lists only {}", names(listed));
            (NodeService::V1alpha3, why)
        }
    };
    let health = [HealthService::V1, HealthService::V1alpha1];
    Ok(Services {
        node,
        why,
        health: health.into_iter().find(|service| lists(service.name())),
    })
}

/// Maximum number of a driver's services that are printed.
const MAX_LISTED: usize = 8;

/// Formats the services that a driver lists as the kubelet does; long lists in part.
pub fn quoted(listed: &[String]) -> String {
    let mut texts: Vec<String> = listed
        .iter()
        .take(MAX_LISTED)
        .map(|each| truncate_quoted(each))
        .collect();
    if listed.len() > MAX_LISTED {
        texts.push(format!("and {} more", listed.len() - MAX_LISTED));
    }
    texts.join(" ")
}

/// Formats the services that a driver lists for people; long lists and long names in part.
fn names(listed: &[String]) -> String {
    let name = |name: &String| {
        name.chars()
            .take(64)
            .flat_map(char::escape_debug)
            .collect::<String>()
    };
    let names: Vec<String> = listed.iter().take(MAX_LISTED).map(name).collect();
    match listed.len().saturating_sub(MAX_LISTED) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(listed: &[&str]) -> Result<Services, UnsupportedServices> {
        let listed: Vec<String> = listed.iter().map(|each| (*each).to_owned()).collect();
        choose(&listed)
    }

    // TestRegistrationHandler/{current-service, two-services}
    #[test]
    fn the_newest_service_is_chosen_in_any_order() {
        for listed in [
            &["v1.DRAPlugin"][..],
            &["v1.DRAPlugin", "v1beta1.DRAPlugin"],
            &["v1beta1.DRAPlugin", "v1.DRAPlugin", "1.0.0"],
        ] {
            assert_eq!(chosen(listed).unwrap().node, NodeService::V1, "{listed:?}");
        }
        let older = chosen(&["v1beta1.DRAPlugin", "v2.DRAPlugin"]).unwrap();
        assert_eq!(older.node, NodeService::V1beta1);
        assert_eq!(older.why, "the newest of v1beta1.DRAPlugin, v2.DRAPlugin");
    }

    #[test]
    fn a_driver_without_a_known_service_may_have_the_alpha_service() {
        for listed in [
            &["1.0.0"][..],
            &["v1alpha3.NodeService"],
            &["v1.DRAResourceHealth", "v1alpha4.Node"],
        ] {
            let services = chosen(listed).unwrap();
            assert_eq!(services.node, NodeService::V1alpha3, "{listed:?}");
            assert!(services.why.starts_with("because the driver lists only "));
        }
    }

    // TestRegistrationHandler/no-services
    #[test]
    fn an_empty_list_is_rejected_with_the_kubelets_text() {
        assert_eq!(
            chosen(&[]).unwrap_err().to_string(),
            "empty list of supported gRPC services (aka supported versions)"
        );
    }

    // TestPickHealthService
    #[test]
    fn the_newest_health_service_is_chosen_and_none_is_required() {
        let health = |listed: &[&str]| chosen(listed).unwrap().health;
        let node = "v1.DRAPlugin";
        assert_eq!(health(&[node]), None);
        let [new, old] = ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
        assert_eq!(health(&[node, old]), Some(HealthService::V1alpha1));
        assert_eq!(health(&[node, new]), Some(HealthService::V1));
        assert_eq!(health(&[old, new, node]), Some(HealthService::V1));
    }

    #[test]
    fn a_long_list_is_quoted_in_part() {
        let listed: Vec<String> = (0..100)
            .map(|number| format!("{number}.{}", "x".repeat(1000)))
            .collect();
        let quoted = quoted(&listed);
        assert!(quoted.len() < 1000 && quoted.ends_with("and 92 more"), "{quoted}");
    }
}
