//! `devlet cdi`: Container Device Interface specs.

mod list;
mod resolve;
mod show;
mod validate;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Subcommand;
use devlet_cdi::{ContainerEdits, DEFAULT_DIRECTORIES, DeviceNode, QualifiedName, Registry};

use crate::Outcome;
use crate::output::OutputArg;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List all devices, and the definition that is used for each
    #[command(
        after_help = "Examples:\n  devlet cdi list\n  devlet cdi list --cdi-dir ./specs -o json\n\n\
        Files and directories that cannot be used are reported on standard error, and in JSON and YAML under \
        \"problems\". Exit codes: 0 listed, 2 wrong usage or an unreadable --cdi-dir."
    )]
    List {
        #[command(flatten)]
        directories: Directories,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show one device: its definition, and its changes to a container
    #[command(after_help = "Examples:\n  devlet cdi show vendor.com/gpu=gpu0\n\n\
        Exit codes: 0 shown, 1 there is no such usable device, 2 wrong usage or an unreadable --cdi-dir.")]
    Show {
        /// A qualified name, vendor/class=name
        name: QualifiedName,
        #[command(flatten)]
        directories: Directories,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Check spec files, or all files in the directories
    #[command(
        after_help = "Examples:\n  devlet cdi validate\n  devlet cdi validate vendor.yaml other.json\n\n\
        Exit codes: 0 all files are valid, 1 a file is invalid, or two define the same device, 2 wrong usage or an \
        unreadable path."
    )]
    Validate {
        /// Files to check [default: all files in the directories]
        #[arg(conflicts_with = "directories")]
        files: Vec<PathBuf>,
        #[command(flatten)]
        directories: Directories,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show the changes of devices to a container, or apply them to an OCI runtime spec
    #[command(
        after_help = "Examples:\n  devlet cdi resolve vendor.com/gpu=gpu0 vendor.com/nic=vf3\n  \
        devlet cdi resolve vendor.com/gpu=gpu0 --oci-spec config.json > changed.json\n\n\
        With --oci-spec the changed runtime spec is printed, as JSON unless -o yaml is given; the file itself \
        stays as it is. Exit codes: 0 resolved, 1 a name is unknown or unusable, its edits cannot be made on \
        this host, or the file is not a runtime spec, 2 wrong usage or an unreadable path."
    )]
    Resolve {
        /// Qualified names, vendor/class=name
        #[arg(required = true, value_name = "NAME")]
        names: Vec<QualifiedName>,
        /// OCI runtime spec to change, - for standard input
        #[arg(long, value_name = "FILE")]
        oci_spec: Option<PathBuf>,
        #[command(flatten)]
        directories: Directories,
        #[command(flatten)]
        output: OutputArg,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Directories {
    /// Directory with spec files; may be repeated, later ones take precedence [default: /etc/cdi and /var/run/cdi]
    #[arg(long = "cdi-dir", value_name = "DIR")]
    directories: Vec<PathBuf>,
}

impl Directories {
    /// Reads the directories. Those given with `--cdi-dir` must exist; the default ones may be missing.
    pub(crate) fn open(&self) -> anyhow::Result<Registry> {
        for directory in &self.directories {
            std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
        }
        Ok(self.load())
    }

    pub(crate) fn load(&self) -> Registry {
        if self.directories.is_empty() {
            Registry::load(DEFAULT_DIRECTORIES)
        } else {
            Registry::load(&self.directories)
        }
    }

    /// Returns the hint after an unknown name.
    pub(crate) fn hint(&self) -> String {
        let given = self
            .directories
            .iter()
            .map(|directory| format!(" --cdi-dir {}", directory.display()));
        format!(
            "hint: devlet cdi list{} lists all devices",
            given.collect::<String>()
        )
    }
}

pub(crate) fn run(command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::List { directories, output } => list::run(&directories, output.output),
        Command::Show {
            name,
            directories,
            output,
        } => show::run(&name, &directories, output.output),
        Command::Validate {
            files,
            directories,
            output,
        } => validate::run(&files, &directories, output.output),
        Command::Resolve {
            names,
            oci_spec,
            directories,
            output,
        } => resolve::run(&names, oci_spec.as_deref(), &directories, output.output),
    }
}

/// Returns edits as rows of a table: kind and value.
fn edit_lines(edits: &ContainerEdits) -> Vec<[String; 2]> {
    let mut lines: Vec<[String; 2]> = Vec::new();
    let mut add = |what: &str, text: String| lines.push([what.to_owned(), text]);
    for variable in &edits.env {
        add("env", variable.clone());
    }
    for node in &edits.device_nodes {
        add("device node", node_text(node));
    }
    for device in &edits.net_devices {
        add(
            "network device",
            format!("{} -> {}", device.host_interface_name, device.name),
        );
    }
    for mount in &edits.mounts {
        let options = mount.options.join(",");
        let options = if options.is_empty() {
            String::new()
        } else {
            format!(" ({options})")
        };
        add(
            "mount",
            format!("{} -> {}{options}", mount.host_path, mount.container_path),
        );
    }
    for hook in &edits.hooks {
        // The first argument is the name of the program.
        let arguments: String = hook
            .args
            .iter()
            .skip(1)
            .map(|argument| format!(" {argument}"))
            .collect();
        add("hook", format!("{}: {}{arguments}", hook.hook_name, hook.path));
    }
    if let Some(rdt) = &edits.intel_rdt {
        add("Intel RDT", serde_json::to_string(rdt).unwrap_or_default());
    }
    for gid in &edits.additional_gids {
        add("additional gid", gid.to_string());
    }
    lines
}

fn node_text(node: &DeviceNode) -> String {
    let host_path = if node.host_path.is_empty() {
        &node.path
    } else {
        &node.host_path
    };
    let mut text = format!("{host_path} -> {}", node.path);
    if !node.permissions.is_empty() {
        text.push_str(&format!(" ({})", node.permissions));
    }
    text
}
