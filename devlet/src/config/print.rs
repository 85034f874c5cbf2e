//! Settings as a file, with what each key means.

use super::file::Settings;

/// What stands above each key.
const MEANINGS: &[(&str, &str)] = &[
    (
        "rootDir",
        "Where plugins look for the node and it keeps its state: the kubelet's layout.\n\
         By default /var/lib/kubelet for root, otherwise devlet below the user's state directory. $DEVLET_ROOT overrides it.",
    ),
    (
        "http",
        "Where /healthz, /readyz and /metrics are served, such as localhost:7359, or :7359 for all interfaces; by default nowhere.",
    ),
    ("log", "text or json, on standard error."),
    (
        "logLevel",
        "error, warn, info, debug, trace or off; or by module: info,devlet_agent=debug. By default info.",
    ),
    (
        "wait",
        "How long an admission may take, plugins that are not there yet included, unless its caller says otherwise.",
    ),
    ("deadlines", "How long plugins may take."),
    ("deadlines.dial", "To accept a connection."),
    ("deadlines.options", "To say what they want to be asked."),
    (
        "deadlines.preferred",
        "To say which devices they would choose; then devlet chooses.",
    ),
    ("deadlines.allocate", "To hand out devices."),
    (
        "deadlines.allocateByResource",
        "The same for some resources: {acme.com/fpga: 5m, slow.example.org/*: 90s}.",
    ),
    (
        "deadlines.preStart",
        "To prepare devices before a container starts.",
    ),
    (
        "deadlines.prepare",
        "Of DRA drivers: to prepare claims, or to undo that.",
    ),
    (
        "deadlines.prepareByDriver",
        "The same for some drivers: {gpu.acme.com: 5m}.",
    ),
    (
        "deadlines.info",
        "To say who they are, if found in plugins_registry.",
    ),
    ("deadlines.notify", "To hear whether they were taken in."),
    (
        "foreign",
        "Resources that others serve: pods may ask for them, and devlet looks away. [example.org/*]",
    ),
    (
        "access",
        "Who may do what, besides root and the user that devlet runs as.",
    ),
    (
        "access.register",
        "Who may serve resources and drivers: [{resource: acme.com/*, uids: [1001]}]. A second plugin for one, of another\n\
         user than the first, is refused, even of root; share: true in a rule for that user allows it.",
    ),
    ("access.admit", "Who may admit and remove pods: [1002]."),
    (
        "onReboot",
        "What becomes of pods admitted over devlet's API when the machine reboots: keep or release.",
    ),
    (
        "limits",
        "How much is put up with. What is over a limit is refused, with an error that names it.",
    ),
    (
        "limits.connectionsPerUid",
        "Connections that one user may have at a time on kubelet.sock.",
    ),
    (
        "limits.callersPerUid",
        "Connections that one user may have at a time on devlet.sock, and calls on one of them.",
    ),
    (
        "limits.streamsPerConnection",
        "Calls that one connection to kubelet.sock may have under way.",
    ),
    (
        "limits.preface",
        "How long a peer may take to say hello, and on kubelet.sock to make its first call.",
    ),
    ("limits.drain", "How long calls may go on after a stop."),
    ("limits.requestBytes", "Bytes of a request on devlet's own API."),
    ("limits.manifestBytes", "Bytes of a pod's manifest."),
    (
        "limits.registrationBytes",
        "Bytes of what a plugin says about itself: when it registers, and when asked who it is and what it wants.",
    ),
    (
        "limits.listBytes",
        "Bytes of a list of devices, and of advice which to choose.",
    ),
    (
        "limits.answerBytes",
        "Bytes of an answer to Allocate. A kubelet takes 4194304.",
    ),
    (
        "limits.registrationsPerMinute",
        "Registrations of one process: so many at once, and as many a minute; of one resource a tenth of that.",
    ),
    ("limits.plugins", "Plugins that are connected at a time."),
    (
        "limits.resourcesPerPlugin",
        "Resources that one process may serve.",
    ),
    ("limits.devicesPerResource", "Devices in a list."),
    ("limits.idBytes", "Bytes of a device's id."),
    (
        "limits.listsPerSecond",
        "Lists of one plugin: so many at once, and as many a second. Of more only the newest counts.",
    ),
    (
        "limits.entriesPerAnswer",
        "Variables, mounts, device nodes, annotations and CDI names in an answer to Allocate, of each so many.",
    ),
    (
        "limits.envBytes",
        "Bytes of a variable or an annotation, name and value.",
    ),
    (
        "limits.pathBytes",
        "Bytes of a path or a CDI name in an answer to Allocate.",
    ),
    (
        "limits.claimBytes",
        "Memory that a DRA driver can fill for a claim, roughly: with names of devices and CDI devices.",
    ),
    ("limits.bytesPerDriver", "The same for all claims together."),
    (
        "limits.bytesPerPlugin",
        "Memory that the plugins of one process can fill: with lists, and as much with the answers that pods keep.",
    ),
];

/// The settings as YAML, `plain` or with explanations.
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
        if let Some((_, meaning)) = MEANINGS.iter().find(|(known, _)| is_key && *known == path) {
            if indent.is_empty() && !text.is_empty() {
                text.push('\n');
            }
            for explained in meaning.lines() {
                text.push_str(&format!("{indent}# {explained}\n"));
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
    fn what_is_printed_can_be_read_again() {
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
            let (_, meaning) = MEANINGS.iter().find(|(known, _)| known == key).unwrap();
            assert!(
                printed.contains(meaning.lines().next().unwrap()),
                "{key}\n{printed}"
            );
        }
        assert_eq!(keys.len(), MEANINGS.len());
    }
}
