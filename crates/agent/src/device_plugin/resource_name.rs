//! Which names a device plugin may serve, and which requests of a pod are for us.

use devlet_core::ResourceName;

/// Not the name of an extended resource. The text is the kubelet's, known to authors of plugins.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the ResourceName {0:?} is invalid")]
pub struct InvalidResourceName(pub String);

/// Longest prefix: a DNS name of 253 characters, of which Kubernetes keeps `requests.` for itself.
const LONGEST_PREFIX: usize = 253 - "requests.".len();
const LONGEST_NAME: usize = 63;

/// Parses the name of an extended resource, `acme.com/gpu`: a lower-case DNS name that is not Kubernetes' own,
/// a slash, and a name of letters, digits, `-`, `_` and `.` that begins and ends with a letter or digit.
pub fn parse(text: &str) -> Result<ResourceName, InvalidResourceName> {
    let valid = text.split_once('/').is_some_and(|(prefix, name)| {
        is_subdomain(prefix)
            && is_name(name)
            && !prefix.starts_with("requests.")
            && !text.contains("kubernetes.io/")
    });
    if valid {
        Ok(ResourceName::from(text))
    } else {
        Err(InvalidResourceName(text.to_owned()))
    }
}

fn is_subdomain(text: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
        let edge = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
        bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
    };
    text.len() <= LONGEST_PREFIX && text.split('.').all(is_label)
}

fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let inner = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    bytes.len() <= LONGEST_NAME && bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
}

/// Whether a container's limit of this name is for a device plugin. Names without a slash and Kubernetes' own
/// are for others, and so are those that the configuration calls foreign.
pub fn is_ours(name: &str, foreign: &[String]) -> bool {
    let in_kubernetes = |prefix: &str| prefix == "kubernetes.io" || prefix.ends_with(".kubernetes.io");
    match name.split_once('/') {
        None => false,
        Some((prefix, _)) if in_kubernetes(prefix) => false,
        Some(_) => !foreign.iter().any(|pattern| matches(pattern, name)),
    }
}

/// Whether the Kubernetes API would let a container have a limit of this name, as far as its domain is concerned: it has
/// one, or it is a resource of the kubelet's own, or the configuration calls it foreign.
pub fn is_known(name: &str, foreign: &[String]) -> bool {
    name.contains('/')
        || matches!(name, "cpu" | "memory" | "ephemeral-storage")
        || name.starts_with("hugepages-")
        || foreign.iter().any(|pattern| matches(pattern, name))
}

/// Whether a name fits a pattern: the name itself, or `acme.com/*`.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => pattern == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_kubelet_takes_are_taken() {
        let longest = format!("{}.com/{}", "a".repeat(LONGEST_PREFIX - 4), "b".repeat(63));
        for name in ["vendor.com/gpu", "a/b", "vendor.com/GPU_1.x-y", "1.2/3", &longest] {
            assert!(parse(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn names_that_a_kubelet_refuses_are_refused_in_its_words() {
        let too_long = format!("{}.com/b", "a".repeat(LONGEST_PREFIX - 3));
        let long_name = format!("vendor.com/{}", "b".repeat(64));
        for name in [
            "gpu",
            "kubernetes.io/gpu",
            "sub.kubernetes.io/gpu",
            "requests.vendor.com/gpu",
            "vendor.com/",
            "/gpu",
            "a/b/c",
            "VENDOR.com/gpu",
            "vendor.com/-gpu",
            "",
            "vendor_x.com/gpu",
            "vendor..com/gpu",
            &too_long,
            &long_name,
        ] {
            let refused = parse(name).unwrap_err().to_string();
            assert_eq!(refused, format!("the ResourceName {name:?} is invalid"));
        }
    }

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
