//! The rules for the name of an extended resource.

use alloc::borrow::ToOwned as _;
use alloc::string::String;

use crate::id::ResourceName;

/// A text is not the name of an extended resource. The message is the kubelet's, which plugin authors know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the ResourceName {0:?} is invalid")]
pub struct InvalidResourceName(pub String);

/// Maximum bytes of the domain: a DNS name of 253 characters, less the prefix `requests.` of quotas.
const MAX_DOMAIN: usize = 253 - "requests.".len();

/// Maximum bytes of the name after the slash.
const MAX_NAME: usize = 63;

impl ResourceName {
    /// Parses the name of an extended resource, such as `acme.com/gpu`.
    ///
    /// The part before the slash is a lower-case DNS name outside of Kubernetes' own domain. The part after it has
    /// letters, digits, `-`, `_` and `.`, and begins and ends with a letter or digit.
    pub fn parse(text: &str) -> Result<Self, InvalidResourceName> {
        let is_valid = text.split_once('/').is_some_and(|(domain, name)| {
            is_subdomain(domain)
                && is_name(name)
                && !domain.starts_with("requests.")
                && !text.contains("kubernetes.io/")
        });
        if is_valid {
            Ok(Self::from(text))
        } else {
            Err(InvalidResourceName(text.to_owned()))
        }
    }
}

fn is_subdomain(text: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
        let edge = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
        bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
    };
    text.len() <= MAX_DOMAIN && text.split('.').all(is_label)
}

fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let inner = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    bytes.len() <= MAX_NAME && bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::ToString as _;

    use super::*;

    #[test]
    fn names_that_a_kubelet_takes_are_taken() {
        let longest = format!("{}.com/{}", "a".repeat(MAX_DOMAIN - 4), "b".repeat(63));
        for name in ["vendor.com/gpu", "a/b", "vendor.com/GPU_1.x-y", "1.2/3", &longest] {
            assert!(ResourceName::parse(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn names_that_a_kubelet_refuses_are_refused_in_its_words() {
        let too_long = format!("{}.com/b", "a".repeat(MAX_DOMAIN - 3));
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
            let rejected = ResourceName::parse(name).unwrap_err().to_string();
            assert_eq!(rejected, format!("the ResourceName {name:?} is invalid"));
        }
    }
}
