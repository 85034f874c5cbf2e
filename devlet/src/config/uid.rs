//! Users in a configuration file, by numeric user ID.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};

/// A numeric user ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(super) struct Uid(pub(super) u32);

impl<'de> Deserialize<'de> for Uid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not `any`: the error for a list would lack its position.
        deserializer.deserialize_str(Number)
    }
}

struct Number;

impl de::Visitor<'_> for Number {
    type Value = Uid;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the number of a user, such as 1001")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Uid, E> {
        text.parse().map(Uid).map_err(|_| {
            let is_name = text.starts_with(|first: char| first.is_alphabetic() || first == '_');
            let hint = if is_name {
                format!("; `id -u {text}` prints it")
            } else {
                String::new()
            };
            E::custom(format!("{text:?} is not the number of a user{hint}"))
        })
    }
}
