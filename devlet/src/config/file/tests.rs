use std::time::Duration;

use super::*;

#[test]
fn every_key_reaches_the_node() {
    let text = "
rootDir: /srv/node
http: 127.0.0.1:7350
log: json
logLevel: debug
wait: 5m
deadlines: {dial: 1s, options: 2s, preferred: 3s, allocate: 4s, preStart: 5s, info: 6s, notify: 7s,
  allocateByResource: {acme.com/*: 90s}, prepare: 8s, prepareByDriver: {gpu.acme.com: 2m}}
foreign: [example.org/*]
access: {register: [{resource: acme.com/*, uids: [1001], share: true}], admit: [1002]}
onReboot: release
limits: {connectionsPerUid: 8, callersPerUid: 28, requestBytes: 12, manifestBytes: 13, listBytes: 15, answerBytes: 16,
  registrationsPerMinute: 17, plugins: 18, resourcesPerPlugin: 19, devicesPerResource: 20, listsPerSecond: 22,
  bytesPerPlugin: 26, claimBytes: 27, bytesPerDriver: 29}
";
    let settings = Settings::parse(text).unwrap();
    let config = settings.node("/srv/node".into());
    let seconds = Duration::from_secs;
    assert_eq!(settings.root_dir, Some("/srv/node".into()));
    assert_eq!(settings.http, Some("127.0.0.1:7350".parse().unwrap()));
    assert_eq!(
        (settings.log, settings.log_level),
        (LogFormat::Json, "debug".parse().ok())
    );
    assert_eq!(config.wait, seconds(300));
    assert_eq!(config.deadlines.allocate_of(&"acme.com/gpu".into()), seconds(90));
    let of = &config.deadlines;
    let all = [
        of.dial,
        of.options,
        of.preferred,
        of.allocate,
        of.pre_start,
        of.info,
        of.notify,
        of.prepare,
    ];
    assert_eq!(all, [1, 2, 3, 4, 5, 6, 7, 8].map(seconds));
    assert_eq!(of.prepare_of(&"gpu.acme.com".into()), seconds(120));
    assert_eq!(config.foreign, ["example.org/*"]);
    assert!(config.access.may_register(1001, "acme.com/gpu") && config.access.may_admit(1002));
    assert!(config.access.may_share(1001, "acme.com/gpu"));
    assert_eq!(config.on_reboot, OnReboot::Release);
    let limits = Limits {
        connections_per_uid: 8,
        callers_per_uid: 28,
        request_bytes: 12,
        manifest_bytes: 13,
        list_bytes: 15,
        answer_bytes: 16,
        registrations_per_minute: 17,
        plugins: 18,
        resources_per_plugin: 19,
        devices_per_resource: 20,
        lists_per_second: 22,
        claim_bytes: 27,
        bytes_per_driver: 29,
        bytes_per_plugin: 26,
    };
    assert_eq!(config.limits, limits);
}

fn refused(text: &str) -> String {
    Settings::parse(text).unwrap_err().to_string()
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_and_the_known_ones() {
    for (text, said) in [
        (
            "rootdir: /x",
            "1:1: unknown key rootdir; did you mean rootDir? Known keys are rootDir, http, log, logLevel, wait, \
             deadlines, foreign, access, onReboot, kubernetes, shield, hostDevices, limits",
        ),
        (
            "access: {registers: []}",
            "1:10: unknown key registers; did you mean register? Known keys are register, admit",
        ),
        (
            "access:\n  zebra: 1",
            "2:3: unknown key zebra; known keys are register, admit",
        ),
        (
            "limits:\n  plugin: 5",
            "2:3: unknown key plugin; did you mean plugins?",
        ),
    ] {
        assert_eq!(refused(text), said);
    }
}

#[test]
fn a_wrong_value_is_refused_with_its_position() {
    for (text, said) in [
        ("wait: soon", "1:7: \"soon\" is not a time; write it as"),
        ("log: json\nwait: -5", "2:7: \"-5\" is negative"),
        ("wait: 1.5", "1:7: \"1.5\" is not a time"),
        ("log: json\nwait: [5]", "2:7: expected a text"),
        ("access:\n  admit:\n  - {}", "3:5: expected a text"),
        ("onReboot: forget", "1:11: expected keep or release, found forget"),
        ("http: localhost", "1:7: \"localhost\" is not an address"),
        ("foreign: x", "1:10: expected a list"),
        ("access: x", "1:9: expected keys and values"),
        ("- wait: 5s", "1:1: expected keys and values"),
        ("limits: {plugins: abc}", "1:19: expected a whole number"),
        ("limits:\n  callersPerUid: -1", "2:18: expected a whole number"),
        ("limits: {listsPerSecond: 1.5}", "1:26: expected a whole number"),
        (
            "access: {register: [{uids: [1]}]}",
            "1:22: the key resource is missing",
        ),
        (
            "access: {register: [{resource: a, uids: [1], share: 7}]}",
            "1:53: expected true or false",
        ),
        ("wait: 5s\nwait: 6s", "2:1: the key wait is there twice"),
        ("wait: 5s\n---\nwait: 6s", "there are several documents"),
    ] {
        let problem = refused(text);
        assert!(problem.starts_with(said), "{text}: {problem}");
    }
}

#[test]
fn a_syntax_error_has_a_position_and_no_parser_terms() {
    for (text, said) in [
        ("foreign: [5s", "1:"),
        (
            "wait: 5s\n\tlog: json",
            "1:7: this value goes on in a line that begins with a tab; indent with spaces",
        ),
        ("wait: 5s\n log: json", "1:7: \"5s log\" is not a time"),
        ("log: json: x", "1:10: a colon is not allowed here"),
    ] {
        let problem = refused(text);
        assert!(problem.starts_with(said), "{text}: {problem}");
        for word in ["field", "scalar", "variant", "mapping", "u64", " at line"] {
            assert!(!problem.contains(word), "{text}: {problem}");
        }
    }
}

#[test]
fn an_error_names_the_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let name = file.path().display();
    for (text, said) in [
        (
            &b"wait: 5s\nlog: jsn\n"[..],
            "2:6: expected text or json, found jsn",
        ),
        (&b"wait: 5s\nlog: \xff"[..], "2:6: the file is not UTF-8"),
    ] {
        std::fs::write(file.path(), text).unwrap();
        let problem = Settings::read(file.path()).unwrap_err().to_string();
        assert_eq!(problem, format!("{name}:{said}"));
    }
}

#[test]
fn a_limit_or_deadline_of_zero_is_refused() {
    for (text, key) in [
        (
            "limits: {connectionsPerUid: 0}",
            "1:29: limits.connectionsPerUid: 0",
        ),
        ("deadlines: {allocate: 0}", "1:23: deadlines.allocate: 0"),
        (
            "deadlines: {prepareByDriver: {gpu.acme.com: 0s}}",
            "1:45: deadlines.prepareByDriver.gpu.acme.com: 0",
        ),
    ] {
        let problem = Settings::parse(text).unwrap_err().to_string();
        assert!(problem.starts_with(key), "{problem}");
    }
    assert!(Settings::parse("wait: 0s").is_ok());
}

#[test]
fn a_name_that_is_empty_is_refused_with_its_key() {
    for (text, key) in [
        (
            "deadlines: {allocateByResource: {'': 1s}}",
            "1:38: deadlines.allocateByResource: ",
        ),
        (
            "deadlines: {prepareByDriver: {' ': 1s}}",
            "1:36: deadlines.prepareByDriver: ",
        ),
        ("foreign: [a, '']", "1:14: foreign: "),
        (
            "access:\n  register:\n  - {resource: a, uids: [1]}\n  - {resource: '', uids: [1]}",
            "4:16: access.register.resource: ",
        ),
    ] {
        let problem = Settings::parse(text).unwrap_err().to_string();
        assert!(problem.starts_with(key), "{problem}");
    }
}

#[test]
fn a_plain_number_is_a_time_in_seconds() {
    let set = Settings::parse("wait: 5\ndeadlines: {dial: '7'}")
        .unwrap()
        .node("/".into());
    assert_eq!(set.wait, Duration::from_secs(5));
    assert_eq!(set.deadlines.dial, Duration::from_secs(7));
}

#[test]
fn sharing_is_off_by_default() {
    let text = "access: {register: [{resource: acme.com/*, uids: [1001]}]}";
    let access = Settings::parse(text).unwrap().node("/".into()).access;
    assert!(access.may_register(1001, "acme.com/gpu") && !access.may_share(1001, "acme.com/gpu"));
}

#[test]
fn a_user_name_is_refused_with_the_command_that_prints_its_uid() {
    for text in [
        "access: {admit: [alice]}",
        "access: {register: [{resource: acme.com/*, uids: [alice]}]}",
    ] {
        let problem = Settings::parse(text).unwrap_err().to_string();
        for part in ["alice", "`id -u alice`", "1:"] {
            assert!(problem.contains(part), "{problem}");
        }
    }
    for text in [
        "access: {admit: [-1]}",
        "access: {admit: [4294967296]}",
        "access: {admit: ['']}",
    ] {
        let problem = Settings::parse(text).unwrap_err().to_string();
        assert!(problem.contains("not the number of a user"), "{problem}");
    }
    let quoted = Settings::parse("access: {admit: ['1002']}").unwrap();
    assert!(quoted.node("/".into()).access.may_admit(1002));
}

#[test]
fn an_empty_file_sets_nothing() {
    for text in ["", "# nothing yet\n", "\n"] {
        assert_eq!(Settings::parse(text).unwrap(), Settings::default());
    }
}

#[test]
fn a_rule_of_host_devices_is_refused_with_its_place_and_the_nearest_key() {
    for (text, said) in [
        (
            "hostDevices:\n- {resource: a.b/c, match: {paht: /dev/x}}",
            "2:29: unknown key paht; did you mean path?",
        ),
        (
            "hostDevices:\n- {resource: tty, match: {path: /dev/x}}",
            "2:14: hostDevices.resource: \"tty\" is not the name of a resource",
        ),
        (
            "hostDevices:\n- {resource: a.b/c, match: {path: /etc/x}}",
            "2:35: hostDevices: rule 1: match.path: /etc/x is not below /dev",
        ),
        (
            "hostDevices: [{resource: a.b/c, match: {usb: {vendor: xyz}}}]",
            "1:55: \"xyz\" is not an id of up to 4 hexadecimal digits",
        ),
        (
            "hostDevices: [{resource: a.b/c, match: {path: '/dev/[a'}}]",
            "1:47: \"/dev/[a\" is not a pattern",
        ),
        (
            "hostDevices: [{resource: a.b/c, match: {path: /dev/x}, groupBy: usb}]",
            "1:65: expected usbDevice or device or rule, found usb",
        ),
    ] {
        let problem = refused(text);
        assert!(problem.starts_with(said), "{text}: {problem}");
    }
}
