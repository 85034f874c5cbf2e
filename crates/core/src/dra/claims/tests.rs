use alloc::string::{String, ToString};

use super::claim::{PREPARE, UNPREPARE};
use super::*;

fn skipped(lists: &[&[&str]]) -> Vec<String> {
    let results = lists.iter().map(|skip| AllocationResult {
        driver: "d".into(),
        device: AllocatedDevice {
            request: "r".into(),
            pool: "p".into(),
            device: "x".into(),
            share: None,
            admin_access: false,
        },
        skip: skip.iter().map(ToString::to_string).collect(),
    });
    let claim = AllocatedClaim::new(ClaimKey::default(), "c".into(), results);
    claim.drivers["d"].skip.iter().cloned().collect()
}

#[test]
fn an_operation_is_skipped_if_no_device_needs_it() {
    assert_eq!(skipped(&[&[]]), [""; 0]);
    assert_eq!(skipped(&[&["*"], &["*"]]), ["*"]);
    assert_eq!(skipped(&[&["*"], &[PREPARE]]), [PREPARE]);
    assert_eq!(
        skipped(&[&[PREPARE, UNPREPARE], &[UNPREPARE, PREPARE]]),
        [PREPARE, UNPREPARE]
    );
    assert_eq!(skipped(&[&[PREPARE], &[UNPREPARE]]), [""; 0]);
    assert_eq!(skipped(&[&["*"], &[]]), [""; 0]);
    assert_eq!(skipped(&[&["*", PREPARE], &["*"]]), ["*"]);
    assert_eq!(
        skipped(&[&["Unheard"], &["*"]]),
        ["Unheard"],
        "kept, and without effect"
    );
}

#[test]
fn pauses_grow_up_to_a_limit() {
    let mut task = Task::default();
    let failure = || Failure::Call {
        driver: "d".into(),
        reason: String::new(),
    };
    let mut pauses = Vec::new();
    for _ in 0..100 {
        task.failed(failure(), Moment(0));
        pauses.push(task.retry_at.0);
    }
    assert_eq!(
        pauses[..3],
        [MIN_BACKOFF_MS, 2 * MIN_BACKOFF_MS, 4 * MIN_BACKOFF_MS]
    );
    assert_eq!(pauses[99], MAX_BACKOFF_MS);
}
