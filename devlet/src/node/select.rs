//! Selection and order of listed objects: names, `--namespace`, `--selector`, `--sort-by`.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;

use super::complete;
use super::kind::{Kind, name};
use super::listing::Item;
use super::selector::Selector;
use crate::jsonpath::{Path, keys};

/// `-n` and `-A`.
#[derive(Debug, clap::Args)]
pub(super) struct NamespaceArg {
    /// Use only pods and claims of this namespace; names are looked up in it
    #[arg(short, long, value_name = "NAMESPACE", value_parser = name, add = complete::namespaces())]
    pub(super) namespace: Option<String>,
    /// Use pods and claims of all namespaces; this is the default
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
}

impl NamespaceArg {
    /// Returns the namespace. Fails if it was given for a kind without namespaces.
    pub(super) fn of(&self, kind: Kind) -> anyhow::Result<Option<&str>> {
        if self.namespace.is_some() && !kind.has_namespace() {
            anyhow::bail!("{} do not have a namespace: omit --namespace", kind.many());
        }
        Ok(self.namespace.as_deref())
    }

    /// Returns `namespace/name` for a name, if a namespace was given.
    pub(super) fn qualified(&self, name: &str) -> String {
        match &self.namespace {
            Some(namespace) if !name.contains('/') && !name.starts_with("uid:") => {
                format!("{namespace}/{name}")
            }
            _ => name.to_owned(),
        }
    }
}

/// A filter of a list.
#[derive(Debug, Default)]
pub(super) struct Filter<'a> {
    pub(super) namespace: Option<&'a str>,
    /// Empty: all.
    pub(super) names: Vec<String>,
    pub(super) selector: Option<&'a Selector>,
    pub(super) resource: Option<&'a str>,
}

/// A name that does not match exactly one object.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoMatch {
    Unknown { name: String, near: Option<String> },
    Ambiguous { name: String, names: Vec<String> },
}

impl Filter<'_> {
    /// Returns the text for an empty list.
    pub(super) fn none(&self, kind: Kind) -> String {
        let labels = if self.selector.is_some() {
            " with these labels"
        } else {
            ""
        };
        let namespace = self
            .namespace
            .map(|namespace| format!(" in namespace {namespace}"));
        format!("No {}{labels}{}.", kind.many(), namespace.unwrap_or_default())
    }

    pub(super) fn admits<I: Item>(&self, item: &I) -> bool {
        let has_name = |name: &String| item.is_called(name);
        self.namespace
            .is_none_or(|wanted| item.namespace() == Some(wanted))
            && self
                .resource
                .is_none_or(|wanted| item.resource().is_none_or(|own| own == wanted))
            && (self.names.is_empty() || self.names.iter().any(has_name))
            && self
                .selector
                .is_none_or(|selector| item.labels().is_some_and(|labels| selector.matches(labels)))
    }

    /// Returns the names that are unknown or ambiguous.
    pub(super) fn problems<I: Item>(&self, items: &[I]) -> Vec<NoMatch> {
        let in_namespace = |item: &&I| {
            self.namespace
                .is_none_or(|wanted| item.namespace() == Some(wanted))
        };
        let items: Vec<&I> = items.iter().filter(in_namespace).collect();
        let problem = |name: &String| {
            let meant: BTreeSet<String> = items
                .iter()
                .filter(|item| item.is_called(name))
                .map(|item| item.name())
                .collect();
            match meant.len() {
                0 => Some(NoMatch::Unknown {
                    name: name.clone(),
                    near: near(name, items.iter().map(|item| item.name())),
                }),
                1 => None,
                _ => Some(NoMatch::Ambiguous {
                    name: name.clone(),
                    names: meant.into_iter().collect(),
                }),
            }
        };
        self.names.iter().filter_map(problem).collect()
    }
}

impl NoMatch {
    /// Returns the error text, with a hint.
    pub(super) fn text(&self, kind: Kind) -> String {
        match self {
            Self::Unknown { name, near: None } => format!(
                "no such {}: {name}; `devlet get {}` lists them",
                kind.one(),
                kind.many()
            ),
            Self::Unknown {
                name,
                near: Some(near),
            } => format!("no such {}: {name}; did you mean {near}?", kind.one()),
            Self::Ambiguous { name, names } => {
                format!("{name} may be {}: name one of them", names.join(" or "))
            }
        }
    }
}

/// Returns the known name most similar to an unknown one. Names are also compared without namespace or domain.
pub(super) fn near(wanted: &str, known: impl Iterator<Item = String>) -> Option<String> {
    let similarity = |name: &str| {
        let is_typo = strsim::damerau_levenshtein(wanted, name) == 1;
        strsim::jaro_winkler(wanted, name).max(if is_typo { 0.9 } else { 0.0 })
    };
    let similarity = |name: &String| {
        let last = name.rsplit('/').next().unwrap_or(name);
        similarity(name).max(similarity(last))
    };
    known
        .map(|name| (similarity(&name), name))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, name)| name)
}

/// Sorts by the value at a path: missing values first, then numbers, then text. The sort is stable.
pub(super) fn sort_by<I: Serialize>(items: &mut Vec<I>, path: &Path) -> anyhow::Result<()> {
    let mut keyed = Vec::with_capacity(items.len());
    for item in items.drain(..) {
        let value = serde_json::to_value(&item)?;
        keyed.push((path.values(&value).first().map(|&key| key.clone()), item));
    }
    keyed.sort_by(|(a, _), (b, _)| compared(a.as_ref(), b.as_ref()));
    items.extend(keyed.into_iter().map(|(_, item)| item));
    Ok(())
}

/// Refuses a sort path if its first key does not exist in items of this kind.
pub(super) fn check_sort_key<I: Item>(path: &Path) -> anyhow::Result<()> {
    let blank = serde_json::to_value(I::blank())?;
    match path.missing_key(&blank) {
        Some(key) => anyhow::bail!(
            "--sort-by: {} do not have a key {key}{}",
            I::KIND.many(),
            keys_text(&blank)
        ),
        None => Ok(()),
    }
}

/// Refuses a sort path that does not match in any item.
pub(super) fn check_sort_path<I: Item>(items: &[I], path: &Path) -> anyhow::Result<()> {
    let mut last = None;
    for item in items {
        let value = serde_json::to_value(item)?;
        if !path.values(&value).is_empty() {
            return Ok(());
        }
        last = Some(value);
    }
    match last {
        Some(value) => anyhow::bail!(
            "--sort-by: no {} has a value at this path{}",
            I::KIND.one(),
            keys_text(&value)
        ),
        None => Ok(()),
    }
}

fn keys_text(value: &Value) -> String {
    format!("; the keys are {}", keys(value).join(", "))
}

fn compared(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    let rank = |value: Option<&Value>| match value {
        None | Some(Value::Null) => 0,
        Some(Value::Bool(_)) => 1,
        Some(Value::Number(_)) => 2,
        Some(Value::String(_)) => 3,
        Some(_) => 4,
    };
    match (a, b) {
        (Some(Value::Number(a)), Some(Value::Number(b))) => {
            let float = |number: &serde_json::Number| number.as_f64().unwrap_or(0.0);
            float(a).total_cmp(&float(b))
        }
        (Some(Value::String(a)), Some(Value::String(b))) => a.cmp(b),
        (Some(Value::Bool(a)), Some(Value::Bool(b))) => a.cmp(b),
        (a, b) => rank(a).cmp(&rank(b)),
    }
}

#[cfg(test)]
mod tests {
    use devlet_client::v1;
    use serde_json::json;

    use super::*;
    use crate::node::inventory::Plugin;

    #[test]
    fn items_are_sorted_by_number_or_text() {
        let mut items = vec![
            json!({"n": 10, "s": "b"}),
            json!({"n": 9, "s": "c"}),
            json!({"s": "a"}),
        ];
        let order =
            |items: &[Value]| -> Vec<String> { items.iter().map(|each| each["s"].to_string()).collect() };
        sort_by(&mut items, &".n".parse().unwrap()).unwrap();
        assert_eq!(order(&items), ["\"a\"", "\"c\"", "\"b\""]);
        sort_by(&mut items, &"{.s}".parse().unwrap()).unwrap();
        assert_eq!(order(&items), ["\"a\"", "\"b\"", "\"c\""]);
    }

    #[test]
    fn a_plugin_may_be_named_by_its_resource_if_it_is_the_only_one() {
        let plugin = |resource: &str, endpoint: &str| {
            Plugin::from(v1::Plugin {
                resource: resource.to_owned(),
                endpoint: endpoint.to_owned(),
                ..v1::Plugin::default()
            })
        };
        let plugins = [
            plugin("acme.com/gpu", "/run/gpu.sock"),
            plugin("acme.com/nic", "/run/nic.sock"),
            plugin("acme.com/nic", "/run/nic2.sock"),
        ];
        let filter = Filter {
            names: vec!["acme.com/gpu".into(), "acme.com/nic".into(), "nic2.sock".into()],
            ..Filter::default()
        };
        let problems = filter.problems(&plugins);
        let texts: Vec<String> = problems.iter().map(|each| each.text(Kind::Plugins)).collect();
        assert_eq!(
            texts,
            ["acme.com/nic may be /run/nic.sock or /run/nic2.sock: name one of them"]
        );
    }

    #[test]
    fn a_near_name_is_found_with_and_without_its_domain() {
        let known = || {
            ["acme.com/gpu", "sample.devlet.dev/widget"]
                .map(str::to_owned)
                .into_iter()
        };
        assert_eq!(
            near("widgets", known()).as_deref(),
            Some("sample.devlet.dev/widget")
        );
        assert_eq!(near("acme.com/gpus", known()).as_deref(), Some("acme.com/gpu"));
        assert_eq!(near("zzz", known()), None);
    }
}
