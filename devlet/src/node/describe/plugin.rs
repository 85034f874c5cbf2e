//! `devlet describe plugin`: a device plugin.

use devlet_client::{Client, v1};

use super::field;
use crate::Outcome;
use crate::node::inventory::Plugin;
use crate::node::kind::Kind;
use crate::node::listing::Item as _;
use crate::node::select::Filter;
use crate::output::{self, Output, escape_control};

pub(super) async fn run(client: &Client, name: &str, output: Output) -> anyhow::Result<Outcome> {
    let plugins = client.list_plugins(v1::ListPluginsRequest {}).await?.plugins;
    let plugins: Vec<Plugin> = plugins.into_iter().map(Plugin::from).collect();
    let filter = Filter {
        names: vec![name.to_owned()],
        ..Filter::default()
    };
    if let Some(problem) = filter.problems(&plugins).first() {
        output::warn(&format!("error: {}", problem.text(Kind::Plugins)));
        return Ok(Outcome::Bad);
    }
    // A plugin that registers again may be listed twice for a moment.
    for plugin in plugins.iter().filter(|plugin| plugin.is_called(name)) {
        output::print(output.clone(), plugin, plugin_text)?;
    }
    Ok(Outcome::Fine)
}

fn plugin_text(plugin: &Plugin) -> String {
    let devices = plugin
        .devices
        .map_or_else(|| "-".to_owned(), |number| number.to_string());
    let mut text = format!(
        "Resource:    {}\nEndpoint:    {}\nState:       {}\nDevices:     {devices}\nOptions:     {}\n\
         User:        {}\n",
        escape_control(&plugin.resource),
        escape_control(&plugin.endpoint),
        plugin.tone().paint(plugin.state),
        plugin.options_text(),
        plugin.uid,
    );
    if let Some(rejection) = &plugin.rejection {
        text.push_str(&format!(
            "Rejected:    {} ({} ago, {} times)\n{}",
            rejection.rejected_at,
            plugin.age_text(),
            rejection.attempts,
            field("Reason:      ", &rejection.reason),
        ));
    }
    if let Some(connected_at) = &plugin.connected_at {
        text.push_str(&format!(
            "Connected:   {connected_at} ({} ago)\nConnection:  {}\n",
            plugin.age_text(),
            escape_control(&plugin.connection),
        ));
    }
    text
}
