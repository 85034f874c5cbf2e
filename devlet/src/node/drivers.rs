//! DRA drivers and their plugins in the format of `-o json`. The keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::claims::Wait;
use super::inventory::LastPlugin;
use super::slices::Slice;
use super::time;
use crate::output::or_dash;
use crate::table::Tone;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Driver {
    pub(super) name: String,
    pub(super) state: &'static str,
    pub(super) plugins: Vec<DriverPlugin>,
    /// Time at which the last of them disconnected; `None` while one is connected.
    pub(super) unusable_since: Option<String>,
    #[serde(skip)]
    unusable_for_ms: u64,
    pub(super) last_plugin: Option<LastPlugin>,
    pub(super) claims: u64,
    pub(super) waits: Vec<Wait>,
    pub(super) slices: Vec<Slice>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DriverPlugin {
    pub(super) endpoint: String,
    /// The user that it runs as.
    pub(super) uid: u32,
    /// The API version in use.
    pub(super) service: String,
    pub(super) service_reason: String,
    pub(super) health_service: Option<String>,
    pub(super) registered_at: String,
    #[serde(skip)]
    pub(super) age_ms: u64,
    pub(super) connected: bool,
    pub(super) serving: bool,
    pub(super) connection: String,
}

/// A refused plugin of a driver.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RefusedDriver {
    pub(super) name: String,
    pub(super) socket: String,
    pub(super) reason: String,
    pub(super) hint: Option<String>,
    pub(super) refused_at: String,
    #[serde(skip)]
    pub(super) age_ms: u64,
    pub(super) attempts: u64,
}

impl From<v1::RefusedDriver> for RefusedDriver {
    fn from(refused: v1::RefusedDriver) -> Self {
        Self {
            name: refused.name,
            socket: refused.socket,
            reason: refused.reason,
            hint: Some(refused.hint).filter(|hint| !hint.is_empty()),
            refused_at: time::moment(refused.refused_at_ms),
            age_ms: refused.age_ms,
            attempts: refused.attempts,
        }
    }
}

impl RefusedDriver {
    /// Returns the reason and the hint.
    pub(super) fn reason_text(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}: {hint}", self.reason),
            None => self.reason.clone(),
        }
    }
}

impl From<v1::Driver> for Driver {
    fn from(driver: v1::Driver) -> Self {
        let plugin = |plugin: v1::DriverPlugin| DriverPlugin {
            endpoint: plugin.endpoint,
            uid: plugin.uid,
            service: plugin.service,
            service_reason: plugin.service_reason,
            health_service: Some(plugin.health_service).filter(|service| !service.is_empty()),
            registered_at: time::moment(plugin.registered_at_ms),
            age_ms: plugin.age_ms,
            connected: plugin.connected,
            serving: plugin.serving,
            connection: plugin.connection,
        };
        let is_serving = driver.plugins.iter().any(|plugin| plugin.serving);
        let state = match (is_serving, driver.unusable_since_ms) {
            (true, _) => "serving",
            (false, Some(_)) if driver.plugins.is_empty() => "gone",
            (false, Some(_)) => "notConnected",
            (false, None) => "neverRegistered",
        };
        Self {
            name: driver.name,
            state,
            plugins: driver.plugins.into_iter().map(plugin).collect(),
            unusable_since: driver.unusable_since_ms.map(time::moment),
            unusable_for_ms: driver.unusable_for_ms,
            last_plugin: driver.last_plugin.map(LastPlugin::from),
            claims: driver.claims,
            waits: driver.waits.into_iter().map(Wait::from).collect(),
            slices: driver.slices.into_iter().map(Slice::from).collect(),
        }
    }
}

impl Driver {
    fn serving(&self) -> Option<&DriverPlugin> {
        self.plugins.iter().find(|plugin| plugin.serving)
    }

    pub(super) fn tone(&self) -> Tone {
        match self.state {
            "serving" => Tone::Plain,
            _ => Tone::Bad,
        }
    }

    /// Returns the state and its duration.
    pub(super) fn state_text(&self) -> String {
        match self.unusable_since {
            Some(_) if self.state != "serving" => {
                format!("{} for {}", self.state, time::age(self.unusable_for_ms))
            }
            _ => self.state.to_owned(),
        }
    }

    /// Returns the age of the registration in use.
    pub(super) fn age_text(&self) -> String {
        let plugin = self.serving().or(self.plugins.last());
        plugin.map_or_else(|| "-".to_owned(), |plugin| time::age(plugin.age_ms))
    }

    /// Returns the API version in use.
    pub(super) fn service_text(&self) -> String {
        let plugin = self.serving().or(self.plugins.last());
        or_dash(plugin.map_or_else(String::new, |plugin| plugin.service.clone()))
    }

    pub(super) fn health_text(&self) -> String {
        let plugin = self.serving().or(self.plugins.last());
        or_dash(
            plugin
                .and_then(|plugin| plugin.health_service.clone())
                .unwrap_or_default(),
        )
    }
}

impl DriverPlugin {
    pub(super) fn state_text(&self) -> &'static str {
        match (self.serving, self.connected) {
            (true, _) => "serving",
            (false, true) => "standby",
            (false, false) => "notConnected",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::samples;

    #[test]
    fn the_state_of_a_driver_follows_its_plugins() {
        let serving = Driver::from(samples::driver());
        assert_eq!(serving.state_text(), "serving");
        assert_eq!(serving.service_text(), "v1.DRAPlugin");
        let mut left = samples::driver();
        left.plugins.clear();
        left.unusable_since_ms = Some(u64::MAX);
        assert_eq!(Driver::from(left.clone()).state_text(), "gone for 0s");
        left.unusable_since_ms = None;
        assert_eq!(Driver::from(left).state_text(), "neverRegistered");
    }
}
