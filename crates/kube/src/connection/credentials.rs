//! Reads address and credentials of an API server.
//!
//! No error has content of these files: parsers print the lines around a problem, and so a token or key.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Uri;
use kube::client::ClientBuilder;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError, NamedAuthInfo, NamedCluster};
use kube::{Client, Config};

use super::{chain, retry_after};

/// The token of the ServiceAccount in a pod.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// The origin of address and credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A kubeconfig file.
    Kubeconfig(PathBuf),
    /// The ServiceAccount of the pod that devlet runs in.
    InCluster,
}

/// Why the connection does not have a client.
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

/// Address and credentials, and the content that they came from.
pub(super) struct Loaded {
    pub(super) config: Config,
    /// The kubeconfig and the files that it names, to notice changes.
    pub(super) content: Arc<[Option<Vec<u8>>]>,
}

/// Returns a client. Reads the files with certificates and tokens.
pub(super) async fn client(mut config: Config) -> Result<Client, ConnectError> {
    // Each reconciler retries by itself, with its own deadline and backoff.
    config.default_retry = false;
    let server = address(&config.cluster_url);
    let built = blocking(move || {
        let builder = ClientBuilder::try_from(config).map_err(|error| describe(&error))?;
        Ok(builder.with_layer(&retry_after::layer()).build())
    });
    built
        .await
        .map_err(|problem| ConnectError::Client { server, problem })
}

pub(super) async fn load(access: &Access) -> Result<Loaded, ConnectError> {
    match access {
        Access::InCluster => {
            let loaded = blocking(|| {
                // Before the token is read for the client: a later change is noticed.
                let token = std::fs::read(TOKEN).ok();
                let config = Config::incluster().map_err(|error| chain(&error))?;
                Ok((config, token))
            });
            let (config, token) = loaded
                .await
                .map_err(|problem| ConnectError::InCluster { problem })?;
            Ok(Loaded {
                config,
                content: Arc::new([token]),
            })
        }
        Access::Kubeconfig(path) => load_kubeconfig(path)
            .await
            .map_err(|problem| ConnectError::Kubeconfig {
                path: path.clone(),
                problem,
            }),
    }
}

async fn load_kubeconfig(path: &Path) -> Result<Loaded, String> {
    let path = path.to_owned();
    let (kubeconfig, content) = blocking(move || {
        let text = std::fs::read(&path).map_err(|error| error.to_string())?;
        let kubeconfig = Kubeconfig::read_from(&path).map_err(|error| describe(&error))?;
        let named = files(&kubeconfig).into_iter();
        let content = [Some(text)].into_iter();
        let content = content
            .chain(named.map(|file| std::fs::read(file).ok()))
            .collect();
        Ok((kubeconfig, content))
    })
    .await?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .map_err(|error| describe(&error))?;
    let provider = config.auth_info.auth_provider.as_ref();
    if let Some(provider) = provider.filter(|provider| provider.config.contains_key("cmd-path")) {
        let name = &provider.name;
        return Err(format!("auth-provider {name} runs a program; use exec instead"));
    }
    Ok(Loaded { config, content })
}

/// Runs work that may wait for a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(error.to_string()))
}

/// Returns the files that a kubeconfig names.
fn files(kubeconfig: &Kubeconfig) -> Vec<PathBuf> {
    let cluster = |named: &NamedCluster| named.cluster.as_ref()?.certificate_authority.clone();
    let user = |named: &NamedAuthInfo| {
        let AuthInfo {
            client_certificate,
            client_key,
            token_file,
            ..
        } = named.auth_info.clone()?;
        Some([client_certificate, client_key, token_file])
    };
    let clusters = kubeconfig.clusters.iter().filter_map(cluster);
    let users = kubeconfig.auth_infos.iter().filter_map(user).flatten().flatten();
    clusters.chain(users).map(PathBuf::from).collect()
}

/// Returns an address without user and password.
pub(super) fn address(url: &Uri) -> String {
    let text = url.to_string();
    let Some(authority) = url.authority() else {
        return text;
    };
    let host = authority.as_str().rsplit('@').next().unwrap_or_default();
    text.replacen(authority.as_str(), host, 1)
}

/// Describes an error without secrets.
pub(super) fn describe(error: &(dyn Error + 'static)) -> String {
    let mut cause = Some(error);
    while let Some(each) = cause {
        if let Some(text) = without_content(each) {
            return text;
        }
        cause = each.source();
    }
    chain(error)
}

/// Describes an error whose own text has content of a file, or a password.
fn without_content(error: &(dyn Error + 'static)) -> Option<String> {
    match error.downcast_ref() {
        Some(KubeconfigError::Parse(error)) => {
            let place = error.location().map_or_else(String::new, |place| {
                format!(" (line {}, column {})", place.line(), place.column())
            });
            return Some(format!(
                "the file is not a kubeconfig in YAML{place}; check it there"
            ));
        }
        Some(KubeconfigError::ParseCertificates(_)) => {
            return Some("the certificate authority is not a PEM certificate".to_owned());
        }
        _ => {}
    }
    match error.downcast_ref()? {
        kube::Error::ProxyProtocolUnsupported { proxy_url }
        | kube::Error::ProxyProtocolDisabled { proxy_url, .. } => Some(format!(
            "devlet cannot use the proxy {}; remove proxy-url from the kubeconfig",
            address(proxy_url)
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "abcdef-0123456789";

    async fn refused(kubeconfig: &str) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), kubeconfig).unwrap();
        let access = Access::Kubeconfig(file.path().to_owned());
        let opened = super::super::Connection::open(access).await;
        opened.err().unwrap().to_string()
    }

    #[tokio::test]
    async fn an_error_in_a_kubeconfig_has_its_place_and_no_secret() {
        let cut = format!(
            "kind: Config\nusers:\n- name: a\n  user:\n    token: {SECRET}\n    client-key-data: \"{SECRET}\n"
        );
        let nested = format!("kind: Config\nusers:\n- name: a\n  user: {{token: {{value: {SECRET}}}}}\n");
        for text in [cut, nested] {
            let error = refused(&text).await;
            assert!(!error.contains(SECRET), "{error}");
            assert!(error.contains("(line "), "{error}");
        }
    }

    #[tokio::test]
    async fn an_error_about_a_proxy_has_no_password() {
        let text = format!(
            "{{kind: Config, current-context: a, contexts: [{{name: a, context: {{cluster: a, user: a}}}}], \
             clusters: [{{name: a, cluster: {{server: 'http://127.0.0.1:1', proxy-url: 'http://u:{SECRET}@127.0.0.1:2'}}}}], \
             users: [{{name: a, user: {{}}}}]}}"
        );
        let error = refused(&text).await;
        assert!(
            !error.contains(SECRET) && error.contains("127.0.0.1:2"),
            "{error}"
        );
    }

    #[test]
    fn an_address_has_no_password() {
        let shown = |url: &str| address(&url.parse().unwrap());
        assert_eq!(shown("https://u:p@a.test:6443/x"), "https://a.test:6443/x");
        assert_eq!(shown("https://a.test:6443/x"), "https://a.test:6443/x");
    }
}
