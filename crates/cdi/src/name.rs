//! Qualified device names, `vendor/class=name`, and the rules for their parts.
//!
//! | part   | first character | inner characters             | last character  |
//! |--------|-----------------|------------------------------|-----------------|
//! | vendor | letter          | letter, digit, `_`, `-`, `.` | letter or digit |
//! | class  | letter          | letter, digit, `_`, `-`, `.` | letter or digit |
//! | name   | letter or digit | the same, and `:`            | letter or digit |
//!
//! Letters and digits are ASCII. The vendor ends at the first `/` before the first `=`. A part of one
//! character is valid, as in CDI 1.1.1. But a vendor or class of one character crashes container runtimes
//! built with an older CDI library, so [`Spec::write`](crate::Spec::write) refuses to write one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// One part of a qualified name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The part before the `/`.
    Vendor,
    /// The part between the `/` and the `=`.
    Class,
    /// The part after the `=`.
    Name,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vendor => "vendor",
            Self::Class => "class",
            Self::Name => "device name",
        })
    }
}

/// Why a text is not a qualified device name, or not a part of one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// A host path, which names a device node and not a CDI device.
    #[error("{path:?} is a path, not a device name like \"vendor.com/class=name\"")]
    Path {
        /// The text as given.
        path: String,
    },
    /// A part or its separator is missing.
    #[error("{text:?} does not have a {part}, a device name is like \"vendor.com/class=name\"")]
    Missing {
        /// The text as given.
        text: String,
        /// The first part that is missing.
        part: Part,
    },
    /// The part must begin with a letter, or for a device name with a letter or a digit.
    #[error("{part} {value:?} begins with {found:?}, it must begin with a {}", first_rule(*.part))]
    First {
        /// The part.
        part: Part,
        /// The part's text.
        value: String,
        /// Its first character.
        found: char,
    },
    /// A character inside the part is not allowed there.
    #[error("{part} {value:?} contains {found:?}, it may contain only letters, digits and {}", inner_rule(*.part))]
    Inner {
        /// The part.
        part: Part,
        /// The part's text.
        value: String,
        /// The first such character.
        found: char,
    },
    /// The part must end with a letter or a digit.
    #[error("{part} {value:?} ends with {found:?}, it must end with a letter or digit")]
    Last {
        /// The part.
        part: Part,
        /// The part's text.
        value: String,
        /// Its last character.
        found: char,
    },
}

fn first_rule(part: Part) -> &'static str {
    match part {
        Part::Vendor | Part::Class => "letter",
        Part::Name => "letter or digit",
    }
}

fn inner_rule(part: Part) -> &'static str {
    match part {
        Part::Vendor | Part::Class => "_ - .",
        Part::Name => "_ - . :",
    }
}

/// Checks one part against its rules. `text` is shown in an error about an empty part.
pub(crate) fn check(part: Part, value: &str, text: &str) -> Result<(), InvalidName> {
    let mut chars = value.chars();
    let Some(first) = chars.next() else {
        return Err(InvalidName::Missing {
            text: text.to_owned(),
            part,
        });
    };
    let starts_well = match part {
        Part::Vendor | Part::Class => first.is_ascii_alphabetic(),
        Part::Name => first.is_ascii_alphanumeric(),
    };
    if !starts_well {
        return Err(InvalidName::First {
            part,
            value: value.to_owned(),
            found: first,
        });
    }
    let Some(last) = chars.next_back() else {
        return Ok(());
    };
    let allowed = |c: &char| {
        c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.') || (*c == ':' && part == Part::Name)
    };
    if let Some(found) = chars.find(|c| !allowed(c)) {
        return Err(InvalidName::Inner {
            part,
            value: value.to_owned(),
            found,
        });
    }
    if !last.is_ascii_alphanumeric() {
        return Err(InvalidName::Last {
            part,
            value: value.to_owned(),
            found: last,
        });
    }
    Ok(())
}

/// Splits a spec's `kind` into vendor and class, and checks both.
pub(crate) fn split_kind(kind: &str) -> Result<(&str, &str), InvalidName> {
    let Some((vendor, class)) = kind.split_once('/') else {
        return Err(InvalidName::Missing {
            text: kind.to_owned(),
            part: Part::Class,
        });
    };
    check(Part::Vendor, vendor, kind)?;
    check(Part::Class, class, kind)?;
    Ok((vendor, class))
}

/// A valid device name, `vendor/class=name`.
///
/// It is ordered and serialised as its text.
///
/// ```
/// use devlet_cdi::QualifiedName;
///
/// let name: QualifiedName = "vendor.com/gpu=0".parse()?;
/// assert_eq!((name.vendor(), name.class(), name.name()), ("vendor.com", "gpu", "0"));
/// assert_eq!(name.kind(), "vendor.com/gpu");
/// # Ok::<(), devlet_cdi::InvalidName>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QualifiedName {
    text: String,
    slash: usize,
    equals: usize,
}

impl QualifiedName {
    /// Joins three parts. Each must be valid by itself.
    pub fn new(vendor: &str, class: &str, name: &str) -> Result<Self, InvalidName> {
        let text = format!("{vendor}/{class}={name}");
        check(Part::Vendor, vendor, &text)?;
        check(Part::Class, class, &text)?;
        check(Part::Name, name, &text)?;
        Ok(Self {
            slash: vendor.len(),
            equals: vendor.len() + 1 + class.len(),
            text,
        })
    }

    /// Returns the part before the `/`.
    pub fn vendor(&self) -> &str {
        &self.text[..self.slash]
    }

    /// Returns the part between the `/` and the `=`.
    pub fn class(&self) -> &str {
        &self.text[self.slash + 1..self.equals]
    }

    /// Returns the part after the `=`.
    pub fn name(&self) -> &str {
        &self.text[self.equals + 1..]
    }

    /// Returns vendor and class as in a spec file, `vendor/class`.
    pub fn kind(&self) -> &str {
        &self.text[..self.equals]
    }

    /// Returns the whole name.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for QualifiedName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let missing = |part| InvalidName::Missing {
            text: text.to_owned(),
            part,
        };
        if text.starts_with('/') {
            return Err(InvalidName::Path {
                path: text.to_owned(),
            });
        }
        let Some((kind, name)) = text.split_once('=') else {
            let part = if text.contains('/') {
                Part::Name
            } else {
                Part::Vendor
            };
            return Err(missing(part));
        };
        let Some((vendor, class)) = kind.split_once('/') else {
            return Err(missing(if kind.is_empty() {
                Part::Vendor
            } else {
                Part::Class
            }));
        };
        Self::new(vendor, class, name)
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

impl fmt::Debug for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl AsRef<str> for QualifiedName {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl Serialize for QualifiedName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for QualifiedName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
