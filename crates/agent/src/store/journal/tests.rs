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
    let (mut journal, contents) = disk.read(0).unwrap();
    assert_eq!(contents, [b"one"]);
    append(&mut journal, &[b"two"]);
    assert_eq!(disk.contents(0), [b"one", b"two"]);
}

#[test]
fn a_journal_whose_database_knows_a_part_of_it_goes_on() {
    let disk = Disk::new();
    let mut journal = disk.journal();
    append(&mut journal, &[b"one", b"two", b"three"]);
    // The database has taken over two, and the journal did not begin anew.
    let (mut journal, contents) = disk.read(2).unwrap();
    assert_eq!(contents, [b"three"]);
    append(&mut journal, &[b"four"]);
    assert_eq!(disk.contents(2), [b"three".to_vec(), b"four".to_vec()]);
}

#[test]
fn no_byte_can_be_damaged_unnoticed() {
    for place in (0..64)
        .chain(512..512 + 80)
        .chain(1024..1024 + 80)
        .chain(2048..2048 + 48)
    {
        let disk = Disk::new();
        append(&mut disk.journal(), &[b"one", b"two", b"three"]);
        disk.change(place, |byte| *byte ^= 0x40);
        let intact = vec![b"one".to_vec(), b"two".to_vec(), b"three".to_vec()];
        match disk.read(0) {
            Err(JournalError::Damaged { .. } | JournalError::Header | JournalError::Foreign) => {}
            Ok((_, contents)) => assert_eq!(contents, intact, "byte {place}"),
            Err(error) => panic!("byte {place}: {error}"),
        }
    }
}

#[test]
fn a_journal_with_a_hole_is_damaged() {
    for sectors in [1..2, 2..3, 1..4] {
        let disk = Disk::new();
        append(&mut disk.journal(), &[b"one", b"two"]);
        for sector in sectors.clone() {
            disk.file().write((sector * SECTOR) as u64, &[0; SECTOR]).unwrap();
        }
        let refused = disk.read(0).map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, JournalError::Damaged { .. }),
            "{sectors:?}: {refused:?}"
        );
    }
}

#[test]
fn records_that_the_database_misses_are_missed() {
    let disk = Disk::new();
    let mut journal = disk.journal();
    append(&mut journal, &[b"one", b"two"]);
    journal.begin_anew();
    append(&mut journal, &[b"three"]);
    // As if the database had fallen back to before it took over.
    let refused = disk.read(1).map(|_| ()).unwrap_err();
    assert!(
        matches!(refused, JournalError::Damaged { missing: 2 }),
        "{refused:?}"
    );
    // Or as if the journal were an older one.
    let refused = disk.read(4).map(|_| ()).unwrap_err();
    assert!(
        matches!(refused, JournalError::Damaged { missing: 4 }),
        "{refused:?}"
    );
}

#[test]
fn what_is_recorded_cannot_look_like_a_record() {
    let disk = Disk::new();
    let mut journal = disk.journal();
    // As well as it can be made without knowing the salt.
    let mut forged = vec![0; SECTOR - HEAD];
    forged.extend_from_slice(&head(&[0; SALT], RECORD, 3, b"bad"));
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
