//! Peers with another protocol or without a word, and sockets and directories that are replaced. Pods of another plugin are
//! not affected.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};

use devlet_testkit::{
    Babbler, Door, Event, PATIENCE, Plugin, Script, nonsense_of_a_client, nonsense_of_a_server,
};

use crate::hostile::{BAD, GOOD, IMPATIENT, Instead, Neighbourhood, throw};

#[test]
fn nonsense_on_our_sockets_does_no_harm() {
    let mut neighbours = Neighbourhood::new();
    for socket in neighbours.sockets() {
        let mut open = Vec::new();
        for (name, bytes) in nonsense_of_a_client() {
            open.push(throw(&socket, &bytes));
            neighbours.one_pod_goes_on();
            assert!(neighbours.usage().mib < 512, "{name}: {:?}", neighbours.usage());
        }
    }
    neighbours.unharmed();
}

#[test]
fn nonsense_from_a_plugin_is_refused_in_time() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    for (name, bytes) in nonsense_of_a_server() {
        let socket = neighbours.root().join("device-plugins/bad.sock");
        let _babbler = Babbler::at(&socket, bytes);
        let mut plugin = Plugin::start(&Script {
            door: Door::Claim,
            socket: "bad.sock".into(),
            ..neighbours.bad(1)
        });
        neighbours.one_pod_goes_on();
        let said = plugin.refused();
        assert!(said.contains("device plugin"), "{name}: {said}");
    }
    assert!(neighbours.resource(BAD).is_none());
    neighbours.unharmed();
}

#[test]
fn nonsense_in_the_registry_is_left_alone() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let babblers: Vec<Babbler> = nonsense_of_a_server()
        .into_iter()
        .enumerate()
        .map(|(number, (_, bytes))| {
            let name = format!("plugins_registry/{number}.sock");
            Babbler::at(&neighbours.root().join(name), bytes)
        })
        .collect();
    for babbler in &babblers {
        babbler.until_heard();
        neighbours.one_pod_goes_on();
    }
    drop(babblers);
    neighbours.unharmed();
}

/// Waits for the end of a connection, and returns the bytes before it.
fn until_end(mut stream: &UnixStream) -> Vec<u8> {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut heard = Vec::new();
    // A reset is an end too.
    let ended = stream.read_to_end(&mut heard);
    assert!(
        !matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock),
        "the connection stays open"
    );
    heard
}

#[test]
fn connections_that_say_nothing_are_closed() {
    let mut neighbours = Neighbourhood::new();
    let connect = |socket: &std::path::PathBuf| UnixStream::connect(socket).unwrap();
    let sockets = neighbours.sockets();
    let silent: Vec<UnixStream> = sockets.iter().cycle().take(200).map(connect).collect();
    neighbours.pods_go_on();
    silent.iter().for_each(|stream| _ = until_end(stream));
    neighbours.unharmed();
}

#[test]
fn a_caller_that_sends_a_byte_at_a_time_is_closed() {
    let mut neighbours = Neighbourhood::new();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    // Settings, and the head of a request with 64 bytes.
    let head = [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 64, 1, 4, 0, 0, 0, 1];
    let [kubelet, own] = neighbours.sockets();
    let request = [&head[..], &[0; 63]].concat();
    let mut slow = [
        (&kubelet, &b""[..], &preface[..]),
        (&own, b"", preface),
        (&kubelet, preface, &request),
    ]
    .map(|(socket, at_once, slowly)| {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(at_once).unwrap();
        (stream, slowly)
    });
    // Each connection still has bytes to send when its deadline is over.
    let steps = slow.iter().map(|(_, slowly)| slowly.len()).max().unwrap();
    for step in 0..steps - 1 {
        for (stream, slowly) in &mut slow {
            if let Some(byte) = slowly.get(step).filter(|_| step + 1 < slowly.len()) {
                let _ = stream.write_all(&[*byte]);
            }
        }
        neighbours.one_pod_goes_on();
    }
    slow.iter().for_each(|(stream, _)| _ = until_end(stream));
    neighbours.unharmed();
}

#[test]
fn a_plugin_whose_socket_becomes_something_else_is_lost_and_nothing_else_is_opened() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let socket = neighbours.root().join("device-plugins/evil.example_device.sock");
    let elsewhere = neighbours.root().join("elsewhere.sock");
    let _elsewhere = UnixListener::bind(&elsewhere).unwrap();
    for kind in Instead::ALL {
        let mut plugin = Plugin::registered(&neighbours.bad(1));
        neighbours.until_capacity(BAD, 1);
        std::fs::remove_file(&socket).unwrap();
        kind.put(&socket, &elsewhere);
        neighbours.pods_go_on();
        let claim = Script {
            door: Door::Claim,
            ..neighbours.bad(1)
        };
        let said = Plugin::start(&claim).refused();
        let expected = match kind {
            Instead::Link => "is a symbolic link",
            _ => "is not a socket",
        };
        assert!(said.contains(expected), "{kind:?}: {said}");
        // The connection still works. Once it breaks, the daemon cannot connect again.
        plugin.command("end-stream");
        neighbours.until_resource(BAD, |each| each.allocatable == 0);
        plugin.kill();
        kind.take_away(&socket);
    }
    neighbours.unharmed();
}

#[test]
fn a_file_in_place_of_our_socket_is_reported_and_left_alone() {
    let mut neighbours = Neighbourhood::new();
    let socket = neighbours.kubelet_socket();
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "mine").unwrap();
    neighbours.pods_go_on();
    let ready = neighbours.ready();
    assert!(ready.contains("[-]listening failed"), "{ready}");
    let Neighbourhood { daemon, .. } = neighbours;
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "mine");
}

#[test]
fn pods_go_on_when_directories_are_deleted_under_us() {
    let mut neighbours = Neighbourhood::new();
    for directory in ["device-plugins", "plugins_registry"] {
        std::fs::remove_dir_all(neighbours.root().join(directory)).unwrap();
        neighbours.pods_go_on();
    }
    assert!(neighbours.resource(GOOD).unwrap().allocatable > 0);
}

#[test]
fn a_registry_that_is_deleted_and_made_anew_is_watched_again() {
    let mut neighbours = Neighbourhood::new();
    let registry = neighbours.root().join("plugins_registry");
    std::fs::remove_dir_all(&registry).unwrap();
    neighbours.one_pod_goes_on();
    std::fs::create_dir(&registry).unwrap();
    let mut plugin = Plugin::start(&Script {
        door: Door::Registry,
        ..neighbours.bad(1)
    });
    plugin.until(&Event::Registered);
    neighbours.until_capacity(BAD, 1);
    neighbours.unharmed();
}

#[test]
fn more_events_than_the_kernel_keeps_lose_no_socket() {
    let neighbours = Neighbourhood::new();
    let registry = neighbours.root().join("plugins_registry");
    let queue = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let queue: usize = queue.trim().parse().unwrap();
    // A stopped daemon does not read the queue of events.
    neighbours.daemon.signal("-STOP");
    let other = registry.join("other");
    for _ in 0..=queue / 2 {
        std::fs::write(&other, "").unwrap();
        std::fs::remove_file(&other).unwrap();
    }
    let mut plugin = Plugin::start(&Script {
        door: Door::Registry,
        ..neighbours.bad(1)
    });
    plugin.find("its socket", |event| {
        matches!(event, Event::Serving { .. }).then_some(())
    });
    neighbours.daemon.signal("-CONT");
    plugin.until(&Event::Registered);
    neighbours.until_capacity(BAD, 1);
    neighbours.unharmed();
}
