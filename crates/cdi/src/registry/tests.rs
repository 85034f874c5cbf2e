use std::os::unix::fs::symlink;

use rustix::fs::{CWD, Mode};
use tempfile::TempDir;

use super::*;
use crate::validate::Warning;

/// Creates a directory with one subdirectory for each list of files.
fn directories(content: &[&[(&str, &str)]]) -> (TempDir, Vec<PathBuf>) {
    let root = TempDir::new().unwrap();
    let mut paths = Vec::new();
    for (number, files) in content.iter().enumerate() {
        let directory = root.path().join(number.to_string());
        fs::create_dir(&directory).unwrap();
        for (name, text) in *files {
            fs::write(directory.join(name), text).unwrap();
        }
        paths.push(directory);
    }
    (root, paths)
}

fn spec(kind: &str, devices: &[&str]) -> String {
    let devices = devices
        .iter()
        .map(|name| format!("- name: {name}\n  containerEdits: {{env: [\"N={name}\"]}}\n"));
    format!(
        "cdiVersion: 0.5.0\nkind: {kind}\ndevices:\n{}",
        devices.collect::<String>()
    )
}

fn name(text: &str) -> QualifiedName {
    text.parse().unwrap()
}

fn usable(registry: &Registry) -> Vec<String> {
    let definitions = registry
        .definitions()
        .filter(|definition| definition.state == DefinitionState::Usable);
    definitions
        .map(|definition| definition.name.to_string())
        .collect()
}

#[test]
fn missing_and_empty_directories_are_not_problems() {
    let (root, _) = directories(&[]);
    let none: [&str; 0] = [];
    for registry in [
        Registry::load(none),
        Registry::load([root.path()]),
        Registry::load([root.path().join("x")]),
    ] {
        assert!(registry.files().is_empty() && registry.problems().is_empty());
        assert_eq!(registry.definitions().count(), 0);
    }
}

#[test]
fn a_later_directory_wins_and_the_former_is_shadowed() {
    let one = spec("v.com/c", &["a", "b"]);
    let two = spec("v.com/c", &["a"]);
    let (_root, directories) = directories(&[&[("one.yaml", &one)], &[("two.json", &two)]]);
    let registry = Registry::load(&directories);

    assert_eq!(registry.directories(), directories);
    assert!(registry.problems().is_empty());
    assert_eq!(usable(&registry), ["v.com/c=a", "v.com/c=b"]);
    let winner = registry.get(&name("v.com/c=a")).unwrap();
    assert_eq!((winner.file.priority, winner.device.name.as_str()), (1, "a"));
    let standings: Vec<_> = registry
        .definitions_of(&name("v.com/c=a"))
        .map(|one| one.state)
        .collect();
    assert_eq!(
        standings,
        [
            DefinitionState::Shadowed {
                by: directories[1].join("two.json")
            },
            DefinitionState::Usable
        ]
    );
    assert!(registry.get(&name("v.com/c=x")).is_none());
}

#[test]
fn files_of_one_directory_that_define_the_same_device_make_it_unusable() {
    let one = spec("v.com/c", &["a", "b"]);
    let two = spec("v.com/c", &["a", "c"]);
    let (_root, directories) = directories(&[&[("1.yaml", &one), ("2.yaml", &two), ("3.yaml", &two)]]);
    let registry = Registry::load(&directories);

    assert_eq!(usable(&registry), ["v.com/c=b"]);
    assert_eq!(registry.files().len(), 3);
    let paths: Vec<_> = ["1.yaml", "2.yaml", "3.yaml"]
        .map(|file| directories[0].join(file))
        .into();
    let [
        Problem::Conflict {
            device: a,
            paths: of_a,
        },
        Problem::Conflict {
            device: c,
            paths: of_c,
        },
    ] = registry.problems()
    else {
        panic!("{:?}", registry.problems());
    };
    assert_eq!((a.as_str(), c.as_str()), ("v.com/c=a", "v.com/c=c"));
    assert_eq!((of_a.as_slice(), of_c.as_slice()), (&paths[..], &paths[1..]));
    assert!(registry.problems()[0].concerns(&paths[0]) && !registry.problems()[1].concerns(&paths[0]));
    let definitions: Vec<_> = registry.definitions_of(&name("v.com/c=a")).collect();
    assert_eq!(definitions.len(), 3);
    assert_eq!(definitions[0].state, DefinitionState::Conflicting { paths });
}

#[test]
fn a_directory_above_does_not_resolve_a_conflict_below() {
    let same = spec("v.com/c", &["a"]);
    let (_root, directories) = directories(&[&[("1.yaml", &same), ("2.yaml", &same)], &[("3.yaml", &same)]]);
    let registry = Registry::load(&directories);
    assert!(registry.get(&name("v.com/c=a")).is_none());
    assert_eq!(registry.problems().len(), 1);
}

#[test]
fn broken_files_are_reported_and_do_not_hide_good_ones() {
    let good = spec("v.com/c", &["a"]);
    let (root, directories) = directories(&[
        &[
            ("a-broken.json", "{"),
            ("b-good.yaml", &good),
            (
                "c-version.yaml",
                "cdiVersion: 9.9.9\nkind: v.com/d\ndevices: [{name: x, containerEdits: {env: [A=b]}}]",
            ),
            ("d-empty.yaml", ""),
        ],
        &[],
    ]);
    symlink("/no such file", directories[1].join("dangling.json")).unwrap();
    symlink(root.path(), directories[1].join("directory.json")).unwrap();
    rustix::fs::mknodat(
        CWD,
        directories[1].join("fifo.json"),
        rustix::fs::FileType::Fifo,
        Mode::RWXU,
        0,
    )
    .unwrap();
    let registry = Registry::load(&directories);

    assert_eq!(usable(&registry), ["v.com/c=a"]);
    let broken: Vec<_> = registry
        .problems()
        .iter()
        .map(|problem| match problem {
            Problem::File { path, priority, .. } => (path.file_name().unwrap().to_str().unwrap(), *priority),
            other => panic!("{other}"),
        })
        .collect();
    let expected = [
        ("a-broken.json", 0),
        ("c-version.yaml", 0),
        ("d-empty.yaml", 0),
        ("dangling.json", 1),
        ("directory.json", 1),
        ("fifo.json", 1),
    ];
    assert_eq!(broken, expected);
    let text = registry.problems()[1].to_string();
    assert!(text.ends_with("c-version.yaml: CDI version \"9.9.9\" is not one of 0.3.0, 0.4.0, 0.5.0, 0.6.0, 0.7.0, 0.8.0, 1.0.0, 1.1.0"), "{text}");
}

#[test]
fn an_unreadable_directory_does_not_end_the_scan() {
    let good = spec("v.com/c", &["a"]);
    let (root, directories) = directories(&[&[("good.yaml", &good)]]);
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let registry = Registry::load([&file, &directories[0]]);
    assert!(matches!(registry.problems(), [Problem::Directory { directory, .. }] if *directory == file));
    assert_eq!(registry.get(&name("v.com/c=a")).unwrap().file.priority, 1);
}

#[test]
fn only_json_and_yaml_files_are_read_and_subdirectories_are_not() {
    let text = |device| spec("v.com/c", &[device]);
    let (a, b, c, d) = (text("a"), text("b"), text("c"), text("d"));
    let (_root, directories) = directories(&[&[
        ("1.json", &a),
        (".json", &b),
        (".2.yaml", &c),
        ("3.yml", &d),
        ("4.json.bak", &d),
        ("5.JSON", &d),
        ("6", &d),
        ("yaml", &d),
    ]]);
    fs::create_dir(directories[0].join("sub.json")).unwrap();
    fs::write(directories[0].join("sub.json/inner.json"), &d).unwrap();
    let registry = Registry::load(&directories);
    assert_eq!(usable(&registry), ["v.com/c=a", "v.com/c=b", "v.com/c=c"]);
    assert!(registry.problems().is_empty());
}

#[test]
fn vendors_and_classes_are_listed_once() {
    let (one, two, three) = (
        spec("v2.com/e", &["a"]),
        spec("v1.com/c", &["a"]),
        spec("v1.com/e", &["a", "b"]),
    );
    let (_root, directories) = directories(&[&[("1.json", &one), ("2.json", &two)], &[("3.json", &three)]]);
    let registry = Registry::load(&directories);
    assert_eq!(registry.vendors(), ["v1.com", "v2.com"]);
    assert_eq!(registry.classes(), ["c", "e"]);
}

#[test]
fn a_one_character_class_is_loaded_with_a_warning() {
    let short = spec("one.com/d", &["a"]);
    let (_root, directories) = directories(&[&[("1.json", &short)]]);
    let registry = Registry::load(&directories);
    assert_eq!(usable(&registry), ["one.com/d=a"]);
    assert!(matches!(
        registry.files()[0].warnings[..],
        [Warning::OneCharacter { .. }]
    ));
}

#[test]
fn a_registry_is_a_snapshot_and_loading_again_sees_changes() {
    let (one, two) = (spec("v.com/c", &["a"]), spec("v.com/c", &["b"]));
    let (_root, directories) = directories(&[&[("1.json", &one)]]);
    let before = Registry::load(&directories);
    fs::write(directories[0].join("2.json"), &two).unwrap();
    fs::remove_file(directories[0].join("1.json")).unwrap();
    assert_eq!(usable(&before), ["v.com/c=a"]);
    assert_eq!(usable(&Registry::load(&directories)), ["v.com/c=b"]);
}

#[test]
fn the_default_directories_are_those_of_runtimes() {
    assert_eq!(DEFAULT_DIRECTORIES, ["/etc/cdi", "/var/run/cdi"]);
}
