//! Runs a plugin for credentials: a program that a kubeconfig names under `exec`.
//!
//! Errors have no output of the plugin, which may contain a token.

use std::process::Stdio;

use k8s_openapi::ByteString;
use k8s_openapi::jiff::Timestamp;
use kube::config::{AuthInfo, ExecConfig};
use serde::Deserialize;
use serde_json::json;
use tokio::process::Command;
use tokio::time::timeout;

use super::CHECK_INTERVAL;

/// Credentials of a plugin.
pub(super) struct Issued {
    auth: AuthInfo,
    pub(super) expires: Option<Timestamp>,
}

impl Issued {
    /// Adds the credentials to a user.
    pub(super) fn put_into(self: &Issued, user: &mut AuthInfo) {
        user.token = self.auth.token.clone();
        user.client_certificate_data = self.auth.client_certificate_data.clone();
        user.client_key_data = self.auth.client_key_data.clone();
    }
}

/// The answer of a plugin.
#[derive(Deserialize)]
struct Credential {
    status: Status,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    expiration_timestamp: Option<Timestamp>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

/// Runs a plugin, with a deadline, and without a terminal.
pub(super) async fn run(plugin: &ExecConfig) -> Result<Issued, String> {
    let program = plugin
        .command
        .as_deref()
        .ok_or("exec has no command; add it to the kubeconfig")?;
    let request = json!({
        "apiVersion": plugin.api_version,
        "kind": "ExecCredential",
        "spec": { "interactive": false, "cluster": plugin.cluster },
    });
    let variables = plugin.env.iter().flatten();
    let variables = variables.filter_map(|each| Some((each.get("name")?, each.get("value")?)));
    let mut command = Command::new(program);
    command
        .args(plugin.args.iter().flatten())
        .envs(variables)
        .env("KUBERNETES_EXEC_INFO", request.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(CHECK_INTERVAL, command.output())
        .await
        .map_err(|_| format!("{program} did not end within {CHECK_INTERVAL:?}; run it to see why"))?
        .map_err(|error| {
            let hint = plugin
                .install_hint
                .as_deref()
                .unwrap_or("install it, or change exec");
            format!("{program} cannot be run: {error}; {hint}")
        })?;
    if !output.status.success() {
        return Err(format!("{program} failed ({}); run it to see why", output.status));
    }
    issued(&output.stdout).map_err(|problem| format!("the output of {program} {problem}; run it to see it"))
}

fn issued(output: &[u8]) -> Result<Issued, String> {
    let Credential { status } = serde_json::from_slice(output).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        format!("is not an ExecCredential with a status (line {line}, column {column})")
    })?;
    let has_certificate = status.client_certificate_data.is_some() && status.client_key_data.is_some();
    if status.token.is_none() && !has_certificate {
        return Err("has no token, and no certificate with a key".to_owned());
    }
    // Base64, as in a kubeconfig.
    let encoded = |text: Option<String>| text.map(|text| ByteString(text.into_bytes()));
    let auth = json!({
        "token": status.token,
        "client-certificate-data": encoded(status.client_certificate_data),
        "client-key-data": encoded(status.client_key_data),
    });
    Ok(Issued {
        auth: serde_json::from_value(auth).map_err(|_| "cannot be used")?,
        expires: status.expiration_timestamp,
    })
}
