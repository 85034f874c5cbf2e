//! What a caller is told when there is nobody to talk to.

#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use devlet_client::{Client, ConnectError, v1};

async fn refusal(path: PathBuf) -> String {
    Client::connect(path).await.unwrap_err().to_string()
}

#[tokio::test]
async fn without_a_socket_the_message_says_where_it_should_be_and_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("devlet/devlet.sock");
    let shown = path.display();
    let expected = format!("devlet is not running: no socket at {shown}; start it with `devlet serve`");
    assert_eq!(refusal(path.clone()).await, expected);

    let other = directory.path().join("other.sock");
    let error = Client::connect_any(&[path.clone(), other.clone()])
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
async fn a_socket_without_a_process_is_told_from_a_missing_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stale.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(refusal(path.clone()).await.contains("nobody answers at"));
    let missing = directory.path().join("missing.sock");
    let error = Client::connect_any(&[missing, path]).await.unwrap_err();
    assert!(matches!(error, ConnectError::Stale { .. }), "{error}");
}

#[tokio::test]
async fn the_first_socket_behind_which_somebody_is_counts() {
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

    let client = Client::connect_any(&[directory.path().join("no.sock"), stale, live])
        .await
        .unwrap();

    let answer = client.status(v1::StatusRequest {}).await.unwrap_err();
    assert_eq!(answer.code(), tonic::Code::Unimplemented, "{answer}");
}
