//! Label selectors of Kubernetes, for `-l`.

use std::collections::BTreeMap;
use std::str::FromStr;

/// A label selector: all of its requirements must match.
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

/// Returns `true` for a valid label value. It may be empty.
fn is_label_value(text: &str) -> bool {
    let is_inner = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let is_outer = |character: char| character.is_ascii_alphanumeric();
    text.len() <= 63
        && text.chars().all(is_inner)
        && text.chars().next().is_none_or(is_outer)
        && text.chars().next_back().is_none_or(is_outer)
}

/// Returns `true` for a valid label key: `NAME` or `DOMAIN/NAME`.
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
    use super::*;

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
}
