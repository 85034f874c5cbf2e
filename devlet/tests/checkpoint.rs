//! `devlet checkpoint` on the built binary.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/kubelet-files/testdata")
        .join(path)
}

fn devlet(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_devlet"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn on(command: &[&str], path: &Path) -> Output {
    let path = path.to_str().unwrap();
    devlet(&[&["checkpoint"], command, &[path]].concat())
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn shown(path: &str) -> Value {
    let output = on(&["show", "-o", "json"], &testdata(path));
    assert_eq!(output.status.code(), Some(0), "{path}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn show_names_every_format() {
    for (path, format) in [
        ("deviceplugin/v1-one-pod.json", "device-plugin-v1"),
        ("deviceplugin/v2-one-pod.json", "device-plugin-v2"),
        ("deviceplugin/v1-empty.json", "device-plugin-v2"),
        ("dra/flat-1.27/01-single.json", "dra-flat-1.27"),
        ("dra/flat-1.30/00-empty.json", "dra-flat-1.27"),
        ("dra/flat-1.28-1.29/01-single.json", "dra-flat-1.28"),
        ("dra/flat-1.30/01-single.json", "dra-flat-1.30"),
        ("dra/envelope-v1/03-single-device.json", "dra-envelope-v1"),
        ("dra/health/01-two-devices.json", "dra-health"),
        ("dra/health/00-empty.json", "dra-health"),
    ] {
        assert_eq!(shown(path)["format"], format, "{path}");
    }
}

#[test]
fn show_as_json_has_the_whole_document() {
    let document = shown("deviceplugin/v2-full-response.json");
    let sum = 1_664_235_135;
    assert_eq!(
        document["checksum"],
        json!({"stored": sum, "computed": sum, "valid": true})
    );
    let entry = &document["entries"][0];
    assert_eq!(entry["podUID"], "9d1c3e1a-7b1f-4a57-8e0a-aaaaaaaaaaaa");
    assert_eq!(
        entry["numaNodes"],
        json!({"0": ["GPU-fef8089b"], "1": ["GPU-0a1b2c3d"]})
    );
    assert_eq!(entry["response"]["envs"]["EMPTY"], "");
    assert_eq!(entry["response"]["mounts"][0]["readOnly"], true);
    assert_eq!(entry["response"]["devices"][1]["permissions"], "mrw");
    assert_eq!(entry["response"]["annotations"]["vendor.example.com/slot"], "3");
    assert_eq!(entry["response"]["cdiDevices"][1], "vendor.com/gpu=gpu1");
    assert_eq!(document["registeredDevices"]["vendor.com/gpu"][2], "GPU-11112222");
}

#[test]
fn show_as_yaml_says_the_same_as_json() {
    let yaml = on(
        &["show", "-o", "yaml"],
        &testdata("dra/envelope-v1/04-share-id.json"),
    );
    let document: Value = serde_saphyr::from_slice(&yaml.stdout).unwrap();
    let json = shown("dra/envelope-v1/04-share-id.json");
    assert_eq!(document["claims"], json["claims"]);
    assert_eq!(
        json["claims"][0]["drivers"]["test-driver.cdi.k8s.io"]["devices"][0]["shareID"],
        "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"
    );
}

#[test]
fn show_displays_a_file_with_a_wrong_checksum_and_says_so() {
    let json = shown("deviceplugin/corrupt-checksum-wrong.json");
    assert_eq!(json["checksum"]["valid"], false);
    let table = on(&["show"], &testdata("deviceplugin/corrupt-checksum-wrong.json"));
    assert!(stdout(&table).contains("WRONG"), "{}", stdout(&table));
    assert!(stdout(&table).contains("gpu0"), "{}", stdout(&table));
}

#[test]
fn show_lets_nothing_in_a_file_steer_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubelet_internal_checkpoint");
    let hostile = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"\u001b[2J","ContainerName":"\u009b31m","ResourceName":"\u202egpu","DeviceIDs":{"0":["\u0007"]},"AllocResp":"ChAKAUUSC1wbXTA7b3duZWQH"}],"RegisteredDevices":null},"Checksum":0}"#;
    std::fs::write(&path, hostile).unwrap();
    for command in [&["show"][..], &["verify"], &["repair"]] {
        let output = on(command, &path);
        let text = stdout(&output) + &stderr(&output);
        let bad = text
            .chars()
            .find(|c| c.is_control() && *c != '\n' || *c == '\u{202e}');
        assert_eq!(bad, None, "{command:?}: {text:?}");
    }
}

#[test]
fn verify_judges_each_file_on_a_line_and_the_worst_decides() {
    let good = testdata("deviceplugin/v2-one-pod.json");
    let odd = testdata("deviceplugin/lenient-duplicate-keys.json");
    let fine = devlet(&[
        "checkpoint",
        "verify",
        good.to_str().unwrap(),
        odd.to_str().unwrap(),
    ]);
    assert_eq!(fine.status.code(), Some(0), "{}", stdout(&fine));
    assert_eq!(stdout(&fine).lines().count(), 2);
    assert!(
        stdout(&fine).contains("key \"0\" is repeated"),
        "{}",
        stdout(&fine)
    );

    let old = testdata("deviceplugin/v1-one-pod.json");
    let bad = devlet(&[
        "checkpoint",
        "verify",
        good.to_str().unwrap(),
        old.to_str().unwrap(),
    ]);
    assert_eq!(bad.status.code(), Some(1));
    let text = stdout(&bad);
    assert!(text.contains("BAD (device-plugin-v1)"), "{text}");
    assert!(text.contains("1.23 to 1.30"), "{text}");
}

#[test]
fn verify_knows_an_empty_object_by_the_name_of_its_file() {
    let directory = tempfile::tempdir().unwrap();
    for (name, code) in [("dra_health_state", 0), ("dra_manager_state", 1), ("unnamed", 1)] {
        let path = directory.path().join(name);
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(on(&["verify"], &path).status.code(), Some(code), "{name}");
    }
    let unnamed = directory.path().join("unnamed");
    let told = on(&["verify", "--role", "dra_health_state"], &unnamed);
    assert_eq!(told.status.code(), Some(0), "{}", stdout(&told));
}

#[test]
fn an_unreadable_path_is_an_error_of_usage_and_the_other_files_are_judged_all_the_same() {
    let good = testdata("deviceplugin/v2-one-pod.json");
    let output = devlet(&["checkpoint", "verify", "/does/not/exist", good.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("cannot read /does/not/exist: No such file"),
        "{}",
        stderr(&output)
    );
    assert!(
        stdout(&output).contains("ok (device-plugin-v2)"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn bad_paths_get_a_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let huge = directory.path().join("huge");
    std::fs::File::create(&huge)
        .unwrap()
        .set_len((64 << 20) + 1)
        .unwrap();
    for (path, says) in [
        (directory.path(), "it is a directory"),
        (&socket, "cannot read"),
        (Path::new("/dev/zero"), "it is a device node"),
        (&huge, "the largest file read here has 64 MiB"),
        (Path::new("/does/not/exist"), "No such file"),
    ] {
        for command in [&["show"][..], &["verify"], &["convert"], &["repair"]] {
            let output = on(command, path);
            assert_eq!(output.status.code(), Some(2), "{command:?} {}", path.display());
            assert!(
                stderr(&output).starts_with("error: cannot read"),
                "{}",
                stderr(&output)
            );
            assert!(stderr(&output).contains(says), "{}", stderr(&output));
        }
    }
}

#[test]
fn garbage_is_refused_without_a_backtrace() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("garbage");
    let elf: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    for content in [
        &b""[..],
        b"\0\0\0\0",
        b"\x7fELF",
        b"[[[[",
        b"\xff\xfe\x00",
        &elf,
        b"{\"a\":1}",
    ] {
        std::fs::write(&path, content).unwrap();
        for command in [&["show"][..], &["verify"], &["convert"], &["repair"]] {
            let output = on(command, &path);
            assert_eq!(
                output.status.code(),
                Some(1),
                "{command:?} {content:.20?}: {}",
                stderr(&output)
            );
            assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
        }
    }
}

#[test]
fn convert_writes_v2_to_standard_output() {
    let output = on(&["convert"], &testdata("deviceplugin/v1-one-pod.json"));
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        output.stdout,
        std::fs::read(testdata("deviceplugin/v2-one-pod.json")).unwrap()
    );
    assert!(stderr(&output).contains("NUMA node 0"), "{}", stderr(&output));
}

#[test]
fn convert_in_place_keeps_a_backup_and_the_mode_and_never_overwrites_a_backup() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubelet_internal_checkpoint");
    let backup = directory.path().join("kubelet_internal_checkpoint.bak");
    let old = std::fs::read(testdata("deviceplugin/v1-one-pod.json")).unwrap();
    std::fs::write(&path, &old).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();

    let output = on(&["convert", "--in-place"], &path);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(std::fs::read(&backup).unwrap(), old);
    assert_eq!(
        std::fs::read(&path).unwrap(),
        std::fs::read(testdata("deviceplugin/v2-one-pod.json")).unwrap()
    );
    for file in [&path, &backup] {
        assert_eq!(
            std::fs::metadata(file).unwrap().permissions().mode() & 0o7777,
            0o640
        );
    }

    let again = on(&["convert", "--in-place"], &path);
    assert_eq!(again.status.code(), Some(2));
    assert_eq!(std::fs::read(&backup).unwrap(), old);
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "temporary files are left: {left:?}");
}

#[test]
fn convert_refuses_a_damaged_file_and_points_to_repair() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let args = ["convert", "--out", out.to_str().unwrap()];
    let output = on(&args, &testdata("deviceplugin/corrupt-checksum-wrong.json"));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("devlet checkpoint repair"),
        "{}",
        stderr(&output)
    );
    assert!(!out.exists());
}

#[test]
fn convert_refuses_the_format_of_another_kind_of_file() {
    let output = on(
        &["convert", "--to", "dra-envelope-v1"],
        &testdata("deviceplugin/v2-one-pod.json"),
    );
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("its newest format is device-plugin-v2"),
        "{}",
        stderr(&output)
    );
    assert_eq!(stdout(&output), "");
}

#[test]
fn convert_to_a_directory_that_does_not_exist_says_so() {
    let output = on(
        &["convert", "--out", "/does/not/exist/file"],
        &testdata("deviceplugin/v2-one-pod.json"),
    );
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("cannot write /does/not/exist/file"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn repair_writes_only_when_told_and_what_it_writes_verifies() {
    let directory = tempfile::tempdir().unwrap();
    let damaged = directory.path().join("kubelet_internal_checkpoint");
    let whole = std::fs::read(testdata("deviceplugin/v2-two-resources-one-container.json")).unwrap();
    std::fs::write(&damaged, &whole[..500]).unwrap();

    let looked = on(&["repair"], &damaged);
    assert_eq!(
        looked.status.code(),
        Some(1),
        "parts are lost: {}",
        stderr(&looked)
    );
    for says in ["DROPPED", "devlet forget FILE"] {
        assert!(stdout(&looked).contains(says), "{says}: {}", stdout(&looked));
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);

    let out = directory.path().join("repaired");
    let output = on(
        &["repair", "-o", "json", "--out", out.to_str().unwrap()],
        &damaged,
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    // The last one without its answer.
    assert_eq!(report["kept"]["entries"].as_array().unwrap().len(), 3);
    assert_eq!(report["incomplete"], true);
    assert!(!report["dropped"].as_array().unwrap().is_empty());
    assert_eq!(on(&["verify"], &out).status.code(), Some(0));
    assert_eq!(
        std::fs::read(&damaged).unwrap(),
        &whole[..500],
        "the damaged file was touched"
    );
}

/// Runs a command whose standard output nobody reads.
fn unread(command: &str, path: &str) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    Command::new(env!("CARGO_BIN_EXE_devlet"))
        .args(["checkpoint", command, testdata(path).to_str().unwrap()])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap()
}

#[test]
fn a_reader_that_leaves_early_changes_no_exit_code() {
    for (command, path, code) in [
        ("show", "deviceplugin/v2-full-response.json", 0),
        ("verify", "deviceplugin/v2-full-response.json", 0),
        ("verify", "deviceplugin/corrupt-checksum-wrong.json", 1),
    ] {
        let output = unread(command, path);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{command} {path}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn convert_into_a_closed_pipe_fails() {
    let output = unread("convert", "deviceplugin/v2-full-response.json");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("cannot write to standard output"),
        "{}",
        stderr(&output)
    );
}

/// A directory with a V1 checkpoint.
fn old_checkpoint() -> (TempDir, PathBuf, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubelet_internal_checkpoint");
    let old = std::fs::read(testdata("deviceplugin/v1-one-pod.json")).unwrap();
    std::fs::write(&path, &old).unwrap();
    (directory, path, old)
}

#[test]
fn the_file_that_is_read_is_never_written_with_out() {
    let (directory, path, old) = old_checkpoint();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let roundabout = directory.path().join(".").join("kubelet_internal_checkpoint");
    for (command, hint) in [("convert", "--in-place"), ("repair", "another name")] {
        for out in [&path, &link, &roundabout] {
            let output = on(&[command, "--out", out.to_str().unwrap()], &path);
            assert_eq!(output.status.code(), Some(2), "{command} {}", out.display());
            assert!(stderr(&output).contains(hint), "{}", stderr(&output));
        }
        let output = Command::new(env!("CARGO_BIN_EXE_devlet"))
            .args(["checkpoint", command, "-", "--out", path.to_str().unwrap()])
            .stdin(std::fs::File::open(&path).unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{command} from standard input");
    }
    assert_eq!(std::fs::read(&path).unwrap(), old);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn out_replaces_nothing_but_files() {
    let (directory, path, _) = old_checkpoint();
    let fifo = directory.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let dangling = directory.path().join("dangling");
    std::os::unix::fs::symlink("/does/not/exist", &dangling).unwrap();
    let stdout_link = directory.path().join("stdout");
    std::os::unix::fs::symlink("/proc/self/fd/1", &stdout_link).unwrap();
    let null = directory.path().join("null");
    std::os::unix::fs::symlink("/dev/null", &null).unwrap();
    for (out, says) in [
        (&fifo, "it is a pipe"),
        (&dangling, "its link is dangling"),
        (&stdout_link, "its link is dangling"),
        (&null, "it is a device node"),
    ] {
        let before = out.symlink_metadata().unwrap();
        for command in ["convert", "repair"] {
            let output = on(&[command, "--out", out.to_str().unwrap()], &path);
            assert_eq!(output.status.code(), Some(2), "{command} {}", out.display());
            assert!(stderr(&output).contains(says), "{}", stderr(&output));
        }
        assert_eq!(out.symlink_metadata().unwrap().ino(), before.ino());
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 5);
}

#[test]
fn out_follows_a_link_to_a_file_and_keeps_the_link() {
    let (directory, path, _) = old_checkpoint();
    let (real, link) = (directory.path().join("real"), directory.path().join("link"));
    std::fs::write(&real, "old").unwrap();
    std::os::unix::fs::symlink("real", &link).unwrap();
    let output = on(&["convert", "--out", link.to_str().unwrap()], &path);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(link.is_symlink());
    assert_eq!(
        std::fs::read(&real).unwrap(),
        std::fs::read(testdata("deviceplugin/v2-one-pod.json")).unwrap()
    );
}

#[test]
fn out_is_not_where_standard_output_goes() {
    let (directory, path, _) = old_checkpoint();
    let log = directory.path().join("log");
    let status = Command::new(env!("CARGO_BIN_EXE_devlet"))
        .args([
            "checkpoint",
            "convert",
            path.to_str().unwrap(),
            "--out",
            "/dev/stdout",
        ])
        .stdout(std::fs::File::create(&log).unwrap())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(2));
    assert_eq!(std::fs::read(&log).unwrap(), b"");
}

#[test]
fn the_backup_has_the_owner_of_the_file() {
    let (_directory, path, _) = old_checkpoint();
    // Only root may give files away.
    if std::os::unix::fs::chown(&path, Some(12345), Some(23456)).is_err() {
        return;
    }
    let output = on(&["convert", "--in-place"], &path);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for file in [path.clone(), path.with_extension("bak")] {
        let about = std::fs::metadata(&file).unwrap();
        assert_eq!((about.uid(), about.gid()), (12345, 23456), "{}", file.display());
    }
}

/// Ends a command that waits, and fails.
fn in_time(command: &mut Command) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{command:?} waits for ever");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn a_pipe_is_read_when_somebody_writes_to_it_and_not_waited_for_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("dra_manager_state");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let devlet = env!("CARGO_BIN_EXE_devlet");
    for command in ["show", "verify", "convert", "repair"] {
        let output = in_time(Command::new(devlet).args(["checkpoint", command, fifo.to_str().unwrap()]));
        assert_eq!(output.status.code(), Some(2), "{command}");
        assert!(
            stderr(&output).contains("it is a pipe that no process writes to"),
            "{}",
            stderr(&output)
        );
    }

    // Here the writer is there first, and slow.
    let file = testdata("dra/envelope-v1/06-two-claims.json");
    let script = format!(
        "{devlet} checkpoint show <(sleep 0.3; cat {file}) && {{ (sleep 0.3; cat {file}) > {fifo} & }} \
         && sleep 0.1 && {devlet} checkpoint show {fifo}",
        file = file.display(),
        fifo = fifo.display(),
    );
    let output = in_time(Command::new("bash").args(["-c", &script]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(
        stdout(&output).matches("default/example-2").count(),
        2,
        "{}",
        stdout(&output)
    );
}

#[test]
fn nothing_in_a_file_or_its_name_looks_like_a_line_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a\nFormat:    forged\nb");
    // The answer is the variable "E" with the value "\nforged\nx".
    let hostile = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"pod\nforged","ContainerName":"c\u2028forged","ResourceName":"g\ufeff\u061cpu\u2029","DeviceIDs":{"0":["a\nforged"]},"AllocResp":"Cg4KAUUSCQpmb3JnZWQKeA=="}],"RegisteredDevices":{"r\nforged":["d\nforged"]}},"Checksum":0}"#;
    std::fs::write(&path, hostile).unwrap();
    let missing = directory.path().join("none\nforged");
    for (command, path) in [
        (&["show"][..], &path),
        (&["verify"], &path),
        (&["repair"], &path),
        (&["convert"], &path),
        (&["show"], &missing),
    ] {
        let output = on(command, path);
        let text = stdout(&output) + &stderr(&output);
        assert!(text.contains("forged"), "{command:?}: {text}");
        let forged = text
            .lines()
            .find(|line| line.trim_start().starts_with("forged") || line.starts_with("Format:    forged"));
        assert_eq!(forged, None, "{command:?}: {text}");
        let bad = text
            .chars()
            .find(|c| "\u{61c}\u{2028}\u{2029}\u{feff}".contains(*c));
        assert_eq!(bad, None, "{command:?}: {text:?}");
    }
}

#[test]
fn show_tells_null_from_an_empty_list() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    for (file, key) in [
        (
            r#"{"Data":{"PodDeviceEntries":LIST,"RegisteredDevices":{}},"Checksum":1}"#,
            "entries",
        ),
        (r#"{"version":"v1","entries":LIST,"checksum":1}"#, "claims"),
        (
            r#"{"data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"claimInfoStateList\":LIST}","checksum":1}"#,
            "claims",
        ),
    ] {
        for (text, shown) in [("null", Value::Null), ("[]", json!([]))] {
            std::fs::write(&path, file.replace("LIST", text)).unwrap();
            let output = on(&["show", "-o", "json"], &path);
            assert_eq!(output.status.code(), Some(0), "{file}: {}", stderr(&output));
            let document: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(document[key], shown, "{file}");
            assert_eq!(on(&["show"], &path).status.code(), Some(0), "{file}");
        }
    }
}

#[test]
fn keys_of_yaml_are_texts_as_in_json() {
    let output = on(
        &["show", "-o", "yaml"],
        &testdata("deviceplugin/v2-full-response.json"),
    );
    let text = stdout(&output);
    assert!(text.contains("numaNodes:\n"), "{text}");
    assert!(text.contains("\"0\":\n") || text.contains("'0':\n"), "{text}");
}

#[test]
fn examples_can_be_pasted() {
    for command in [
        ["checkpoint", "show"],
        ["checkpoint", "verify"],
        ["checkpoint", "convert"],
        ["checkpoint", "repair"],
        ["cdi", "list"],
        ["cdi", "show"],
        ["cdi", "validate"],
        ["cdi", "resolve"],
    ] {
        let help = Command::new(env!("CARGO_BIN_EXE_devlet"))
            .args(command)
            .arg("--help")
            .env("COLUMNS", "80")
            .output()
            .unwrap();
        let text = stdout(&help);
        let examples = text.split_once("Examples:\n").unwrap().1;
        let examples = examples.split_once("\n\n").unwrap().0;
        for line in examples.lines() {
            assert!(line.starts_with("  devlet "), "{command:?}: {line:?} in {text}");
        }
    }
}

#[test]
fn wrong_usage_is_exit_code_two() {
    for args in [
        &["checkpoint"][..],
        &["checkpoint", "verify"],
        &["checkpoint", "show", "-o", "xml", "f"],
        &["nope"],
    ] {
        assert_eq!(devlet(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn standard_input_is_read_for_a_dash() {
    let input = std::fs::File::open(testdata("dra/envelope-v1/06-two-claims.json")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_devlet"))
        .args(["checkpoint", "show", "-"])
        .stdin(input)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(
        stdout(&output).contains("default/example-2"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn every_command_has_help_and_those_that_work_on_files_have_examples() {
    for command in ["show", "verify", "convert", "repair"] {
        let help = devlet(&["checkpoint", command, "--help"]);
        assert!(stdout(&help).contains("Examples:"), "{command}");
        assert!(stdout(&help).contains("Exit codes:"), "{command}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            stdout(&devlet(&["completions", shell])).contains("COMPLETE"),
            "{shell}"
        );
    }
    let directory = tempfile::tempdir().unwrap();
    let out = devlet(&["man", "--out", directory.path().to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert!(directory.path().join("devlet-checkpoint-repair.1").exists());
}

#[test]
fn repair_of_a_file_that_is_lost_writes_nothing_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let damaged = testdata("deviceplugin/corrupt-truncated.json");
    let output = on(&["repair", "--out", out.to_str().unwrap()], &damaged);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(
        stdout(&output).contains("everything was lost"),
        "{}",
        stdout(&output)
    );
    assert!(!out.exists());
}

#[test]
fn convert_tells_what_is_lost_on_the_way() {
    for (path, says) in [
        ("deviceplugin/lenient-invalid-utf8.json", "U+FFFD"),
        ("deviceplugin/lenient-unknown-keys.json", "unknown key"),
        (
            "deviceplugin-v1-extra/06-bad-response.json",
            "warning: in the new file, entry",
        ),
    ] {
        let output = on(&["convert"], &testdata(path));
        assert_eq!(output.status.code(), Some(0), "{path}");
        assert!(stderr(&output).contains(says), "{path}: {}", stderr(&output));
    }
}

#[test]
fn nothing_passes_for_an_empty_state_by_accident() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dra_manager_state");
    for content in ["{}", "null", r#"{"foo":{"bar":1}}"#] {
        std::fs::write(&path, content).unwrap();
        for command in [&["verify"][..], &["convert"], &["repair"]] {
            assert_eq!(on(command, &path).status.code(), Some(1), "{command:?} {content}");
        }
        assert!(
            stdout(&on(&["show"], &path)).contains("no list of claims"),
            "{content}"
        );
    }
}
