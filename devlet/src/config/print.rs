//! Settings as a configuration file with an explanation of each key.

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
        "limits",
        "Limits on callers, plugins and drivers. Over a limit, a request is refused with an error that names it.",
    ),
    (
        "limits.connectionsPerUid",
        "Maximum connections of one user to kubelet.sock.",
    ),
    (
        "limits.callersPerUid",
        "Maximum connections of one user to devlet.sock, and maximum calls in flight on one of them.",
    ),
    (
        "limits.streamsPerConnection",
        "Maximum calls in flight on one connection to kubelet.sock.",
    ),
    (
        "limits.framesPerSecond",
        "HTTP/2 frames per second, and burst, that one process may send besides its calls. A connection without a call counts as 64.",
    ),
    (
        "limits.preface",
        "Maximum time for a peer to send the HTTP/2 preface, and on kubelet.sock its first call.",
    ),
    (
        "limits.drain",
        "Time that calls get to complete when devlet stops.",
    ),
    (
        "limits.requestBytes",
        "Maximum bytes of a request on devlet's API.",
    ),
    ("limits.manifestBytes", "Maximum bytes of a pod's manifest."),
    (
        "limits.registrationBytes",
        "Maximum bytes of a registration, and of an answer to GetInfo and GetDevicePluginOptions.",
    ),
    (
        "limits.listBytes",
        "Maximum bytes of a device list, and of an answer to GetPreferredAllocation.",
    ),
    (
        "limits.answerBytes",
        "Maximum bytes of an answer to Allocate. A kubelet accepts 4194304.",
    ),
    (
        "limits.registrationsPerMinute",
        "Registrations per minute, and burst, of one process; a tenth of that for one resource.",
    ),
    ("limits.plugins", "Maximum connected plugins."),
    (
        "limits.resourcesPerPlugin",
        "Maximum resources that one process may serve.",
    ),
    ("limits.devicesPerResource", "Maximum devices in a list."),
    ("limits.idBytes", "Maximum bytes of a device ID."),
    (
        "limits.listsPerSecond",
        "Device lists per second, and burst, of one plugin. Above that, only the newest list is used.",
    ),
    (
        "limits.entriesPerAnswer",
        "Maximum variables in an answer to Allocate; and as many mounts, device nodes, annotations and CDI names each.",
    ),
    (
        "limits.envBytes",
        "Maximum bytes of a variable or an annotation, name and value together.",
    ),
    (
        "limits.pathBytes",
        "Maximum bytes of a path or a CDI name in an answer to Allocate.",
    ),
    (
        "limits.claimBytes",
        "Approximate memory in bytes that a DRA driver may use per claim, for names of devices and CDI devices.",
    ),
    (
        "limits.bytesPerDriver",
        "Approximate memory in bytes that a DRA driver may use for all claims together.",
    ),
    (
        "limits.bytesPerPlugin",
        "Memory in bytes that the plugins of one process may use for lists; and as much for stored answers to Allocate.",
    ),
];

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
        if let Some((_, explanation)) = EXPLANATIONS.iter().find(|(known, _)| is_key && *known == path) {
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
                   deadlines: {allocateByResource: {a.b/*: 90s}, prepareByDriver: {a.b: 2m}}";
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
            let free = key == "access" || key == "deadlines" || key == "limits";
            let inner = value.as_object().into_iter().flatten().filter(|_| free);
            keys.extend(inner.map(|(inner, _)| format!("{key}.{inner}")));
        }
        let printed = text(&Settings::default(), false).unwrap();
        for key in &keys {
            let (_, explanation) = EXPLANATIONS.iter().find(|(known, _)| known == key).unwrap();
            assert!(
                printed.contains(explanation.lines().next().unwrap()),
                "{key}\n{printed}"
            );
        }
        assert_eq!(keys.len(), EXPLANATIONS.len());
    }
}
