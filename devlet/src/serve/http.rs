//! `/healthz`, `/readyz` and `/metrics`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use devlet_agent::agent::Agent;
use devlet_agent::metrics::{self, View};
use tokio::net::TcpListener;

/// Until the node stops.
pub(super) async fn serve(listener: TcpListener, agent: Agent) {
    let stopping = agent.stopping();
    let routes = Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(measured))
        .with_state(agent);
    tokio::select! {
        ended = axum::serve(listener, routes) => if let Err(error) = ended {
            tracing::error!(%error, "health and metrics are not served any longer");
        },
        // Nobody's question is worth waiting for.
        () = stopping.cancelled() => {}
    }
}

/// What must hold for pods to be admitted, by name.
fn checks(agent: &Agent) -> [(&'static str, Result<(), String>); 4] {
    let store = agent.store();
    let blocked = store.read(|node| node.blocked().map(ToString::to_string));
    let running = if agent.stopping().is_cancelled() {
        Err("it is being stopped".to_owned())
    } else {
        Ok(())
    };
    let unreachable: Vec<String> = agent.unreachable().iter().map(ToString::to_string).collect();
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

/// In the shape of the API server's: `[+]name ok`, `[-]name failed: reason`.
async fn ready(State(agent): State<Agent>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    let checks = checks(&agent);
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

async fn measured(State(agent): State<Agent>) -> Response {
    // It reads files, and may be long.
    let text = tokio::task::spawn_blocking(move || {
        let view = View::of(agent.store(), &agent.config().database());
        agent.metrics().text(&view)
    });
    match text.await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Ok(Err(_)) | Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
