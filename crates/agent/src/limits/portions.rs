//! Long work in small portions, so that whoever is woken meanwhile does not have to wait for it.
//!
//! A thread that computes has its processor until its turn is over, whoever else is woken: a millisecond or more, which is
//! as long as an admission takes. One that sleeps after a fraction of that, and for longer than it worked, is in nobody's way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;
use tokio::time::{Instant as Now, sleep_until};

use super::rate::Paces;
use super::seats::Process;

/// So many milliseconds of work are done for a process in one go, at once and in each period: a hundredth of the time.
const MILLISECONDS: u32 = 100;
const PERIOD: Duration = Duration::from_secs(10);

/// So long is worked in one go.
const PORTION: Duration = Duration::from_micros(200);
/// Then it is left to others for so many times as long.
const LEFT_TO_OTHERS: u32 = 29;
/// Who was kept from working for a while has not worked for that long.
const LONGEST_PORTION: Duration = Duration::from_millis(2);
/// The clock is looked at after so many steps.
const STEPS: u32 = 32;

/// How much was done for whom.
type Done = Arc<Paces<Option<Process>>>;

/// Turns for long work, one at a time. Whoever had much of that lately waits, or has turns with pauses, for which nobody
/// else has to wait.
#[derive(Debug, Clone)]
pub(crate) struct Turns {
    in_one_go: Arc<Semaphore>,
    with_pauses: Arc<Semaphore>,
    done: Done,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            in_one_go: Arc::new(Semaphore::new(1)),
            with_pauses: Arc::new(Semaphore::new(1)),
            done: Arc::new(Paces::new(MILLISECONDS, PERIOD)),
        }
    }
}

impl Turns {
    /// For what can only be done in one go: who had much of that waits.
    pub(crate) async fn turn(&self, process: Option<Process>) -> Turn {
        loop {
            match self.had_much(process) {
                Some(due) => sleep_until(due).await,
                None => {
                    let permit = self.in_one_go.clone().acquire_owned().await;
                    // Several of the same process may have waited.
                    if self.had_much(process).is_none() {
                        return Turn::in_one_go(permit, &self.done, process);
                    }
                }
            }
        }
    }

    /// For what can be done in portions: who had any of that lately, a hundred times as long ago as it took, has pauses.
    pub(crate) async fn turn_or_pauses(&self, process: Option<Process>) -> Turn {
        if !self.done.is_settled(&process, Now::now()) {
            return self.turn_with_pauses().await;
        }
        let permit = self.in_one_go.clone().acquire_owned().await;
        Turn::in_one_go(permit, &self.done, process)
    }

    /// For what nobody is in a hurry for.
    pub(crate) async fn turn_with_pauses(&self) -> Turn {
        Turn {
            permit: self.with_pauses.clone().acquire_owned().await,
            charged: None,
        }
    }

    /// As if much had been done for a process.
    #[cfg(test)]
    pub(crate) fn give_much(&self, process: Option<Process>) {
        self.done.owe(process, 2 * MILLISECONDS, Now::now());
    }

    fn had_much(&self, process: Option<Process>) -> Option<Now> {
        self.done.due(&process, Now::now())
    }
}

/// Somebody's turn.
#[derive(Debug)]
pub(crate) struct Turn {
    permit: Result<OwnedSemaphorePermit, AcquireError>,
    /// On whose account, if that matters.
    charged: Option<(Done, Option<Process>)>,
}

impl Turn {
    fn in_one_go(
        permit: Result<OwnedSemaphorePermit, AcquireError>,
        done: &Done,
        process: Option<Process>,
    ) -> Self {
        Self {
            permit,
            charged: Some((Arc::clone(done), process)),
        }
    }

    /// Does something on a thread on which it may take long. It is done to the end, also when nobody waits for it any more.
    pub(crate) async fn work<T: Send + 'static>(
        self,
        work: impl FnOnce(&mut Portions) -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let work = move || {
            let Self { permit, charged } = self;
            let mut portions = match charged {
                Some(_) => Portions::in_one_go(),
                None => Portions::with_pauses(),
            };
            let worked = work(&mut portions);
            if let Some((done, process)) = charged {
                let milliseconds = u32::try_from(portions.worked().as_millis()).unwrap_or(u32::MAX);
                done.owe(process, milliseconds.saturating_add(1), Now::now());
            }
            drop(permit);
            worked
        };
        tokio::task::spawn_blocking(work).await
    }
}

/// Work that may take long, on a thread that may sleep.
#[derive(Debug)]
pub(crate) struct Portions {
    began: Instant,
    /// In the portions before.
    worked: Duration,
    steps: u32,
    has_pauses: bool,
}

impl Portions {
    /// Work that somebody waits for, or that is short.
    pub(crate) fn in_one_go() -> Self {
        Self {
            began: Instant::now(),
            worked: Duration::ZERO,
            steps: 0,
            has_pauses: false,
        }
    }

    /// Work that takes a thirtieth of a processor's time.
    pub(crate) fn with_pauses() -> Self {
        Self {
            has_pauses: true,
            ..Self::in_one_go()
        }
    }

    /// A step is done, which took a few microseconds at most. Here the thread may sleep.
    pub(crate) fn step(&mut self) {
        self.steps += 1;
        if self.steps >= STEPS {
            self.steps = 0;
            if self.has_pauses && self.began.elapsed() >= PORTION {
                self.pause();
            }
        }
    }

    /// A portion is done, however short: whoever waits for what it had would not get it in the moment in which nobody has
    /// it.
    pub(crate) fn portion(&mut self) {
        if self.has_pauses {
            self.pause();
        }
    }

    fn pause(&mut self) {
        let worked = self.began.elapsed().min(LONGEST_PORTION);
        self.worked += worked;
        std::thread::sleep(worked * LEFT_TO_OTHERS);
        self.began = Instant::now();
    }

    /// How long was worked, without the pauses.
    pub(crate) fn worked(&self) -> Duration {
        self.worked + self.began.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    const ONE: Option<Process> = Some((0, Some(1)));
    const OTHER: Option<Process> = Some((0, Some(2)));

    async fn has_pauses(turns: &Turns, process: Option<Process>) -> bool {
        let turn = turns.turn_or_pauses(process).await;
        turn.work(|portions| portions.has_pauses).await.unwrap()
    }

    #[tokio::test]
    async fn who_had_much_has_pauses_or_waits_and_nobody_else_does() {
        let turns = Turns::default();
        assert!(!has_pauses(&turns, ONE).await);
        assert!(has_pauses(&turns, ONE).await);
        turns.turn(ONE).await.work(|_| ()).await.unwrap();
        turns.give_much(ONE);
        assert!(has_pauses(&turns, ONE).await);
        let mut waits = pin!(turns.turn(ONE));
        assert!((&mut waits).now_or_never().is_none());
        let _slow = turns.turn_with_pauses().await;
        assert!(!has_pauses(&turns, OTHER).await);
        let other = turns.turn(OTHER).await;
        assert!(!other.work(|portions| portions.has_pauses).await.unwrap());
        assert!((&mut waits).now_or_never().is_none());
    }

    #[tokio::test]
    async fn of_several_who_wait_one_has_its_turn_and_the_next_waits_again() {
        let turns = Turns::default();
        let first = turns.turn(ONE).await;
        let mut next = pin!(turns.turn(ONE));
        assert!((&mut next).now_or_never().is_none());
        turns.give_much(ONE);
        first.work(|_| ()).await.unwrap();
        assert!((&mut next).now_or_never().is_none());
        assert_eq!(turns.in_one_go.available_permits(), 1);
    }

    #[test]
    fn there_is_a_pause_after_each_portion_and_it_is_not_work() {
        let mut portions = Portions::with_pauses();
        let began = Instant::now();
        while portions.worked < 5 * PORTION {
            portions.step();
        }
        let (all, worked) = (began.elapsed(), portions.worked());
        assert!(
            all >= portions.worked * (1 + LEFT_TO_OTHERS),
            "{all:?}, {worked:?}"
        );
        let mut in_one_go = Portions::in_one_go();
        while in_one_go.worked() < 2 * PORTION {
            in_one_go.step();
        }
        assert_eq!(in_one_go.worked, Duration::ZERO, "no portion ended");
    }
}
