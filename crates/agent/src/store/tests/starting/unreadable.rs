//! Databases and kubelet's files that cannot be read.

use super::*;

#[tokio::test]
async fn an_unreadable_file_and_no_database_block_the_node() {
    let mixed = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"p","ContainerName":"c","ResourceName":"r","DeviceIDs":["0"],"AllocResp":""},{"PodUID":"q","ContainerName":"c","ResourceName":"r","DeviceIDs":{"0":["1"]},"AllocResp":""}],"RegisteredDevices":{}},"Checksum":1}"#;
    let cases = [
        mixed.to_vec(),
        testdata("deviceplugin/corrupt-truncated.json"),
        testdata("deviceplugin/corrupt-checksum-wrong.json"),
        testdata("deviceplugin/corrupt-empty-file.json"),
        testdata("deviceplugin/corrupt-json-null.json"),
        b"{}".to_vec(),
    ];
    for file in cases {
        let root = Root::new();
        std::fs::write(root.checkpoint(), &file).unwrap();

        let (_store, report) = root.open_with_report();

        let [aside] = &report.quarantined[..] else {
            panic!("{report:?}");
        };
        assert_eq!(aside.original, root.checkpoint());
        assert_eq!(std::fs::read(&aside.kept).unwrap(), file);
        assert!(!root.checkpoint().exists());
        assert!(!aside.reason.is_empty());
        let file = aside.kept.display().to_string();
        let reason = aside.reason.clone();
        assert_eq!(report.blocked, Some(Blocked::UnreadableState { file, reason }));
        let name = aside.kept.file_name().unwrap().to_str().unwrap();
        assert_eq!(
            name,
            "kubelet_internal_checkpoint.unreadable-20260921T141320.123Z"
        );
    }
}

#[tokio::test]
async fn a_quarantined_file_overwrites_no_other() {
    let root = root_with_a_pod().await;
    for number in 1..=3 {
        std::fs::write(root.checkpoint(), format!("broken {number}")).unwrap();
        let (store, report) = root.open_with_report();
        assert_eq!(report.quarantined.len(), 1);
        stop(&store).await;
    }
    let asides = asides(&root);
    let contents: Vec<_> = asides
        .iter()
        .map(|name| std::fs::read_to_string(root.path().join(name)).unwrap())
        .collect();
    assert_eq!(contents, ["broken 1", "broken 2", "broken 3"]);
}

#[tokio::test]
async fn a_crash_during_a_quarantine_is_not_a_first_start() {
    let root = Root::new();
    std::fs::write(root.checkpoint(), "broken").unwrap();
    // The database cannot be created.
    let disk = Disk::default();
    disk.fail_writes(Some(ErrorKind::StorageFull));
    let options = OpenOptions {
        storage: disk.storage(),
        ..root.options()
    };
    let failed = Store::open(options).unwrap_err();
    assert!(matches!(failed, OpenError::Disk { .. }), "{failed:?}");
    assert!(
        root.checkpoint().exists(),
        "it is kept under its name until the database knows of it"
    );

    let (_store, report) = root.open_with_report();

    assert!(report.blocked.is_some());
    assert_eq!(asides(&root).len(), 2);
}

#[tokio::test]
async fn an_unreadable_file_beside_a_readable_database_blocks_until_an_operator_decides() {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), "broken").unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(uids(&store), ["a"]);
    assert_eq!(report.quarantined.len(), 1);
    assert_eq!(asides(&root).len(), 1);
    // A kubelet may have written it, and given more devices.
    assert!(
        matches!(report.blocked, Some(Blocked::UnreadableState { .. })),
        "{report:?}"
    );
    store.forget().await.unwrap();
    store.mirror().await.unwrap();
    assert!(root.checkpoint().exists());
    store.stop().await.unwrap();
    // A second name of a mirror has nothing new.
    std::fs::hard_link(root.checkpoint(), root.path().join("second")).unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn each_unreadable_file_needs_its_own_decision() {
    let root = root_with_a_pod().await;
    let mut kept = Vec::new();
    for content in ["half of a file", "half of another"] {
        std::fs::write(root.checkpoint(), content).unwrap();
        let (store, report) = root.open_with_report();
        kept.push(report.quarantined[0].kept.display().to_string());
        store.stop().await.unwrap_err();
    }
    let store = root.open();
    let open = |store: &Store| -> Vec<String> {
        let reasons = contests(store);
        reasons.iter().map(|reason| reason.file().to_owned()).collect()
    };
    assert_eq!(open(&store), kept);
    // It is unknown which of them a sound file replaces.
    store
        .import(kubelet_file(&[("b", &["01"])]).as_bytes())
        .await
        .unwrap();
    assert_eq!(open(&store), kept);
    store.forget_reason(&contests(&store)[1]).await.unwrap();
    assert_eq!(open(&store), kept[..1]);
    assert!(refuses(&store));
    drop(store);

    let killed = after_a_kill(&root);
    let store = killed.open();
    assert_eq!(open(&store), kept[..1]);
    store
        .import(kubelet_file(&[("c", &["02"])]).as_bytes())
        .await
        .unwrap();
    assert_eq!(open(&store), [""; 0]);
}

#[tokio::test]
async fn a_crash_before_an_unreadable_file_is_removed_does_not_block_twice() {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), "half of a file").unwrap();
    let (store, report) = root.open_with_report();
    store.stop().await.unwrap_err();
    std::fs::hard_link(&report.quarantined[0].kept, root.checkpoint()).unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(contests(&store).len(), 1);
    assert!(report.quarantined.is_empty(), "{report:?}");
    assert!(!root.checkpoint().exists());
}

#[tokio::test]
async fn an_adopted_file_does_not_end_the_block_by_an_unreadable_one() {
    let root = root_contested_by(&[("c", &["05"])]).await;
    let store = root.open();
    let contested = contests(&store).remove(0).file().to_owned();
    stop(&store).await;
    std::fs::write(root.checkpoint(), "half of a file").unwrap();
    let store = root.open();
    assert_eq!(contests(&store).len(), 2);

    let copy = std::fs::read(contested).unwrap();
    // The second time it adds nothing.
    for _ in 0..2 {
        store.import(&copy).await.unwrap();

        let [Blocked::UnreadableState { .. }] = &contests(&store)[..] else {
            panic!("{:?}", contests(&store));
        };
        assert!(refuses(&store));
    }
}

/// Damages the database so that it cannot be read.
fn damage(root: &Root, how: &str) {
    let path = root.database();
    let mut bytes = std::fs::read(&path).unwrap();
    match how {
        "empty" => bytes.clear(),
        "cut" => bytes.truncate(100),
        "log" => bytes.truncate(wal::LENGTH as usize),
        "text" => bytes = b"this is not a database".to_vec(),
        "ones" => bytes.iter_mut().skip(64).for_each(|byte| *byte = 0xff),
        "zeros" => bytes.iter_mut().skip(4096).for_each(|byte| *byte = 0),
        other => panic!("{other}"),
    }
    std::fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn an_unreadable_database_is_quarantined_and_the_mirror_imported_but_no_new_pod_admitted() {
    for how in ["empty", "cut", "log", "text", "ones", "zeros"] {
        let root = root_with_a_pod().await;
        damage(&root, how);
        let damaged = std::fs::read(root.database()).unwrap();

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::KubeletFile, "{how}: {report:?}");
        let [aside] = &report.quarantined[..] else {
            panic!("{report:?}");
        };
        assert_eq!(std::fs::read(&aside.kept).unwrap(), damaged, "{how}");
        // The mirror may lag behind the database.
        let file = aside.kept.display().to_string();
        let files = "both kubelet_internal_checkpoint and dra_manager_state".to_owned();
        assert_eq!(
            report.blocked,
            Some(Blocked::UnreadableDatabase { file, files }),
            "{how}"
        );
        assert_eq!(devices(&store, "a"), ["00"], "{how}");
    }
}

/// A file that records the reads before it was locked.
#[derive(Debug)]
struct Watched {
    file: FileBackend,
    /// Lengths of the reads before it was locked.
    unlocked: Arc<Mutex<Vec<usize>>>,
    is_locked: AtomicBool,
}

impl StorageBackend for Watched {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if !self.is_locked.load(Ordering::Relaxed) {
            self.unlocked.lock().unwrap().push(out.len());
        }
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.is_locked.store(true, Ordering::Relaxed);
        self.file.try_lock_range(start, end)
    }
}

#[tokio::test]
async fn the_log_is_not_read_while_another_process_may_write_it() {
    let root = root_with_a_pod().await;
    let unlocked: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut options = root.options();
    options.storage = Storage::new({
        let unlocked = Arc::clone(&unlocked);
        move |file| {
            Box::new(Watched {
                file,
                unlocked: Arc::clone(&unlocked),
                is_locked: AtomicBool::new(false),
            })
        }
    });
    let (store, _) = Store::open(options).unwrap();
    assert_eq!(devices(&store, "a"), ["00"]);
    let unlocked = unlocked.lock().unwrap();
    // The mark at the beginning, which never changes.
    assert!(unlocked.iter().all(|length| *length <= 512), "{unlocked:?}");
}

#[tokio::test]
async fn a_flipped_bit_in_a_pod_is_detected() {
    let root = root_with_a_pod().await;
    let mut bytes = std::fs::read(root.database()).unwrap();
    let needle = b"acme.com/gpu\x22\x0200";
    let places: Vec<usize> = bytes
        .windows(needle.len())
        .enumerate()
        .filter(|(_, window)| window == needle)
        .map(|(place, _)| place)
        .collect();
    assert!(!places.is_empty());
    for place in places {
        bytes[place + needle.len() - 1] = b'7';
    }
    std::fs::write(root.database(), bytes).unwrap();

    let (store, _) = root.open_with_report();

    assert_eq!(devices(&store, "a"), ["00"]);
}

#[tokio::test]
async fn an_unreadable_database_without_a_sound_file_blocks_the_node() {
    for file in [None, Some("broken")] {
        let root = root_with_a_pod().await;
        damage(&root, "ones");
        std::fs::remove_file(root.checkpoint()).unwrap();
        if let Some(file) = file {
            std::fs::write(root.checkpoint(), file).unwrap();
        }

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::Nothing);
        assert!(report.blocked.is_some(), "{file:?}");
        assert_eq!(report.quarantined.len(), 1 + usize::from(file.is_some()));
        stop(&store).await;
        assert!(root.open_with_report().1.blocked.is_some());
    }
}
