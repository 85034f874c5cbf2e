//! Rules of the Kubernetes API for names, labels and UIDs.

use super::InvalidManifest;
use super::object::Metadata;

/// Maximum bytes of a namespace or a container name: a DNS label.
pub(super) const MAX_LABEL: usize = 63;

/// Maximum bytes of the name or UID of a pod or claim: a DNS name.
pub(super) const MAX_NAME: usize = 253;

/// Returns the namespace and the name of an object.
pub(super) fn full_name(metadata: &Metadata) -> Result<(String, String), InvalidManifest> {
    let name = metadata.name.clone().unwrap_or_default();
    if name.is_empty() {
        return Err(InvalidManifest::Missing("metadata.name"));
    }
    check_name("metadata.name", &name)?;
    let namespace = metadata
        .namespace
        .clone()
        .filter(|namespace| !namespace.is_empty());
    let namespace = namespace.unwrap_or_else(|| "default".to_owned());
    check_label("metadata.namespace", &namespace)?;
    Ok((namespace, name))
}

pub(super) fn check_label(field: &str, value: &str) -> Result<(), InvalidManifest> {
    if is_label(value) && value.len() <= MAX_LABEL {
        return Ok(());
    }
    let rule = "a lower-case DNS label of at most 63 characters";
    Err(InvalidManifest::Name {
        field: field.to_owned(),
        value: value.to_owned(),
        rule,
    })
}

/// Checks a label as the Kubernetes API does, which also limits the memory of labels.
pub(super) fn check_pod_label(key: &str, value: &str) -> Result<(), InvalidManifest> {
    let is_word = |text: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = text.as_bytes();
        text.len() <= MAX_LABEL && text.bytes().all(inner) && edge(bytes.first()) && edge(bytes.last())
    };
    let is_key = match key.split_once('/') {
        Some((domain, name)) => domain.len() <= MAX_NAME && is_dns_name(domain) && is_word(name),
        None => is_word(key),
    };
    if is_key && (value.is_empty() || is_word(value)) {
        return Ok(());
    }
    Err(InvalidManifest::Name {
        field: "metadata.labels".to_owned(),
        value: format!("{key}={value}"),
        rule: "a label: at most 63 letters, digits, '-', '_' and '.' for the name and the value",
    })
}

pub(super) fn check_name(field: &str, value: &str) -> Result<(), InvalidManifest> {
    if value.len() <= MAX_NAME && is_dns_name(value) {
        return Ok(());
    }
    let rule = "a lower-case DNS name of at most 253 characters";
    Err(InvalidManifest::Name {
        field: field.to_owned(),
        value: value.to_owned(),
        rule,
    })
}

pub(super) fn is_dns_name(text: &str) -> bool {
    text.split('.').all(is_label)
}

pub(super) fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
    bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
}

pub(super) fn check_uid(uid: &str) -> Result<(), InvalidManifest> {
    let valid = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    if uid.len() <= MAX_NAME && uid.bytes().all(valid) {
        return Ok(());
    }
    let rule = "a UID: at most 253 printable characters without spaces or slashes";
    Err(InvalidManifest::Name {
        field: "metadata.uid".to_owned(),
        value: uid.to_owned(),
        rule,
    })
}
