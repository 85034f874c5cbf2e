//! Locates errors in manifests.
//!
//! Manifests are parsed without positions, which is cheaper. Only an invalid one is parsed again, into a tree of nodes
//! with positions, and the field that the error is about is looked up there.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, SeqAccess};
use serde_saphyr::Spanned;

use super::{InvalidManifest, syntax};

/// A line and a column, beginning with 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The line.
    pub line: u64,
    /// The column, in characters.
    pub column: u64,
}

/// A manifest, and a position in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The name of the manifest, such as that of its file; may be empty.
    pub name: String,
    /// Its number, beginning with 1, if there are several.
    pub number: Option<usize>,
    /// The position, if it is known.
    pub position: Option<Position>,
}

impl Place {
    /// Returns a place in a file of this name.
    pub fn in_file(name: impl Into<String>, position: Option<Position>) -> Self {
        Self {
            name: name.into(),
            number: None,
            position,
        }
    }

    /// Returns `true` if nothing is known.
    pub(super) fn is_unknown(&self) -> bool {
        self.name.is_empty() && self.number.is_none() && self.position.is_none()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match (name.is_empty(), self.number, self.position) {
            (false, _, Some(Position { line, column })) => write!(f, "{name}:{line}:{column}"),
            (false, _, None) => write!(f, "{name}"),
            (true, Some(number), Some(Position { line, column })) => {
                write!(f, "manifest {number}, line {line}, column {column}")
            }
            (true, Some(number), None) => write!(f, "manifest {number}"),
            (true, None, Some(Position { line, column })) => write!(f, "line {line}, column {column}"),
            (true, None, None) => f.write_str("the manifest"),
        }
    }
}

/// Returns the position of a value in a YAML text: below these keys, and with this text if one is given.
pub fn position_of(text: &str, path: &[&str], value: Option<&str>) -> Option<Position> {
    let documents: Vec<Node> = syntax::yaml_documents(text).ok()?;
    let path = path.iter().map(|key| Step::Key((*key).to_owned()));
    let value = value.map(|value| Step::Text(value.to_owned()));
    let steps: Vec<Step> = path.chain(value).collect();
    documents.iter().find_map(|document| document.find(&steps))
}

/// The path to an object of a text: the index of the document, then of items of lists.
pub(super) type Trail = Vec<usize>;

/// Returns the position of the field that an error is about. If the field is missing, returns that of its closest parent.
pub(super) fn position(text: &str, trail: &[usize], problem: &InvalidManifest) -> Option<Position> {
    let documents: Vec<Node> = syntax::yaml_documents(text).ok()?;
    let (document, items) = trail.split_first()?;
    let object = items.iter().try_fold(documents.get(*document)?, |list, place| {
        list.get("items")?.elements().nth(*place)
    })?;
    let paths = problem.paths();
    let depth = |path: &[Step]| {
        let lengths = (0..=path.len()).rev();
        let mut found = lengths.filter_map(|length| Some((length, object.find(&path[..length])?)));
        found.next()
    };
    let found = paths.iter().filter_map(|path| depth(path));
    let deepest = found.max_by_key(|(length, _)| *length);
    Some(deepest.map_or(object.position, |(_, position)| position))
}

/// A step from a node to one within it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// The value of a key; in a list, of the first element that leads on.
    Key(String),
    /// The last element of a list with this `name`.
    Named(String),
    /// The node itself, or an element of a list, if it is this text.
    Text(String),
}

/// Returns the steps of a path such as `spec.containers`.
pub(super) fn keys(path: &str) -> Vec<Step> {
    path.split('.').map(|key| Step::Key(key.to_owned())).collect()
}

#[derive(Debug)]
struct Node {
    position: Position,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Null,
    Text(String),
    List(Vec<Node>),
    Mapping(Vec<(String, Node)>),
}

impl Node {
    fn get(&self, key: &str) -> Option<&Self> {
        match &self.content {
            Content::Mapping(entries) => entries.iter().find(|(each, _)| each == key).map(|(_, node)| node),
            _ => None,
        }
    }

    /// The elements of a list that are not null.
    fn elements(&self) -> impl DoubleEndedIterator<Item = &Self> {
        let elements = match &self.content {
            Content::List(elements) => &elements[..],
            _ => &[],
        };
        elements
            .iter()
            .filter(|element| !matches!(element.content, Content::Null))
    }

    fn is_text(&self, text: &str) -> bool {
        matches!(&self.content, Content::Text(each) if each == text)
    }

    fn find(&self, path: &[Step]) -> Option<Position> {
        let Some((step, rest)) = path.split_first() else {
            return Some(self.position);
        };
        match step {
            Step::Key(key) => match &self.content {
                Content::List(elements) => elements.iter().find_map(|element| element.find(path)),
                _ => self.get(key)?.find(rest),
            },
            Step::Named(name) => {
                let is_named = |element: &&Self| element.get("name").is_some_and(|each| each.is_text(name));
                self.elements().rfind(is_named)?.find(rest)
            }
            Step::Text(text) => match &self.content {
                Content::List(elements) => elements.iter().find_map(|element| element.find(path)),
                _ => self.is_text(text).then_some(self.position),
            },
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Content>::deserialize(deserializer)?;
        Ok(Self {
            position: Position {
                line: spanned.referenced.line(),
                column: spanned.referenced.column(),
            },
            content: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Content, E> {
                Ok(Content::Text(value.to_string()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Content, E> {
                Ok(Content::Text(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Content, E> {
                Ok(Content::Text(number.to_string()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Content, E> {
                Ok(Content::Text(number.to_string()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_unit<E>(self) -> Result<Content, E> {
                Ok(Content::Null)
            }

            fn visit_none<E>(self) -> Result<Content, E> {
                Ok(Content::Null)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element()? {
                    elements.push(element);
                }
                Ok(Content::List(elements))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut mapping: A) -> Result<Content, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = mapping.next_entry()? {
                    entries.push(entry);
                }
                Ok(Content::Mapping(entries))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}
