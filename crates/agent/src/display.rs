//! Texts for people that the core cannot make: dates, and the names of pods in errors.

use std::fmt;

use devlet_core::dra::view::{Wait, listed_as};
use devlet_core::{Moment, Node, PodName, PodUid};

/// A pod with its name, for errors and logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPod {
    /// Its UID.
    pub uid: PodUid,
    /// Its name, if it is known. A kubelet's file does not contain it.
    pub name: Option<PodName>,
}

impl NamedPod {
    /// Looks up the name of a pod that is recorded, in admission, or gone with claims left.
    pub fn of(node: &Node, uid: &PodUid) -> Self {
        Self {
            uid: uid.clone(),
            name: node.name_of(uid).cloned(),
        }
    }

    /// Returns `namespace/name`, for the field `pod` of the log; `-` if the name is not known.
    pub(crate) fn label(&self) -> String {
        self.name.as_ref().map_or_else(|| "-".to_owned(), pod_label)
    }
}

/// Returns `namespace/name`.
pub fn pod_label(PodName { namespace, name }: &PodName) -> String {
    format!("{namespace}/{name}")
}

impl fmt::Display for NamedPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uid = &self.uid;
        match &self.name {
            Some(PodName { namespace, name }) => write!(f, "{namespace}/{name} ({uid})"),
            None => write!(f, "{uid}"),
        }
    }
}

/// Maximum number of names in a text.
const MAX_NAMED: usize = 10;

/// Returns the first names, separated by commas.
pub(crate) fn first<T: fmt::Display>(names: impl IntoIterator<Item = T>) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names
        .by_ref()
        .take(MAX_NAMED)
        .map(|name| name.to_string())
        .collect();
    let more = if names.next().is_some() { ", ..." } else { "" };
    shown.join(", ") + more
}

/// Returns `before` and a time; an empty text for a time that is out of range.
pub(crate) fn format_since(before: &str, since: Moment) -> String {
    let moment = i64::try_from(since.0).ok();
    let moment = moment.and_then(|milliseconds| jiff::Timestamp::from_millisecond(milliseconds).ok());
    moment.map_or_else(String::new, |moment| format!("{before}{moment}"))
}

/// Describes a wait of a claim, with its start.
pub(crate) fn wait(wait: &Wait) -> String {
    let since = wait.since.map(|since| format_since(" since ", since));
    wait.describe(&since.unwrap_or_default())
}

/// Describes the first waits of claims.
pub(crate) fn waits(waits: &[Wait]) -> String {
    listed_as(waits, wait)
}
