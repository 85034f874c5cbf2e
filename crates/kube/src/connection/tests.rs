use std::path::Path;

use devlet_agent::config::Config;
use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::core::Status;
use tempfile::{NamedTempFile, TempDir};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const SECRET: &str = "abcdef-0123456789";

/// Returns a kubeconfig for this address and user.
fn kubeconfig(server: &str, user: &str) -> String {
    format!(
        "{{kind: Config, current-context: a, contexts: [{{name: a, context: {{cluster: a, user: a}}}}], \
         clusters: [{{name: a, cluster: {{server: '{server}'}}}}], users: [{{name: a, user: {user}}}]}}"
    )
}

fn write(file: &Path, server: &str, user: &str) {
    std::fs::write(file, kubeconfig(server, user)).unwrap();
}

async fn opened(file: &NamedTempFile) -> Connection {
    let access = Access::Kubeconfig(file.path().to_owned());
    Connection::open(access).await.unwrap()
}

/// Returns a connection to an address where nothing listens.
pub(crate) async fn unused() -> Connection {
    let file = NamedTempFile::new().unwrap();
    write(file.path(), "http://127.0.0.1:1", "{}");
    opened(&file).await
}

/// Returns an agent, and its directory.
pub(crate) async fn agent() -> (Agent, TempDir) {
    let root = tempfile::tempdir().unwrap();
    let (agent, _) = Agent::start(Config::new(root.path())).await.unwrap();
    (agent, root)
}

/// Answers one request, and returns its text.
async fn answer(listener: &TcpListener, answer: &str) -> String {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.unwrap());
    }
    stream.write_all(answer.as_bytes()).await.unwrap();
    String::from_utf8(request).unwrap()
}

async fn get_node(connection: &Connection) -> Result<Node, CallError> {
    connection
        .call(async |client| Api::<Node>::all(client).get("n").await)
        .await
}

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

#[tokio::test]
async fn the_pause_of_a_header_is_kept() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let file = NamedTempFile::new().unwrap();
    write(file.path(), &server, "{}");
    let connection = opened(&file).await;
    let rejection = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Type: text/plain\r\n\
                     Content-Length: 19\r\nConnection: close\r\n\r\nToo many requests.\n";
    let (_, refused) = tokio::join!(answer(&listener, rejection), get_node(&connection));
    let error = refused.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    assert_eq!(error.to_string(), "Too many requests. (429)");
}

#[tokio::test]
async fn a_change_before_the_first_check_is_noticed() {
    let file = NamedTempFile::new().unwrap();
    write(file.path(), "http://127.0.0.1:1", "{token: a}");
    let connection = opened(&file).await;
    write(file.path(), "http://127.0.0.1:2", "{token: a}");
    connection.renew(false).await.unwrap();
    assert_eq!(connection.server(), "http://127.0.0.1:2/");
}

#[tokio::test]
async fn only_another_server_ends_watches_and_unchanged_files_change_nothing() {
    let file = NamedTempFile::new().unwrap();
    write(file.path(), "http://127.0.0.1:1", "{token: a}");
    let connection = opened(&file).await;
    let endpoint = connection.endpoint();
    let mut replaced = connection.subscribe();

    connection.renew(true).await.unwrap();
    assert!(!replaced.has_changed().unwrap());

    write(file.path(), "http://127.0.0.1:1", "{token: b}");
    connection.renew(true).await.unwrap();
    assert!(replaced.has_changed().unwrap());
    replaced.mark_unchanged();
    assert_eq!(connection.moved(&endpoint).now_or_never(), None);

    write(file.path(), "http://127.0.0.1:2", "{token: b}");
    connection.renew(false).await.unwrap();
    assert_eq!(connection.moved(&endpoint).now_or_never(), Some(()));
}

#[tokio::test]
async fn a_plugin_that_fails_does_not_end_the_start_and_is_run_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let (file, script) = (NamedTempFile::new().unwrap(), NamedTempFile::new().unwrap());
    let plugin = format!(
        "{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: sh, args: ['{}']}}}}",
        script.path().display()
    );
    write(file.path(), &server, &plugin);
    let issued = format!("echo '{{\"status\": {{\"token\": \"{SECRET}\"}}}}'\n");
    std::fs::write(script.path(), format!("{issued}exit 7\n")).unwrap();

    let connection = opened(&file).await;
    let waiting = get_node(&connection).await.unwrap_err();
    assert!(waiting.to_string().contains("has not answered yet"), "{waiting}");

    let (agent, _root) = agent().await;
    let mut replaced = connection.subscribe();
    agent.spawn(connection.clone().follow(agent.clone()));
    replaced.changed().await.unwrap();
    let failed = get_node(&connection).await.unwrap_err().to_string();
    assert!(failed.contains("sh failed (exit status: 7)"), "{failed}");
    let reported = agent.cluster().read(|state| format!("{:?}", state.tasks));
    assert!(
        !failed.contains(SECRET) && !reported.contains(SECRET),
        "{reported}"
    );

    std::fs::write(script.path(), issued).unwrap();
    replaced.wait_for(|current| current.client.is_ok()).await.unwrap();
    let none = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let (request, _) = tokio::join!(answer(&listener, none), get_node(&connection));
    assert!(
        request.to_lowercase().contains(&format!("bearer {SECRET}")),
        "{request}"
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_plugin_is_run_again_before_its_credentials_expire_and_after_a_rejection() {
    let file = NamedTempFile::new().unwrap();
    write(file.path(), "http://127.0.0.1:1", "{token: a}");
    let connection = opened(&file).await;
    let mut current = connection.inner.current.borrow().clone();
    let loaded = credentials::load(&connection.inner.access).await.unwrap();
    let now = Instant::now();
    let expired = Some(Timestamp::now());
    let aged = now.checked_sub(CHECK_INTERVAL).unwrap();
    for (issued, is_rejected, is_due) in [
        (None, true, false),
        (Some((now, expired)), true, false),
        (Some((aged, None)), false, false),
        (Some((aged, None)), true, true),
        (Some((aged, expired)), false, true),
    ] {
        current.issued = issued;
        assert_eq!(current.is_outdated(&loaded, is_rejected), is_due, "{issued:?}");
    }
}
