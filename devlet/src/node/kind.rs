//! The kinds of objects on the command line: `pods`, `po` or `pod/NAME`.

use std::ffi::OsStr;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command, ValueEnum};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// Resources that plugins offer (res)
    #[value(alias = "resource", alias = "res")]
    Resources,
    /// Devices, and the pods that hold them (dev)
    #[value(alias = "device", alias = "dev")]
    Devices,
    /// Device plugins (pl)
    #[value(alias = "plugin", alias = "pl")]
    Plugins,
    /// Admitted pods (po)
    #[value(alias = "pod", alias = "po")]
    Pods,
    /// DRA drivers (dr)
    #[value(alias = "driver", alias = "dr")]
    Drivers,
    /// ResourceClaims, and the progress of their drivers (cl)
    #[value(
        alias = "claim",
        alias = "cl",
        alias = "resourceclaim",
        alias = "resourceclaims"
    )]
    Claims,
    /// ResourceSlices of this node at the API server (sl)
    #[value(
        alias = "slice",
        alias = "sl",
        alias = "resourceslice",
        alias = "resourceslices"
    )]
    Slices,
}

impl Kind {
    /// `pod`
    pub(super) fn one(self) -> &'static str {
        match self {
            Self::Resources => "resource",
            Self::Devices => "device",
            Self::Plugins => "plugin",
            Self::Pods => "pod",
            Self::Drivers => "driver",
            Self::Claims => "claim",
            Self::Slices => "slice",
        }
    }

    /// `pods`
    pub(super) fn many(self) -> &'static str {
        match self {
            Self::Resources => "resources",
            Self::Devices => "devices",
            Self::Plugins => "plugins",
            Self::Pods => "pods",
            Self::Drivers => "drivers",
            Self::Claims => "claims",
            Self::Slices => "slices",
        }
    }

    /// Returns `true` for kinds with namespaces.
    pub(super) fn has_namespace(self) -> bool {
        matches!(self, Self::Pods | Self::Claims)
    }

    /// Returns the value parser of arguments that name one object of this kind.
    pub(super) fn name_parser(self) -> impl Fn(&str) -> Result<String, String> + Clone {
        move |text| self.check_name(text).map(|()| text.to_owned())
    }

    /// Refuses a text that cannot be a name of this kind on any node.
    fn check_name(self, text: &str) -> Result<(), String> {
        let name = name(text)?;
        let is_name = match self.has_namespace() {
            true => !name.starts_with('/') && !name.ends_with('/') && name.strip_prefix("uid:") != Some(""),
            false => true,
        };
        if is_name {
            return Ok(());
        }
        let forms = match self {
            Self::Pods | Self::Claims => "NAME, NAMESPACE/NAME or a UID",
            Self::Devices => "ID or RESOURCE/ID",
            Self::Resources | Self::Plugins | Self::Drivers | Self::Slices => "NAME",
        };
        Err(format!(
            "{name:?} is not the name of a {}: write {forms}",
            self.one()
        ))
    }

    /// Refuses texts that cannot be names of this kind.
    pub(super) fn check_names(self, names: &[String]) -> anyhow::Result<()> {
        let checked = names.iter().try_for_each(|name| self.check_name(name));
        checked.map_err(anyhow::Error::msg)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::from_str(text, false).ok()
    }
}

/// Parses a name. An empty name is refused: devlet would treat it as all objects of a kind, and imported pods lack a
/// name. An unset shell variable must not select them.
pub(super) fn name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("the name is empty".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

/// A kind, or `KIND/NAME`.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) kind: Kind,
    pub(super) name: Option<String>,
}

impl Target {
    /// Returns the kind and the names of `KIND NAME...` or `KIND/NAME...`.
    pub(super) fn names(self, others: Vec<String>) -> anyhow::Result<(Kind, Vec<String>)> {
        let Some(first) = self.name else {
            self.kind.check_names(&others)?;
            return Ok((self.kind, others));
        };
        let mut names = vec![first];
        for other in others {
            let (kind, name) = other.split_once('/').unwrap_or((&other, ""));
            match Kind::parse(kind) {
                Some(kind) if kind == self.kind && !name.is_empty() => names.push(name.to_owned()),
                Some(kind) if !name.is_empty() => anyhow::bail!(
                    "{} and {} in one command: name objects of one kind",
                    self.kind.many(),
                    kind.many()
                ),
                _ => anyhow::bail!("{other}: after {0}/NAME, write {0}/NAME again", self.kind.one()),
            }
        }
        self.kind.check_names(&names)?;
        Ok((self.kind, names))
    }
}

/// Parses a [`Target`].
#[derive(Debug, Clone, Copy)]
pub(super) struct TargetParser;

impl TypedValueParser for TargetParser {
    type Value = Target;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<Target, clap::Error> {
        let text = value
            .to_str()
            .ok_or_else(|| clap::Error::new(ErrorKind::InvalidUtf8).with_cmd(command))?;
        let (kind, name) = match text.split_once('/') {
            Some((kind, name)) => (kind, Some(name)),
            None => (text, None),
        };
        let kind = EnumValueParser::<Kind>::new().parse_ref(command, arg, OsStr::new(kind))?;
        let Some(name) = name else {
            return Ok(Target { kind, name: None });
        };
        let name = kind.name_parser().parse_ref(command, arg, OsStr::new(name))?;
        Ok(Target {
            kind,
            name: Some(name),
        })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = Kind::value_variants()
            .iter()
            .filter_map(ValueEnum::to_possible_value);
        Some(Box::new(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        TargetParser
            .parse_ref(&Command::new("get"), None, OsStr::new(text))
            .unwrap()
    }

    #[test]
    fn kinds_have_short_names_and_names_of_their_own() {
        for text in ["pods", "pod", "po"] {
            let target = target(text);
            assert_eq!((target.kind, target.name), (Kind::Pods, None), "{text}");
        }
        let (kind, names) = target("dev/acme.com/gpu/0")
            .names(vec!["device/acme.com/gpu/1".into()])
            .unwrap();
        assert_eq!(kind, Kind::Devices);
        assert_eq!(names, ["acme.com/gpu/0", "acme.com/gpu/1"]);
        assert_eq!(target("pods").names(vec!["a/b".into()]).unwrap().1, ["a/b"]);
    }

    #[test]
    fn kinds_are_not_mixed() {
        for wrong in ["claim/gpu", "two", "pod/"] {
            assert!(target("pod/one").names(vec![wrong.into()]).is_err(), "{wrong}");
        }
    }
}
