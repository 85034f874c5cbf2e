//! What a peer sends besides calls: connections that come to nothing, pings, settings, resets. All of it has to be
//! looked at, and none of it is of use to anybody; more than a little of it waits.
//!
//! HEADERS, with which a question or an answer begins, pay for themselves and for a few frames more, so that where there are
//! calls nobody is kept waiting, however many; whoever sends the rest without them is heard so often and no more. A process
//! that connects has one account for all its connections, and each that never had a call counts for some frames. Nor does
//! one connection keep its thread from others for long.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use crate::call_tracking::Calls;
use crate::peer::PeerCred;
use crate::rate_limit::KeyedRateLimiter;

/// How many bytes of a client come before its first frame.
const PREFACE: usize = 24;
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;

/// How many frames HEADERS pay for: what belongs to a call.
const CALL: u32 = 8;
/// What a reset counts for: more than what it resets has paid.
const RESET: u32 = CALL + 1;
/// What a connection without a call counts for, in frames.
const CONNECTION: u32 = 64;
/// So many are put on the account at a time.
const PORTION: u32 = 64;
/// So many in a row, and others have their turn.
const TURN: u32 = 256;

/// Called when a limit is hit.
pub type OnHit = Arc<dyn Fn() + Send + Sync>;

/// Who talks: a user's process.
type Speaker = (u32, Option<i32>);

/// The accounts of all of them.
#[derive(Debug, Clone)]
pub(crate) struct Speakers(Arc<KeyedRateLimiter<Speaker>>);

impl Speakers {
    pub(crate) fn new(frames_per_second: u32) -> Self {
        Self(Arc::new(KeyedRateLimiter::new(
            frames_per_second,
            Duration::from_secs(1),
        )))
    }

    /// The account of this one. Processes that cannot be told apart have one for each connection.
    fn of(&self, peer: &PeerCred) -> Self {
        match peer.pid {
            Some(_) => self.clone(),
            None => Self(Arc::new(self.0.same_quota())),
        }
    }

    /// Whether this one has said more than it may.
    pub(crate) fn is_over(&self, peer: &PeerCred) -> bool {
        self.0
            .next_allowed_at(&(peer.uid, peer.pid), Instant::now())
            .is_some()
    }
}

/// One of them.
#[derive(Debug)]
struct Account {
    who: Speaker,
    speakers: Speakers,
}

impl Account {
    /// So many frames more. If that is too much, when the next ones may come.
    fn owe(&self, frames: u32) -> Option<Instant> {
        self.speakers.0.charge(self.who, frames, Instant::now())
    }

    fn due(&self) -> Option<Instant> {
        self.speakers.0.next_allowed_at(&self.who, Instant::now())
    }
}

/// What comes over one connection.
pub(crate) struct Chatter {
    account: Account,
    on_hit: OnHit,
    /// Of a peer who connected; each without a call counts.
    calls: Option<Arc<Calls>>,
    frames: Frames,
    /// Frames that are not on the account.
    unpaid: u32,
    /// Frames in a row.
    row: u32,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Chatter {
    /// Of a peer who connected.
    pub(crate) fn new(peer: &PeerCred, calls: Arc<Calls>, speakers: &Speakers, on_hit: OnHit) -> Self {
        let mut chatter = Self::of(peer, speakers, on_hit);
        chatter.calls = Some(calls);
        chatter.frames = Frames::after(PREFACE);
        chatter
    }

    /// Of a peer who was dialled.
    pub(crate) fn dialed(peer: &PeerCred, hearing: &ReadLimit) -> Self {
        let account = Speakers::new(hearing.frames_per_second);
        Self::of(peer, &account, hearing.on_hit.clone())
    }

    fn of(peer: &PeerCred, speakers: &Speakers, on_hit: OnHit) -> Self {
        Self {
            account: Account {
                who: (peer.uid, peer.pid),
                speakers: speakers.of(peer),
            },
            on_hit,
            calls: None,
            frames: Frames::after(0),
            unpaid: 0,
            row: 0,
            pause: None,
        }
    }

    /// The connection does not count: it is refused anyhow.
    pub(crate) fn spare(&mut self) {
        self.calls = None;
    }

    /// Whether more may be read.
    pub(crate) fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            // Another connection of the same process may have been faster.
            self.pause = self.account.due().map(until);
        }
        if self.row >= TURN {
            self.row = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    /// This came; nothing, if there is nothing more for the moment.
    pub(crate) fn heard(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            self.row = 0;
            return;
        }
        let (row, unpaid) = (&mut self.row, &mut self.unpaid);
        self.frames.pass(bytes, |kind| {
            *row = row.saturating_add(1);
            *unpaid = match kind {
                HEADERS => unpaid.saturating_sub(CALL),
                RST_STREAM => unpaid.saturating_add(RESET),
                _ => unpaid.saturating_add(1),
            };
        });
        if self.unpaid < PORTION {
            return;
        }
        if let Some(due) = self.account.owe(std::mem::take(&mut self.unpaid)) {
            (self.on_hit)();
            self.pause = Some(until(due));
        }
    }
}

fn until(due: Instant) -> Pin<Box<Sleep>> {
    Box::pin(tokio::time::sleep_until(due))
}

impl Drop for Chatter {
    fn drop(&mut self) {
        if self.calls.as_ref().is_some_and(|calls| !calls.has_had_call()) {
            self.account.owe(self.unpaid.saturating_add(CONNECTION));
        }
    }
}

/// How much is heard of peers who are dialled.
#[derive(Clone)]
pub struct ReadLimit {
    pub(crate) frames_per_second: u32,
    pub(crate) on_hit: OnHit,
}

impl ReadLimit {
    pub fn new(frames_per_second: u32, on_hit: OnHit) -> Self {
        Self {
            frames_per_second,
            on_hit,
        }
    }
}

/// Tells the frames in what passes.
#[derive(Debug)]
struct Frames {
    /// Bytes until the next frame.
    skip: usize,
    /// How much of a frame's head has passed, and what is known of it.
    head: usize,
    length: usize,
    kind: u8,
}

impl Frames {
    fn after(skip: usize) -> Self {
        Self {
            skip,
            head: 0,
            length: 0,
            kind: 0,
        }
    }

    /// The kinds of those whose heads end in these bytes.
    fn pass(&mut self, mut bytes: &[u8], mut frame: impl FnMut(u8)) {
        while let Some((&first, rest)) = bytes.split_first() {
            if self.skip > 0 {
                let passed = self.skip.min(bytes.len());
                self.skip -= passed;
                bytes = &bytes[passed..];
                continue;
            }
            match self.head {
                0..3 => self.length = self.length << 8 | usize::from(first),
                3 => self.kind = first,
                _ => {}
            }
            self.head += 1;
            bytes = rest;
            if self.head == FRAME_HEAD {
                frame(self.kind);
                *self = Self::after(self.length);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, length: usize) -> Vec<u8> {
        let mut frame = u32::try_from(length).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend([kind, 0, 0, 0, 0, 0]);
        frame.resize(FRAME_HEAD + length, 0xff);
        frame
    }

    #[test]
    fn frames_are_told_however_they_are_cut() {
        let frames =
            [(4, 0), (6, 8), (0, 1), (1, 0), (0, 70_000), (8, 4)].map(|(kind, length)| frame(kind, length));
        let bytes = [vec![0xff; PREFACE], frames.concat()].concat();
        for size in [1, 2, 3, 7, 9, 10, 17, 4096, bytes.len()] {
            let mut frames = Frames::after(PREFACE);
            let mut kinds = Vec::new();
            for chunk in bytes.chunks(size) {
                frames.pass(chunk, |kind| kinds.push(kind));
            }
            assert_eq!(kinds, [4, 6, 0, 1, 0, 8], "in pieces of {size}");
        }
    }

    fn peer(pid: Option<i32>) -> PeerCred {
        PeerCred { uid: 0, gid: 0, pid }
    }

    fn chatter(pid: Option<i32>, speakers: &Speakers, calls: &Arc<Calls>) -> Chatter {
        let mut chatter = Chatter::new(&peer(pid), calls.clone(), speakers, Arc::new(|| {}));
        chatter.heard(&[0; PREFACE]);
        chatter
    }

    #[tokio::test]
    async fn a_process_has_one_account_and_those_that_cannot_be_told_apart_have_none_in_common() {
        for pid in [Some(7), None] {
            let speakers = Speakers::new(100);
            let mut talks = chatter(pid, &speakers, &Arc::default());
            talks.heard(&frame(6, 8).repeat(1_000));
            assert!(talks.pause.is_some());
            assert_eq!(speakers.is_over(&peer(pid)), pid.is_some());
            let mut other = chatter(pid, &speakers, &Arc::default());
            other.heard(&frame(6, 8).repeat(70));
            assert_eq!(other.pause.is_some(), pid.is_some());
        }
    }

    #[tokio::test]
    async fn whoever_makes_calls_is_not_kept_waiting_however_many_come_at_once() {
        let (speakers, calls) = (Speakers::new(100), Arc::<Calls>::default());
        let mut talks = chatter(Some(7), &speakers, &calls);
        // Of its head, its body, two windows and a ping.
        let call = [(1, 40), (0, 100), (8, 4), (8, 4), (6, 8)].map(|(kind, length)| frame(kind, length));
        for _ in 0..10 {
            talks.heard(&call.concat().repeat(500));
            assert!(talks.pause.is_none());
        }
        // Calls that are taken back are none.
        let taken_back = [frame(1, 40), frame(3, 4)].concat();
        talks.heard(&taken_back.repeat(500));
        assert!(talks.pause.is_some());
    }

    #[tokio::test]
    async fn connections_that_come_to_nothing_count() {
        let speakers = Speakers::new(100);
        drop(chatter(Some(7), &speakers, &Arc::default()));
        assert!(!speakers.is_over(&peer(Some(7))));
        drop(chatter(Some(7), &speakers, &Arc::default()));
        assert!(speakers.is_over(&peer(Some(7))));
    }
}
