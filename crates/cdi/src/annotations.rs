//! Container annotations that request CDI devices from a runtime.
//!
//! A key is `cdi.k8s.io/<plugin>_<device id>`, a value is a list of qualified device names joined by commas.
//! The part of the key after the prefix follows the rules of Kubernetes for annotation keys: at most 63
//! characters, letters, digits, `_`, `-` and `.`, a letter or digit at both ends. A `/` in the device id is
//! written as `_`.
//!
//! A DRA claim's UID has 36 characters, which leaves 26 for the driver's name. [`hashed_key`] supports longer
//! names.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::name::{InvalidName, QualifiedName};

/// Prefix of the key of every annotation that requests CDI devices.
pub const PREFIX: &str = "cdi.k8s.io/";

/// Maximum number of characters in a key after [`PREFIX`].
pub const MAX_KEY_NAME: usize = 63;

/// Number of hexadecimal digits of the SHA-256 sum at the end of a hashed key: 128 bits.
const HASH_DIGITS: usize = 32;

/// Why a text cannot be the key of a CDI annotation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    /// The name of the plugin or driver is empty.
    #[error("the plugin name is empty")]
    EmptyPlugin,
    /// The ID of the device or claim is empty.
    #[error("the device id is empty")]
    EmptyDeviceId,
    /// The key does not begin with [`PREFIX`].
    #[error("annotation key {key:?} does not begin with {PREFIX:?}")]
    Prefix {
        /// The whole key.
        key: String,
    },
    /// The name is too long. [`hashed_key`] supports such names.
    #[error("annotation key name {name:?} has {} characters, at most {MAX_KEY_NAME} are allowed", .name.len())]
    TooLong {
        /// The key without its prefix.
        name: String,
    },
    /// A character is not allowed at its position.
    #[error("annotation key name {name:?} contains {found:?}, it may contain only letters, digits and _ - .")]
    Character {
        /// The key without its prefix.
        name: String,
        /// The first such character.
        found: char,
    },
    /// The first or the last character is a separator.
    #[error("annotation key name {name:?} must begin and end with a letter or digit")]
    Edge {
        /// The key without its prefix.
        name: String,
    },
}

/// Returns the key for the devices that `plugin` allocates for `device_id`.
pub fn key(plugin: &str, device_id: &str) -> Result<String, InvalidKey> {
    let name = key_name(plugin, device_id)?;
    check_key_name(&name, MAX_KEY_NAME)?;
    Ok(format!("{PREFIX}{name}"))
}

/// Like [`key`], but shortens an overlong name and makes it unique by a hash instead of rejecting it.
///
/// If `<plugin>_<device id>` fits into 63 characters, the result is that of [`key`]. Otherwise it is the first 30
/// characters of `plugin` without trailing separators, `_`, and the first 32 hexadecimal digits of the SHA-256
/// sum of the whole `<plugin>_<device id>`. The result depends only on the input. Runtimes read only the prefix
/// and the value, so both forms work.
///
/// ```
/// use devlet_cdi::annotations::hashed_key;
///
/// let uid = "11111111-2222-3333-4444-555555555555";
/// assert_eq!(hashed_key("gpu.vendor.com", uid)?, format!("cdi.k8s.io/gpu.vendor.com_{uid}"));
///
/// let long = hashed_key("accelerators.datacenter.vendor.com", uid)?;
/// assert_eq!(long, "cdi.k8s.io/accelerators.datacenter.vendor_010339595c8521fe05af165b9dbc72a9");
/// # Ok::<(), devlet_cdi::annotations::InvalidKey>(())
/// ```
pub fn hashed_key(plugin: &str, device_id: &str) -> Result<String, InvalidKey> {
    let name = key_name(plugin, device_id)?;
    check_key_name(&name, usize::MAX)?;
    if name.len() <= MAX_KEY_NAME {
        return Ok(format!("{PREFIX}{name}"));
    }
    let mut hash: String = Sha256::digest(&name)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    hash.truncate(HASH_DIGITS);
    // All characters were checked above to be ASCII.
    let readable = &plugin[..plugin.len().min(MAX_KEY_NAME - 1 - HASH_DIGITS)];
    let readable = readable.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    Ok(format!("{PREFIX}{readable}_{hash}"))
}

fn key_name(plugin: &str, device_id: &str) -> Result<String, InvalidKey> {
    if plugin.is_empty() {
        return Err(InvalidKey::EmptyPlugin);
    }
    if device_id.is_empty() {
        return Err(InvalidKey::EmptyDeviceId);
    }
    Ok(format!("{plugin}_{}", device_id.replace('/', "_")))
}

fn check_key_name(name: &str, longest: usize) -> Result<(), InvalidKey> {
    if name.len() > longest {
        return Err(InvalidKey::TooLong {
            name: name.to_owned(),
        });
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if let Some(found) = name.chars().find(|&c| !allowed(c)) {
        return Err(InvalidKey::Character {
            name: name.to_owned(),
            found,
        });
    }
    if !(name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric()))
    {
        return Err(InvalidKey::Edge {
            name: name.to_owned(),
        });
    }
    Ok(())
}

/// Why an annotation cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InsertError {
    /// The key is not one that [`key`] or [`hashed_key`] returns.
    #[error(transparent)]
    Key(#[from] InvalidKey),
    /// The key is in use. It identifies one allocation, so the value is not replaced.
    #[error("annotation {key:?} already exists")]
    KeyUsed {
        /// The whole key.
        key: String,
    },
    /// There are no devices. An empty value could not be parsed back.
    #[error("an annotation for CDI devices needs at least one device")]
    NoDevices,
    /// One of the devices is not a qualified name.
    #[error(transparent)]
    Device(#[from] InvalidName),
}

/// Adds one annotation that requests `devices`. On any error `annotations` stays unchanged.
pub fn insert<D: AsRef<str>>(
    annotations: &mut BTreeMap<String, String>,
    key: String,
    devices: impl IntoIterator<Item = D>,
) -> Result<(), InsertError> {
    let Some(name) = key.strip_prefix(PREFIX) else {
        return Err(InvalidKey::Prefix { key }.into());
    };
    check_key_name(name, MAX_KEY_NAME)?;
    if annotations.contains_key(&key) {
        return Err(InsertError::KeyUsed { key });
    }
    let mut value = String::new();
    for device in devices {
        if !value.is_empty() {
            value.push(',');
        }
        value.push_str(device.as_ref().parse::<QualifiedName>()?.as_str());
    }
    if value.is_empty() {
        return Err(InsertError::NoDevices);
    }
    annotations.insert(key, value);
    Ok(())
}

/// The devices that one annotation requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The annotation's whole key.
    pub key: String,
    /// In the order of the annotation's value.
    pub devices: Vec<QualifiedName>,
}

/// Why the devices requested by annotations cannot be determined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key:?}: {source}")]
pub struct InvalidAnnotation {
    /// The key of the annotation with the bad value.
    pub key: String,
    /// The error of the first bad name in it.
    pub source: InvalidName,
}

/// Finds all requests for CDI devices among a container's annotations, in the order of their keys.
///
/// Annotations without [`PREFIX`] are ignored. As in the reference implementation, the rest of the key is
/// not checked: runtimes accept `cdi.k8s.io/anything`.
pub fn parse<K: AsRef<str>, V: AsRef<str>>(
    annotations: impl IntoIterator<Item = (K, V)>,
) -> Result<Vec<Request>, InvalidAnnotation> {
    let mut requests = Vec::new();
    for (key, value) in annotations {
        let key = key.as_ref();
        if !key.starts_with(PREFIX) {
            continue;
        }
        let devices = value
            .as_ref()
            .split(',')
            .map(str::parse)
            .collect::<Result<_, _>>();
        let devices = devices.map_err(|source| InvalidAnnotation {
            key: key.to_owned(),
            source,
        })?;
        requests.push(Request {
            key: key.to_owned(),
            devices,
        });
    }
    requests.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(requests)
}

#[cfg(test)]
mod tests;
