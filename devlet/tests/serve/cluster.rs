//! `devlet serve` with a cluster: flags, and an API server that cannot be reached. Tests with a real one are in
//! `interop/kubernetes`.

use crate::common::{Daemon, devlet, root, stderr};

/// A kubeconfig for an address at which nothing listens.
fn kubeconfig() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}]\n\
         users: [{{name: u, user: {{}}}}]\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n"
    )
}

#[test]
fn contradictory_settings_of_a_cluster_are_refused() {
    let root = root();
    let path = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    let (file, missing, broken) = (path("kubeconfig"), path("missing"), path("broken"));
    std::fs::write(&file, kubeconfig()).unwrap();
    std::fs::write(&broken, "clusters: 7").unwrap();
    for (config, args, expected) in [
        (
            "",
            &["--kubeconfig", &file, "--in-cluster"][..],
            "cannot be used with",
        ),
        (
            "",
            &["--node-name", "n1"],
            "--node-name has no effect without a cluster",
        ),
        (
            "",
            &["--mode", "observe"],
            "--mode has no effect without a cluster",
        ),
        ("", &["--mode", "watch"], "[possible values: agent, observe]"),
        (
            "",
            &["--kubeconfig", &file, "--node-name", "N 1"],
            "\"N 1\" is not the name of a node",
        ),
        ("", &["--kubeconfig", &missing], "missing: No such file"),
        ("", &["--kubeconfig", &broken], "broken: "),
        (
            "",
            &["--in-cluster"],
            "--in-cluster needs a pod with a ServiceAccount",
        ),
        (
            "kubernetes: {finalDelete: true}",
            &[],
            "kubernetes.finalDelete has no effect",
        ),
        (
            "kubernetes: {inCluster: true, kubeconfig: x}",
            &[],
            "exclude each other",
        ),
        (
            "kubernetes: {finalDelete: true, mode: observe, kubeconfig: x}",
            &[],
            "finalDelete needs the mode agent",
        ),
        (
            "kubernetes: {abandonAfter: {gpu.acme.com: 10m}, mode: observe, kubeconfig: x}",
            &[],
            "abandonAfter needs the mode agent",
        ),
        (
            "kubernetes: {heartbeat: true, mode: observe, kubeconfig: x}",
            &[],
            "heartbeat needs the mode agent",
        ),
        (
            "kubernetes: {slices: {wipeAtStart: all}, mode: observe, kubeconfig: x}",
            &[],
            "slices needs the mode agent",
        ),
        (
            "kubernetes: {onUnhealthy: {acme.com/gpu: evict}, mode: observe, kubeconfig: x}",
            &[],
            "onUnhealthy needs the mode agent",
        ),
        (
            "kubernetes: {besideKubelet: true, slices: {wipeAtStart: all}, kubeconfig: x}",
            &[],
            "slices and besideKubelet exclude each other",
        ),
        (
            "kubernetes: {besideKubelet: true, onUnhealthy: {gpu.acme.com: evict}, kubeconfig: x}",
            &[],
            "onUnhealthy: gpu.acme.com is a DRA driver",
        ),
        (
            "{shield: {enabled: true}, kubernetes: {kubeconfig: x}}",
            &[],
            "--shield and a cluster exclude each other",
        ),
        (
            "kubernetes: {finalDelete: true, besideKubelet: true, kubeconfig: x}",
            &[],
            "finalDelete and besideKubelet exclude each other",
        ),
        ("kubernetes: {abandonAfter: {'': 5m}}", &[], "a name is empty"),
    ] {
        let settings = path("devlet.yaml");
        std::fs::write(&settings, config).unwrap();
        let serve = [
            "serve",
            "--root-dir",
            root.path().to_str().unwrap(),
            "--config",
            &settings,
        ];
        let refused = devlet().args(serve).args(args).output().unwrap();
        assert_eq!(
            refused.status.code(),
            Some(2),
            "{config} {args:?}: {}",
            stderr(&refused)
        );
        assert!(
            stderr(&refused).contains(expected),
            "{config} {args:?}: {}",
            stderr(&refused)
        );
    }
}

#[test]
fn devlet_works_while_the_api_server_is_away() {
    let root = root();
    let file = root.path().join("kubeconfig");
    std::fs::write(&file, kubeconfig()).unwrap();
    let args = [
        "--sample",
        "--kubeconfig",
        file.to_str().unwrap(),
        "--node-name",
        "n1",
    ];
    let daemon = Daemon::with(root.path(), &args);
    assert!(
        daemon.banner.contains("(node n1, mode agent)"),
        "{}",
        daemon.banner
    );
    // A pod without claims does not need the API server.
    assert_eq!(daemon.admit("plain", "sample.devlet.dev/widget=1").len(), 1);
    // Neither does a pod with its claims in the manifests.
    let sample = |name: &str| root.path().join("sample").join(name).to_str().unwrap().to_owned();
    let (pod, claim) = (sample("pod.yaml"), sample("claim.yaml"));
    let refused = daemon.refused(&["admit", "-f", &pod]);
    assert!(refused.contains("fetch ResourceClaim gadgets: "), "{refused}");
    assert!(refused.contains("Connection refused"), "{refused}");
    assert!(daemon.run(&["admit", "-f", &pod, "-f", &claim]).status.success());
    assert_eq!(daemon.stop(), Some(0));
}
