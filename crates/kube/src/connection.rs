//! The connection to the API server: credentials that are read again, and calls with a deadline.
//!
//! `kube` reads token files again by itself. Kubeconfig files, client certificates and keys are read again here: every
//! 30 seconds, and at once after the API server rejected the credentials. A change replaces the client; streams
//! of the old client go on until they end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster};
use kube::{Client, Config};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Deadline of a call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between checks of the files with credentials.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Longest pause that an API server can ask for.
const MAX_RETRY_AFTER_SECONDS: u32 = 60;

/// Shortest pause between two readings of the credentials after rejections.
const REJECTED_PAUSE: Duration = Duration::from_secs(1);

/// The origin of address and credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A kubeconfig file.
    Kubeconfig(PathBuf),
    /// The ServiceAccount of the pod that devlet runs in.
    InCluster,
}

/// The reason why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig file cannot be used.
    #[error("kubeconfig {}: {problem}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// There is no ServiceAccount.
    #[error(
        "{problem}; --in-cluster needs a pod with a ServiceAccount: outside of a pod, use --kubeconfig FILE"
    )]
    InCluster {
        /// The reason.
        problem: String,
    },
    /// The credentials are not usable.
    #[error("credentials for {server}: {problem}")]
    Client {
        /// The API server.
        server: String,
        /// The reason.
        problem: String,
    },
}

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
    /// Its address.
    pub(crate) server: String,
    pub(crate) client: Client,
}

/// Address and credentials, and the content that they came from.
struct Loaded {
    config: Config,
    /// The kubeconfig and the files that it names, to notice changes.
    content: Vec<Option<Vec<u8>>>,
}

impl Connection {
    /// Reads address and credentials. Does not call the API server.
    pub(crate) async fn open(access: Access) -> Result<Self, ConnectError> {
        let loaded = load(&access).await?;
        let (current, _) = watch::channel(Current::new(loaded.config)?);
        let inner = Inner {
            access,
            current,
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

    /// Returns the current client.
    pub(crate) fn client(&self) -> Client {
        self.inner.current.borrow().client.clone()
    }

    /// Makes a call, with a deadline.
    pub(crate) async fn call<T, F>(&self, call: impl FnOnce(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        match timeout(CALL_TIMEOUT, call(self.client())).await {
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

    /// Replaces the client when the credentials change, until `stop`.
    pub(crate) async fn follow(self, stop: CancellationToken) {
        let mut known = load(&self.inner.access)
            .await
            .map_or_else(|_| Vec::new(), |loaded| loaded.content);
        loop {
            let rejected = tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => false,
                () = self.inner.rejected.notified() => true,
                () = stop.cancelled() => return,
            };
            match load(&self.inner.access).await {
                Ok(loaded) if rejected || loaded.content != known => {
                    let content = loaded.content;
                    match Current::new(loaded.config) {
                        Ok(current) => {
                            if content != known {
                                tracing::info!(server = current.server, "address and credentials replaced");
                            }
                            self.inner.current.send_replace(current);
                            known = content;
                        }
                        Err(error) => tracing::warn!(%error, "credentials not usable"),
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "credentials not readable"),
            }
            if rejected {
                tokio::select! {
                    () = tokio::time::sleep(REJECTED_PAUSE) => {}
                    () = stop.cancelled() => return,
                }
            }
        }
    }
}

impl Current {
    fn new(mut config: Config) -> Result<Self, ConnectError> {
        // Each reconciler retries by itself, with its own deadline and backoff.
        config.default_retry = false;
        let server = config.cluster_url.to_string();
        match Client::try_from(config) {
            Ok(client) => Ok(Self { server, client }),
            Err(error) => Err(ConnectError::Client {
                server,
                problem: chain(&error),
            }),
        }
    }
}

async fn load(access: &Access) -> Result<Loaded, ConnectError> {
    match access {
        Access::InCluster => {
            let config = Config::incluster().map_err(|error| ConnectError::InCluster {
                problem: chain(&error),
            })?;
            // `kube` reads the token and the CA again.
            Ok(Loaded {
                config,
                content: Vec::new(),
            })
        }
        Access::Kubeconfig(path) => load_kubeconfig(path).await,
    }
}

async fn load_kubeconfig(path: &Path) -> Result<Loaded, ConnectError> {
    let failed = |problem: String| ConnectError::Kubeconfig {
        path: path.to_owned(),
        problem,
    };
    let text = tokio::fs::read(path)
        .await
        .map_err(|error| failed(error.to_string()))?;
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| failed(chain(&error)))?;
    let mut content = vec![Some(text)];
    for file in files(&kubeconfig) {
        content.push(tokio::fs::read(file).await.ok());
    }
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options)
        .await
        .map_err(|error| failed(chain(&error)))?;
    Ok(Loaded { config, content })
}

/// Returns the files that a kubeconfig names, except the token file, which `kube` reads again.
fn files(kubeconfig: &Kubeconfig) -> Vec<PathBuf> {
    let cluster = |named: &NamedCluster| named.cluster.as_ref()?.certificate_authority.clone();
    let user = |named: &NamedAuthInfo| {
        let AuthInfo {
            client_certificate,
            client_key,
            ..
        } = named.auth_info.clone()?;
        Some([client_certificate, client_key])
    };
    let clusters = kubeconfig.clusters.iter().filter_map(cluster);
    let users = kubeconfig.auth_infos.iter().filter_map(user).flatten().flatten();
    clusters.chain(users).map(PathBuf::from).collect()
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
    /// The API server cannot be reached, or the answer cannot be read.
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
                // Priority and fairness sends the pause in a header, which `kube` does not pass on.
                let is_throttled = status.code == StatusCode::TOO_MANY_REQUESTS;
                let seconds = seconds.clamp(is_throttled.into(), MAX_RETRY_AFTER_SECONDS);
                Self::Refused {
                    code: StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
                    reason: status.reason.clone(),
                    message: status.message.clone(),
                    retry_after: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
                }
            }
            other => Self::Transport(explain(&chain(&other))),
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
mod tests;
