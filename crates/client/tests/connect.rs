//! Errors that a caller gets if devlet is not running or does not answer.

#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use devlet_client::{Client, ConnectError, NoAnswer, v1};
use tokio::net::{UnixSocket, UnixStream};

/// Longer than any of these tests.
const LONG: Duration = Duration::from_secs(60);
/// Timeout for an answer that never comes.
const SHORT: Duration = Duration::from_millis(50);

async fn refusal(path: PathBuf) -> String {
    Client::connect(path).await.unwrap_err().to_string()
}

#[tokio::test]
async fn without_a_socket_the_error_states_the_path_and_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("devlet/devlet.sock");
    let shown = path.display();
    let expected = format!("devlet is not running: no socket at {shown}; start it with `devlet serve`");
    assert_eq!(refusal(path.clone()).await, expected);

    let other = directory.path().join("other.sock");
    let error = Client::connect_any(&[path.clone(), other.clone()], LONG)
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("no socket at {shown} or {};", other.display())),
        "{error}"
    );
}

#[tokio::test]
async fn a_socket_without_a_process_is_distinguished_from_a_missing_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stale.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(refusal(path.clone()).await.contains("no process listens on"));
    let missing = directory.path().join("missing.sock");
    let error = Client::connect_any(&[missing, path], LONG).await.unwrap_err();
    assert!(matches!(error, ConnectError::Stale { .. }), "{error}");
}

#[tokio::test]
async fn the_first_socket_with_a_listening_process_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let (stale, live) = (
        directory.path().join("stale.sock"),
        directory.path().join("live.sock"),
    );
    drop(UnixListener::bind(&stale).unwrap());
    let listener = tokio::net::UnixListener::bind(&live).unwrap();
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
    let server = tonic::transport::Server::builder().add_routes(tonic::service::Routes::default());
    tokio::spawn(server.serve_with_incoming(incoming));

    let client = Client::connect_any(&[directory.path().join("no.sock"), stale, live], LONG)
        .await
        .unwrap();

    let answer = client.status(v1::StatusRequest {}).await.unwrap_err();
    assert_eq!(answer.code(), tonic::Code::Unimplemented, "{answer}");
}

#[tokio::test]
async fn a_call_that_is_not_answered_ends_with_its_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("silent.sock");
    let _silent = UnixListener::bind(&path).unwrap();
    let client = Client::connect_any(std::slice::from_ref(&path), SHORT)
        .await
        .unwrap();

    let list = client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap_err();
    let watch = client
        .watch_pods(v1::ListPodsRequest::default())
        .await
        .unwrap_err();
    let waiting = v1::RemovePodRequest {
        wait_ms: Some(50),
        ..Default::default()
    };
    let removed = client.remove_pod(waiting).await.unwrap_err();

    for (status, waited) in [(list, SHORT), (watch, SHORT), (removed, SHORT * 2)] {
        let source = std::error::Error::source(&status).unwrap();
        let path = path.clone();
        assert_eq!(source.downcast_ref(), Some(&NoAnswer { path, waited }));
    }
}

#[tokio::test]
async fn a_process_that_does_not_accept_connections_does_not_lead_to_another_socket() {
    let directory = tempfile::tempdir().unwrap();
    let (full, live) = (
        directory.path().join("full.sock"),
        directory.path().join("live.sock"),
    );
    let socket = UnixSocket::new_stream().unwrap();
    socket.bind(&full).unwrap();
    let _full = socket.listen(1).unwrap();
    let _live = UnixListener::bind(&live).unwrap();
    let mut queued = Vec::new();
    while let Ok(stream) = UnixStream::connect(&full).await {
        queued.push(stream);
    }

    let error = Client::connect_any(&[full.clone(), live], SHORT)
        .await
        .unwrap_err();

    let shown = format!("devlet at {} does not answer (waited 0.1 s)", full.display());
    assert_eq!(error.to_string(), shown);
}
