//! Applies container edits to an OCI runtime spec.
//!
//! The OCI spec is plain JSON. Only the fields that edits touch are read; other fields, known or not, stay
//! unchanged. The edits are applied to a copy that replaces the original at the end, so an error leaves the
//! caller's spec unchanged.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::host::{HostNode, LookupError, NodeType};
use crate::spec::{ContainerEdits, DeviceNode, Hook, IntelRdt, Mount};

/// Why edits could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The edits omit type or numbers of a device node, and the host does not have the node.
    #[error("host device {host_path:?}: {source}")]
    HostDevice {
        /// The node's path on the host.
        host_path: String,
        /// Why the lookup on the host failed.
        source: LookupError,
    },
    /// The type in the edits differs from the type of the node on the host.
    #[error("host device {host_path:?} has type {}, but {stated:?} is stated", .found.as_str())]
    NodeType {
        /// The node's path on the host.
        host_path: String,
        /// The type in the edits.
        stated: String,
        /// The type on the host.
        found: NodeType,
    },
    /// A hook for an unknown stage.
    #[error("hook name {name:?} is not one of {}", Hook::NAMES.join(", "))]
    HookName {
        /// The name as given.
        name: String,
    },
    /// A field of the OCI spec has the wrong type.
    #[error("{field} of the OCI spec is not {expected}")]
    OciSpec {
        /// The path of the field, such as `linux.devices`.
        field: String,
        /// The expected type.
        expected: &'static str,
    },
}

impl ContainerEdits {
    /// Applies the edits to an OCI runtime spec. On any error the spec stays unchanged.
    ///
    /// Omitted properties of device nodes are looked up on this host.
    pub fn apply(&self, oci: &mut Value) -> Result<(), ApplyError> {
        self.apply_with(oci, HostNode::lookup)
    }

    /// Like [`ContainerEdits::apply`], with another source of host device nodes.
    pub fn apply_with(
        &self,
        oci: &mut Value,
        lookup: impl Fn(&Path) -> Result<HostNode, LookupError>,
    ) -> Result<(), ApplyError> {
        let mut edited = oci.clone();
        if !edited.is_object() {
            return Err(ApplyError::OciSpec {
                field: "the root".to_owned(),
                expected: "an object",
            });
        }
        set_env(&mut edited, &self.env)?;
        for node in &self.device_nodes {
            add_device(&mut edited, node, &lookup)?;
        }
        for device in &self.net_devices {
            let devices = object(&mut edited, "linux.netDevices")?;
            devices.insert(device.host_interface_name.clone(), json!({ "name": device.name }));
        }
        add_mounts(&mut edited, &self.mounts)?;
        for hook in &self.hooks {
            add_hook(&mut edited, hook)?;
        }
        if let Some(rdt) = &self.intel_rdt {
            object(&mut edited, "linux")?.insert("intelRdt".to_owned(), rdt_value(rdt));
        }
        for &gid in self.additional_gids.iter().filter(|&&gid| gid != 0) {
            let gids = list(&mut edited, "process.user.additionalGids")?;
            if !gids.contains(&json!(gid)) {
                gids.push(json!(gid));
            }
        }
        *oci = edited;
        Ok(())
    }
}

fn set_env(oci: &mut Value, variables: &[String]) -> Result<(), ApplyError> {
    if variables.is_empty() {
        return Ok(());
    }
    let env = list(oci, "process.env")?;
    let name_of = |variable: &str| {
        variable
            .split_once('=')
            .map_or(variable, |(name, _)| name)
            .to_owned()
    };
    let mut places: HashMap<String, usize> = HashMap::new();
    for (place, variable) in env.iter().enumerate() {
        if let Some(variable) = variable.as_str() {
            places.insert(name_of(variable), place);
        }
    }
    for variable in variables {
        match places
            .get(&name_of(variable))
            .and_then(|&place| env.get_mut(place))
        {
            Some(former) => *former = json!(variable),
            None => {
                places.insert(name_of(variable), env.len());
                env.push(json!(variable));
            }
        }
    }
    Ok(())
}

fn add_device(
    oci: &mut Value,
    node: &DeviceNode,
    lookup: impl Fn(&Path) -> Result<HostNode, LookupError>,
) -> Result<(), ApplyError> {
    let node = &complete(node, lookup)?;
    let process_id = |key: &str| {
        let id = oci.pointer("/process/user")?.get(key)?.as_u64();
        id.filter(|&id| id > 0)
    };
    let uid = node.uid.map(u64::from).or_else(|| process_id("uid"));
    let gid = node.gid.map(u64::from).or_else(|| process_id("gid"));

    let mut device = Map::new();
    device.insert("path".to_owned(), json!(node.path));
    device.insert("type".to_owned(), json!(node.node_type));
    device.insert("major".to_owned(), json!(node.major));
    device.insert("minor".to_owned(), json!(node.minor));
    let optional = [
        ("fileMode", node.file_mode.map(u64::from)),
        ("uid", uid),
        ("gid", gid),
    ];
    for (key, number) in optional {
        if let Some(number) = number {
            device.insert(key.to_owned(), json!(number));
        }
    }
    let device = Value::Object(device);

    let devices = list(oci, "linux.devices")?;
    let has_path = |device: &Value| text_of(device, "path") == node.path;
    if let Some(place) = devices.iter().position(has_path) {
        devices.remove(place);
    }
    match devices.iter_mut().find(|device| has_path(device)) {
        Some(second) => *second = device,
        None => devices.push(device),
    }

    if matches!(&*node.node_type, "b" | "c") {
        let mut rule = json!({
            "allow": true, "type": node.node_type, "major": node.major, "minor": node.minor,
        });
        let access = match &*node.permissions {
            "" => "rwm",
            "none" => "",
            permissions => permissions,
        };
        if !access.is_empty() {
            rule["access"] = json!(access);
        }
        list(oci, "linux.resources.devices")?.push(rule);
    }
    Ok(())
}

/// Fills in omitted properties of a device node from the host.
///
/// With a type and a major number (a fifo needs none) the host need not have the node; if it does, only the file
/// mode is copied from it. Otherwise the host must have the node, with the type of the edits if they give one.
fn complete(
    node: &DeviceNode,
    lookup: impl Fn(&Path) -> Result<HostNode, LookupError>,
) -> Result<DeviceNode, ApplyError> {
    let mut node = node.clone();
    if node.host_path.is_empty() {
        node.host_path.clone_from(&node.path);
    }
    let enough = match &*node.node_type {
        "" => false,
        "p" => true,
        _ => node.major != 0,
    };
    let found = match lookup(Path::new(&node.host_path)) {
        Ok(found) => found,
        Err(_) if enough => return Ok(node),
        Err(source) => {
            return Err(ApplyError::HostDevice {
                host_path: node.host_path,
                source,
            });
        }
    };
    node.file_mode.get_or_insert(found.mode);
    if enough {
        return Ok(node);
    }
    let found_type = found.node_type.as_str();
    if node.node_type.is_empty() {
        found_type.clone_into(&mut node.node_type);
    }
    if node.node_type != found_type {
        let (host_path, stated) = (node.host_path, node.node_type);
        return Err(ApplyError::NodeType {
            host_path,
            stated,
            found: found.node_type,
        });
    }
    if found.node_type != NodeType::Fifo && node.major == 0 {
        node.major = found.major.into();
        node.minor = found.minor.into();
    }
    Ok(node)
}

/// Each mount replaces one with the same destination, but at the end of the list. Then all mounts are sorted by
/// depth, so that no mount hides an earlier one.
fn add_mounts(oci: &mut Value, new: &[Mount]) -> Result<(), ApplyError> {
    if new.is_empty() {
        return Ok(());
    }
    let namespaces = oci.pointer("/linux/namespaces").and_then(Value::as_array);
    let user_namespace = namespaces
        .into_iter()
        .flatten()
        .any(|one| text_of(one, "type") == "user");
    let mounts = list(oci, "mounts")?;
    for mount in new {
        let destination = &*mount.container_path;
        if let Some(place) = mounts
            .iter()
            .position(|mount| text_of(mount, "destination") == destination)
        {
            mounts.remove(place);
        }
        let mut options: Vec<&str> = mount.options.iter().map(String::as_str).collect();
        if user_namespace {
            options.extend(id_map_option(&mount.mount_type, &options));
        }
        let mut value = json!({ "destination": destination });
        if !mount.mount_type.is_empty() {
            value["type"] = json!(mount.mount_type);
        }
        if !mount.host_path.is_empty() {
            value["source"] = json!(mount.host_path);
        }
        if !options.is_empty() {
            value["options"] = json!(options);
        }
        mounts.push(value);
    }
    mounts.sort_by_cached_key(|mount| depth(text_of(mount, "destination")));
    Ok(())
}

/// Returns the option that maps IDs. Without it, a bind mount in a user namespace shows the owners of the host.
fn id_map_option(mount_type: &str, options: &[&str]) -> Option<&'static str> {
    if options.iter().any(|option| matches!(*option, "idmap" | "ridmap")) {
        return None;
    }
    let last = options
        .iter()
        .rfind(|option| matches!(**option, "bind" | "rbind"));
    match last {
        Some(&"rbind") => Some("ridmap"),
        Some(_) => Some("idmap"),
        None => (mount_type == "bind").then_some("idmap"),
    }
}

/// Returns the number of slashes in a path after `.`, `..` and repeated slashes are resolved.
fn depth(path: &str) -> usize {
    let absolute = path.starts_with('/');
    // The number of parts, and the number of leading `..` parts of a relative path.
    let (mut parts, mut upward) = (0usize, 0usize);
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts > upward => parts -= 1,
            ".." if absolute => {}
            ".." => {
                parts += 1;
                upward += 1;
            }
            _ => parts += 1,
        }
    }
    if absolute {
        parts.max(1)
    } else {
        parts.saturating_sub(1)
    }
}

fn add_hook(oci: &mut Value, hook: &Hook) -> Result<(), ApplyError> {
    if !Hook::NAMES.contains(&&*hook.hook_name) {
        return Err(ApplyError::HookName {
            name: hook.hook_name.clone(),
        });
    }
    let mut value = json!({ "path": hook.path });
    if !hook.args.is_empty() {
        value["args"] = json!(hook.args);
    }
    if !hook.env.is_empty() {
        value["env"] = json!(hook.env);
    }
    if let Some(timeout) = hook.timeout {
        value["timeout"] = json!(timeout);
    }
    list(oci, &format!("hooks.{}", hook.hook_name))?.push(value);
    Ok(())
}

fn rdt_value(rdt: &IntelRdt) -> Value {
    let mut value = json!({});
    for (key, text) in [
        ("closID", &rdt.clos_id),
        ("l3CacheSchema", &rdt.l3_cache_schema),
        ("memBwSchema", &rdt.mem_bw_schema),
    ] {
        if !text.is_empty() {
            value[key] = json!(text);
        }
    }
    if let Some(schemata) = rdt.schemata.as_ref().filter(|schemata| !schemata.is_empty()) {
        value["schemata"] = json!(schemata);
    }
    if rdt.enable_monitoring {
        value["enableMonitoring"] = json!(true);
    }
    value
}

fn text_of<'v>(object: &'v Value, key: &str) -> &'v str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// Returns the object at a path like `linux.resources`. Creates it if it is absent or null.
fn object<'v>(oci: &'v mut Value, path: &str) -> Result<&'v mut Map<String, Value>, ApplyError> {
    let mut value = oci;
    let mut end = 0;
    for key in path.split('.') {
        let Value::Object(fields) = value else {
            return Err(ApplyError::OciSpec {
                field: path[..end].to_owned(),
                expected: "an object",
            });
        };
        end = if end == 0 { key.len() } else { end + 1 + key.len() };
        value = fields.entry(key).or_insert(Value::Null);
        if value.is_null() {
            *value = json!({});
        }
    }
    let error = || ApplyError::OciSpec {
        field: path.to_owned(),
        expected: "an object",
    };
    value.as_object_mut().ok_or_else(error)
}

/// Returns the list at a path like `linux.devices`. Creates it if it is absent or null.
fn list<'v>(oci: &'v mut Value, path: &str) -> Result<&'v mut Vec<Value>, ApplyError> {
    let error = || ApplyError::OciSpec {
        field: path.to_owned(),
        expected: "a list",
    };
    let value = match path.rsplit_once('.') {
        Some((parent, key)) => object(oci, parent)?.entry(key).or_insert(Value::Null),
        None => oci
            .as_object_mut()
            .ok_or_else(error)?
            .entry(path)
            .or_insert(Value::Null),
    };
    if value.is_null() {
        *value = json!([]);
    }
    value.as_array_mut().ok_or_else(error)
}

#[cfg(test)]
mod tests;
