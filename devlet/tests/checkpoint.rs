//! `devlet checkpoint` on the built binary.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

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
        serde_json::json!({"stored": sum, "computed": sum, "valid": true})
    );
    let entry = &document["entries"][0];
    assert_eq!(entry["podUID"], "9d1c3e1a-7b1f-4a57-8e0a-aaaaaaaaaaaa");
    assert_eq!(
        entry["numaNodes"],
        serde_json::json!({"0": ["GPU-fef8089b"], "1": ["GPU-0a1b2c3d"]})
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
        stdout(&fine).contains("key \"0\" stands twice"),
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
    std::fs::File::create(&huge).unwrap().set_len(600 << 20).unwrap();
    for (path, says) in [
        (directory.path(), "it is a directory"),
        (&socket, "cannot read"),
        (Path::new("/dev/zero"), "it is a device node"),
        (&huge, "the largest file read here"),
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
    assert_eq!(looked.status.code(), Some(0), "{}", stderr(&looked));
    assert!(stdout(&looked).contains("DROPPED"), "{}", stdout(&looked));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);

    let out = directory.path().join("repaired");
    let output = on(
        &["repair", "-o", "json", "--out", out.to_str().unwrap()],
        &damaged,
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["kept"]["entries"].as_array().unwrap().len(), 2);
    assert!(!report["dropped"].as_array().unwrap().is_empty());
    assert_eq!(on(&["verify"], &out).status.code(), Some(0));
    assert_eq!(
        std::fs::read(&damaged).unwrap(),
        &whole[..500],
        "the damaged file was touched"
    );
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let path = testdata("deviceplugin/v2-full-response.json");
    let mut child = Command::new(env!("CARGO_BIN_EXE_devlet"))
        .args(["checkpoint", "show", path.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
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
            stdout(&devlet(&["completions", shell])).contains("checkpoint"),
            "{shell}"
        );
    }
    let directory = tempfile::tempdir().unwrap();
    let out = devlet(&["man", "--out", directory.path().to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert!(directory.path().join("devlet-checkpoint-repair.1").exists());
}
