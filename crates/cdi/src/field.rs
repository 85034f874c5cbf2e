//! Deserializers for single fields of a spec file.
//!
//! Derived deserializers would be close, but runtimes read specs with go-yaml into Go types. go-yaml has its own
//! rules for numbers, booleans and lists. `null` is the same as an absent value, even in a list. `08` is a number
//! and `'8'` is not. `yes` is a boolean and `'true'` is not. These deserializers follow it, except that a number
//! with a fraction is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

pub(crate) fn optional_items<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<Vec<T>>, D::Error> {
    let items = Option::<Vec<Option<T>>>::deserialize(from)?;
    Ok(items.map(|items| items.into_iter().flatten().collect()))
}

pub(crate) fn items<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(optional_items(from)?.unwrap_or_default())
}

/// An entry of a list that is invalid without some of its fields.
pub(crate) trait Entry {
    /// Returns the first required field that is empty.
    fn missing(&self) -> Option<&'static str>;
}

/// Reads a list, and stops at the first entry without a required field. Such an entry is not valid, and needs much
/// more memory than the `{}` that it may be in the file.
pub(crate) fn entries<'de, D: Deserializer<'de>, T: Deserialize<'de> + Entry>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_option(EntriesVisitor(PhantomData))
}

struct EntriesVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Entry> Visitor<'de> for EntriesVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_none<E: de::Error>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<Vec<T>, D::Error> {
        from.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut entries: Vec<T> = Vec::new();
        while let Some(entry) = list.next_element::<T>()? {
            if let Some(field) = entry.missing() {
                let number = entries.len() + 1;
                return Err(de::Error::custom(format_args!(
                    "entry {number} of the list lacks {field}"
                )));
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

pub(crate) fn integers<'de, D: Deserializer<'de>, T: TryFrom<i128>>(from: D) -> Result<Vec<T>, D::Error> {
    items(from)?.into_iter().map(narrow).collect()
}

pub(crate) fn optional_integer<'de, D: Deserializer<'de>, T: TryFrom<i128>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    Option::deserialize(from)?.map(narrow).transpose()
}

pub(crate) fn integer<'de, D: Deserializer<'de>, T: TryFrom<i128> + Default>(from: D) -> Result<T, D::Error> {
    Ok(optional_integer(from)?.unwrap_or_default())
}

pub(crate) fn boolean<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    Ok(Option::deserialize(from)?.is_some_and(|Boolean(on)| on))
}

fn narrow<T: TryFrom<i128>, E: de::Error>(Integer(number): Integer) -> Result<T, E> {
    T::try_from(number).map_err(|_| E::custom(format_args!("{number} is out of range")))
}

struct Integer(i128);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(IntegerVisitor)
    }
}

struct IntegerVisitor;

impl Visitor<'_> for IntegerVisitor {
    type Value = Integer;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Integer, E> {
        Ok(Integer(number.into()))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Integer, E> {
        Ok(Integer(number.into()))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Integer, E> {
        // Beyond 2^53 a float does not identify one integer.
        if number.fract() == 0.0 && number.abs() <= (1u64 << 53) as f64 {
            Ok(Integer(number as i128))
        } else {
            Err(E::invalid_value(de::Unexpected::Float(number), &self))
        }
    }
}

struct Boolean(bool);

impl<'de> Deserialize<'de> for Boolean {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(BooleanVisitor)
    }
}

struct BooleanVisitor;

impl Visitor<'_> for BooleanVisitor {
    type Value = Boolean;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true or false")
    }

    fn visit_bool<E: de::Error>(self, on: bool) -> Result<Boolean, E> {
        Ok(Boolean(on))
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<Boolean, E> {
        match word {
            "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Ok(Boolean(true)),
            "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Ok(Boolean(false)),
            _ => Err(E::invalid_value(de::Unexpected::Str(word), &self)),
        }
    }
}

/// Reads annotations, and rejects a repeated key.
pub(crate) fn texts_by_key<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    from.deserialize_option(TextsVisitor)
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of texts")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_none<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some((key, text)) = entries.next_entry::<String, Option<String>>()? {
            if texts.contains_key(&key) {
                return Err(de::Error::custom(format_args!("annotation {key:?} is repeated")));
            }
            texts.insert(key, text.unwrap_or_default());
        }
        Ok(texts)
    }
}
