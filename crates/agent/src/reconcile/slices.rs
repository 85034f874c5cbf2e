//! Deletes the ResourceSlices of drivers that are gone, so that the scheduler does not count on their devices.
//!
//! Level-triggered: whatever slices the source shows, those of a driver are deleted once they have been there, and the driver
//! away, for a while ([`Node::wipe_at`]). So slices of a driver that crashed before it registered are deleted, and those that
//! come back with a restored database. A kubelet deletes all slices when it starts, those of healthy drivers included. A driver
//! that comes back during the deletion keeps the rest of its slices. Failures are retried.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use devlet_core::dra::drivers::WIPE_DELAY_MS;
use devlet_core::{DriverName, Moment, Node};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::store::Store;

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The reason why slices could not be deleted. The deletion is retried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SliceError {
    /// What failed, and why.
    pub message: String,
    /// The shortest pause before the next attempt.
    pub retry_after: Option<Duration>,
}

/// Drivers with slices, and the time when the first slice of each was seen.
pub type SliceDrivers = BTreeMap<DriverName, Moment>;

/// The store of the ResourceSlices of this node.
pub trait ResourceSlices: Send + Sync {
    /// Returns the drivers that have slices, now and in the future. Each report ends the pause after a failed deletion.
    fn drivers(&self) -> watch::Receiver<SliceDrivers>;

    /// Deletes the slices of a driver. Succeeds if there are none.
    fn wipe(&self, driver: &DriverName) -> impl Future<Output = Result<(), SliceError>> + Send;
}

/// `None` for a driver that was never seen; otherwise the time since which it has been away, if it is.
type Away = Option<Option<Moment>>;

/// Deletes the slices of drivers that are gone, until `stop`. Drivers have time to connect from `started` on.
pub(crate) async fn follow(
    store: Store,
    slices: impl ResourceSlices,
    started: Moment,
    stop: CancellationToken,
) {
    let wiping = async {
        let mut seen = slices.drivers();
        let mut running: BTreeSet<DriverName> = BTreeSet::new();
        let mut wipes = FuturesUnordered::new();
        let mut changes = store.subscribe();
        loop {
            changes.borrow_and_update();
            let present = seen.borrow_and_update().clone();
            let now = store.now();
            let outdated = |node: &Node, (driver, seen): (DriverName, Moment)| {
                let at = node.wipe_at(&driver, seen.max(started))?;
                Some((at, away(node, &driver), driver))
            };
            let idle = present
                .into_iter()
                .filter(|(driver, _)| !running.contains(driver));
            let outdated: Vec<(Moment, Away, DriverName)> =
                store.read(|node| idle.filter_map(|each| outdated(node, each)).collect());
            let next = outdated.iter().map(|(at, ..)| *at).filter(|at| *at > now).min();
            for (_, since, driver) in outdated.into_iter().filter(|(at, ..)| *at <= now) {
                running.insert(driver.clone());
                wipes.push(wipe(&store, &slices, driver, since));
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    return;
                },
                Ok(()) = seen.changed() => {}
                Some(driver) = wipes.next() => {
                    running.remove(&driver);
                }
                () = passed(next, now) => {}
            }
        }
    };
    tokio::select! {
        () = wiping => {}
        () = stop.cancelled() => {}
    }
}

/// Deletes a driver's slices unless it comes back. Returns the driver.
async fn wipe(store: &Store, slices: &impl ResourceSlices, driver: DriverName, since: Away) -> DriverName {
    let wiped = async {
        let mut reports = slices.drivers();
        delete(slices, &driver, &mut reports).await;
        tracing::info!(%driver, "ResourceSlices of absent driver deleted");
        // The source shows it later. If it never does, they are deleted again.
        let gone = reports.wait_for(|present| !present.contains_key(&driver));
        let _ = timeout(Duration::from_millis(WIPE_DELAY_MS), gone).await;
    };
    tokio::select! {
        () = wiped => {}
        () = came_back(store.subscribe(), store, &driver, since) => {}
    }
    driver
}

/// Deletes a driver's slices, again and again until it succeeds.
async fn delete(
    slices: &impl ResourceSlices,
    driver: &DriverName,
    reports: &mut watch::Receiver<SliceDrivers>,
) {
    let mut pauses = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut logged = None;
    loop {
        reports.mark_unchanged();
        let Err(error) = slices.wipe(driver).await else {
            return;
        };
        if logged.as_ref() != Some(&error.message) {
            tracing::warn!(%driver, %error, "ResourceSlices not deleted; devlet keeps trying");
        }
        let least = error.retry_after.unwrap_or_default().max(FIRST_PAUSE);
        logged = Some(error.message);
        let pause = jittered(pauses.next_pause());
        sleep(least).await;
        tokio::select! {
            () = sleep(pause.saturating_sub(least)) => {}
            Ok(()) = reports.changed() => {}
        }
    }
}

/// Completes when a driver is back, or has been back in between.
async fn came_back(mut changes: watch::Receiver<u64>, store: &Store, driver: &DriverName, since: Away) {
    loop {
        changes.borrow_and_update();
        if store.read(|node| away(node, driver)) != since {
            return;
        }
        if changes.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

fn away(node: &Node, driver: &DriverName) -> Away {
    node.driver(driver).map(|driver| driver.unusable_since)
}

async fn passed(next: Option<Moment>, now: Moment) {
    match next {
        Some(next) => sleep(Duration::from_millis(next.since(now))).await,
        None => std::future::pending().await,
    }
}

/// Adds up to a fifth, so that nodes do not retry at the same moment.
fn jittered(pause: Duration) -> Duration {
    let share = u32::try_from(RandomState::new().hash_one(()) % 200).unwrap_or(0);
    pause + pause * share / 1000
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use devlet_core::ConnectionId;
    use devlet_core::dra::drivers::DriverOffer;
    use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
    use tokio::time::Instant;
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::store::OpenOptions;

    #[derive(Debug, PartialEq)]
    enum Event {
        Begun(DriverName),
        Wiped(DriverName),
        GivenUp(DriverName),
    }

    /// Slices of drivers. `failures` attempts fail; those of `hangs` do not end.
    struct Fake {
        drivers: Arc<watch::Sender<SliceDrivers>>,
        failures: Arc<AtomicUsize>,
        hangs: Option<DriverName>,
        events: UnboundedSender<Event>,
    }

    struct Attempt<'a>(&'a Fake, DriverName, bool);

    impl Drop for Attempt<'_> {
        fn drop(&mut self) {
            let Attempt(fake, driver, wiped) = self;
            let event = if *wiped { Event::Wiped } else { Event::GivenUp };
            let _ = fake.events.send(event(driver.clone()));
        }
    }

    impl Fake {
        fn fails(&self) -> Result<(), SliceError> {
            let less = |left: usize| left.checked_sub(1);
            match self
                .failures
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
            {
                Ok(_) => Err(SliceError {
                    message: "out of order".into(),
                    retry_after: Some(ASKED),
                }),
                Err(_) => Ok(()),
            }
        }
    }

    impl ResourceSlices for Fake {
        fn drivers(&self) -> watch::Receiver<SliceDrivers> {
            self.drivers.subscribe()
        }

        async fn wipe(&self, driver: &DriverName) -> Result<(), SliceError> {
            self.events.send(Event::Begun(driver.clone())).unwrap();
            let mut attempt = Attempt(self, driver.clone(), false);
            self.fails()?;
            if self.hangs.as_ref() == Some(driver) {
                std::future::pending::<()>().await;
            }
            attempt.2 = true;
            self.drivers.send_modify(|drivers| {
                drivers.remove(driver);
            });
            Ok(())
        }
    }

    struct Wiping {
        store: Store,
        drivers: Arc<watch::Sender<SliceDrivers>>,
        events: UnboundedReceiver<Event>,
        failures: Arc<AtomicUsize>,
        _task: AbortOnDropHandle<()>,
        _directory: tempfile::TempDir,
    }

    /// The pause that failed attempts ask for.
    const ASKED: Duration = Duration::from_secs(1);

    /// Milliseconds until the slices of an absent driver are deleted.
    const SOON: u64 = 300;

    impl Wiping {
        async fn new(drivers: &[&str], hangs: Option<&str>) -> Self {
            let failures = Arc::new(AtomicUsize::new(0));
            let directory = tempfile::tempdir().unwrap();
            let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
            let (store, _) = Store::open(options).unwrap();
            let (sender, events) = mpsc::unbounded_channel();
            let present = drivers.iter().map(|each| (DriverName::from(*each), Moment(0)));
            let drivers = Arc::new(watch::Sender::new(present.collect()));
            let fake = Fake {
                drivers: Arc::clone(&drivers),
                failures: Arc::clone(&failures),
                hangs: hangs.map(DriverName::from),
                events: sender,
            };
            // As if the node had run for a while.
            let started = Moment(store.now().0 - WIPE_DELAY_MS + SOON);
            let task = tokio::spawn(follow(store.clone(), fake, started, CancellationToken::new()));
            Self {
                store,
                drivers,
                events,
                failures,
                _task: AbortOnDropHandle::new(task),
                _directory: directory,
            }
        }

        /// As if its slices had been there for a while.
        fn publishes(&self, driver: &str) {
            self.drivers.send_modify(|drivers| {
                drivers.insert(driver.into(), Moment(self.store.now().0 - WIPE_DELAY_MS + SOON));
            });
        }

        async fn event(&mut self) -> Event {
            let event = timeout(Duration::from_secs(60), self.events.recv()).await;
            event.unwrap().unwrap()
        }

        fn register(&self, driver: &str) -> ConnectionId {
            let offer = DriverOffer {
                driver: driver.into(),
                endpoint: "dra.sock".into(),
                process: devlet_core::ProcessId { uid: 0, pid: None },
                may_share: false,
                service: String::new(),
                service_reason: String::new(),
                health_service: None,
            };
            let now = self.store.now();
            self.store.update(|node| {
                let (id, _) = node.driver_registered(offer, now).unwrap();
                node.link_up(id, now);
                id
            })
        }

        /// As if it had left a while ago.
        fn leaves(&self, id: ConnectionId) {
            let then = Moment(self.store.now().0 - WIPE_DELAY_MS + SOON);
            self.store.update(|node| node.driver_deregistered(id, then));
        }
    }

    // TestConnectionHandling/wipe-on-disconnect, TestRegistrationHandler/manage-resource-slices
    #[tokio::test]
    async fn slices_of_a_driver_that_is_away_for_a_while_are_wiped_once() {
        let mut wiping = Wiping::new(&["a", "b"], None).await;
        let (a, b) = (wiping.register("a"), wiping.register("b"));
        for (driver, id) in [("a", a), ("b", b)] {
            wiping.leaves(id);
            assert_eq!(wiping.event().await, Event::Begun(driver.into()));
            assert_eq!(wiping.event().await, Event::Wiped(driver.into()));
        }
        assert!(wiping.events.try_recv().is_err());
    }

    #[tokio::test]
    async fn slices_that_come_back_or_have_no_driver_are_wiped_too() {
        let mut wiping = Wiping::new(&["a"], None).await;
        wiping.leaves(wiping.register("a"));
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
        assert_eq!(wiping.event().await, Event::Wiped("a".into()));
        // The database of the API server was restored; "b" crashed before it registered.
        for driver in ["a", "b"] {
            wiping.publishes(driver);
            assert_eq!(wiping.event().await, Event::Begun(driver.into()));
            assert_eq!(wiping.event().await, Event::Wiped(driver.into()));
        }
    }

    // TestConnectionHandling/no-wipe-on-reconnect
    #[tokio::test]
    async fn a_driver_that_comes_back_in_time_keeps_its_slices() {
        let mut wiping = Wiping::new(&["a", "b"], None).await;
        let (a, b) = (wiping.register("a"), wiping.register("b"));
        wiping.leaves(a);
        wiping.leaves(b);
        wiping.register("a");
        assert_eq!(wiping.event().await, Event::Begun("b".into()));
        assert_eq!(wiping.event().await, Event::Wiped("b".into()));
        assert!(wiping.events.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_wipe_that_fails_is_tried_again_and_one_that_is_under_way_ends_when_the_driver_is_back() {
        let mut wiping = Wiping::new(&["a"], Some("a")).await;
        wiping.leaves(wiping.register("a"));
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
        let again = wiping.register("a");
        assert_eq!(wiping.event().await, Event::GivenUp("a".into()));
        // It leaves once more, and the same happens again.
        wiping.leaves(again);
        assert_eq!(wiping.event().await, Event::Begun("a".into()));

        let mut wiping = Wiping::new(&["a"], None).await;
        wiping.failures.store(1, Ordering::SeqCst);
        let began = Instant::now();
        wiping.leaves(wiping.register("a"));
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
        assert_eq!(wiping.event().await, Event::GivenUp("a".into()), "it failed");
        wiping.publishes("a");
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
        assert!(began.elapsed() >= ASKED, "also after a report");
        assert_eq!(wiping.event().await, Event::Wiped("a".into()));
    }

    // A kubelet wipes the slices of all drivers when it starts.
    #[tokio::test]
    async fn of_slices_from_before_the_start_only_those_of_drivers_that_do_not_come_are_wiped() {
        let mut wiping = Wiping::new(&["comes", "gone"], None).await;
        wiping.register("comes");
        assert_eq!(wiping.event().await, Event::Begun("gone".into()));
        assert_eq!(wiping.event().await, Event::Wiped("gone".into()));
        assert!(wiping.events.try_recv().is_err());
    }
}
