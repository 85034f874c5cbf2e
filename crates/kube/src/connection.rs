//! The connection to the API server: credentials that are read again, and calls with a deadline.
//!
//! Kubeconfig files, certificates, keys and tokens are read again every 30 seconds, and at once after the API server rejected the
//! credentials. A change replaces the client; streams of the old client go on until they end, unless the API server
//! is another one. A plugin for credentials runs here, and not in `kube`, which has no deadline for it.

mod credentials;
mod exec;
mod retry_after;

use std::sync::Arc;
use std::time::Duration;

use devlet_agent::agent::Agent;
use http::StatusCode;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use crate::task::Task;
use credentials::Loaded;
pub use credentials::{Access, ConnectError};

/// Deadline of a call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between checks of the files with credentials, and the longest run of a plugin for credentials.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Longest pause that an API server can ask for.
const MAX_RETRY_AFTER_SECONDS: u32 = 60;

/// Shortest pause between two readings of the credentials after rejections.
const REJECTED_PAUSE: Duration = Duration::from_secs(1);

/// A connection to an API server. Clones share it.
#[derive(Clone)]
pub(crate) struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    access: Access,
    current: watch::Sender<Current>,
    rejected: Notify,
}

/// The API server in use.
#[derive(Clone)]
pub(crate) struct Current {
    /// Its address, without a password.
    pub(crate) server: String,
    endpoint: Endpoint,
    /// The client, or the reason why there is none yet.
    client: Result<Client, String>,
    /// The content of the files that it came from, to notice changes.
    content: Arc<[Option<Vec<u8>>]>,
    /// Credentials of a plugin: the time since which they are used, and when they expire.
    issued: Option<(Instant, Option<Timestamp>)>,
}

/// The identity of an API server. A watch of another one cannot be continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    url: http::Uri,
    authorities: Option<Vec<Vec<u8>>>,
}

impl Current {
    /// Returns the server without a client, for credentials that come from a plugin.
    fn without_client(loaded: &Loaded, problem: &str) -> Self {
        let config = &loaded.config;
        Self {
            server: credentials::address(&config.cluster_url),
            endpoint: Endpoint {
                url: config.cluster_url.clone(),
                authorities: config.root_cert.clone(),
            },
            client: Err(problem.to_owned()),
            content: loaded.content.clone(),
            issued: None,
        }
    }

    /// Makes a client. Runs the plugin for credentials, if there is one.
    async fn new(loaded: Loaded) -> Result<Self, ConnectError> {
        let mut current = Self::without_client(&loaded, "");
        let mut config = loaded.config;
        if let Some(plugin) = config.auth_info.exec.take() {
            let issued = exec::run(&plugin).await;
            let issued = issued.map_err(|problem| ConnectError::Client {
                server: current.server.clone(),
                problem,
            })?;
            issued.put_into(&mut config.auth_info);
            current.issued = Some((Instant::now(), issued.expires));
        }
        current.client = Ok(credentials::client(config).await?);
        Ok(current)
    }

    /// Returns `true` if these files, or their plugin, may have other credentials.
    fn is_outdated(&self, loaded: &Loaded, is_rejected: bool) -> bool {
        let is_plugin_due = self.issued.is_some_and(|(since, expires)| {
            let soon = Timestamp::now() + 2 * CHECK_INTERVAL;
            let expires_soon = expires.is_some_and(|expires| expires < soon);
            let has_aged = since.elapsed() >= CHECK_INTERVAL;
            has_aged && (is_rejected || expires_soon)
        });
        loaded.content != self.content || self.client.is_err() || is_plugin_due
    }
}

impl Connection {
    /// Reads address and credentials. Does not call the API server, and does not wait for a plugin.
    pub(crate) async fn open(access: Access) -> Result<Self, ConnectError> {
        let loaded = credentials::load(&access).await?;
        let current = match loaded.config.auth_info.exec {
            Some(_) => Current::without_client(&loaded, "the plugin for credentials has not answered yet"),
            None => Current::new(loaded).await?,
        };
        let inner = Inner {
            access,
            current: watch::channel(current).0,
            rejected: Notify::new(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Returns the address of the API server.
    pub(crate) fn server(&self) -> String {
        self.inner.current.borrow().server.clone()
    }

    /// Returns the API server in use, and sees when address or credentials are replaced.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Current> {
        self.inner.current.subscribe()
    }

    /// Returns the identity of the API server.
    pub(crate) fn endpoint(&self) -> Endpoint {
        self.inner.current.borrow().endpoint.clone()
    }

    /// Completes when another API server is in use. Other credentials do not matter.
    pub(crate) async fn moved(&self, from: &Endpoint) {
        let mut current = self.subscribe();
        // The sender lives as long as this connection.
        let _ = current.wait_for(|current| current.endpoint != *from).await;
    }

    /// Returns the current client.
    pub(crate) fn client(&self) -> Result<Client, CallError> {
        let client = self.inner.current.borrow().client.clone();
        client.map_err(|problem| CallError::Transport(format!("no credentials: {problem}")))
    }

    /// Makes a call, with a deadline.
    pub(crate) async fn call<T, F>(&self, call: impl FnOnce(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        let client = self.client()?;
        match timeout(CALL_TIMEOUT, call(client)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.failed(error)),
            Err(_) => Err(CallError::Timeout),
        }
    }

    /// Describes an error of a call or watch. Rejected credentials are read again.
    pub(crate) fn failed(&self, error: kube::Error) -> CallError {
        let error = CallError::from(error);
        if let CallError::Refused { code, .. } = &error
            && *code == StatusCode::UNAUTHORIZED
        {
            self.inner.rejected.notify_one();
        }
        error
    }

    /// Replaces the client when address or credentials change, until the node stops. Errors are in `status`.
    pub(crate) async fn follow(self, agent: Agent) {
        let mut task = Task::new("credentials", &agent);
        let mut pause = match self.client() {
            Ok(_) => CHECK_INTERVAL,
            Err(_) => Duration::ZERO,
        };
        let mut is_failing = false;
        loop {
            let is_rejected = tokio::select! {
                () = tokio::time::sleep(pause) => false,
                () = self.inner.rejected.notified(), if !is_failing => true,
                () = task.stopped() => return,
            };
            let renewed = tokio::select! {
                renewed = self.renew(is_rejected) => renewed,
                () = task.stopped() => return,
            };
            is_failing = renewed.is_err();
            pause = match renewed {
                Ok(()) => {
                    task.succeeded();
                    CHECK_INTERVAL
                }
                Err(error) => {
                    let problem = self.client().err().map(|_| error.to_string());
                    if let Some(problem) = problem {
                        self.inner
                            .current
                            .send_modify(|current| current.client = Err(problem));
                    }
                    task.failed(&CallError::Transport(error.to_string()))
                }
            };
            if is_rejected && !task.pause(REJECTED_PAUSE).await {
                return;
            }
        }
    }

    async fn renew(&self, is_rejected: bool) -> Result<(), ConnectError> {
        let loaded = credentials::load(&self.inner.access).await?;
        if !self.inner.current.borrow().is_outdated(&loaded, is_rejected) {
            return Ok(());
        }
        let current = Current::new(loaded).await?;
        tracing::info!(server = current.server, "address and credentials replaced");
        self.inner.current.send_replace(current);
        Ok(())
    }
}

/// The reason why a call to the API server failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// The API server refused it.
    #[error("{message} ({}){}", code.as_u16(), advice(*code, message))]
    Refused {
        code: StatusCode,
        /// The reason as one word, such as `Expired`.
        reason: String,
        message: String,
        /// The pause that the API server asks for.
        retry_after: Option<Duration>,
    },
    /// No answer by the deadline.
    #[error("no answer from the API server within {CALL_TIMEOUT:?}")]
    Timeout,
    /// There are no credentials, the API server cannot be reached, or the answer cannot be read.
    #[error("{0}")]
    Transport(String),
}

/// The synthetic resource that Kubernetes 1.36 and later check for changes of `status.devices`. A missing right for it is not
/// refused with 403.
const DEVICE_RIGHT: &str = "resourceclaims/driver";

fn advice(code: StatusCode, message: &str) -> &'static str {
    match code {
        StatusCode::UNPROCESSABLE_ENTITY if message.contains(DEVICE_RIGHT) => {
            "; grant it, and bind the token to the node: docs/kubernetes.md lists the rules that devlet needs"
        }
        StatusCode::FORBIDDEN => "; grant it: docs/kubernetes.md lists the rules that devlet needs",
        StatusCode::UNAUTHORIZED => {
            "; devlet reads the credentials again: check that the certificate or token is valid, and the clock"
        }
        _ => "",
    }
}

impl CallError {
    /// Returns the code of a refusal.
    pub(crate) fn code(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            Self::Timeout | Self::Transport(_) => None,
        }
    }

    /// Returns `true` if the object has changed, or is another one of that name: writes of it are outdated.
    pub(crate) fn is_outdated(&self) -> bool {
        match self {
            Self::Refused { code, message, .. } => {
                let is_invalid = *code == StatusCode::UNPROCESSABLE_ENTITY;
                self.is_conflict() || (is_invalid && !message.contains(DEVICE_RIGHT))
            }
            Self::Timeout | Self::Transport(_) => false,
        }
    }

    /// Returns `true` if the object does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        self.code() == Some(StatusCode::NOT_FOUND)
    }

    /// Returns `true` if the object exists already, or another writer owns a field.
    pub(crate) fn is_conflict(&self) -> bool {
        self.code() == Some(StatusCode::CONFLICT)
    }

    /// Returns the pause that the API server asks for.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            Self::Timeout | Self::Transport(_) => None,
        }
    }
}

impl From<kube::Error> for CallError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => {
                let seconds = status.details.as_ref().map_or(0, |it| it.retry_after_seconds);
                let is_throttled = status.code == StatusCode::TOO_MANY_REQUESTS;
                let seconds = seconds.clamp(is_throttled.into(), MAX_RETRY_AFTER_SECONDS);
                Self::Refused {
                    code: StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
                    reason: status.reason.clone(),
                    message: status.message.clone(),
                    retry_after: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
                }
            }
            other => Self::Transport(explain(&credentials::describe(&other))),
        }
    }
}

/// Adds what to do to errors of TLS that a clock causes.
fn explain(text: &str) -> String {
    let text = text.trim_start_matches("ServiceError: ");
    if text.contains("NotValidYet") || text.contains("not valid yet") {
        return format!(
            "the certificate of the API server is not yet valid: check the clocks of both machines ({text})"
        );
    }
    if text.contains("Expired") || text.contains("expired") {
        return format!("a certificate has expired: renew it, or check the clocks of both machines ({text})");
    }
    text.to_owned()
}

/// Returns an error with its causes, without repetitions.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
pub(crate) mod tests;
