use std::fs::File;

use redb::backends::FileBackend;

use super::*;
use crate::store::backend::Storage;

struct Disk(File);

impl Disk {
    fn new() -> Self {
        Self(tempfile::tempfile().unwrap())
    }

    fn file(&self) -> Arc<Counted> {
        let file = FileBackend::new(self.0.try_clone().unwrap()).unwrap();
        Storage::default().over(file, &Arc::default())
    }

    fn journal(&self) -> Journal {
        Journal::create(self.file()).unwrap()
    }

    fn read(&self, taken_over: u64) -> Result<(Journal, Vec<Vec<u8>>), JournalError> {
        Journal::open(self.file())?.read(taken_over)
    }

    fn contents(&self, taken_over: u64) -> Vec<Vec<u8>> {
        self.read(taken_over).unwrap().1
    }

    fn change(&self, place: u64, change: impl FnOnce(&mut u8)) {
        let mut byte = [0];
        self.file().read(place, &mut byte).unwrap();
        change(&mut byte[0]);
        self.file().write(place, &byte).unwrap();
    }
}

fn append(journal: &mut Journal, contents: &[&[u8]]) {
    for content in contents {
        assert!(journal.append(content).unwrap());
    }
}

#[test]
fn what_was_written_is_read_and_what_was_taken_over_is_not() {
    let disk = Disk::new();
    let long = vec![b'x'; 3 * SECTOR];
    append(&mut disk.journal(), &[b"one", &long, b""]);
    assert_eq!(disk.contents(0), [b"one".to_vec(), long, Vec::new()]);
    // As if the journal had begun anew behind the third.
    assert_eq!(disk.contents(3), Vec::<Vec<u8>>::new());
}

#[test]
fn a_journal_goes_on_behind_what_was_read() {
    let disk = Disk::new();
    append(&mut disk.journal(), &[b"one"]);
    let (mut journal, _) = disk.read(0).unwrap();
    append(&mut journal, &[b"two"]);
    assert_eq!(journal.number(), 2);
    assert_eq!(disk.contents(0), [b"one", b"two"]);
}

#[test]
fn records_of_before_it_began_anew_do_not_count() {
    let disk = Disk::new();
    let mut journal = disk.journal();
    append(&mut journal, &[b"one", b"two", b"three"]);
    journal.begin_anew();
    append(&mut journal, &[b"four"]);
    assert_eq!(disk.contents(3), [b"four"]);
}

#[test]
fn half_a_record_at_the_end_does_not_count() {
    let disk = Disk::new();
    append(&mut disk.journal(), &[b"one", &[b'x'; 2 * SECTOR]]);
    // The second sector of the second record.
    disk.change(3 * SECTOR as u64 + 7, |byte| *byte = 0);
    assert_eq!(disk.contents(0), [b"one"]);
}

#[test]
fn a_damaged_record_that_others_follow_is_not_skipped_over() {
    for place in [0, 5, 9, 20, HEAD as u64 + 1] {
        let disk = Disk::new();
        append(&mut disk.journal(), &[b"one", b"two", b"three"]);
        disk.change(2 * SECTOR as u64 + place, |byte| *byte ^= 0x40);
        let refused = disk.read(0).map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, JournalError::Damaged { missing: 2 }),
            "byte {place}: {refused:?}"
        );
    }
}

#[test]
fn what_is_recorded_cannot_look_like_a_record() {
    let disk = Disk::new();
    let mut journal = disk.journal();
    // As well as it can be made without knowing the salt.
    let mut forged = vec![0; SECTOR - HEAD];
    forged.extend_from_slice(RECORD);
    forged.extend_from_slice(&3_u32.to_le_bytes());
    forged.extend_from_slice(&7_u64.to_le_bytes());
    forged.extend_from_slice(&hash(&[0; SALT], 7, b"bad"));
    forged.extend_from_slice(b"bad");
    append(&mut journal, &[&forged]);
    journal.begin_anew();
    append(&mut journal, &[b"two"]);
    assert_eq!(disk.contents(1), [b"two"]);
}

#[test]
fn a_full_journal_says_so_and_writes_nothing() {
    let disk = Disk::new();
    let mut journal = disk.journal();
    let half = vec![1; length() / 2];
    append(&mut journal, &[&half]);
    assert!(!journal.append(&half).unwrap());
    append(&mut journal, &[b"two"]);
    assert_eq!(disk.contents(0), [half, b"two".to_vec()]);
}

#[test]
fn other_files_are_refused() {
    let disk = Disk::new();
    disk.file().write(0, &vec![b'x'; length()]).unwrap();
    let refused = disk.read(0).map(|_| ()).unwrap_err();
    assert!(matches!(refused, JournalError::Foreign), "{refused:?}");
    assert!(Journal::is_in(&disk.file()).unwrap());
    disk.file().write(0, b"redb").unwrap();
    assert!(!Journal::is_in(&disk.file()).unwrap());
}
