use kube::core::Status;

use super::*;

fn refused(code: u16, message: &str) -> CallError {
    let status = Status {
        code,
        message: message.to_owned(),
        ..Status::default()
    };
    CallError::from(kube::Error::Api(Box::new(status)))
}

#[test]
fn a_missing_right_for_devices_is_not_a_change_of_the_object() {
    let changed = refused(422, "metadata.uid: Invalid value: \"a\": field is immutable");
    assert!(changed.is_outdated());
    assert!(refused(409, "the object has been modified").is_outdated());
    let message = "status.devices: Forbidden: changing status.devices requires resource=\"resourceclaims/driver\", \
                   verb=\"[associated-node:patch arbitrary-node:patch]\" permission";
    let right = refused(422, message);
    assert!(!right.is_outdated());
    assert!(right.to_string().contains("docs/kubernetes.md"), "{right}");
    assert!(!changed.to_string().contains("docs/kubernetes.md"), "{changed}");
}

/// Returns a kubeconfig for this address.
fn kubeconfig(server: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Config, current-context: a, contexts: [{{name: a, context: {{cluster: a, user: a}}}}], \
         clusters: [{{name: a, cluster: {{server: \"{server}\"}}}}], users: [{{name: a, user: {{token: t}}}}]}}"
    )
}

#[tokio::test]
async fn the_address_is_that_of_the_kubeconfig_as_it_was_read_last() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), kubeconfig("http://127.0.0.1:1/")).unwrap();
    let access = Access::Kubeconfig(file.path().to_owned());
    let connection = Connection::open(access).await.unwrap();
    assert_eq!(connection.server(), "http://127.0.0.1:1/");

    let mut current = connection.subscribe();
    let stop = CancellationToken::new();
    let following = tokio::spawn(connection.clone().follow(stop.clone()));
    std::fs::write(file.path(), kubeconfig("http://127.0.0.1:2/")).unwrap();
    connection.inner.rejected.notify_one();
    current.changed().await.unwrap();
    assert_eq!(connection.server(), "http://127.0.0.1:2/");
    stop.cancel();
    following.await.unwrap();
}
