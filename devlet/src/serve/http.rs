//! The HTTP server of `/healthz`, `/readyz` and `/metrics`.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use devlet_agent::agent::Agent;
use devlet_agent::metrics;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::log::LogWriter;

/// Maximum open connections. Part of the descriptors reserved for devlet.
pub(super) const CONNECTIONS: usize = 64;

/// Maximum time for a client to send the head of a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time for a request and its answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum bytes of a request's head.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// Pause after a failed accept, such as for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
struct Served {
    agent: Agent,
    log: LogWriter,
}

/// Serves until the future is dropped, also while the node stops: `/readyz` reports that state.
pub(super) async fn serve(listener: TcpListener, agent: Agent, log: LogWriter) {
    let routes = Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(Served { agent, log });
    accept(listener, routes).await;
}

/// Serves connections forever. With [`CONNECTIONS`] open, a new connection evicts the oldest: a request takes
/// milliseconds, so the oldest client is slow.
async fn accept(listener: TcpListener, routes: Router) {
    // Dropping this future closes all connections.
    let mut connections = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "HTTP connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        oldest.retain(|connection| !connection.is_finished());
        while connections.len() >= CONNECTIONS {
            if let Some(connection) = oldest.pop_front() {
                connection.abort();
            }
            // Its descriptor is closed before the new connection is served.
            connections.join_next().await;
        }
        oldest.push_back(connections.spawn(serve_connection(stream, routes.clone())));
    }
}

/// Serves one request within [`CONNECTION_TIMEOUT`]; then closes the connection of a slow client.
async fn serve_connection(stream: TcpStream, routes: Router) {
    let mut http = http1::Builder::new();
    http.keep_alive(false)
        .max_buf_size(MAX_HEAD_BYTES)
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    // Errors are those of the client, and are ignored.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
}

/// Returns the results of all readiness checks, by name.
async fn checks(agent: &Agent) -> [(&'static str, Result<(), String>); 4] {
    let store = agent.store();
    let blocked = store.read(|node| node.blocked().map(ToString::to_string));
    let running = if agent.stopping().is_cancelled() {
        Err("devlet is stopping".to_owned())
    } else {
        Ok(())
    };
    let unreachable = agent.unreachable().await;
    let unreachable: Vec<String> = unreachable.iter().map(ToString::to_string).collect();
    let listening = if unreachable.is_empty() {
        Ok(())
    } else {
        Err(unreachable.join("; "))
    };
    [
        ("running", running),
        ("listening", listening),
        ("store", store.health().map_err(|error| error.to_string())),
        ("state", blocked.map_or(Ok(()), Err)),
    ]
}

/// Answers `/readyz` in the API server's format: `[+]name ok`, `[-]name failed: reason`.
async fn ready(
    State(Served { agent, .. }): State<Served>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let checks = checks(&agent).await;
    let fine = checks.iter().all(|(_, check)| check.is_ok());
    if fine && !query.contains_key("verbose") {
        return "ok".into_response();
    }
    let mut text = String::new();
    for (name, check) in checks {
        // Writing to a string does not fail.
        let _ = match check {
            Ok(()) => writeln!(text, "[+]{name} ok"),
            Err(reason) => writeln!(text, "[-]{name} failed: {reason}"),
        };
    }
    let (status, word) = if fine {
        (StatusCode::OK, "passed")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "failed")
    };
    text.push_str(&format!("readyz check {word}\n"));
    (status, text).into_response()
}

async fn metrics(State(Served { agent, log }): State<Served>) -> Response {
    agent.metrics().log_lines_dropped(log.dropped_lines());
    // Reads files, and may return a long text.
    let text = tokio::task::spawn_blocking(move || agent.metrics_text());
    match text.await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Ok(Err(_)) | Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
