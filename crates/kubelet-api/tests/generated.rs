//! Checks that the bindings under `src/generated` match the `.proto` files. `devlet-client` includes this file as
//! its own test.
//!
//! The generator is a test, so that a build needs neither the generator nor `protoc`. Running [`REGENERATE`] writes
//! the files instead of comparing them. It compiles the crate first; if the present files do not compile, empty
//! them before.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const REGENERATE: &str = concat!(
    "DEVLET_REGENERATE=1 cargo test -p ",
    env!("CARGO_PKG_NAME"),
    " --test generated"
);

/// Contents by path: `deviceplugin/v1beta1.rs`.
type Files = BTreeMap<PathBuf, String>;

#[test]
fn checked_in_bindings_match_the_protos() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = generate(&root.join("proto"));
    let sources = root.join("src/generated");
    if std::env::var_os("DEVLET_REGENERATE").is_some_and(|value| value == "1") {
        replace(&sources, &generated);
    }

    let checked_in = read(&sources);

    let paths: Vec<_> = checked_in.keys().collect();
    let expected: Vec<_> = generated.keys().collect();
    assert_eq!(
        paths, expected,
        "files missing or left over in src/generated; run: {REGENERATE}"
    );
    for (path, text) in &generated {
        // Without assert_eq!, which would print both files.
        assert!(
            checked_in[path] == *text,
            "src/generated/{} is stale; run: {REGENERATE}",
            path.display()
        );
    }
}

#[test]
fn generating_twice_gives_the_same_files() {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    assert!(generate(&protos) == generate(&protos));
}

/// Generates one file for each `proto/<api>/<version>`, which contains one `.proto` file.
fn generate(protos: &Path) -> Files {
    let mut files = Files::new();
    for api in entries(protos) {
        for version in entries(&api) {
            let path = version.strip_prefix(protos).unwrap().with_extension("rs");
            files.insert(path, bindings(&version));
        }
    }
    files
}

/// Generates one version by itself, because packages collide: `v1` is pod resources and DRA health.
fn bindings(version: &Path) -> String {
    let [proto] = <[PathBuf; 1]>::try_from(entries(version)).unwrap();
    let mut descriptors = protox::compile([proto], [version]).unwrap();
    for message in descriptors
        .file
        .iter_mut()
        .flat_map(|file| &mut file.message_type)
    {
        for field in &mut message.field {
            // Field names are not on the wire. `deviceIDs` would become `device_i_ds`.
            let name = field.name().replace("IDs", "_ids");
            field.name = Some(name);
        }
    }
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        .emit_rerun_if_changed(false)
        // Maps are encoded in key order: equal values give equal bytes.
        .btree_map(".")
        // `connect` is for TCP; the services are on unix sockets.
        .build_transport(false)
        .compile_fds(descriptors)
        .unwrap();
    let [file] = <[PathBuf; 1]>::try_from(entries(out.path())).unwrap();
    fs::read_to_string(file).unwrap()
}

fn read(sources: &Path) -> Files {
    let mut files = Files::new();
    for file in entries(sources).iter().flat_map(|api| entries(api)) {
        let path = file.strip_prefix(sources).unwrap().to_owned();
        files.insert(path, fs::read_to_string(&file).unwrap());
    }
    files
}

fn replace(sources: &Path, files: &Files) {
    fs::remove_dir_all(sources).unwrap();
    for (path, text) in files {
        let path = sources.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    entries
}
