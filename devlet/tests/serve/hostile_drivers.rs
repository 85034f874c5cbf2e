//! Hostile DRA drivers. Pods of another driver and of a plugin are not affected.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use devlet_client::v1;
use devlet_testkit::{
    Babbler, DeviceHealth, DriverEndpoint, DriverScript, Event, Fault, PATIENCE, Plugin, PreparedDevice,
    nonsense_of_a_server,
};

use crate::hostile::{Caller, Instead, Neighbourhood, pod_with_claim};

const GOOD: &str = "good.acme.com";
const BAD: &str = "bad.acme.com";

/// Deadlines for drivers. Pods of bad drivers wait for [`A_WHILE`].
const IMPATIENT: &str =
    "deadlines: {dial: 300ms, options: 300ms, info: 300ms, notify: 300ms, prepare: 300ms}\n";
const A_WHILE: Duration = Duration::from_millis(1500);

/// A daemon with a good plugin, a good driver and pods of both.
struct Town {
    neighbours: Neighbourhood,
    caller: Caller,
    _good: Plugin,
    next: usize,
}

fn cdi_devices(pod: &v1::Pod) -> Vec<String> {
    pod.containers[0].options.as_ref().unwrap().cdi_devices.clone()
}

fn is_connected(drivers: &[v1::Driver], name: &str) -> bool {
    let mut named = drivers.iter().filter(|driver| driver.name == name);
    named.any(|driver| driver.plugins.iter().any(|plugin| plugin.connected))
}

impl Town {
    fn new(config: &str) -> Self {
        let neighbours = Neighbourhood::configured(config);
        let good = Plugin::registered_driver(&DriverScript::new(neighbours.root(), GOOD));
        let mut town = Self {
            caller: neighbours.caller(),
            neighbours,
            _good: good,
            next: 0,
        };
        town.until_connected(GOOD);
        town.goes_on();
        town
    }

    fn root(&self) -> &Path {
        self.neighbours.root()
    }

    fn bad(&self) -> DriverScript {
        DriverScript::new(self.root(), BAD)
    }

    fn until_connected(&self, name: &str) {
        self.caller
            .until_drivers(|drivers| is_connected(drivers, name).then_some(()));
    }

    fn until_disconnected(&self, name: &str) {
        self.caller
            .until_drivers(|drivers| (!is_connected(drivers, name)).then_some(()));
    }

    /// Admits and removes a pod of the good plugin and a pod of the good driver.
    fn goes_on(&mut self) {
        self.neighbours.one_pod_goes_on();
        let name = format!("claimed-{}", self.next);
        self.next += 1;
        let pod = pod_with_claim(&name, GOOD);
        let pod = self.caller.admit_manifest(pod, Some(PATIENCE)).unwrap();
        assert_eq!(cdi_devices(&pod), [format!("{GOOD}/device={name}")]);
        self.caller.remove(&name, PATIENCE).unwrap();
    }

    /// Admits a pod of the bad driver, and returns the refusal.
    fn bad_pod(&self, name: &str) -> Result<v1::Pod, String> {
        self.caller
            .admit_manifest(pod_with_claim(name, BAD), Some(A_WHILE))
    }

    fn unharmed(mut self) {
        self.goes_on();
        self.neighbours.unharmed();
    }
}

#[test]
fn a_driver_that_registers_and_vanishes_leaves_nothing_behind() {
    let mut town = Town::new(IMPATIENT);
    for number in 0..6 {
        let driver = Plugin::registered_driver(&town.bad());
        match number % 3 {
            // It vanishes at once, or when it is connected.
            0 => driver.kill(),
            1 => {
                town.until_connected(BAD);
                driver.kill();
            }
            _ => driver.exit(),
        }
        town.until_disconnected(BAD);
        town.goes_on();
    }
    let said = town.bad_pod("late").unwrap_err();
    assert!(said.contains(BAD), "{said}");
    town.unharmed();
}

#[test]
fn a_driver_that_does_not_answer_holds_up_its_own_pods_alone() {
    let mut town = Town::new(IMPATIENT);
    for (number, fault) in [Fault::Hang, Fault::Half, Fault::Drip { pause_ms: 10 }]
        .into_iter()
        .enumerate()
    {
        let name = format!("bad-{number}");
        let mut driver = Plugin::registered_driver(&town.bad());
        town.until_connected(BAD);
        let pod = town.bad_pod(&name).unwrap();
        assert_eq!(cdi_devices(&pod), [format!("{BAD}/device={name}")]);
        driver.fault("NodeUnprepareResources", Some(&fault));
        let other = town.neighbours.caller();
        let removing = {
            let name = name.clone();
            std::thread::spawn(move || other.remove(&name, A_WHILE))
        };
        driver.called("NodeUnprepareResources");
        town.goes_on();
        let said = removing.join().unwrap().unwrap_err();
        assert!(
            said.contains("NodeUnprepareResources was not answered within 0.3 s"),
            "{fault:?}: {said}"
        );
        driver.fault("NodeUnprepareResources", None);
        town.caller.remove(&name, PATIENCE).unwrap();

        driver.fault("NodePrepareResources", Some(&fault));
        let other = town.neighbours.caller();
        let admitting = {
            let pod = pod_with_claim(&name, BAD);
            std::thread::spawn(move || other.admit_manifest(pod, Some(A_WHILE)))
        };
        driver.called("NodePrepareResources");
        town.goes_on();
        let said = admitting.join().unwrap().unwrap_err();
        assert!(
            said.contains("NodePrepareResources was not answered within 0.3 s"),
            "{fault:?}: {said}"
        );
        // devlet has the driver undo a call that may have succeeded.
        driver.fault("NodePrepareResources", None);
        driver.until_prepared(&[].into());
        driver.exit();
        town.until_disconnected(BAD);
    }
    town.unharmed();
}

#[test]
fn a_driver_that_does_not_answer_get_info_is_refused_and_one_that_ignores_its_status_is_not() {
    let mut town = Town::new(IMPATIENT);
    for fault in [Fault::Hang, Fault::Half, Fault::Drip { pause_ms: 10 }] {
        let mut driver = Plugin::driver(&town.bad().with_fault("GetInfo", fault.clone()));
        driver.called("GetInfo");
        town.goes_on();
        // It is asked again, and answers then.
        driver.fault("GetInfo", None);
        driver.until(&Event::Registered);
        town.until_connected(BAD);
        driver.exit();
        town.until_disconnected(BAD);

        let mut driver = Plugin::driver(&town.bad().with_fault("NotifyRegistrationStatus", fault));
        driver.called("NotifyRegistrationStatus");
        town.until_connected(BAD);
        town.goes_on();
        driver.exit();
        town.until_disconnected(BAD);
    }
    town.unharmed();
}

#[test]
fn answers_that_are_none_are_refused_and_named() {
    let mut town = Town::new("");
    let mut driver = Plugin::registered_driver(&town.bad());
    town.until_connected(BAD);
    let mut number = 0;
    let mut refused = |town: &mut Town, driver: &mut Plugin, fault: Option<&Fault>| {
        number += 1;
        driver.fault("NodePrepareResources", fault);
        // A driver needs time for a long answer.
        let wait = match fault {
            Some(Fault::ManyDevices(10_000..)) => 4 * A_WHILE,
            _ => A_WHILE,
        };
        let pod = pod_with_claim(&format!("bad-{number}"), BAD);
        let said = town.caller.admit_manifest(pod, Some(wait)).unwrap_err();
        town.goes_on();
        driver.fault("NodePrepareResources", None);
        said
    };
    for (fault, expected) in [
        (
            Fault::UnknownClaim,
            "\"unrequested\", which it was not asked about",
        ),
        (
            Fault::LeaveOut(vec!["bad-2".into()]),
            "did not answer for ResourceClaim default/bad-2",
        ),
        (Fault::Raw(vec![0xff; 100]), "the answer is damaged"),
        (Fault::LongName(2_000), "devlet allows 1024"),
        (Fault::ManyDevices(3_000), "limits.claimBytes allows 131072"),
        (Fault::ManyDevices(20_000), "devlet allows 16384"),
        (Fault::ManyDevices(120_000), "limits.answerBytes allows 4194304"),
        (
            Fault::Refuse {
                code: 7,
                message: "no".into(),
            },
            "no (PermissionDenied)",
        ),
    ] {
        let said = refused(&mut town, &mut driver, Some(&fault));
        assert!(said.contains(expected) && said.contains(BAD), "{fault:?}: {said}");
    }
    let device = PreparedDevice::new("pool", "{name}", "acme.com/bad=1");
    let twice = PreparedDevice {
        cdi: vec!["acme.com/bad=1".into(); 2],
        ..device.clone()
    };
    let other = PreparedDevice {
        device: "of-another-pod".into(),
        ..device.clone()
    };
    let no_name = PreparedDevice {
        cdi: vec!["../../etc".into()],
        ..device.clone()
    };
    let no_request = PreparedDevice {
        requests: vec!["two".into()],
        ..device
    };
    for (device, expected) in [
        (twice, "twice for device"),
        (other, "which is not allocated to"),
        (no_name, "which is not of the form"),
        (no_request, "which the claim does not have"),
    ] {
        driver.prepares(&[device]);
        let said = refused(&mut town, &mut driver, None);
        assert!(
            said.contains(expected) && said.contains(BAD),
            "{expected}: {said}"
        );
    }
    // Once it behaves, it can be used, and nothing of the above is left.
    driver.prepares(&[PreparedDevice::new("pool", "{name}", "acme.com/bad={name}")]);
    driver.until_prepared(&[].into());
    assert_eq!(cdi_devices(&town.bad_pod("fine").unwrap()), ["acme.com/bad=fine"]);
    town.caller.remove("fine", PATIENCE).unwrap();
    driver.exit();
    town.unharmed();
}

#[test]
fn nonsense_from_a_driver_is_heard_less_and_less_often() {
    let mut town = Town::new(IMPATIENT);
    for (number, (name, bytes)) in nonsense_of_a_server().into_iter().enumerate() {
        let socket = town.root().join(format!("{number}.sock"));
        let babbler = Babbler::at(&socket, bytes);
        let mut driver = Plugin::driver(&DriverScript {
            endpoint: DriverEndpoint::Named(socket.display().to_string()),
            ..town.bad()
        });
        driver.until(&Event::Registered);
        babbler.until_heard();
        town.goes_on();
        let said = town.bad_pod("bad").unwrap_err();
        assert!(said.contains(BAD), "{name}: {said}");
        driver.exit();
        town.until_disconnected(BAD);
    }
    town.unharmed();
}

#[test]
fn a_flood_of_health_is_heard_slowly_and_in_part() {
    const DEVICES: usize = 100_000;
    let mut town = Town::new(IMPATIENT);
    let mut driver = Plugin::registered_driver(&town.bad().with_health(Vec::new()));
    town.until_connected(BAD);
    let devices = (0..DEVICES).map(|number| DeviceHealth::healthy("p", &number.to_string()));
    driver.report(&devices.collect::<Vec<_>>());
    let kept = "devlet_driver_devices{driver_name=\"bad.acme.com\",health=\"Healthy\"} 16384";
    while !town.neighbours.metrics().contains(kept) {
        town.goes_on();
    }
    driver.flood(20, 0);
    for _ in 0..10 {
        town.goes_on();
    }
    // A driver that floods can still prepare claims.
    town.caller
        .admit_manifest(pod_with_claim("fine", BAD), Some(PATIENCE))
        .unwrap();
    town.caller.remove("fine", PATIENCE).unwrap();
    drop(driver);
    town.until_disconnected(BAD);
    town.unharmed();
}

#[test]
fn missing_or_invalid_health_does_no_harm() {
    let mut town = Town::new(IMPATIENT);
    let endless = Fault::Endless(vec![0x0a, 0x00]);
    for (number, fault) in [
        Fault::Hang,
        Fault::Half,
        Fault::Drip { pause_ms: 10 },
        Fault::Raw(vec![0xff; 100]),
        endless,
    ]
    .into_iter()
    .enumerate()
    {
        let script = town.bad().with_health(vec![DeviceHealth::healthy("p", "d")]);
        let mut driver = Plugin::driver(&script.with_fault("NodeWatchResources", fault));
        driver.called("NodeWatchResources");
        town.goes_on();
        let name = format!("fine-{number}");
        town.caller
            .admit_manifest(pod_with_claim(&name, BAD), Some(PATIENCE))
            .unwrap();
        town.caller.remove(&name, PATIENCE).unwrap();
        driver.exit();
        town.until_disconnected(BAD);
    }
    town.unharmed();
}

#[test]
fn a_driver_whose_socket_becomes_something_else_is_lost_and_nothing_else_is_opened() {
    let mut town = Town::new(IMPATIENT);
    let script = town.bad();
    let socket = script.endpoint_socket();
    let elsewhere = town.root().join("elsewhere.sock");
    let listener = UnixListener::bind(&elsewhere).unwrap();
    listener.set_nonblocking(true).unwrap();
    for (kind, name) in Instead::ALL.into_iter().zip(["file", "directory", "link"]) {
        let mut driver = Plugin::registered_driver(&script);
        town.until_connected(BAD);
        let aside = socket.with_extension("aside");
        std::fs::rename(&socket, &aside).unwrap();
        kind.put(&socket, &elsewhere);
        // The connection still works. Once it breaks, the daemon cannot connect again.
        town.caller
            .admit_manifest(pod_with_claim(name, BAD), Some(PATIENCE))
            .unwrap();
        driver.command("hang-up");
        town.until_disconnected(BAD);
        town.goes_on();
        assert!(
            listener.accept().is_err(),
            "{kind:?}: a connection came through a link"
        );
        kind.take_away(&socket);
        std::fs::rename(&aside, &socket).unwrap();
        town.until_connected(BAD);
        town.caller.remove(name, PATIENCE).unwrap();
        driver.exit();
        town.until_disconnected(BAD);
    }
    town.unharmed();
}

#[test]
fn a_driver_that_registers_too_often_is_slowed_down_alone() {
    let mut town = Town::new("limits: {registrationsPerMinute: 10}");
    let mut driver = Plugin::registered_driver(&town.bad());
    let said = loop {
        driver.command("deregister");
        driver.command("register");
        let told = driver.find("an answer", |event| match event {
            Event::Registered => Some(None),
            Event::RegisterFailed { message, .. } => Some(Some(message.clone())),
            _ => None,
        });
        if let Some(said) = told {
            break said;
        }
    };
    assert!(said.contains("limits.registrationsPerMinute allows 10"), "{said}");
    town.goes_on();
    let other = DriverScript::new(town.root(), "other.acme.com");
    let _other = Plugin::registered_driver(&other);
    town.until_connected("other.acme.com");
    drop(driver);
    town.unharmed();
}
