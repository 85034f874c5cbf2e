use devlet_core::{ContainerKind, ContainerRequest};

use super::object::Head;
use super::quantity::quantity;
use super::syntax::json_documents;
use super::*;

mod api_object;
mod claims;
mod fingerprint;

const FULL: &str = r"
apiVersion: v1
kind: Pod
metadata:
  name: train
  namespace: team-a
  uid: 5a1b
  labels: {app: train}
spec:
  restartPolicy: Never
  initContainers:
  - name: fetch
    image: fetch:1
    resources: {limits: {acme.com/nic: 1, cpu: 500m}}
  - name: proxy
    restartPolicy: Always
    resources: {limits: {acme.com/nic: '2'}}
  containers:
  - name: main
    image: train:1
    resources:
      limits: {acme.com/gpu: 2, memory: 4Gi, kubernetes.io/x: 1, other.org/seat: 3}
      requests: {acme.com/gpu: '2', cpu: 1}
  - name: log
  ephemeralContainers:
  - name: debug
    resources: {limits: {acme.com/gpu: 7}}
";

fn parsed(text: &str) -> Result<PodRequest, InvalidManifest> {
    parse(text, Source::Api, &["other.org/*".to_owned()])
}

/// Why a text is refused, without the place.
fn refused(text: &str) -> String {
    match parsed(text).unwrap_err() {
        InvalidManifest::At { problem, .. } => problem.to_string(),
        other => other.to_string(),
    }
}

/// Why texts are refused, the first of which is called `pod.yaml`, and the second `claim.yaml`.
fn refused_files(texts: &[&str]) -> String {
    let names = ["pod.yaml", "claim.yaml"];
    let texts = names.iter().zip(texts).map(|(name, text)| Text { name, text });
    read(texts, Source::Api, &[]).unwrap_err().to_string()
}

/// A pod whose only container has these resources.
fn with_resources(resources: &str) -> String {
    format!("metadata: {{name: a}}\nspec: {{containers: [{{name: main, resources: {resources}}}]}}")
}

fn wants(container: &ContainerRequest) -> Vec<(&str, usize)> {
    container
        .wants
        .iter()
        .map(|(name, count)| (name.as_str(), *count))
        .collect()
}

#[test]
fn only_the_device_fields_of_a_pod_are_read() {
    let pod = parsed(FULL).unwrap();
    assert_eq!(pod.uid.as_str(), "5a1b");
    assert_eq!(
        (pod.name.namespace.as_str(), pod.name.name.as_str()),
        ("team-a", "train")
    );
    assert_eq!(pod.source, Source::Api);
    let containers: Vec<_> = pod
        .containers
        .iter()
        .map(|each| (each.name.as_str(), each.kind, wants(each)))
        .collect();
    let expected = [
        ("fetch", ContainerKind::Init, vec![("acme.com/nic", 1)]),
        ("proxy", ContainerKind::Sidecar, vec![("acme.com/nic", 2)]),
        ("main", ContainerKind::App, vec![("acme.com/gpu", 2)]),
        ("log", ContainerKind::App, vec![]),
    ];
    assert_eq!(containers, expected);
}

#[test]
fn json_and_yaml_give_the_same_request() {
    let yaml =
        "metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {acme.com/gpu: 1k}}}]}";
    let json = r#"{"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a", "creationTimestamp": null},
        "spec": {"containers": [{"name": "b", "resources": {"limits": {"acme.com/gpu": 1e3}}}]}, "status": {}}"#;
    assert_eq!(parsed(yaml), parsed(json));
    assert_eq!(
        wants(&parsed(json).unwrap().containers[0]),
        [("acme.com/gpu", 1000)]
    );
    // YAML that begins as JSON does.
    assert!(parsed("{metadata: {name: a}, spec: {containers: [{name: b}]}}").is_ok());
    assert!(parsed("---\nmetadata: {name: a}\nspec: {containers: [{name: b}]}\n...\n").is_ok());
    // Several documents, each in either.
    let unused = r#"{"kind": "ResourceClaim", "metadata": {"name": "a"}}"#;
    for pod in [yaml, json] {
        for text in [
            format!("{pod}\n---\n{unused}\n---\n"),
            format!("{unused}\n---\n\n---\n{pod}"),
            format!("---\n{unused}\n---\n{pod}"),
        ] {
            assert_eq!(parsed(&text), parsed(yaml), "{text}");
        }
    }
    // A separator within a text is none.
    let named = r#"{"metadata": {"name": "a", "annotations": {"b": "1\n---\n2"}}, "spec": {"containers": [{"name": "b"}]}}"#;
    assert!(parsed(named).is_ok());
    assert!(json_documents::<Head>(named).is_some());
    assert!(json_documents::<Head>(&format!("{unused}\n---\n{json}")).is_some_and(|heads| heads.len() == 2));
    assert!(json_documents::<Head>(&format!("{unused}\n---\n{yaml}")).is_none());
}

#[test]
fn a_missing_uid_is_derived_from_namespace_and_name() {
    let pod = parsed(&with_resources("{}")).unwrap();
    assert_eq!(pod.name.namespace, "default");
    // Fixed for ever: pods on disk have such UIDs.
    assert_eq!(pod.uid.as_str(), "0c80a151-aeaf-52e7-a551-916eb2229a51");
    let other = PodName {
        namespace: "team-a".into(),
        name: "a".into(),
    };
    assert_ne!(derived_uid(&other), pod.uid);
    let empty = parsed("metadata: {name: a, uid: ''}\nspec: {containers: [{name: b}]}").unwrap();
    assert_eq!(empty.uid, pod.uid);
}

#[test]
fn quantities_follow_kubernetes_and_fractions_are_rounded_up() {
    for (text, count) in [
        ("0", 0),
        ("2", 2),
        ("+2", 2),
        ("007", 7),
        ("2.", 2),
        (".5", 1),
        ("1.0", 1),
        ("1.000000000000000000000000001", 2),
        ("500m", 1),
        ("1500m", 2),
        ("2000m", 2),
        ("1u", 1),
        ("1n", 1),
        ("0m", 0),
        ("-0", 0),
        ("1k", 1000),
        ("1.5k", 1500),
        ("2M", 2_000_000),
        ("1Ki", 1024),
        ("0.5Ki", 512),
        ("1.0001Ki", 1025),
        ("2Mi", 2 << 20),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 1_000_000_000_000_000_000),
        ("1e-3", 1),
        ("12e-1", 2),
        ("1e+2", 100),
        ("0e999999999999999999999", 0),
        ("1e-999999999999999999999", 1),
        ("9223372036854775807", 9_223_372_036_854_775_807),
        ("0000000000000000000000000000000000000000000000001", 1),
    ] {
        assert_eq!(quantity(text), Ok(count), "{text}");
    }
}

#[test]
fn an_invalid_quantity_is_rejected() {
    use InvalidQuantity::{Malformed, Negative, TooLarge};
    for (text, problem) in [
        ("", Malformed),
        (".", Malformed),
        ("-", Malformed),
        ("k", Malformed),
        ("1 ", Malformed),
        (" 1", Malformed),
        ("1.2.3", Malformed),
        ("1K", Malformed),
        ("1ki", Malformed),
        ("1mi", Malformed),
        ("1e", Malformed),
        ("1e+", Malformed),
        ("1e1.5", Malformed),
        ("1e--1", Malformed),
        ("--1", Malformed),
        ("two", Malformed),
        ("0x2", Malformed),
        ("1_000", Malformed),
        ("٣", Malformed),
        ("NaN", Malformed),
        ("inf", Malformed),
        ("-1", Negative),
        ("-500m", Negative),
        ("9223372036854775808", TooLarge),
        ("10E", TooLarge),
        ("16Ei", TooLarge),
        ("1e19", TooLarge),
        ("1e999999999999999999999", TooLarge),
    ] {
        assert_eq!(quantity(text), Err(problem), "{text}");
    }
}

#[test]
fn an_invalid_quantity_is_reported_with_container_resource_and_value() {
    assert_eq!(
        refused(&with_resources("{limits: {acme.com/gpu: two}}")),
        "container main: acme.com/gpu: \"two\" is not a quantity: write a number such as 2"
    );
    assert_eq!(
        refused(&with_resources("{limits: {acme.com/gpu: -1}}")),
        "container main: acme.com/gpu: \"-1\" is not a quantity: it is negative"
    );
    // Not ours: for another program to check.
    assert!(parsed(&with_resources("{limits: {cpu: lots, other.org/x: many}}")).is_ok());
    for not_even_text in ["[1]", "{a: b}", "null", "true"] {
        let text = with_resources(&format!("{{limits: {{acme.com/gpu: {not_even_text}}}}}"));
        assert!(parsed(&text).is_err(), "{not_even_text}");
    }
}

#[test]
fn devices_are_requested_in_limits() {
    let only = refused(&with_resources("{requests: {acme.com/gpu: 1}}"));
    assert_eq!(
        only,
        "container main: acme.com/gpu is in requests only; devices are asked for in resources.limits"
    );
    let differ = refused(&with_resources(
        "{requests: {acme.com/gpu: 1}, limits: {acme.com/gpu: 2}}",
    ));
    assert!(
        differ.starts_with("container main: requests of acme.com/gpu (1) differ from its limits (2);"),
        "{differ}"
    );
    assert!(
        parsed(&with_resources(
            "{requests: {acme.com/gpu: 1k}, limits: {acme.com/gpu: 1000}}"
        ))
        .is_ok()
    );
    assert!(
        parsed(&with_resources(
            "{requests: {cpu: 1, other.org/x: 1}, limits: {cpu: 2}}"
        ))
        .is_ok()
    );
    let pod_level = "metadata: {name: a}\nspec: {resources: {limits: {cpu: 1, acme.com/gpu: 1}}, containers: [{name: b}]}";
    assert!(refused(pod_level).contains("acme.com/gpu is asked for by the pod"));
}

#[test]
fn a_resource_that_no_plugin_can_serve_is_rejected_at_once() {
    for name in [
        "Acme.com/gpu",
        "acme.com/",
        "acme.com/a/b",
        "requests.acme.com/gpu",
    ] {
        let text = with_resources(&format!("{{limits: {{{name}: 1}}}}"));
        assert!(refused(&text).contains(name), "{name}");
    }
}

#[test]
fn an_object_of_another_kind_is_rejected_with_its_kind() {
    let two = "metadata: {name: a}\nspec: {containers: [{name: b}]}\n";
    for (text, expected) in [
        ("", "the manifest is empty"),
        (" \n", "the manifest is empty"),
        ("null", "the manifest is empty"),
        ("---\n", "the manifest is empty"),
        ("# nothing\n", "the manifest is empty"),
        ("just text", "expected keys and values, as in `name: value`"),
        ("[1, 2]", "expected keys and values, as in `name: value`"),
        ("{\"kind\": \"Pod\",", "neither YAML nor JSON: "),
        (
            "kind: Deployment\napiVersion: apps/v1",
            "expected a v1 Pod or ResourceClaim, found apps/v1 Deployment",
        ),
        (
            "kind: Pod\napiVersion: v2",
            "expected a v1 Pod or ResourceClaim, found v2 Pod",
        ),
        ("kind: Pod", "metadata is missing"),
        ("metadata: {}\nspec: {}", "metadata.name is missing"),
        (
            "metadata: {generateName: a-}\nspec: {}",
            "metadata.name is missing",
        ),
        ("metadata: {name: a}", "spec is missing"),
        ("metadata: {name: a}\nspec: {}", "spec.containers is missing"),
        (
            "metadata: {name: a}\nspec: {containers: []}",
            "spec.containers is missing",
        ),
        (
            "metadata: {name: a}\nspec: {containers: [{image: b}]}",
            "spec.containers.name: \"\" is not",
        ),
        (
            "metadata: {name: a}\nspec: {initContainers: [{name: B}], containers: [{name: b}]}",
            "spec.initContainers.name: \"B\"",
        ),
        (
            "metadata: {name: a}\nspec: {containers: [{name: b}, {name: b}]}",
            "two containers are called b",
        ),
        (
            "metadata: {name: a}\nspec: {initContainers: [{name: b}], containers: [{name: b}]}",
            "two containers are called b",
        ),
        (
            "metadata: {name: A_1}\nspec: {containers: [{name: b}]}",
            "metadata.name: \"A_1\" is not a lower-case DNS name",
        ),
        (
            "metadata: {name: a, namespace: b.c}\nspec: {containers: [{name: b}]}",
            "metadata.namespace: \"b.c\"",
        ),
        (
            "metadata: {name: a, uid: a b}\nspec: {containers: [{name: b}]}",
            "metadata.uid: \"a b\"",
        ),
        (
            &format!("{two}---\n{two}"),
            "there are several Pods, default/a and default/a: admit one pod at a time",
        ),
        (
            "metadata: {name: a, name: b}\nspec: {containers: [{name: b}]}",
            "the key name is there twice",
        ),
    ] {
        let refused = refused(text);
        assert!(refused.contains(expected), "{text:?}: {refused}");
    }
}

#[test]
fn the_expansion_of_aliases_is_limited() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..30 {
        let before = level - 1;
        let aliases = vec![format!("*a{before}"); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
    }
    bomb.push_str("metadata: {name: a}\nspec: {containers: [{name: b}]}\n");
    assert_eq!(refused(&bomb), "it is too large once its aliases are replaced");
    let deep = "[".repeat(100_000);
    let told = "it is nested more than 64 levels deep";
    assert_eq!(refused(&deep), told);
    let deep = format!("metadata: {{name: a}}\nspec: {}", "{x: ".repeat(70));
    assert_eq!(refused(&deep), told);
    let deep = format!("{{\"metadata\": {}", "{\"a\":".repeat(100_000));
    assert_eq!(refused(&deep), told);
}

#[test]
fn an_error_has_the_file_the_line_and_the_column() {
    let pod = "kind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - name: main\n";
    let limits = "    resources:\n      limits:\n        cpu: 1\n";
    for (text, expected) in [
        (
            "kind: Pod\nmetadata:\n\tname: a\n".to_owned(),
            "pod.yaml:3:2: a tab is not allowed here; indent with spaces",
        ),
        (
            "kind: Pod\n metadata:\n".to_owned(),
            "pod.yaml:2:10: a colon is not allowed here; check the indentation, or quote the text",
        ),
        (
            "kind: Pod\nmetadata:\n  name: a\n  name: b\n".to_owned(),
            "pod.yaml:4:3: the key name is there twice",
        ),
        (
            "kind: Pod\nmetadata: {name: *a}\n".to_owned(),
            "pod.yaml:2:18: the alias refers to an anchor that is not there",
        ),
        (
            "kind: Pod\nmetadata: {name: a}\nspec:\n  containers: main\n".to_owned(),
            "pod.yaml:4:15: expected a list, as in `- name: value`",
        ),
        (
            "{\"kind\": \"Pod\",\n \"metadata\": {\"name\": []}}".to_owned(),
            "pod.yaml:2:23: expected a text",
        ),
        (
            format!("{pod}{limits}        acme.com/gpu: [1]\n"),
            "pod.yaml:9:9: expected a quantity, found a list",
        ),
        (
            format!("{pod}{limits}        acme.com/gpu: two\n"),
            "pod.yaml:9:23: container main: acme.com/gpu: \"two\" is not a quantity: write a number such as 2",
        ),
        (
            format!("{pod}{limits}        widget: 1\n"),
            "pod.yaml:9:17: container main: \"widget\" is not a resource: those of devices have a domain, as in \
             acme.com/gpu, and those without one are cpu, memory, ephemeral-storage and hugepages-SIZE",
        ),
        (
            format!("{pod}  - name: Log\n"),
            "pod.yaml:6:11: spec.containers.name: \"Log\" is not a lower-case DNS label of at most 63 characters",
        ),
        (
            format!("{pod}  - name: main\n"),
            "pod.yaml:6:5: two containers are called main",
        ),
        (
            "kind: Pod\nmetadata: {name: a}\nspec:\n  restartPolicy: Never\n".to_owned(),
            "pod.yaml:4:3: spec.containers is missing",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\n".to_owned(),
            "pod.yaml:2:7: expected a v1 Pod or ResourceClaim, found apps/v1 Deployment",
        ),
        (
            format!("{pod}---\n# Another one.\n{pod}"),
            "pod.yaml:8:1: there are several Pods, default/a and default/a: admit one pod at a time",
        ),
        (
            format!("kind: List\nitems:\n- null\n- {{kind: Secret, data: {{}}}}\n---\n{pod}"),
            "pod.yaml:4:10: expected a v1 Pod or ResourceClaim, found v1 Secret",
        ),
        (String::new(), "pod.yaml: the manifest is empty"),
    ] {
        assert_eq!(refused_files(&[&text, ""]), expected, "{text}");
    }
    assert_eq!(
        refused_files(&[pod, "kind: ResourceClaim\nmetadata: {name: B}\n"]),
        "claim.yaml:2:18: metadata.name: \"B\" is not a lower-case DNS name of at most 253 characters"
    );
    let told = |texts: &[&str]| {
        read(texts.iter().copied(), Source::Api, &[])
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        told(&["kind: Pod"]),
        "line 1, column 1: metadata is missing",
        "without a name"
    );
    assert_eq!(
        told(&[pod, "kind: Pod"]),
        "manifest 2, line 1, column 1: metadata is missing"
    );
}

#[test]
fn a_resource_without_a_domain_must_be_one_of_kubernetes() {
    let standard =
        "{limits: {cpu: 1, memory: 1Gi, ephemeral-storage: 1Gi, hugepages-2Mi: 4Mi, kubernetes.io/x: 1}}";
    assert!(parsed(&with_resources(standard)).is_ok());
    for resources in [
        "{limits: {widget: 1}}",
        "{requests: {gpu: 0}}",
        "{limits: {nvidia.com: 1}}",
    ] {
        let refused = parsed(&with_resources(resources)).unwrap_err();
        assert!(refused.invalid_resource().is_some(), "{resources}: {refused}");
    }
    let foreign = parse(
        &with_resources("{limits: {widget: 1}}"),
        Source::Api,
        &["widget".to_owned()],
    );
    assert!(foreign.is_ok(), "{foreign:?}");
}
