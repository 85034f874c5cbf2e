//! ResourceSlices in the format of `-o json`. The keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::kind::Kind;
use super::listing::Item;
use super::time;
use crate::output::or_dash;
use crate::table::{Cell, Tone};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Slice {
    pub(super) name: String,
    pub(super) driver: String,
    pub(super) pool: String,
    pub(super) generation: i64,
    /// Number of devices.
    pub(super) devices: u64,
    /// `None` if unknown.
    pub(super) created_at: Option<String>,
    #[serde(skip)]
    pub(super) age_ms: u64,
    /// `true` if the owner is an earlier Node object.
    pub(super) stale_owner: bool,
    /// Time at which devlet deletes it; `None` if it does not.
    pub(super) wiped_at: Option<String>,
    #[serde(skip)]
    wiped_in_ms: u64,
}

impl From<v1::Slice> for Slice {
    fn from(slice: v1::Slice) -> Self {
        Self {
            name: slice.name,
            driver: slice.driver,
            pool: slice.pool,
            generation: slice.generation,
            devices: slice.devices,
            created_at: time::known_moment(slice.created_at_ms),
            age_ms: slice.age_ms,
            stale_owner: slice.has_stale_owner,
            wiped_at: slice.wiped_at_ms.map(time::moment),
            wiped_in_ms: slice.wiped_in_ms,
        }
    }
}

impl Slice {
    pub(super) fn age_text(&self) -> String {
        match self.created_at {
            Some(_) => time::age(self.age_ms),
            None => "-".to_owned(),
        }
    }

    /// Returns the time until it is deleted.
    pub(super) fn wipe_text(&self) -> String {
        match (&self.wiped_at, self.wiped_in_ms) {
            (None, _) => "-".to_owned(),
            (Some(_), 0) => "now".to_owned(),
            (Some(_), time) => time::age(time),
        }
    }

    pub(super) fn owner_cell(&self) -> Cell {
        match self.stale_owner {
            true => Cell::new("stale").tone(Tone::Bad),
            false => Cell::new("current"),
        }
    }

    /// Returns the time of the deletion. Not the time until then: a watch shows a change when the driver leaves.
    fn wipe_cell(&self) -> Cell {
        match &self.wiped_at {
            Some(at) => Cell::new(at.as_str()).tone(Tone::Waiting),
            None => Cell::new("-"),
        }
    }
}

impl Item for Slice {
    const KIND: Kind = Kind::Slices;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &[
            "NAME",
            "DRIVER",
            "POOL",
            "GENERATION",
            "DEVICES",
            "OWNER",
            "WIPED AT",
            "AGE",
        ],
        &["CREATED"],
    );

    fn blank() -> Self {
        v1::Slice::default().into()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::new(self.name.as_str()),
            Cell::new(self.driver.as_str()),
            Cell::new(self.pool.as_str()),
            Cell::new(self.generation.to_string()),
            Cell::new(self.devices.to_string()),
            self.owner_cell(),
            self.wipe_cell(),
            Cell::passing(self.age_text()),
        ]
    }

    fn wide_row(&self) -> Vec<Cell> {
        vec![Cell::new(or_dash(self.created_at.clone().unwrap_or_default()))]
    }
}
