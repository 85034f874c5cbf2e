//! Resource names and the configuration: which limits of a container are for device plugins, and name patterns.

/// Returns `true` if a container's limit of this name is for a device plugin.
///
/// Names without a domain, names in Kubernetes' own domain, and names that match a `foreign` pattern are not.
pub(crate) fn is_ours(name: &str, foreign: &[String]) -> bool {
    let in_kubernetes = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    match name.split_once('/') {
        None => false,
        Some((domain, _)) if in_kubernetes(domain) => false,
        Some(_) => !foreign.iter().any(|pattern| matches(pattern, name)),
    }
}

/// Returns `true` if the Kubernetes API allows a limit of this name, or if it matches a `foreign` pattern.
///
/// The API requires a domain, except for resources of the kubelet itself.
pub(crate) fn is_known(name: &str, foreign: &[String]) -> bool {
    name.contains('/')
        || matches!(name, "cpu" | "memory" | "ephemeral-storage")
        || name.starts_with("hugepages-")
        || foreign.iter().any(|pattern| matches(pattern, name))
}

/// Returns `true` if a name matches a pattern: the name itself, or a prefix such as `acme.com/*`.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => pattern == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_kubernetes_and_foreign_names_are_not_ours() {
        let foreign = ["example.org/*".to_owned(), "acme.com/seat".to_owned()];
        for name in [
            "cpu",
            "memory",
            "kubernetes.io/x",
            "a.kubernetes.io/x",
            "example.org/x",
            "acme.com/seat",
        ] {
            assert!(!is_ours(name, &foreign), "{name}");
        }
        for name in ["acme.com/gpu", "notkubernetes.io/gpu", "acme.com/seats"] {
            assert!(is_ours(name, &foreign), "{name}");
        }
    }
}
