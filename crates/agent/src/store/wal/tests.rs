use std::fs::File;

use redb::backends::FileBackend;

use super::*;
use crate::store::file_backend::Storage;

const BOOT: &str = "boot-1";

struct Disk(File);

impl Disk {
    fn new() -> Self {
        Self(tempfile::tempfile().unwrap())
    }

    fn file(&self) -> Arc<MeteredFile> {
        let file = FileBackend::new(self.0.try_clone().unwrap()).unwrap();
        Storage::default().wrap(file, &Arc::default())
    }

    fn wal(&self) -> Wal {
        Wal::create(self.file(), BOOT).unwrap()
    }

    fn read(&self, checkpoint: u64) -> Result<(Wal, Vec<Vec<u8>>), WalError> {
        Wal::open(self.file(), BOOT, checkpoint)
    }

    fn contents(&self, checkpoint: u64) -> Vec<Vec<u8>> {
        self.read(checkpoint).unwrap().1
    }

    /// A start after the machine was rebooted.
    fn rebooted(&self, checkpoint: u64) -> Result<Vec<Vec<u8>>, WalError> {
        Wal::open(self.file(), "boot-2", checkpoint).map(|(_, contents)| contents)
    }

    fn sectors(&self, first: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count * SECTOR];
        self.file().read(first as u64, &mut bytes).unwrap();
        bytes
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.file().write(offset as u64, bytes).unwrap();
    }

    fn flip(&self, offset: usize) {
        let mut byte = [0];
        self.file().read(offset as u64, &mut byte).unwrap();
        self.write(offset, &[byte[0] ^ 0x40]);
    }
}

fn append(wal: &mut Wal, contents: &[&[u8]]) {
    for content in contents {
        assert!(wal.append(content).unwrap());
    }
}

/// A record of this number of sectors.
fn long(sectors: usize) -> Vec<u8> {
    vec![b'x'; sectors * PAYLOAD_LENGTH]
}

#[test]
fn records_behind_the_checkpoint_are_read() {
    let disk = Disk::new();
    let long = long(3);
    append(&mut disk.wal(), &[b"one", &long, b""]);
    assert_eq!(disk.contents(0), [b"one".to_vec(), long, Vec::new()]);
    assert_eq!(disk.contents(3), Vec::<Vec<u8>>::new());
}

#[test]
fn a_log_continues_behind_the_records_that_were_read() {
    let disk = Disk::new();
    append(&mut disk.wal(), &[b"one"]);
    let (mut wal, _) = disk.read(0).unwrap();
    append(&mut wal, &[b"two"]);
    assert_eq!(wal.number(), 2);
    assert_eq!(disk.contents(0), [b"one", b"two"]);
}

#[test]
fn records_from_before_a_checkpoint_do_not_count() {
    let disk = Disk::new();
    let mut wal = disk.wal();
    append(&mut wal, &[b"one", b"two", b"three"]);
    wal.reset();
    append(&mut wal, &[b"four"]);
    assert_eq!(disk.contents(3), [b"four"]);
}

/// A log with a torn second record: the sectors `lost` have their old content, and the mark is the old one or its own.
fn torn(lost: &[usize], is_marked: bool) -> Disk {
    let disk = Disk::new();
    let mut wal = disk.wal();
    append(&mut wal, &[b"one"]);
    let (offset, before) = (wal.end, disk.sectors(wal.end, 3));
    let mark = disk.sectors(MARK_OFFSET, 1);
    append(&mut wal, &[&long(3)]);
    for sector in lost {
        let old = &before[sector * SECTOR..][..SECTOR];
        disk.write(offset + sector * SECTOR, old);
    }
    if !is_marked {
        disk.write(MARK_OFFSET, &mark);
    }
    disk
}

#[test]
fn a_record_that_a_power_loss_tore_is_dropped() {
    for lost in [&[0][..], &[1], &[2], &[0, 1], &[1, 2], &[0, 1, 2]] {
        for is_marked in [true, false] {
            let disk = torn(lost, is_marked);
            assert_eq!(disk.rebooted(0).unwrap(), [b"one"], "{lost:?} {is_marked}");
            // The log continues at the same offset.
            let (mut wal, _) = disk.read(0).unwrap();
            append(&mut wal, &[b"two"]);
            assert_eq!(disk.contents(0), [b"one", b"two"], "{lost:?} {is_marked}");
        }
    }
}

#[test]
fn old_sectors_in_a_marked_record_of_this_boot_are_damage() {
    for lost in [&[0][..], &[1], &[2], &[0, 1, 2]] {
        let refused = torn(lost, true).read(0).map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, WalError::Damaged { number: 2 }),
            "{lost:?}: {refused:?}"
        );
    }
}

#[test]
fn a_record_that_a_kill_truncated_is_dropped() {
    // The mark is written last, and the kernel copies pages in order.
    for lost in [&[0, 1, 2][..], &[1, 2], &[2]] {
        assert_eq!(torn(lost, false).contents(0), [b"one"], "{lost:?}");
    }
}

#[test]
fn a_complete_record_behind_the_mark_is_kept_and_marked() {
    let disk = torn(&[], false);
    assert_eq!(disk.rebooted(0).unwrap().len(), 2);
    assert_eq!(disk.contents(0), [b"one".to_vec(), long(3)]);
    disk.flip(FIRST_RECORD + SECTOR);
    assert!(matches!(disk.rebooted(0), Err(WalError::Damaged { number: 2 })));
}

#[test]
fn a_mark_that_is_two_records_old_is_damage() {
    let disk = Disk::new();
    let mut wal = disk.wal();
    append(&mut wal, &[b"one"]);
    let mark = disk.sectors(MARK_OFFSET, 1);
    append(&mut wal, &[b"two", b"three"]);
    disk.write(MARK_OFFSET, &mark);
    assert!(matches!(disk.read(0), Err(WalError::Mark)));
    assert!(matches!(disk.rebooted(0), Err(WalError::Mark)));
}

#[test]
fn a_torn_record_is_not_completed_by_an_earlier_attempt() {
    let disk = torn(&[0, 2], true);
    let (mut wal, contents) = Wal::open(disk.file(), "boot-2", 0).unwrap();
    assert_eq!(contents, [b"one"]);
    // A record of the same number at the same offset. Its second sector is lost; that of the earlier attempt is present.
    let attempt = disk.sectors(wal.end + SECTOR, 1);
    let offset = wal.end + SECTOR;
    append(&mut wal, &[&vec![b'y'; 3 * PAYLOAD_LENGTH]]);
    disk.write(offset, &attempt);
    let contents = Wal::open(disk.file(), "boot-3", 0).unwrap().1;
    assert_eq!(contents, [b"one"]);
}

/// Checks that a damaged log has the same records or is rejected, in the same boot and in another one.
fn never_fewer(disk: &Disk, records: &[Vec<u8>], what: &str) {
    for boot in [BOOT, "boot-2"] {
        match Wal::open(disk.file(), boot, 0) {
            Err(WalError::Damaged { .. } | WalError::Header | WalError::Foreign | WalError::Mark) => {}
            Ok((_, contents)) => assert_eq!(contents, records, "{what}"),
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

#[test]
fn a_damaged_log_never_has_fewer_records() {
    let disk = Disk::new();
    let mut wal = disk.wal();
    let records = [b"one".to_vec(), long(2), b"three".to_vec(), long(12)];
    append(&mut wal, &records.each_ref().map(Vec::as_slice));
    let pristine = disk.sectors(0, length() / SECTOR);
    let restore = |first: usize, length: usize| disk.write(first, &pristine[first..][..length]);
    let end = wal.end;
    let offsets = (0..128)
        .chain(MARK_OFFSET..MARK_OFFSET + SECTOR)
        .chain(FIRST_RECORD..end + SECTOR)
        .step_by(7);
    for offset in offsets {
        disk.flip(offset);
        never_fewer(&disk, &records, &format!("byte {offset}"));
        restore(offset, 1);
        restore(MARK_OFFSET, SECTOR);
    }
    for size in [SECTOR, 4096] {
        for offset in (0..end + size).step_by(size) {
            for value in [0, 0xff, BLANK] {
                // Blank pages are not realistic damage: a start after a reboot treats them as lost writes.
                if value == BLANK && offset + size >= FIRST_RECORD {
                    continue;
                }
                disk.write(offset, &vec![value; size]);
                never_fewer(&disk, &records, &format!("{size} bytes of {value} at {offset}"));
                restore(offset, size);
                restore(MARK_OFFSET, SECTOR);
            }
        }
    }
}

#[test]
fn a_log_and_a_database_of_different_ages_are_refused() {
    let disk = Disk::new();
    let mut wal = disk.wal();
    append(&mut wal, &[b"one", b"two"]);
    wal.reset();
    append(&mut wal, &[b"three"]);
    // As if the database had fallen back to before its checkpoint.
    let refused = disk.read(1).map(|_| ()).unwrap_err();
    assert!(matches!(refused, WalError::Damaged { number: 2 }), "{refused:?}");
    // Or as if the log were an older one.
    let refused = disk.read(4).map(|_| ()).unwrap_err();
    assert!(matches!(refused, WalError::Damaged { number: 4 }), "{refused:?}");
}

#[test]
fn content_cannot_look_like_a_record() {
    let disk = Disk::new();
    let mut wal = disk.wal();
    // The best forgery without the salt. Besides, a payload is never at the start of a sector.
    let head = Head {
        number: 2,
        ..wal.head(2, 3)
    };
    let forged = encode(&[0; SALT_LENGTH], FIRST_RECORD + SECTOR, &head, b"bad");
    append(&mut wal, &[b"one"]);
    disk.write(FIRST_RECORD + SECTOR, &forged);
    assert_eq!(disk.contents(0), [b"one"]);
}

#[test]
fn a_full_log_returns_false_and_writes_nothing() {
    let disk = Disk::new();
    let mut wal = disk.wal();
    let half = vec![1; length() / 2];
    append(&mut wal, &[&half]);
    assert!(!wal.append(&half).unwrap());
    append(&mut wal, &[b"two"]);
    assert_eq!(disk.contents(0), [half, b"two".to_vec()]);
}

#[test]
fn other_files_are_refused() {
    let disk = Disk::new();
    disk.write(0, &vec![b'x'; length()]);
    let refused = disk.read(0).map(|_| ()).unwrap_err();
    assert!(matches!(refused, WalError::Foreign), "{refused:?}");
}

#[test]
fn the_mark_is_a_page_away_from_every_record() {
    const { assert!(FIRST_RECORD - (MARK_OFFSET + SECTOR) >= 4096) };
}
