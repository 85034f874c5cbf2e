//! Settings as a configuration file with an explanation of each key.

use devlet_agent::limits::Limit;

use super::file::Settings;

/// The comment above each key.
const EXPLANATIONS: &[(&str, &str)] = &[
    (
        "rootDir",
        "Directory of the plugin sockets and of the state, in the kubelet's layout.\n\
         By default /var/lib/kubelet for root, otherwise devlet below the user's state directory. $DEVLET_ROOT overrides it.",
    ),
    (
        "http",
        "Address of /healthz, /readyz and /metrics, such as localhost:7359, or :7359 for all interfaces; off by default.",
    ),
    ("log", "Format of the log on standard error: text or json."),
    (
        "logLevel",
        "error, warn, info, debug, trace or off; or by module: info,devlet_agent=debug. By default info.",
    ),
    (
        "wait",
        "Maximum time of an admission, including the wait for plugins that are not connected; callers may override it.",
    ),
    ("deadlines", "Timeouts of calls to plugins and drivers."),
    ("deadlines.dial", "Connecting to a plugin."),
    ("deadlines.options", "GetDevicePluginOptions."),
    (
        "deadlines.preferred",
        "GetPreferredAllocation; after the timeout devlet chooses the devices.",
    ),
    ("deadlines.allocate", "Allocate."),
    (
        "deadlines.allocateByResource",
        "Allocate of some resources: {acme.com/fpga: 5m, slow.example.org/*: 90s}.",
    ),
    ("deadlines.preStart", "PreStartContainer."),
    (
        "deadlines.prepare",
        "NodePrepareResources and NodeUnprepareResources of DRA drivers.",
    ),
    (
        "deadlines.prepareByDriver",
        "Both calls of some drivers: {gpu.acme.com: 5m}.",
    ),
    ("deadlines.info", "GetInfo of a plugin in plugins_registry."),
    (
        "deadlines.notify",
        "NotifyRegistrationStatus of a plugin in plugins_registry.",
    ),
    (
        "foreign",
        "Resources that other software serves: pods may request them, and devlet ignores them. [example.org/*]",
    ),
    (
        "access",
        "Permissions of users other than root and the user that devlet runs as.",
    ),
    (
        "access.register",
        "Users that may serve resources and drivers: [{resource: acme.com/*, uids: [1001]}]. A second plugin for a resource\n\
         is refused if another user runs it, even if that is root; share: true in a rule for that user allows it.",
    ),
    ("access.admit", "Users that may admit and remove pods: [1002]."),
    (
        "onReboot",
        "Treatment of pods admitted over devlet's API when the machine reboots: keep or release.",
    ),
    (
        "kubernetes",
        "The API server of a cluster, for which devlet is the device part of a node; off by default.",
    ),
    (
        "kubernetes.kubeconfig",
        "Kubeconfig file with the address and the credentials.",
    ),
    (
        "kubernetes.inCluster",
        "Use the ServiceAccount of the pod that devlet runs in, instead of a kubeconfig.",
    ),
    (
        "kubernetes.nodeName",
        "Name of the Node object; by default the host name in lower case.",
    ),
    (
        "kubernetes.mode",
        "agent: pods of the node are admitted and removed by themselves. observe: claims are looked up for admissions over\n\
         devlet's API, and nothing is written. By default agent.",
    ),
    (
        "kubernetes.finalDelete",
        "Delete a Pod object that is being deleted once its containers have ended and its claims are unprepared. Only for\n\
         nodes where no other program does it, and only pods with devices or claims.",
    ),
    (
        "kubernetes.abandonAfter",
        "Time after which removals stop waiting for a DRA driver that is away: {gpu.acme.com: 10m}.",
    ),
    (
        "kubernetes.besideKubelet",
        "A kubelet owns the Node and the statuses of containers. Capacity and allocatable are both the number of healthy\n\
         devices, and the health of devices is the pod condition devlet.dev/DevicesHealthy.",
    ),
    (
        "kubernetes.heartbeat",
        "Renew the lease and the Ready condition of the Node, and create it if it does not exist. For nodes without a\n\
         kubelet.",
    ),
    (
        "kubernetes.slices",
        "Deletion of ResourceSlices. wipeAtStart: absent, for drivers that have not registered 30 s after the start, or\n\
         all, for all drivers at once, as a kubelet does.",
    ),
    (
        "kubernetes.onUnhealthy",
        "Removal of pods with an unhealthy device of a resource or DRA driver: {acme.com/gpu: evict}, or delete.",
    ),
    (
        "shield",
        "A kubelet of this node, between which and device plugins devlet stands.",
    ),
    ("shield.enabled", "true as with --shield."),
    (
        "shield.kubeletDir",
        "Root directory of the kubelet. devlet needs another one.",
    ),
    (
        "shield.staticPodDir",
        "Directory of the kubelet's static pods, which wait at its start until it knows the devices.",
    ),
    (
        "shield.cdiDir",
        "Directory where devlet writes CDI specs; the container runtime must read it.",
    ),
    (
        "shield.permanentCdiDir",
        "Directory for the CDI specs that containers need after `devlet shield leave`, also after a reboot.",
    ),
    (
        "shield.away",
        "Time during which the devices of a plugin that is away stay advertised; then they are unhealthy.",
    ),
    (
        "shield.runtimeEndpoint",
        "Socket of the container runtime, to check that CDI is on; by default that of containerd or CRI-O.",
    ),
    (
        "shield.requireRuntime",
        "true to register with the kubelet only after the runtime has told that CDI is on.",
    ),
    (
        "hostDevices",
        "Device nodes of this host that devlet offers without a plugin of their own; see docs/host-devices.md.\n\
         [{resource: host.devlet.dev/kvm, match: {path: /dev/kvm}, share: 100}]. `devlet discover` prints such lines.",
    ),
    (
        "limits",
        "Limits on callers, plugins and drivers. Over a limit, a request is refused with an error that names it.",
    ),
];

/// Returns the comment above a key.
fn explanation(path: &str) -> Option<String> {
    if let Some(name) = path.strip_prefix("limits.") {
        let limit = Limit::ALL.iter().find(|limit| limit.name() == name)?;
        let (subject, effect) = limit.documentation();
        return Some(format!("Limits {subject}. Over the limit: {effect}."));
    }
    let known = EXPLANATIONS.iter().find(|(known, _)| *known == path)?;
    Some(known.1.to_owned())
}

/// Returns the settings as YAML, `plain` or with explanations.
pub(super) fn text(settings: &Settings, plain: bool) -> anyhow::Result<String> {
    let yaml = serde_saphyr::to_string(settings)?;
    if plain {
        return Ok(yaml);
    }
    let mut text = String::new();
    let mut above = "";
    for line in yaml.lines() {
        let (indent, rest) = line.split_at(line.len() - line.trim_start().len());
        let key = rest.split(':').next().unwrap_or_default();
        let path = if indent.is_empty() {
            above = key;
            key.to_owned()
        } else {
            format!("{above}.{key}")
        };
        let is_key = indent.len() <= 2 && !rest.starts_with('-');
        if let Some(explanation) = explanation(&path).filter(|_| is_key) {
            if indent.is_empty() && !text.is_empty() {
                text.push('\n');
            }
            for comment in explanation.lines() {
                text.push_str(&format!("{indent}# {comment}\n"));
            }
        }
        text.push_str(line);
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_settings_can_be_read_again() {
        let set = "rootDir: /x\nhttp: 127.0.0.1:1\nforeign: [a.b/c]\naccess: {register: [{resource: a/*, uids: [1]}, {resource: b/*, uids: [2], share: true}]}\n\
                   deadlines: {allocateByResource: {a.b/*: 90s}, prepareByDriver: {a.b: 2m}}\n\
                   hostDevices: [{resource: a.b/c, match: {path: '/dev/tty*', usb: {vendor: 10c4, product: 6001}, udev: {ID_X: '*'}}, \
                   groupBy: usbDevice, idFrom: port, with: [/dev/null], share: 3, as: /dev/x, permissions: r}]\n\
                   kubernetes: {kubeconfig: /k, nodeName: n1, mode: observe, abandonAfter: {a.b: 10m}}";
        for settings in [Settings::default(), Settings::parse(set).unwrap()] {
            for plain in [true, false] {
                let printed = text(&settings, plain).unwrap();
                assert_eq!(Settings::parse(&printed).unwrap(), settings, "{printed}");
            }
        }
    }

    #[test]
    fn every_key_is_explained() {
        let value = serde_json::to_value(Settings::default()).unwrap();
        let mut keys = Vec::new();
        for (key, value) in value.as_object().unwrap() {
            keys.push(key.clone());
            let free = ["access", "deadlines", "kubernetes", "limits", "shield"].contains(&key.as_str());
            let inner = value.as_object().into_iter().flatten().filter(|_| free);
            keys.extend(inner.map(|(inner, _)| format!("{key}.{inner}")));
        }
        let printed = text(&Settings::default(), false).unwrap();
        for key in &keys {
            let explanation = explanation(key).unwrap();
            assert!(
                printed.contains(explanation.lines().next().unwrap()),
                "{key}\n{printed}"
            );
        }
        assert_eq!(keys.len(), EXPLANATIONS.len() + Limit::ALL.len());
    }
}
