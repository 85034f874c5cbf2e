//! The banner that `devlet serve` prints once it runs: version, paths, and commands to try.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use devlet_agent::agent::Agent;

use super::sample;
use crate::output::count;

pub(super) fn text(agent: &Agent, http: Option<SocketAddr>, sample: bool, fresh: bool) -> String {
    let config = agent.config();
    let mut text = format!("devlet {} is running\n\n", env!("CARGO_PKG_VERSION"));
    let mut line = |what: &str, value: &str| text.push_str(&format!("  {what:<16}{value}\n"));
    let kept = if fresh { "  (for this run only)" } else { "" };
    line("root", &format!("{}{kept}", config.root.display()));
    line("plugins", &config.kubelet_socket().display().to_string());
    line("API", &config.api_socket().display().to_string());
    if let Some(address) = http {
        line(
            "HTTP",
            &format!("http://{address}/readyz?verbose  http://{address}/metrics"),
        );
    }
    if let Some(cluster) = agent.cluster().read(|state| state.connection.clone()) {
        let text = format!(
            "{}  (node {}, mode {})",
            cluster.server, cluster.node, cluster.mode
        );
        line("cluster", &text);
    }
    let pods = agent.store().read(|node| node.pods().count());
    if pods > 0 {
        line("pods", &format!("{} from before", count(pods, "pod")));
    }
    if let Err(error) = agent.store().health() {
        line("not ready", &error.to_string());
    }
    if sample {
        line(
            "sample plugin",
            &format!(
                "{} of {}",
                count(sample::DEVICES.len(), "device"),
                sample::RESOURCE
            ),
        );
        let devices = count(sample::driver::DEVICES.len(), "device");
        line("sample driver", &format!("{devices} of {}", sample::driver::NAME));
    }
    text.push_str("\nIn another terminal:\n\n");
    let devlet = program();
    if config.root != usual_root() {
        text.push_str(&format!("  export DEVLET_ROOT={}\n", quoted(&config.root)));
    }
    if sample {
        text.push_str(&format!(
            "  {devlet} admit --name job1 --limit {}=2\n",
            sample::RESOURCE
        ));
        text.push_str(&format!("  {devlet} get devices\n  {devlet} remove job1\n\n"));
        let directory = config.root.join(sample::driver::DIRECTORY);
        let path = |name: &str| quoted(&directory.join(name));
        let (pod, claim) = (path(sample::driver::POD), path(sample::driver::CLAIM));
        let cdi = path(sample::driver::CDI);
        text.push_str(&format!("  {devlet} admit -f {pod} -f {claim}\n"));
        text.push_str(&format!("  {devlet} describe claim gadgets\n"));
        text.push_str(&format!(
            "  {devlet} options job2 main --format oci --cdi-dir {cdi}\n"
        ));
        text.push_str(&format!("  {devlet} remove job2\n"));
    } else {
        text.push_str(&format!("  {devlet} get resources\n"));
    }
    text.push_str("\nStop it with Ctrl-C.\n");
    text
}

/// Returns the root directory that commands use by default.
fn usual_root() -> PathBuf {
    let first = devlet_client::locate::sockets(None).into_iter().next();
    let root = first.as_deref().and_then(Path::parent).and_then(Path::parent);
    root.map(Path::to_owned).unwrap_or_default()
}

/// Returns the command that runs this program: its name if it is in `PATH`, otherwise its path.
fn program() -> String {
    let Ok(path) = std::env::current_exe() else {
        return "devlet".into();
    };
    let search = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&search).any(|directory| directory.join("devlet") == path) {
        return "devlet".into();
    }
    let here = std::env::current_dir().unwrap_or_default();
    quoted(path.strip_prefix(here).unwrap_or(&path))
}

fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |character: char| character.is_ascii_alphanumeric() || "/._-+".contains(character);
    if text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}
