//! `-o jsonpath=TEMPLATE`: kubectl's templates, with the paths of RFC 9535.
//!
//! A template is text with expressions in braces: a path (`{.pods[*].name}`, the results separated by spaces), a
//! string (`{"\n"}`), or `{range PATH}...{end}`, which repeats its content for each result. Within a range, and in
//! `--sort-by`, paths start at the current value. `$` and `@` in front of a path are optional.

use std::str::FromStr;

use serde_json::Value;
use serde_json_path::JsonPath;

use crate::output::escape_control;

/// A parsed template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Path(Path),
    Range(Path, Vec<Part>),
}

/// One path, such as `.pods[0].name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path {
    parsed: JsonPath,
    /// The key that the path starts with, if any.
    first_key: Option<String>,
}

impl FromStr for Path {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
        let relative = inner.unwrap_or(text).trim().trim_start_matches(['$', '@']);
        let standard = match relative.chars().next() {
            None if text.is_empty() => return Err("write a JSONPath, such as .name".to_owned()),
            None => "$".to_owned(),
            Some('.') if relative.len() == 1 => "$".to_owned(),
            Some('.' | '[') => format!("${relative}"),
            Some(_) => format!("$.{relative}"),
        };
        let parsed = JsonPath::parse(&standard);
        let parsed = parsed.map_err(|error| format!("{text} is not a JSONPath: {error}"))?;
        let first_key = first_key(&standard);
        Ok(Self { parsed, first_key })
    }
}

/// Returns the key that a path starts with: `a` for `$.a.b` and `$['a']`, `None` for `$[0]`, `$.*` and `$..a`.
fn first_key(path: &str) -> Option<String> {
    let rest = path.strip_prefix('$')?;
    if let Some(rest) = rest.strip_prefix('.') {
        let key = rest.split(['.', '[', ' ']).next()?;
        return (!key.is_empty() && key != "*").then(|| key.to_owned());
    }
    let rest = rest.strip_prefix('[')?.trim_start();
    let quote = rest.chars().next().filter(|first| "'\"".contains(*first))?;
    let (key, rest) = rest[1..].split_once(quote)?;
    // Several keys in one pair of brackets, and escapes, are not supported.
    (rest.trim_start().starts_with(']') && !key.contains('\\')).then(|| key.to_owned())
}

/// Returns the keys of an object, as paths.
pub(crate) fn keys(value: &Value) -> Vec<String> {
    let keys = value.as_object().into_iter().flat_map(|object| object.keys());
    let mut keys: Vec<String> = keys.map(|key| format!(".{key}")).collect();
    keys.sort_unstable();
    keys
}

impl Path {
    /// Returns the values at the path.
    pub(crate) fn values<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        self.parsed.query(value).all()
    }

    /// Returns the first key of the path, if `value` is an object without it.
    pub(crate) fn missing_key(&self, value: &Value) -> Option<&str> {
        let object = value.as_object()?;
        self.first_key.as_deref().filter(|key| !object.contains_key(*key))
    }
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // As with kubectl, a path alone needs no braces.
        if !text.contains('{') {
            let parts = vec![Part::Path(text.parse()?)];
            return Ok(Self { parts });
        }
        let mut rest = text;
        let parts = parts(&mut rest, false)?;
        Ok(Self { parts })
    }
}

/// Parses up to the end of the template, or of the range that it is in.
fn parts(rest: &mut &str, in_range: bool) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    while let Some(open) = rest.find('{') {
        let (text, after) = rest.split_at(open);
        if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
        }
        let close = closing(after).ok_or_else(|| format!("{after} lacks its closing brace"))?;
        let expression = after[1..close].trim();
        *rest = &after[close + 1..];
        if expression == "end" && in_range {
            return Ok(parts);
        }
        if expression == "end" {
            return Err("{end} without {range}".to_owned());
        }
        if let Some(path) = expression.strip_prefix("range ") {
            parts.push(Part::Range(path.parse()?, self::parts(rest, true)?));
        } else if expression.starts_with(['"', '\'']) {
            parts.push(Part::Text(literal(expression)?));
        } else {
            parts.push(Part::Path(expression.parse()?));
        }
    }
    if in_range {
        return Err("{range} without {end}".to_owned());
    }
    if !rest.is_empty() {
        parts.push(Part::Text((*rest).to_owned()));
    }
    Ok(parts)
}

/// Returns the position of the closing brace; braces in quotes do not count.
fn closing(text: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (at, character) in text.char_indices() {
        match (quote, character) {
            _ if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), _) if open == character => quote = None,
            (None, '"' | '\'') => quote = Some(character),
            (None, '}') => return Some(at),
            _ => {}
        }
    }
    None
}

/// Parses a quoted string with JSON escapes.
fn literal(text: &str) -> Result<String, String> {
    let inner = text
        .strip_prefix('\'')
        .and_then(|text| text.strip_suffix('\''))
        .map(|text| format!("\"{}\"", text.replace('"', "\\\"")));
    let quoted = inner.unwrap_or_else(|| text.to_owned());
    serde_json::from_str(&quoted).map_err(|_| format!("{text} is not a quoted string"))
}

impl Template {
    /// Returns a message if the first key of a path does not exist in `value`; it lists the keys that do.
    pub(crate) fn missing_key(&self, value: &Value) -> Option<String> {
        missing_key(&self.parts, value)
    }

    pub(crate) fn render(&self, value: &Value) -> String {
        let mut text = String::new();
        render(&self.parts, value, &mut text);
        text
    }
}

fn render(parts: &[Part], value: &Value, text: &mut String) {
    for part in parts {
        match part {
            Part::Text(literal) => text.push_str(literal),
            Part::Path(path) => {
                let found: Vec<String> = path.values(value).into_iter().map(plain).collect();
                text.push_str(&found.join(" "));
            }
            Part::Range(path, inner) => {
                for each in path.values(value) {
                    render(inner, each, text);
                }
            }
        }
    }
}

fn missing_key(parts: &[Part], value: &Value) -> Option<String> {
    parts.iter().find_map(|part| match part {
        Part::Text(_) => None,
        Part::Path(path) | Part::Range(path, _) if path.missing_key(value).is_some() => {
            let key = path.missing_key(value)?;
            Some(format!("no .{key} here; the keys are {}", keys(value).join(", ")))
        }
        Part::Path(_) => None,
        Part::Range(path, inner) => {
            // Some keys are optional: a key is missing only if no value has it.
            let missing = path
                .values(value)
                .into_iter()
                .map(|each| missing_key(inner, each));
            missing.collect::<Option<Vec<String>>>()?.into_iter().next()
        }
    })
}

/// Returns a string without its quotes and with control characters escaped; other values as JSON.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => escape_control(text).into_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendered(template: &str) -> Result<String, String> {
        let value = json!({
            "revision": 7,
            "pods": [
                {"name": "a", "labels": {"acme.com/team": "x"}, "containers": [{"ids": ["1", "2"]}]},
                {"name": "b", "labels": {}, "containers": []},
            ],
        });
        Ok(template.parse::<Template>()?.render(&value))
    }

    #[test]
    fn kubectl_templates_are_rendered() {
        for (template, expected) in [
            ("{.pods[*].name}", "a b"),
            ("{$.pods[0].name}", "a"),
            (".revision", "7"),
            ("revision", "7"),
            ("{.pods[*].containers[*].ids}", r#"["1","2"]"#),
            ("{.pods[?(@.name==\"b\")].name}", "b"),
            ("{.pods[0].labels['acme.com/team']}", "x"),
            (
                "{range .pods[*]}{.name}{\"\\t\"}{@.labels}{'\\n'}{end}",
                "a\t{\"acme.com/team\":\"x\"}\nb\t{}\n",
            ),
            ("rev {.revision}, {\"}\"}", "rev 7, }"),
            ("{.none}", ""),
        ] {
            assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
        }
    }

    #[test]
    fn a_missing_key_is_reported_with_the_existing_keys() {
        let value = json!({"revision": 7, "pods": [{"name": "a", "labels": {}}]});
        let missing = |template: &str| template.parse::<Template>().unwrap().missing_key(&value);
        let top = "; the keys are .pods, .revision";
        for (template, expected) in [
            ("{.items[*].metadata.name}", Some(format!("no .items here{top}"))),
            ("x {['items'][0]}", Some(format!("no .items here{top}"))),
            (
                "{range .items[*]}{.name}{end}",
                Some(format!("no .items here{top}")),
            ),
            (
                "{range .pods[*]}{.metadata.name}{end}",
                Some("no .metadata here; the keys are .labels, .name".to_owned()),
            ),
            ("{.pods[*].name} {.revision}{\"\\n\"}", None),
            ("{.pods[0].labels.app}", None),
            ("{$}{..name}{.*}{$[\"pods\"][0]}", None),
        ] {
            assert_eq!(missing(template), expected, "{template}");
        }
    }

    #[test]
    fn a_malformed_template_is_refused() {
        for template in [
            "{.pods",
            "{.pods[}",
            "{range .pods}x",
            "{end}",
            "{\"x}",
            ".pods[?]",
        ] {
            assert!(rendered(template).is_err(), "{template}");
        }
    }
}
