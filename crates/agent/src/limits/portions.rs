//! Long work in small portions, so that whoever is woken meanwhile does not have to wait for it.
//!
//! A thread that computes has its processor until its turn is over, whoever else is woken: a millisecond or more, which is
//! as long as an admission takes. One that sleeps after a fraction of that, and for longer than it worked, is in nobody's way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use devlet_uds::rate_limit::KeyedRateLimiter;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::seats::Process;

/// So long a portion is.
const PORTION: Duration = Duration::from_micros(200);
/// Then it is left to others for so many times as long.
const LEFT_TO_OTHERS: u32 = 29;
/// So many work like this at a time: together they have a tenth of a processor.
const WITH_PAUSES: usize = 3;
/// The clock is looked at after so many steps, or so many bytes.
const STEPS: usize = 32;
const BYTES_PER_STEP: usize = 256;
/// A stop is noticed after so long.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// So much is done for a process in one go, at once; from then on it has one part of the time in so many.
const AT_ONCE: Duration = Duration::from_millis(500);
const PARTS: u32 = 100;
/// The same for all processes together: a new process costs nobody anything.
const ALL_AT_ONCE: Duration = Duration::from_secs(2);
const ALL_PARTS: u32 = 10;
/// Who comes again before so many times as long as the last one took is in no hurry.
const REST: u32 = 4;
const LONGEST_REST: Duration = Duration::from_secs(30);

/// How much was done, and for whom.
#[derive(Debug)]
struct Done {
    /// In one go.
    by_process: KeyedRateLimiter<Option<Process>>,
    all: KeyedRateLimiter<()>,
    /// In whatever way.
    lately: KeyedRateLimiter<Option<Process>>,
}

impl Default for Done {
    fn default() -> Self {
        Self {
            by_process: KeyedRateLimiter::new(1, AT_ONCE * PARTS),
            all: KeyedRateLimiter::new(1, ALL_AT_ONCE * ALL_PARTS),
            // Its debts are of three periods at most.
            lately: KeyedRateLimiter::new(1, LONGEST_REST / 3),
        }
    }
}

impl Done {
    /// When there may be more, if there was too much.
    fn due(&self, process: Option<Process>) -> Option<Instant> {
        let now = Instant::now();
        self.by_process
            .next_allowed_at(&process, now)
            .max(self.all.next_allowed_at(&(), now))
    }

    /// Until when a process rests: if there was too much, or the last one was just now.
    fn rest(&self, process: Option<Process>) -> Option<Instant> {
        let lately = self.lately.idle_at(&process, Instant::now());
        self.due(process).max(lately)
    }

    fn charge_lately(&self, process: Option<Process>, worked: Duration) {
        self.lately
            .charge_time(process, worked.saturating_mul(REST), Instant::now());
    }

    /// What was done in one go.
    fn charge(&self, process: Option<Process>, worked: Duration) {
        self.charge_lately(process, worked);
        let now = Instant::now();
        self.by_process
            .charge_time(process, worked.saturating_mul(PARTS), now);
        self.all.charge_time((), worked.saturating_mul(ALL_PARTS), now);
    }
}

/// Turns for long work. In one go it is done one at a time; whoever had much of that lately has turns with pauses, for
/// which nobody else has to wait.
#[derive(Debug, Clone)]
pub(crate) struct Turns {
    in_one_go: Arc<Semaphore>,
    with_pauses: Arc<Semaphore>,
    /// Of each process one works with pauses, or waits for that.
    own: Arc<Mutex<HashMap<Option<Process>, Arc<Semaphore>>>>,
    done: Arc<Done>,
    stop: CancellationToken,
}

impl Turns {
    /// At a stop nobody pauses any more.
    pub(crate) fn new(stop: CancellationToken) -> Self {
        Self {
            in_one_go: Arc::new(Semaphore::new(1)),
            with_pauses: Arc::new(Semaphore::new(WITH_PAUSES)),
            own: Arc::default(),
            done: Arc::default(),
            stop,
        }
    }

    /// For what can be done in portions: who had much of that, or any of it just now, has pauses. For what somebody waits for,
    /// it is only who had much.
    pub(crate) async fn turn_or_pauses(&self, process: Option<Process>, is_awaited: bool) -> Turn {
        let has_pauses = || match is_awaited {
            true => self.had_much(process),
            false => self.done.rest(process).is_some(),
        };
        if !has_pauses() {
            let permit = self.in_one_go.clone().acquire_owned().await;
            // Several of the same process may have waited.
            if !has_pauses() {
                return self.in_one_go(permit, process);
            }
        }
        self.turn_with_pauses(process).await
    }

    /// For what nobody is in a hurry for.
    pub(crate) async fn turn_with_pauses(&self, process: Option<Process>) -> Turn {
        let own = self.own(process).acquire_owned().await;
        Turn {
            permits: vec![own, self.with_pauses.clone().acquire_owned().await],
            kind: Kind::WithPauses(self.stop.clone()),
            done: Arc::clone(&self.done),
            process,
        }
    }

    fn in_one_go(&self, permit: Permit, process: Option<Process>) -> Turn {
        Turn {
            permits: vec![permit],
            kind: Kind::InOneGo,
            done: Arc::clone(&self.done),
            process,
        }
    }

    fn own(&self, process: Option<Process>) -> Arc<Semaphore> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if own.len() >= 64 {
            // Nobody has or wants the others.
            own.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        let turn = own.entry(process);
        turn.or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }

    /// Whether much was done for this process lately. What was done for others is no reason to keep what is short waiting.
    pub(crate) fn had_much_itself(&self, process: Option<Process>) -> bool {
        self.done
            .by_process
            .next_allowed_at(&process, Instant::now())
            .is_some()
    }

    /// Whether much was done lately, for this process or for all.
    pub(crate) fn had_much(&self, process: Option<Process>) -> bool {
        self.done.due(process).is_some()
    }

    /// Does something that is short, but may come often.
    pub(crate) fn at_once<T>(&self, process: Option<Process>, work: impl FnOnce(&mut Portions) -> T) -> T {
        let mut portions = Portions::in_one_go();
        let worked = work(&mut portions);
        self.done.charge(process, portions.worked());
        worked
    }

    /// As if much had been done for a process.
    #[cfg(test)]
    pub(crate) fn give_much(&self, process: Option<Process>) {
        self.done
            .by_process
            .charge_time(process, 2 * AT_ONCE * PARTS, Instant::now());
    }
}

type Permit = Result<OwnedSemaphorePermit, AcquireError>;

/// Somebody's turn.
#[derive(Debug)]
pub(crate) struct Turn {
    permits: Vec<Permit>,
    kind: Kind,
    done: Arc<Done>,
    process: Option<Process>,
}

#[derive(Debug)]
enum Kind {
    InOneGo,
    /// Until this.
    WithPauses(CancellationToken),
}

impl Turn {
    /// Whether it takes longer than it would have to.
    pub(crate) fn has_pauses(&self) -> bool {
        matches!(self.kind, Kind::WithPauses(_))
    }

    /// Does something on a thread on which it may take long. It is done to the end, also when nobody waits for it any more.
    pub(crate) async fn work<T: Send + 'static>(
        self,
        work: impl FnOnce(&mut Portions) -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let work = move || {
            let Self {
                permits,
                kind,
                done,
                process,
            } = self;
            let mut portions = match &kind {
                Kind::InOneGo => Portions::in_one_go(),
                Kind::WithPauses(stop) => Portions::with_pauses(stop.clone()),
            };
            let worked = work(&mut portions);
            // The last one was a portion, too.
            portions.portion();
            match kind {
                Kind::InOneGo => done.charge(process, portions.worked()),
                Kind::WithPauses(_) => done.charge_lately(process, portions.worked()),
            }
            drop(permits);
            worked
        };
        tokio::task::spawn_blocking(work).await
    }
}

/// Sleeps for so long, or until a stop.
fn pause(mut pause: Duration, stop: &CancellationToken) {
    while !pause.is_zero() && !stop.is_cancelled() {
        let sleep = pause.min(LONGEST_SLEEP);
        std::thread::sleep(sleep);
        pause -= sleep;
    }
}

/// How long this thread has worked. Not how long it was kept from that.
fn clock() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Work that may take long, on a thread that may sleep.
#[derive(Debug)]
pub(crate) struct Portions {
    /// When this portion began, on the thread's clock.
    began: Duration,
    /// In the portions before.
    worked: Duration,
    steps: usize,
    /// There are pauses until this.
    pauses: Option<CancellationToken>,
}

impl Portions {
    /// Work that somebody waits for, or that is short.
    pub(crate) fn in_one_go() -> Self {
        Self {
            began: clock(),
            worked: Duration::ZERO,
            steps: 0,
            pauses: None,
        }
    }

    fn with_pauses(until: CancellationToken) -> Self {
        Self {
            pauses: Some(until),
            ..Self::in_one_go()
        }
    }

    /// A step is done, which mostly takes a microsecond or less. Here the thread may sleep.
    pub(crate) fn step(&mut self) {
        self.step_over(0);
    }

    /// The same for a step that takes longer the more bytes it has.
    pub(crate) fn step_over(&mut self, bytes: usize) {
        self.steps += 1 + bytes / BYTES_PER_STEP;
        if self.steps >= STEPS {
            self.steps = 0;
            if self.pauses.is_some() && clock().saturating_sub(self.began) >= PORTION {
                self.portion();
            }
        }
    }

    /// A portion is done, however short: whoever waits for what it had would not get it in the moment in which nobody has
    /// it.
    pub(crate) fn portion(&mut self) {
        let Some(stop) = &self.pauses else {
            return;
        };
        let worked = clock().saturating_sub(self.began);
        self.worked += worked;
        pause(worked * LEFT_TO_OTHERS, stop);
        self.began = clock();
    }

    /// How long was worked.
    pub(crate) fn worked(&self) -> Duration {
        self.worked + clock().saturating_sub(self.began)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Instant as Clock;

    use futures_util::FutureExt as _;

    use super::*;

    const ONE: Option<Process> = Some((0, Some(1)));
    const OTHER: Option<Process> = Some((0, Some(2)));

    fn turns() -> Turns {
        Turns::new(CancellationToken::new())
    }

    async fn has_pauses(turns: &Turns, process: Option<Process>, is_awaited: bool) -> bool {
        let turn = turns.turn_or_pauses(process, is_awaited).await;
        let has_pauses = turn.has_pauses();
        let works_so = turn.work(|portions| portions.pauses.is_some()).await.unwrap();
        assert_eq!(works_so, has_pauses);
        has_pauses
    }

    #[tokio::test]
    async fn who_had_much_has_pauses_and_nobody_else_does() {
        let turns = turns();
        assert!(!has_pauses(&turns, ONE, false).await);
        turns.give_much(ONE);
        assert!(has_pauses(&turns, ONE, true).await);
        let _slow = turns.turn_with_pauses(ONE).await;
        assert!(!has_pauses(&turns, OTHER, false).await);
    }

    #[tokio::test]
    async fn who_had_any_has_pauses_unless_somebody_waits() {
        let turns = turns();
        turns.done.charge(ONE, AT_ONCE / 2);
        assert!(!has_pauses(&turns, ONE, true).await);
        assert!(has_pauses(&turns, ONE, false).await);
        // What is short counts, too.
        turns.at_once(OTHER, |portions| while portions.worked() < AT_ONCE / 10 {});
        assert!(has_pauses(&turns, OTHER, false).await);
        // And what has pauses does.
        let another = Some((0, Some(3)));
        let turn = turns.turn_with_pauses(another).await;
        turn.work(|portions| portions.worked = AT_ONCE).await.unwrap();
        assert!(!turns.had_much(another));
        assert!(has_pauses(&turns, another, false).await);
    }

    #[tokio::test]
    async fn many_processes_have_pauses_together() {
        let turns = turns();
        for process in [ONE, OTHER] {
            assert!(!has_pauses(&turns, process, true).await);
            turns.done.charge(process, ALL_AT_ONCE * 3 / 4);
        }
        let another = Some((0, Some(3)));
        assert!(has_pauses(&turns, another, true).await);
        assert!(!turns.had_much_itself(another), "what is short does not wait");
        assert!(turns.had_much_itself(ONE));
    }

    #[tokio::test]
    async fn of_several_who_wait_one_has_its_turn_and_the_next_has_pauses() {
        let turns = turns();
        let first = turns.turn_or_pauses(ONE, true).await;
        let mut pausing = pin!(turns.turn_or_pauses(ONE, true));
        assert!((&mut pausing).now_or_never().is_none());
        turns.give_much(ONE);
        first.work(|_| ()).await.unwrap();
        assert!(pausing.await.has_pauses());
        assert_eq!(turns.in_one_go.available_permits(), 1);
    }

    #[tokio::test]
    async fn one_process_does_not_take_all_turns_with_pauses() {
        let turns = turns();
        let _own = turns.turn_with_pauses(ONE).await;
        let mut second = pin!(turns.turn_with_pauses(ONE));
        assert!((&mut second).now_or_never().is_none());
        assert!(turns.turn_with_pauses(OTHER).now_or_never().is_some());
    }

    #[test]
    fn there_is_a_pause_after_each_portion() {
        let began = Clock::now();
        let mut portions = Portions::with_pauses(CancellationToken::new());
        while portions.worked < 3 * PORTION {
            portions.step();
        }
        let (all, worked) = (began.elapsed(), portions.worked);
        assert!(all >= worked * (1 + LEFT_TO_OTHERS), "{all:?}, {worked:?}");
        let mut in_one_go = Portions::in_one_go();
        while in_one_go.worked() < 2 * PORTION {
            in_one_go.step();
        }
        in_one_go.portion();
        assert_eq!(in_one_go.worked, Duration::ZERO, "no portion ended");
    }

    #[test]
    fn a_pause_ends_at_a_stop() {
        let stop = CancellationToken::new();
        let pausing = std::thread::spawn({
            let stop = stop.clone();
            move || pause(Duration::from_secs(3600), &stop)
        });
        stop.cancel();
        pausing.join().unwrap();
    }

    #[test]
    fn long_steps_are_many() {
        let mut portions = Portions::with_pauses(CancellationToken::new());
        while portions.worked() < PORTION {}
        portions.step_over(BYTES_PER_STEP * (STEPS - 2));
        assert_eq!(portions.worked, Duration::ZERO);
        portions.step();
        assert!(portions.worked >= PORTION);
    }
}
