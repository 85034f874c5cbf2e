//! The rights of users other than root. Only root can start processes as other users: without root, these tests are
//! skipped.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use devlet_testkit::{Device, Door, DriverEndpoint, DriverScript, Event, Plugin, Script, skip};
use tempfile::TempDir;

use crate::common::{Daemon, root, stderr, until};

const STRANGER: u32 = 54_321;
const GPU: &str = "acme.com/gpu";

/// Starts a node with sockets that the stranger's group may use. Returns `None` without root.
fn node(config: &str) -> Option<(TempDir, Daemon)> {
    let root = root();
    if std::fs::metadata(root.path()).unwrap().uid() != 0 {
        skip("only root can start processes as other users");
        return None;
    }
    let daemon = Daemon::configured(root.path(), config);
    for (directory, mode) in [
        ("", 0o755),
        ("device-plugins", 0o770),
        ("plugins_registry", 0o770),
    ] {
        std::fs::set_permissions(root.path().join(directory), Permissions::from_mode(mode)).unwrap();
    }
    Some((root, daemon))
}

/// Copies a program to a place that every user can reach.
fn reachable(root: &Path, program: &Path) -> PathBuf {
    let copy = root.join(format!("copy-of-{}", program.file_name().unwrap().display()));
    if !copy.exists() {
        // Another process copies: a child that another test forks meanwhile would inherit a file that we have open for
        // writing, and the system does not run such a file.
        let mut install = Command::new("install");
        assert!(
            install
                .args(["-m", "755"])
                .args([program, &copy])
                .status()
                .unwrap()
                .success()
        );
    }
    copy
}

/// Runs a command as the stranger.
fn as_stranger(daemon: &Daemon, gid: u32, args: &[&str]) -> Output {
    let program = reachable(&daemon.root, Path::new(env!("CARGO_BIN_EXE_devlet")));
    let mut command = Command::new(program);
    command
        .env("DEVLET_ROOT", &daemon.root)
        .args(args)
        .uid(STRANGER)
        .gid(gid)
        .output()
        .unwrap()
}

/// Starts a plugin as the stranger.
fn strangers(script: &Script) -> Plugin {
    let program = reachable(&script.root, &std::env::current_exe().unwrap());
    Plugin::start_as(STRANGER, 0, &program, script)
}

fn gpu(root: &TempDir) -> Script {
    Script::new(root.path(), GPU, vec![Device::new("gpu0")])
}

#[test]
fn users_in_the_group_of_the_socket_may_read_and_not_change() {
    let Some((root, daemon)) = node("wait: 1s") else {
        return;
    };
    let _plugin = Plugin::registered(&gpu(&root));
    daemon.until_capacity(GPU, 1);

    assert!(as_stranger(&daemon, 0, &["get", "resources"]).status.success());
    let admit = ["admit", "--name", "job1", "--limit", "acme.com/gpu=1"];
    let refused = as_stranger(&daemon, 0, &admit);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("user 54321 may not admit"),
        "{}",
        stderr(&refused)
    );
    daemon.admit("job1", "acme.com/gpu=1");
    assert_eq!(
        as_stranger(&daemon, 0, &["remove", "job1"]).status.code(),
        Some(1)
    );
    assert_eq!(
        as_stranger(&daemon, 0, &["options", "job1"]).status.code(),
        Some(1)
    );
}

#[test]
fn users_outside_the_group_cannot_open_the_socket() {
    let Some((_root, daemon)) = node("") else { return };
    let refused = as_stranger(&daemon, STRANGER, &["get", "resources"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        stderr(&refused).contains("you may not open"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn a_user_that_the_configuration_names_may_admit() {
    let Some((root, daemon)) = node("access: {admit: [54321]}") else {
        return;
    };
    let _plugin = Plugin::registered(&gpu(&root));
    daemon.until_capacity(GPU, 1);
    let admitted = as_stranger(
        &daemon,
        0,
        &["admit", "--name", "job1", "--limit", "acme.com/gpu=1"],
    );
    assert!(admitted.status.success(), "{}", stderr(&admitted));
}

#[test]
fn strangers_may_not_register_unless_the_configuration_names_them() {
    let Some((root, daemon)) = node("") else { return };
    // The daemon closes the connection without an answer.
    let mut refused = strangers(&gpu(&root));
    refused.refused();
    // A socket in the registry is asked for its name, and then refused because of its owner.
    let found = Script {
        door: Door::Registry,
        ..Script::new(root.path(), "acme.com/found", Vec::new())
    };
    let said = strangers(&found).refused();
    assert!(said.contains("user 54321 may not serve acme.com/found"), "{said}");
    let plugins = crate::common::items(&daemon.json(&["get", "plugins"]));
    let connected = plugins.iter().filter(|plugin| plugin["rejection"].is_null());
    assert_eq!(connected.count(), 0, "{plugins:?}");
}

#[test]
fn a_rule_is_for_the_resources_that_it_names() {
    let rule = "access: {register: [{resource: acme.com/*, uids: [54321]}]}";
    let Some((root, daemon)) = node(rule) else { return };
    let mut plugin = strangers(&gpu(&root));
    plugin.until(&Event::Registered);
    daemon.until_capacity(GPU, 1);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);

    let mut other = strangers(&Script::new(root.path(), "other.org/nic", vec![Device::new("a")]));

    let said = other.refused();
    assert!(said.contains("user 54321 may not serve other.org/nic"), "{said}");
}

#[test]
fn nobody_registers_the_socket_of_somebody_else() {
    let rule = "access: {register: [{resource: '*', uids: [54321]}]}\ndeadlines: {dial: 1s}";
    let Some((root, _daemon)) = node(rule) else { return };
    let _plugin = Plugin::registered(&gpu(&root));
    let claim = |socket: &str| Script {
        door: Door::Claim,
        socket: socket.into(),
        ..Script::new(root.path(), "acme.com/stolen", Vec::new())
    };
    let said = strangers(&claim("acme.com_gpu.sock")).refused();
    assert!(said.contains("is of user 0, not of user 54321"), "{said}");
    let plugins = root.path().join("device-plugins");
    std::os::unix::fs::symlink(plugins.join("acme.com_gpu.sock"), plugins.join("link.sock")).unwrap();
    let said = Plugin::start(&claim("link.sock")).refused();
    assert!(said.contains("is a symbolic link"), "{said}");
    for path in ["../x.sock", "/x.sock", "sub/x.sock", ""] {
        let said = Plugin::start(&Script {
            resource: "acme.com/stolen".into(),
            ..claim(path)
        })
        .refused();
        let refused = said.contains("is not the plain name of a socket") || said.contains("no socket at");
        assert!(refused, "{path}: {said}");
    }
}

#[test]
fn a_second_plugin_of_another_user_is_refused_unless_a_rule_names_it() {
    let rule = "access: {register: [{resource: acme.com/*, uids: [54321]}]}";
    let Some((root, daemon)) = node(rule) else { return };
    let mut first = strangers(&gpu(&root));
    first.until(&Event::Registered);
    daemon.until_capacity(GPU, 1);
    let second = Script {
        socket: "second.sock".into(),
        ..gpu(&root)
    };
    let said = Plugin::start(&second).refused();
    assert!(said.contains("54321"), "{said}");
    drop(first);
}

#[test]
fn a_rule_lets_users_serve_a_resource_side_by_side_only_if_it_says_so() {
    let rule = |more: &str| format!("access: {{register: [{{resource: acme.com/*, uids: [54321]{more}}}]}}");
    let second = |root: &TempDir| Script {
        socket: "second.sock".into(),
        ..Script::new(root.path(), GPU, vec![Device::new("gpu0"), Device::new("gpu1")])
    };
    let Some((root, daemon)) = node(&rule("")) else {
        return;
    };
    let _first = Plugin::registered(&gpu(&root));
    daemon.until_capacity(GPU, 1);
    let said = strangers(&second(&root)).refused();
    assert!(said.contains("share: true"), "{said}");

    let Some((root, daemon)) = node(&rule(", share: true")) else {
        return;
    };
    let _first = Plugin::registered(&gpu(&root));
    daemon.until_capacity(GPU, 1);
    let mut shares = strangers(&second(&root));
    shares.until(&Event::Registered);
    daemon.until_capacity(GPU, 2);
}

#[test]
fn without_root_everything_works_in_the_users_own_directory() {
    let Some((root, _daemon)) = node("") else { return };
    let home = root.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(STRANGER), Some(STRANGER)).unwrap();
    let program = reachable(root.path(), Path::new(env!("CARGO_BIN_EXE_devlet")));
    let devlet = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.env_clear().env("XDG_STATE_HOME", &home).args(args);
        command.uid(STRANGER).gid(STRANGER);
        command
    };
    let daemon = Daemon::started(devlet(&["serve"]), &home.join("devlet"));
    // Commands search there without DEVLET_ROOT.
    assert!(!daemon.banner.contains("DEVLET_ROOT"), "{}", daemon.banner);
    let plugin = Script::new(home.join("devlet"), GPU, vec![Device::new("gpu0")]);
    let test = reachable(root.path(), &std::env::current_exe().unwrap());
    let mut plugin = Plugin::start_as(STRANGER, STRANGER, &test, &plugin);
    plugin.until(&Event::Registered);

    let admitted = devlet(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"])
        .output()
        .unwrap();

    assert!(admitted.status.success(), "{}", stderr(&admitted));
    assert_eq!(plugin.called("Allocate"), ["gpu0"]);
    assert_eq!(daemon.stop(), Some(0));
}

/// Starts a driver as the stranger that serves on its registration socket.
fn strange_driver(script: &DriverScript) -> Plugin {
    let program = reachable(&script.root, &std::env::current_exe().unwrap());
    let script = DriverScript {
        instance: "strange".into(),
        ..script.clone()
    };
    Plugin::driver_as(STRANGER, 0, &program, &script)
}

#[test]
fn strangers_may_not_serve_drivers_unless_the_configuration_names_them() {
    let driver = |root: &TempDir, name: &str| DriverScript {
        endpoint: DriverEndpoint::Registration,
        ..DriverScript::new(root.path(), name)
    };
    let Some((root, _daemon)) = node("") else { return };
    let said = strange_driver(&driver(&root, "gpu.acme.com")).refused();
    assert!(said.contains("user 54321 may not serve gpu.acme.com"), "{said}");

    let rule = "access: {register: [{resource: gpu.acme.com, uids: [54321]}]}";
    let Some((root, _daemon)) = node(rule) else { return };
    let said = strange_driver(&driver(&root, "nic.acme.com")).refused();
    assert!(said.contains("user 54321 may not serve nic.acme.com"), "{said}");
    let mut allowed = strange_driver(&driver(&root, "gpu.acme.com"));
    allowed.until(&Event::Registered);
    // Root may not register beside it either.
    let said = Plugin::driver(&driver(&root, "gpu.acme.com")).refused();
    assert!(said.contains("54321") && said.contains("share: true"), "{said}");
    allowed.exit();
    // It may not register with the socket of another user.
    let roots = driver(&root, "other.acme.com");
    let mut other = Plugin::driver(&roots);
    other.until(&Event::Registered);
    let socket = roots.registration_socket().display().to_string();
    let thief = DriverScript {
        endpoint: DriverEndpoint::Named(socket),
        ..driver(&root, "gpu.acme.com")
    };
    let said = strange_driver(&thief).refused();
    assert!(said.contains("is of user 0, not of user 54321"), "{said}");
}

/// Fills the registry with dead sockets and directories of a user, many in one place and deeply nested.
fn litter(registry: &Path) {
    let give = |path: &Path| std::os::unix::fs::lchown(path, Some(STRANGER), Some(STRANGER)).unwrap();
    for number in 0..1_100 {
        let socket = registry.join(format!("0{number}.sock"));
        drop(UnixListener::bind(&socket).unwrap());
        give(&socket);
        let directory = registry.join(format!("0{number}"));
        std::fs::create_dir(&directory).unwrap();
        give(&directory);
    }
    let mut deep = registry.join("deep");
    for _ in 0..40 {
        std::fs::create_dir(&deep).unwrap();
        give(&deep);
        deep.push("deep");
    }
}

#[test]
fn many_sockets_and_directories_of_a_user_do_not_hide_a_driver_of_root() {
    let root = root();
    if std::fs::metadata(root.path()).unwrap().uid() != 0 {
        return skip("only root can start processes as other users");
    }
    let (daemon, log) = Daemon::logged(root.path(), &[]);
    let registry = root.path().join("plugins_registry");
    litter(&registry);
    let script = DriverScript::new(root.path(), "gpu.acme.com");
    let mut driver = Plugin::registered_driver(&script);
    // The watcher also finds it in a directory of root.
    let nested = registry.join("zzz");
    std::fs::create_dir(&nested).unwrap();
    driver.forget_events();
    std::fs::rename(script.registration_socket(), nested.join("gpu.sock")).unwrap();
    driver.until(&Event::Registered);

    let problems = until("the problems", || {
        let status = daemon.json(&["status"]);
        let problems = status["problems"].to_string();
        problems
            .contains("1100 sockets in plugins_registry are dead")
            .then_some(problems)
    });
    assert!(problems.contains("directories are skipped"), "{problems}");
    assert_eq!(daemon.stop(), Some(0));
    let lines = log.rest();
    assert!(
        lines.len() < 100,
        "{} lines, such as {:?}",
        lines.len(),
        lines.last()
    );
}
