//! Deletes the ResourceSlices of drivers that are gone, so that the scheduler does not count on their devices.
//!
//! The core decides when: after a driver has been away for a while, or was not seen since the node started that long
//! ago. A kubelet deletes all slices when it starts, those of healthy drivers included. A driver that comes back during
//! the deletion keeps the rest of its slices. Failures are retried.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use devlet_core::dra::drivers::WIPE_DELAY_MS;
use devlet_core::{DriverName, Moment, Node};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::store::Store;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5 * 60);

/// The reason why slices could not be listed or deleted. Both are retried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SliceError(pub String);

/// The store of the ResourceSlices of this node.
pub trait ResourceSlices: Send + Sync {
    /// Returns the drivers that have slices.
    fn drivers(&self) -> impl Future<Output = Result<BTreeSet<DriverName>, SliceError>> + Send;

    /// Deletes the slices of a driver. Succeeds if there are none.
    fn wipe(&self, driver: &DriverName) -> impl Future<Output = Result<(), SliceError>> + Send;
}

/// `None` for a driver that was never seen; otherwise the time since which it has been away, if it is.
type Away = Option<Option<Moment>>;

/// Deletes the slices of drivers that are gone, until `stop`. The node has run since `started`.
pub(crate) async fn follow(
    store: Store,
    slices: impl ResourceSlices,
    started: Moment,
    stop: CancellationToken,
) {
    let wiping = async {
        let mut unseen = listed(&slices).await;
        let mut running: BTreeSet<DriverName> = BTreeSet::new();
        let mut wipes = FuturesUnordered::new();
        let mut changes = store.subscribe();
        loop {
            changes.borrow_and_update();
            let now = store.now();
            let (due, mut next) = store.read(|node| {
                // Known drivers are in `slices_to_wipe`.
                unseen.retain(|driver| node.driver(driver).is_none());
                let gone = unseen.extract_if(.., |driver| !node.keeps_slices(driver, started, now));
                let due = gone.chain(node.slices_to_wipe(now));
                let due = due.map(|driver| (away(node, &driver), driver));
                (due.collect::<Vec<(Away, DriverName)>>(), node.next_wipe(now))
            });
            if !unseen.is_empty() {
                let end = started.after(WIPE_DELAY_MS);
                next = Some(next.map_or(end, |next| next.min(end)));
            }
            for (since, driver) in due {
                if running.insert(driver.clone()) {
                    wipes.push(wipe(&store, &slices, driver, since));
                }
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    return;
                },
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

async fn listed(slices: &impl ResourceSlices) -> BTreeSet<DriverName> {
    let log = |error: &SliceError, pause: Duration| {
        tracing::warn!(%error, retry_in = ?pause, "ResourceSlices not listed");
    };
    retry(|| slices.drivers(), log).await
}

/// Deletes a driver's slices unless it comes back. Returns the driver.
async fn wipe(store: &Store, slices: &impl ResourceSlices, driver: DriverName, since: Away) -> DriverName {
    let log = |error: &SliceError, pause: Duration| {
        tracing::warn!(%driver, %error, retry_in = ?pause, "ResourceSlices not deleted");
    };
    let wiped = async {
        retry(|| slices.wipe(&driver), log).await;
        store.update(|node| {
            if away(node, &driver) == since {
                node.slices_wiped(&driver);
            }
        });
        tracing::info!(%driver, "ResourceSlices of absent driver deleted");
    };
    tokio::select! {
        () = wiped => {}
        () = came_back(store.subscribe(), store, &driver, since) => {}
    }
    driver
}

/// Repeats an attempt until it succeeds, with exponential backoff.
async fn retry<T, F>(attempt: impl Fn() -> F, log: impl Fn(&SliceError, Duration)) -> T
where
    F: Future<Output = Result<T, SliceError>>,
{
    let mut pause = FIRST_PAUSE;
    loop {
        match attempt().await {
            Ok(value) => return value,
            Err(error) => log(&error, pause),
        }
        tokio::time::sleep(jittered(pause)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
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
        Some(next) => tokio::time::sleep(Duration::from_millis(next.since(now))).await,
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
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::store::OpenOptions;

    #[derive(Debug, PartialEq)]
    enum Event {
        Listed,
        Begun(DriverName),
        Wiped(DriverName),
        GivenUp(DriverName),
    }

    /// Slices of these drivers. `failures` attempts fail; those of `hangs` do not end.
    struct Fake {
        drivers: BTreeSet<DriverName>,
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
                Ok(_) => Err(SliceError("out of order".into())),
                Err(_) => Ok(()),
            }
        }
    }

    impl ResourceSlices for Fake {
        async fn drivers(&self) -> Result<BTreeSet<DriverName>, SliceError> {
            self.fails()?;
            self.events.send(Event::Listed).unwrap();
            Ok(self.drivers.clone())
        }

        async fn wipe(&self, driver: &DriverName) -> Result<(), SliceError> {
            self.events.send(Event::Begun(driver.clone())).unwrap();
            let mut attempt = Attempt(self, driver.clone(), false);
            self.fails()?;
            if self.hangs.as_ref() == Some(driver) {
                std::future::pending::<()>().await;
            }
            attempt.2 = true;
            Ok(())
        }
    }

    struct Wiping {
        store: Store,
        events: UnboundedReceiver<Event>,
        failures: Arc<AtomicUsize>,
        _task: AbortOnDropHandle<()>,
        _directory: tempfile::TempDir,
    }

    /// Milliseconds until the slices of an absent driver are deleted.
    const SOON: u64 = 300;

    impl Wiping {
        async fn new(drivers: &[&str], hangs: Option<&str>) -> Self {
            let failures = Arc::new(AtomicUsize::new(0));
            let directory = tempfile::tempdir().unwrap();
            let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
            let (store, _) = Store::open(options).unwrap();
            let (sender, events) = mpsc::unbounded_channel();
            let fake = Fake {
                drivers: drivers.iter().map(|each| DriverName::from(*each)).collect(),
                failures: Arc::clone(&failures),
                hangs: hangs.map(DriverName::from),
                events: sender,
            };
            // As if the node had run for a while.
            let started = Moment(store.now().0 - WIPE_DELAY_MS + SOON);
            let task = tokio::spawn(follow(store.clone(), fake, started, CancellationToken::new()));
            let mut wiping = Self {
                store,
                events,
                failures,
                _task: AbortOnDropHandle::new(task),
                _directory: directory,
            };
            assert_eq!(wiping.event().await, Event::Listed);
            wiping
        }

        async fn event(&mut self) -> Event {
            let event = tokio::time::timeout(Duration::from_secs(60), self.events.recv()).await;
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
        let mut wiping = Wiping::new(&[], None).await;
        for driver in ["a", "b"] {
            wiping.leaves(wiping.register(driver));
            assert_eq!(wiping.event().await, Event::Begun(driver.into()));
            assert_eq!(wiping.event().await, Event::Wiped(driver.into()));
        }
        let now = wiping.store.now();
        let left = wiping.store.read(|node| node.slices_to_wipe(now));
        assert!(left.is_empty(), "{left:?}");
    }

    // TestConnectionHandling/no-wipe-on-reconnect
    #[tokio::test]
    async fn a_driver_that_comes_back_in_time_keeps_its_slices() {
        let mut wiping = Wiping::new(&[], None).await;
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
        let mut wiping = Wiping::new(&[], Some("a")).await;
        wiping.leaves(wiping.register("a"));
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
        let again = wiping.register("a");
        assert_eq!(wiping.event().await, Event::GivenUp("a".into()));
        // It leaves once more, and the same happens again.
        wiping.leaves(again);
        assert_eq!(wiping.event().await, Event::Begun("a".into()));

        let mut wiping = Wiping::new(&[], None).await;
        wiping.failures.store(1, Ordering::SeqCst);
        wiping.leaves(wiping.register("a"));
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
        assert_eq!(wiping.event().await, Event::GivenUp("a".into()), "it failed");
        assert_eq!(wiping.event().await, Event::Begun("a".into()));
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
