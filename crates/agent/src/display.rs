//! What the core cannot put in words: it knows no calendar, and errors outlive what they are about.

use std::fmt;

use devlet_core::dra::view::{Wait, listed_as};
use devlet_core::{Moment, Node, PodName, PodUid};

/// A pod as people know it: by its name, as far as that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPod {
    /// Its UID.
    pub uid: PodUid,
    /// Its name; there is none in a kubelet's file.
    pub name: Option<PodName>,
}

impl NamedPod {
    /// A pod that is on record, is being admitted, or has left claims.
    pub fn of(node: &Node, uid: &PodUid) -> Self {
        Self {
            uid: uid.clone(),
            name: node.name_of(uid).cloned(),
        }
    }
}

impl NamedPod {
    /// Returns `namespace/name`, for the field `pod` of the log; `-` if the name is not known.
    pub(crate) fn label(&self) -> String {
        self.name.as_ref().map_or_else(|| "-".to_owned(), pod_label)
    }
}

/// Returns `namespace/name`.
pub(crate) fn pod_label(PodName { namespace, name }: &PodName) -> String {
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

/// How many names a text has at most.
pub(crate) const MOST_NAMED: usize = 10;

/// The first names of many, separated by commas.
pub(crate) fn first<T: fmt::Display>(names: impl IntoIterator<Item = T>) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names
        .by_ref()
        .take(MOST_NAMED)
        .map(|name| name.to_string())
        .collect();
    let more = if names.next().is_some() { ", ..." } else { "" };
    shown.join(", ") + more
}

/// A moment after what it is the beginning of.
pub(crate) fn format_since(before: &str, since: Moment) -> String {
    let moment = i64::try_from(since.0).ok();
    let moment = moment.and_then(|milliseconds| jiff::Timestamp::from_millisecond(milliseconds).ok());
    moment.map_or_else(String::new, |moment| format!("{before}{moment}"))
}

/// What a claim waits for, and since when.
pub(crate) fn wait(wait: &Wait) -> String {
    let since = wait.since.map(|since| format_since(" since ", since));
    wait.told(&since.unwrap_or_default())
}

/// All of that, unless it is a lot.
pub(crate) fn waits(waits: &[Wait]) -> String {
    listed_as(waits, wait)
}
