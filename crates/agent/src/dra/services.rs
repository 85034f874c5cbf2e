//! Which services are spoken with a driver: the newest that it lists, whatever their order.
//!
//! Drivers of 1.31 to 1.33 list the alpha service under a name that nobody knows, or just say `1.0.0`: if a driver
//! lists nothing that is known, it is asked whether it has that one.

use devlet_kubelet_api::{dra, dra_health};

use crate::limits::truncate_quoted;

/// How claims are prepared. On the wire all three are alike, but for the share of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeService {
    /// Of 1.34 and later.
    V1,
    /// Of 1.32 and later.
    V1beta1,
    /// Of 1.31 to 1.33.
    V1alpha3,
}

impl NodeService {
    /// As drivers list it; the last one by the name that it has on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1 => dra::v1::SERVICE,
            Self::V1beta1 => dra::v1beta1::SERVICE,
            Self::V1alpha3 => dra::v1alpha3::WIRE_SERVICE,
        }
    }

    /// The method that prepares.
    pub fn prepare(self) -> &'static str {
        match self {
            Self::V1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            Self::V1beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
            Self::V1alpha3 => "/v1alpha3.Node/NodePrepareResources",
        }
    }

    /// The method that undoes it.
    pub fn unprepare(self) -> &'static str {
        match self {
            Self::V1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            Self::V1beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
            Self::V1alpha3 => "/v1alpha3.Node/NodeUnprepareResources",
        }
    }

    /// Whether a driver can say which share of a device it prepared.
    pub fn has_shares(self) -> bool {
        self == Self::V1
    }
}

/// How a driver tells how its devices are. On the wire both are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthService {
    /// Of 1.37 and later.
    V1,
    /// Of 1.34 and later.
    V1alpha1,
}

impl HealthService {
    /// As drivers list it.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1 => dra_health::v1::SERVICE,
            Self::V1alpha1 => dra_health::v1alpha1::SERVICE,
        }
    }

    /// The stream.
    pub fn watch(self) -> &'static str {
        match self {
            Self::V1 => "/v1.DRAResourceHealth/NodeWatchResources",
            Self::V1alpha1 => "/v1alpha1.DRAResourceHealth/NodeWatchResources",
        }
    }
}

/// What is spoken with a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Services {
    /// To prepare claims.
    pub node: NodeService,
    /// Why that one, for people.
    pub why: String,
    /// To hear of its devices.
    pub health: Option<HealthService>,
}

/// A driver with which nothing can be spoken. The texts are the kubelet's, known to authors of drivers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoService {
    /// It lists nothing.
    #[error("empty list of supported gRPC services (aka supported versions)")]
    Empty,
    /// It lists nothing that is known here, and has no alpha service either.
    #[error(
        "none of services supported by the plugin ([{listed}]) are supported by the kubelet ([\"{}\" \"{}\" \"{}\"])",
        NodeService::V1.name(), NodeService::V1beta1.name(), NodeService::V1alpha3.name()
    )]
    Unknown {
        /// What it lists.
        listed: String,
    },
}

/// Chooses among the services that a driver lists. Whether it has the alpha service is not known yet.
pub fn choose(listed: &[String]) -> Result<Services, NoService> {
    if listed.is_empty() {
        return Err(NoService::Empty);
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

/// The most services of a driver that are printed.
const MOST: usize = 8;

/// Returns what a driver lists as the kubelet would print it; long lists in part.
pub fn quoted(listed: &[String]) -> String {
    let mut texts: Vec<String> = listed
        .iter()
        .take(MOST)
        .map(|each| truncate_quoted(each))
        .collect();
    if listed.len() > MOST {
        texts.push(format!("and {} more", listed.len() - MOST));
    }
    texts.join(" ")
}

/// Returns what a driver lists for people; long lists, and long names, in part.
fn names(listed: &[String]) -> String {
    let name = |name: &String| {
        name.chars()
            .take(64)
            .flat_map(char::escape_debug)
            .collect::<String>()
    };
    let names: Vec<String> = listed.iter().take(MOST).map(name).collect();
    match listed.len().saturating_sub(MOST) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(listed: &[&str]) -> Result<Services, NoService> {
        let listed: Vec<String> = listed.iter().map(|each| (*each).to_owned()).collect();
        choose(&listed)
    }

    // TestRegistrationHandler/{current-service, two-services}
    #[test]
    fn the_newest_service_is_chosen_whatever_the_order() {
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
    fn a_driver_that_lists_nothing_known_may_have_the_alpha_service() {
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
    fn an_empty_list_is_refused_in_the_kubelets_words() {
        assert_eq!(
            chosen(&[]).unwrap_err().to_string(),
            "empty list of supported gRPC services (aka supported versions)"
        );
    }

    // TestPickHealthService
    #[test]
    fn the_newest_health_service_is_chosen_and_none_need_be_listed() {
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
