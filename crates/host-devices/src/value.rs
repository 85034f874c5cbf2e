//! Values of rules, with errors that say what to write.

use std::fmt;

use glob::{MatchOptions, Pattern};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Implements the serde traits with `Display` and `TryFrom<&str>`.
macro_rules! as_text {
    ($name:ident, $expected:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;

                impl de::Visitor<'_> for Text {
                    type Value = $name;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        $name::try_from(text).map_err(E::custom)
                    }
                }

                // Not `any`: a USB id such as 6001 is a text.
                deserializer.deserialize_str(Text)
            }
        }
    };
}

/// A pattern with `*`, `?` and `[...]`; none of them matches a slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(Pattern);

impl Glob {
    /// Returns `true` if the whole text matches.
    pub fn matches(&self, text: &str) -> bool {
        let options = MatchOptions {
            require_literal_separator: true,
            ..MatchOptions::default()
        };
        self.0.matches_with(text, options)
    }

    /// Returns the pattern.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl TryFrom<&str> for Glob {
    type Error = String;

    fn try_from(text: &str) -> Result<Self, String> {
        Pattern::new(text).map(Self).map_err(|error| {
            format!(
                "{text:?} is not a pattern of *, ? and [...]: {} at character {}",
                error.msg,
                error.pos + 1
            )
        })
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

as_text!(Glob, "a pattern, such as /dev/ttyUSB*");

/// A vendor or product id: up to 4 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HexId(pub u16);

impl TryFrom<&str> for HexId {
    type Error = String;

    fn try_from(text: &str) -> Result<Self, String> {
        let digits = text.trim().trim_start_matches("0x");
        let is_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u16::from_str_radix(digits, 16).ok().filter(|_| is_hex);
        number
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not an id of up to 4 hexadecimal digits, such as 10c4"))
    }
}

impl fmt::Display for HexId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

as_text!(HexId, "up to 4 hexadecimal digits, such as 10c4");

/// Access of a container to the nodes: letters of `rwm`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permissions(String);

impl Default for Permissions {
    fn default() -> Self {
        Self("rw".into())
    }
}

impl TryFrom<&str> for Permissions {
    type Error = String;

    fn try_from(text: &str) -> Result<Self, String> {
        let is_once = |letter: char| "rwm".contains(letter) && text.matches(letter).count() == 1;
        match !text.is_empty() && text.chars().all(is_once) {
            true => Ok(Self(text.into())),
            false => Err(format!(
                "{text:?}: write r (read), w (write) and m (mknod), such as rw"
            )),
        }
    }
}

impl fmt::Display for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

as_text!(Permissions, "letters of rwm, such as rw");

/// The source of a device's id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum IdSource {
    /// The serial number if the device has one, otherwise the port.
    #[default]
    Serial,
    /// The place where the device is plugged in.
    Port,
    /// A property of udev's database.
    Property(String),
}

impl TryFrom<&str> for IdSource {
    type Error = String;

    fn try_from(text: &str) -> Result<Self, String> {
        let is_property = text.starts_with(|first: char| first.is_ascii_uppercase())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
        match text {
            "serial" => Ok(Self::Serial),
            "port" => Ok(Self::Port),
            _ if is_property => Ok(Self::Property(text.into())),
            _ => Err(format!(
                "{text:?}: write serial, port, or the name of a udev property such as ID_SERIAL"
            )),
        }
    }
}

impl fmt::Display for IdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Serial => "serial",
            Self::Port => "port",
            Self::Property(name) => name,
        })
    }
}

as_text!(IdSource, "serial, port or a udev property");
