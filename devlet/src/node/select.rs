//! Selection and order of listed objects: names, `--namespace`, `--selector`, `--sort-by`.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use serde::Serialize;
use serde_json::Value;

use super::complete;
use super::kind::{Kind, name};
use super::listing::Item;
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

/// `-l`: the label selectors of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Selector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

impl Selector {
    pub(super) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.test {
                Test::In(values) => value.is_some_and(|value| values.contains(value)),
                // As in Kubernetes, `notin` matches an object without the label.
                Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Test::Exists => value.is_some(),
                Test::Absent => value.is_none(),
            }
        })
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut requirements = Vec::new();
        let mut rest = text;
        while !rest.trim().is_empty() {
            // Commas in parentheses separate values.
            let mut depth = 0_i32;
            let end = rest.find(|character| {
                match character {
                    '(' => depth += 1,
                    ')' => depth -= 1,
                    _ => {}
                }
                character == ',' && depth == 0
            });
            let (one, after) = end.map_or((rest, ""), |end| (&rest[..end], &rest[end + 1..]));
            requirements.push(one.parse()?);
            rest = after;
        }
        if requirements.is_empty() {
            return Err("write KEY=VALUE, as in app=web".to_owned());
        }
        if text.trim_end().ends_with(',') {
            return Err(format!("{text} ends in a comma"));
        }
        Ok(Self(requirements))
    }
}

impl FromStr for Requirement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let wrong = || {
            format!(
                "{text} is not a label selector: write KEY=VALUE, KEY!=VALUE, KEY, !KEY or KEY in (VALUE, ...)"
            )
        };
        let values = |list: &str| {
            let inner = list.trim().strip_prefix('(')?.strip_suffix(')')?;
            Some(inner.split(',').map(|value| value.trim().to_owned()).collect())
        };
        let one = |value: &str| vec![value.trim().to_owned()];
        let words = text.split_once(char::is_whitespace);
        let (key, test) = if let Some((key, value)) = text.split_once("!=") {
            (key, Test::NotIn(one(value)))
        } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (key, Test::In(one(value)))
        } else if let Some(list) = words.and_then(|(_, rest)| rest.trim().strip_prefix("in")) {
            (
                words.unwrap_or_default().0,
                Test::In(values(list).ok_or_else(wrong)?),
            )
        } else if let Some(list) = words.and_then(|(_, rest)| rest.trim().strip_prefix("notin")) {
            (
                words.unwrap_or_default().0,
                Test::NotIn(values(list).ok_or_else(wrong)?),
            )
        } else if let Some(key) = text.strip_prefix('!') {
            (key, Test::Absent)
        } else {
            (text, Test::Exists)
        };
        let key = key.trim();
        if !is_label_key(key) {
            return Err(wrong());
        }
        let values = match &test {
            Test::In(values) | Test::NotIn(values) => values.as_slice(),
            Test::Exists | Test::Absent => &[],
        };
        if let Some(value) = values.iter().find(|value| !is_label_value(value)) {
            return Err(format!(
                "{value:?} is not a label value: it has at most 63 letters, digits, -, _ and ., and begins and ends \
                 with a letter or digit"
            ));
        }
        Ok(Self {
            key: key.to_owned(),
            test,
        })
    }
}

/// Returns `true` for an empty text, which a label may have.
fn is_label_value(text: &str) -> bool {
    let is_inner = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let is_outer = |character: char| character.is_ascii_alphanumeric();
    text.len() <= 63
        && text.chars().all(is_inner)
        && text.chars().next().is_none_or(is_outer)
        && text.chars().next_back().is_none_or(is_outer)
}

/// `NAME` or `DOMAIN/NAME`.
fn is_label_key(text: &str) -> bool {
    let (domain, name) = match text.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, text),
    };
    let is_domain = |domain: &str| {
        let is_part = |part: &str| {
            !part.is_empty()
                && !part.starts_with('-')
                && !part.ends_with('-')
                && part
                    .chars()
                    .all(|each| each.is_ascii_lowercase() || each.is_ascii_digit() || each == '-')
        };
        domain.len() <= 253 && domain.split('.').all(is_part)
    };
    !name.is_empty() && is_label_value(name) && domain.is_none_or(is_domain)
}

#[cfg(test)]
mod tests {
    use devlet_client::v1;
    use serde_json::json;

    use super::*;
    use crate::node::shown::Plugin;

    #[test]
    fn kubernetes_selectors_are_evaluated() {
        let labels = BTreeMap::from([("app", "web"), ("acme.com/team", "a")]);
        let labels = labels
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let labels: BTreeMap<String, String> = labels.collect();
        for (text, expected) in [
            ("app=web", true),
            ("app==web", true),
            ("app = web , acme.com/team=a", true),
            ("app=web,acme.com/team=b", false),
            ("app!=web", false),
            ("none!=web", true),
            ("app", true),
            ("!app", false),
            ("!none", true),
            ("app in (db, web)", true),
            ("app in (db),acme.com/team", false),
            ("app notin (db, web)", false),
            ("none notin (db)", true),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(selector.matches(&labels), expected, "{text}");
        }
        for wrong in [
            "",
            ",",
            "=web",
            "app in web",
            "a b",
            "app=web,,x=y",
            "app=web,",
            ",app=web",
            "app in (a",
            "app in (a))",
            "app in ((a))",
            "app in (a b)",
            "app in a)",
            "a=b=c",
            "a===b",
            "a!==b",
            "a!=b=c",
            "a=b!=c",
            "a=!b",
            "!a=b",
            "a=b c",
            "a=(b)",
            "a=-b",
            "a=b-",
            "a=b/c",
            "a=\u{e4}",
            "-a=b",
            "a/=b",
            "/a=b",
            "a/b/c=d",
            "a..b/c=d",
            "a>1",
            &format!("a={}", "b".repeat(64)),
            &format!("{}=b", "a".repeat(64)),
        ] {
            assert!(wrong.parse::<Selector>().is_err(), "{wrong}");
        }
        for right in ["a=", "a in (b,)", "a in ()", " a = b ", "a.b-c/d_e=f.g"] {
            assert!(right.parse::<Selector>().is_ok(), "{right}");
        }
    }

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
