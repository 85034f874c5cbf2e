//! Power losses at every sync, kills at every write, and damage.
//!
//! Between two syncs a disk may write in any order, or not at all. So at every sync many images are made: the synced
//! content with some of the later writes, some of them torn. Each must open, and contain exactly the state before the
//! current change or the state after it.
//!
//! After a kill of the process, all writes before it are present, in order, and the boot is the same.
//!
//! Damage means flipped bits and zeroed sectors anywhere in the file. A damaged file has the same pods or is rejected; it
//! never has fewer.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use devlet_core::dra::claims::Claim;
use devlet_core::{ClaimUid, PodUid};
use redb::StorageBackend;
use redb::backends::FileBackend;

use super::claims::{admit_claiming, answer_calls, claiming, drive, prepare};
use super::*;
use crate::store::database::DatabaseFile;
use crate::store::persisted_state::PersistedState;

/// Bytes that a drive writes atomically.
const SECTOR: usize = 512;

/// IDs of the boot in which the store writes, see [`Root::options`], and of the boot after a power loss.
const BOOT: &str = "boot-1";
const REBOOTED: &str = "boot-2";

/// The content that must be complete.
#[derive(Debug, Clone, Default, PartialEq)]
struct State {
    pods: BTreeMap<PodUid, Pod>,
    claims: BTreeMap<ClaimUid, Claim>,
}

#[derive(Debug, Clone)]
enum Operation {
    Write(usize, Vec<u8>),
    Length(usize),
}

impl Operation {
    fn apply(&self, image: &mut Vec<u8>) {
        match self {
            Self::Write(offset, data) => {
                let end = offset + data.len();
                if image.len() < end {
                    image.resize(end, 0);
                }
                image[*offset..end].copy_from_slice(data);
            }
            Self::Length(length) => image.resize(*length, 0),
        }
    }

    /// Only the sectors for which `kept` is true.
    fn torn(&self, kept: impl Fn(usize) -> bool) -> Vec<Self> {
        match self {
            Self::Length(_) => Vec::new(),
            Self::Write(offset, data) => data
                .chunks(SECTOR)
                .enumerate()
                .filter(|(number, _)| kept(*number))
                .map(|(number, chunk)| Self::Write(offset + number * SECTOR, chunk.to_vec()))
                .collect(),
        }
    }
}

#[derive(Debug, Default)]
struct Recording {
    synced: Vec<u8>,
    pending: Vec<Operation>,
    /// The states that an image may have.
    allowed: Vec<State>,
    armed: bool,
    syncs: usize,
    images: usize,
    changed: usize,
    problems: Vec<String>,
}

#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<Recording>>);

#[derive(Debug)]
struct Recorded {
    file: FileBackend,
    recorder: Recorder,
}

impl Recorder {
    fn storage(&self) -> Storage {
        let recorder = self.clone();
        Storage::new(move |file| {
            // Another file, from its beginning.
            let mut recording = recorder.0.lock().unwrap();
            recording.synced.clear();
            recording.pending.clear();
            drop(recording);
            Box::new(Recorded {
                file,
                recorder: recorder.clone(),
            })
        })
    }

    fn note(&self, operation: Operation) {
        self.0.lock().unwrap().pending.push(operation);
    }

    fn sync(&self) {
        let mut recording = self.0.lock().unwrap();
        if recording.armed {
            recording.syncs += 1;
            for lost in losses(&recording.pending, recording.syncs) {
                let mut image = recording.synced.clone();
                lost.iter().for_each(|operation| operation.apply(&mut image));
                recording.check(image, REBOOTED);
            }
            for done in kills(&recording.pending) {
                let mut image = recording.synced.clone();
                done.iter().for_each(|operation| operation.apply(&mut image));
                recording.check(image, BOOT);
            }
        }
        let pending = std::mem::take(&mut recording.pending);
        pending
            .iter()
            .for_each(|operation| operation.apply(&mut recording.synced));
    }
}

impl Recording {
    fn check(&mut self, image: Vec<u8>, boot: &str) {
        self.images += 1;
        let found = load(image, boot);
        let sync = self.syncs;
        match found {
            Ok(state) if self.allowed.contains(&state) => {
                self.changed += usize::from(self.allowed.last() == Some(&state));
            }
            Ok(state) => {
                let uids: (Vec<_>, Vec<_>) = (state.pods.keys().collect(), state.claims.keys().collect());
                self.problems
                    .push(format!("sync {sync}: an impossible state: {uids:?}"));
            }
            Err(problem) => self.problems.push(format!("sync {sync}: {problem}")),
        }
    }
}

/// Returns the state that a start reads from a disk with this content.
fn load(image: Vec<u8>, boot: &str) -> Result<State, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state.redb");
    std::fs::write(&path, b"the content is elsewhere").unwrap();
    let image = Mutex::new(Some(image));
    let file = DatabaseFile {
        path,
        storage: Storage::new(move |_| Box::new(Memory(Mutex::new(image.lock().unwrap().take().unwrap())))),
        counters: Arc::default(),
        boot_id: boot.into(),
    };
    let loaded = file.open().map_err(|error| error.to_string())?;
    let PersistedState { pods, claims, .. } = loaded.persisted;
    Ok(State { pods, claims })
}

/// Returns the combinations of writes that may have reached the disk.
fn losses(pending: &[Operation], seed: usize) -> Vec<Vec<Operation>> {
    let count = pending.len();
    let pick = |kept: &dyn Fn(usize) -> bool| -> Vec<Operation> {
        let kept = pending.iter().enumerate().filter(|(number, _)| kept(*number));
        kept.map(|(_, operation)| operation.clone()).collect()
    };
    let mut losses = vec![Vec::new(), pending.to_vec()];
    for number in 0..count {
        losses.push(pick(&|other| other < number));
        losses.push(pick(&|other| other == number));
        losses.push(pick(&|other| other != number));
        for half in [true, false] {
            // All others, and the beginning or the end of this one.
            let middle = match &pending[number] {
                Operation::Write(_, data) => data.len().div_ceil(SECTOR) / 2,
                Operation::Length(_) => 0,
            };
            let mut torn = pick(&|other| other < number);
            torn.extend(pending[number].torn(|sector| (sector < middle) == half));
            torn.extend(pending[number + 1..].iter().cloned());
            losses.push(torn);
        }
    }
    // Random combinations, with a fixed seed.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed as u64 + 1);
    for _ in 0..16 {
        let mut any = Vec::new();
        for operation in pending {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            match random % 4 {
                0 => {}
                1 => any.extend(operation.torn(|sector| (random >> (sector % 60)) & 4 == 0)),
                _ => any.push(operation.clone()),
            }
        }
        losses.push(any);
    }
    losses
}

/// Returns the writes that a killed process leaves: everything up to a page of one of the writes.
fn kills(pending: &[Operation]) -> Vec<Vec<Operation>> {
    const PAGE: usize = 4096;
    let mut kills = Vec::new();
    for (number, operation) in pending.iter().enumerate() {
        let before = &pending[..number];
        kills.push(before.to_vec());
        if let Operation::Write(offset, data) = operation {
            let first = PAGE - offset % PAGE;
            let mut cuts: Vec<usize> = (first..data.len()).step_by(PAGE).collect();
            cuts.truncate(3);
            kills.extend(cuts.into_iter().map(|cut| {
                let part = Operation::Write(*offset, data[..cut].to_vec());
                [before, &[part]].concat()
            }));
        }
    }
    kills
}

impl StorageBackend for Recorded {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.recorder
            .note(Operation::Length(usize::try_from(len).unwrap()));
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.recorder.sync();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let offset_in_image = usize::try_from(offset).unwrap();
        self.recorder
            .note(Operation::Write(offset_in_image, data.to_vec()));
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }
}

/// A disk in memory.
#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>);

impl StorageBackend for Memory {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let image = self.0.lock().unwrap();
        let start = usize::try_from(offset).unwrap();
        let source = image.get(start..start + out.len());
        out.copy_from_slice(source.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.lock().unwrap().resize(usize::try_from(len).unwrap(), 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        Operation::Write(usize::try_from(offset).unwrap(), data.to_vec()).apply(&mut self.0.lock().unwrap());
        Ok(())
    }
}

/// An answer of this size.
fn big_answer(size: usize) -> Vec<u8> {
    let mut raw = RAW.to_vec();
    // The unknown field 100.
    raw.extend([0xa2, 0x06]);
    let mut length = size;
    while length >= 0x80 {
        raw.push(0x80 | u8::try_from(length & 0x7f).unwrap());
        length >>= 7;
    }
    raw.push(u8::try_from(length).unwrap());
    raw.extend(std::iter::repeat_n(b'x', size));
    raw
}

enum Step {
    Admit(&'static str, usize),
    Remove(&'static str),
    /// Two pods in one change.
    Import(&'static str, &'static str),
    /// A snapshot: the log is copied into the tables, but not durably.
    Look,
}

fn file_of(one: &str, other: &str) -> String {
    kubelet_file(&[(one, &["50", "51"]), (other, &["52"])])
}

#[tokio::test]
async fn a_power_loss_neither_loses_answered_changes_nor_leaves_partial_ones() {
    let root = Root::new();
    let recorder = Recorder::default();
    let store = root.open_on(recorder.storage());
    offer(&store, GPU, 64);
    // Metadata of the plugin may be written before the first step.
    recorder.0.lock().unwrap().allowed = vec![state(&store)];
    recorder.0.lock().unwrap().armed = true;
    let steps = [
        Step::Admit("a", 0),
        Step::Admit("b", 100),
        Step::Look,
        Step::Remove("a"),
        // Larger than a page.
        Step::Admit("c", 20_000),
        Step::Import("k", "l"),
        Step::Admit("e", 5_000),
        Step::Remove("c"),
        Step::Admit("a", 0),
        Step::Admit("d", 600_000),
        Step::Look,
        // Larger than the free space in the log; the file grows and shrinks.
        Step::Admit("f", 600_000),
        Step::Admit("g", 0),
        Step::Remove("k"),
        Step::Remove("d"),
        Step::Remove("f"),
        Step::Remove("g"),
    ];
    for step in steps {
        let before = state(&store);
        let mut after = before.clone();
        match &step {
            Step::Remove(uid) => {
                after.pods.remove(*uid);
            }
            Step::Admit(uid, size) => {
                // The expected result, from another store in the same state.
                let raw = big_answer(*size);
                let (_root, twin) = twin(&store).await;
                admit_raw(&twin, uid, 1, &raw).await.unwrap();
                after = state(&twin);
            }
            Step::Import(one, other) => {
                let (_root, twin) = twin(&store).await;
                twin.import(file_of(one, other).as_bytes()).await.unwrap();
                after = state(&twin);
            }
            Step::Look => {}
        }
        recorder.0.lock().unwrap().allowed = vec![before, after.clone()];
        match step {
            Step::Admit(uid, size) => {
                admit_raw(&store, uid, 1, &big_answer(size)).await.unwrap();
            }
            Step::Remove(uid) => store.release(&uid.into()).await.unwrap(),
            Step::Import(one, other) => {
                store.import(file_of(one, other).as_bytes()).await.unwrap();
            }
            Step::Look => drop(store.dump().await.unwrap()),
        }
        // Answered: from now on the change is always present.
        let recording = &mut *recorder.0.lock().unwrap();
        recording.allowed = vec![after];
        let image = recording.synced.clone();
        recording.check(image.clone(), BOOT);
        recording.check(image, REBOOTED);
    }
    let recording = recorder.0.lock().unwrap();
    assert_eq!(recording.problems, Vec::<String>::new());
    assert!(recording.syncs >= 14, "{}", recording.syncs);
    assert!(recording.images > 400, "{}", recording.images);
    // Some images have the change already, others not yet.
    assert!((recording.syncs..recording.images).contains(&recording.changed));
}

fn state(store: &Store) -> State {
    let pods = pods(store).into_iter();
    let claims = claims::claims(store).into_iter();
    State {
        pods: pods.map(|pod| (pod.uid.clone(), pod)).collect(),
        claims: claims.map(|claim| (claim.uid.clone(), claim)).collect(),
    }
}

impl Recorder {
    /// Makes one change. Images may have the state before or after it, and only the state after it once it is answered.
    async fn watch(&self, before: State, after: State, change: impl Future<Output = ()>) {
        self.0.lock().unwrap().allowed = vec![before, after.clone()];
        change.await;
        let recording = &mut *self.0.lock().unwrap();
        recording.allowed = vec![after];
        let image = recording.synced.clone();
        recording.check(image.clone(), BOOT);
        recording.check(image, REBOOTED);
    }
}

#[tokio::test]
async fn a_power_loss_never_separates_a_pod_from_its_claims() {
    let root = Root::new();
    let recorder = Recorder::default();
    let store = root.open_on(recorder.storage());
    drive(&store);
    recorder.0.lock().unwrap().armed = true;
    let mut on_disk = State::default();
    for (uid, claim) in [("a", "one"), ("b", "two"), ("c", "one")] {
        // The expected state, from another store in the same state.
        let (_root, twin) = twin(&store).await;
        drive(&twin);
        admit_claiming(&twin, uid, claim).await.unwrap();
        let admitted = state(&twin);
        let request = claiming(uid, claim);
        let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
        // The intent: only claims, and nothing if they are recorded already.
        let intended = State {
            pods: on_disk.pods.clone(),
            claims: state(&store).claims,
        };
        recorder
            .watch(on_disk, intended.clone(), async {
                held.intent().await.unwrap();
            })
            .await;
        // Both, or neither.
        prepare(&store, held.id());
        recorder
            .watch(intended, admitted.clone(), async {
                held.commit(&request, Vec::new()).await.unwrap();
            })
            .await;
        assert_eq!(state(&store), admitted);
        on_disk = admitted;
    }
    for uid in ["a", "b", "c"] {
        let mut released = on_disk.clone();
        let pod = released.pods.remove(uid).unwrap();
        let claim = &pod.claims[0].uid;
        let is_held = released.pods.values().any(|other| other.claims[0].uid == *claim);
        if !is_held {
            let left = released.claims.get_mut(claim).unwrap();
            (left.pod, left.pod_name) = (uid.into(), pod.name.clone());
        }
        recorder
            .watch(on_disk, released.clone(), async {
                store.release(&uid.into()).await.unwrap();
            })
            .await;
        let calls = store.update(|node| node.unprepare_calls(&uid.into(), NOW));
        assert_eq!(calls.len(), usize::from(!is_held));
        answer_calls(&store, calls);
        let mut unprepared = released.clone();
        if !is_held {
            unprepared.claims.remove(claim);
        }
        recorder
            .watch(released, unprepared.clone(), async {
                assert_eq!(store.record_claims().await.unwrap(), !is_held);
            })
            .await;
        assert_eq!(state(&store), unprepared);
        on_disk = unprepared;
    }
    assert_eq!(on_disk, State::default());
    let recording = recorder.0.lock().unwrap();
    assert_eq!(recording.problems, Vec::<String>::new());
    // Two intents, three commits, three releases, two deletions.
    assert!(recording.syncs >= 10, "{}", recording.syncs);
    assert!((recording.syncs..recording.images).contains(&recording.changed));
}

/// Opens another store with the same plugin.
async fn twin(store: &Store) -> (Root, Store) {
    let root = Root::new();
    let options = OpenOptions {
        checkpoint: None,
        claims: None,
        ..root.options()
    };
    let (twin, _) = Store::open(options).unwrap();
    offer(&twin, GPU, 64);
    let State { claims, .. } = state(store);
    let pods = pods(store);
    twin.update(|node| claims.into_values().for_each(|claim| node.put_claim(claim)));
    twin.update(|node| pods.into_iter().for_each(|pod| node.put(pod).unwrap()));
    (root, twin)
}

/// Damages the image at `offset`, loads it, and repairs it. Returns `true` if it could be read.
fn is_read_with(image: &mut [u8], offset: usize, damage: &[u8], expected: &State) -> bool {
    let end = image.len().min(offset + damage.len());
    let damage = &damage[..end - offset];
    let whole = image[offset..end].to_vec();
    if whole == damage {
        return true;
    }
    image[offset..end].copy_from_slice(damage);
    let loaded = [BOOT, REBOOTED].map(|boot| load(image.to_vec(), boot));
    image[offset..end].copy_from_slice(&whole);
    for state in loaded.iter().flatten() {
        let found: Vec<_> = state.pods.keys().collect();
        assert!(state == expected, "{} bytes at {offset}: {found:?}", damage.len());
    }
    loaded[0].is_ok()
}

#[tokio::test]
async fn a_damaged_file_never_has_fewer_pods() {
    let root = Root::new();
    let recorder = Recorder::default();
    let store = root.open_on(recorder.storage());
    offer(&store, GPU, 64);
    // Some pods are in the tables, and some of their old records are still in the log.
    for (uid, size) in [("a", 0), ("b", 600_000), ("c", 2_000), ("d", 500_000), ("e", 0)] {
        admit_raw(&store, uid, 1, &big_answer(size)).await.unwrap();
    }
    store.release(&"b".into()).await.unwrap();
    for (uid, size) in [("f", 0), ("g", 5_000), ("h", 0), ("i", 9_000)] {
        admit_raw(&store, uid, 1, &big_answer(size)).await.unwrap();
    }
    let expected = state(&store);
    let mut image = recorder.0.lock().unwrap().synced.clone();
    assert_eq!(load(image.clone(), BOOT), Ok(expected.clone()));

    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut read, mut refused) = (0, 0);
    let mut count = |is_read: bool| match is_read {
        true => read += 1,
        false => refused += 1,
    };
    for offset in (0..image.len()).step_by(SECTOR) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // The first sectors of each part are the most important ones.
        let is_first = [0, 4 << 10, 12 << 10, 1 << 20]
            .iter()
            .any(|first| (*first..first + 1024).contains(&offset));
        // A sample: most of the file is the answer of one pod.
        if !is_first && !random.is_multiple_of(20) {
            continue;
        }
        let flips = if is_first { 24 } else { 1 };
        for flip in 0..flips {
            let byte = offset + (usize::try_from(random >> 9).unwrap() + flip * 21) % SECTOR;
            let byte = byte.min(image.len() - 1);
            let flipped = image[byte] ^ (1 << (random % 8));
            count(is_read_with(&mut image, byte, &[flipped], &expected));
        }
        count(is_read_with(&mut image, offset, &[0; SECTOR], &expected));
    }
    for offset in (0..image.len()).step_by(3 * 4096) {
        count(is_read_with(&mut image, offset, &[0; 4096], &expected));
    }
    // Unused parts of the file may be damaged; used ones may not.
    assert!(read > 50 && refused > 100, "{read} {refused}");
}
