//! Detects which of the kubelet's files a document is.
//!
//! The formats do not name themselves at the top, so the keys there decide, and for two keys the type of their
//! value. A truncated file is classified by the part before the end.

use std::fmt;

use crate::file::{ReadError, UnknownKind};
use crate::go_json::decode::folds_to;
use crate::go_json::{Kind, Reader, SyntaxError};

/// One of the kubelet's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `device-plugins/kubelet_internal_checkpoint`
    DevicePlugin,
    /// `dra_manager_state`
    DraManager,
    /// `dra_health_state`
    DraHealth,
}

impl Role {
    /// Returns the role of a file with this name, if it is one of the kubelet's names. A suffix may follow, as in
    /// `dra_manager_state.unreadable-1` or `dra_manager_state.bak`.
    pub fn of_file_name(name: &str) -> Option<Self> {
        match name.split('.').next()? {
            "kubelet_internal_checkpoint" => Some(Self::DevicePlugin),
            "dra_manager_state" => Some(Self::DraManager),
            "dra_health_state" => Some(Self::DraHealth),
            _ => None,
        }
    }

    /// Returns the role of a damaged file according to the keys in it, or `None` if no key decides it.
    pub(crate) fn of_words(bytes: &[u8]) -> Option<Self> {
        let count = |words: &[&str]| -> usize {
            let is_word = |at: &usize| words.iter().any(|word| bytes[*at..].starts_with(word.as_bytes()));
            (0..bytes.len()).filter(is_word).count()
        };
        let devices = count(&["ContainerName\"", "ResourceName\"", "DeviceIDs\"", "AllocResp\""]);
        let claims = count(&["ClaimUID", "ClaimName", "PodUIDs", "DriverState", "CDIDevice"]);
        match devices.cmp(&claims) {
            std::cmp::Ordering::Greater => Some(Self::DevicePlugin),
            std::cmp::Ordering::Less => Some(Self::DraManager),
            std::cmp::Ordering::Equal => None,
        }
    }
}

/// The reader that a file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    DevicePluginV0,
    DevicePlugin,
    DraFlat,
    DraEnvelope,
    DraHealth,
}

impl FileKind {
    /// Returns the file that a document of this kind is.
    pub(crate) fn role(self) -> Role {
        match self {
            Self::DevicePluginV0 | Self::DevicePlugin => Role::DevicePlugin,
            Self::DraFlat | Self::DraEnvelope => Role::DraManager,
            Self::DraHealth => Role::DraHealth,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DevicePlugin => "kubelet_internal_checkpoint",
            Self::DraManager => "dra_manager_state",
            Self::DraHealth => "dra_health_state",
        })
    }
}

/// Evidence found at the top level of a document.
#[derive(Debug, Default)]
struct Signs {
    data: Option<Kind>,
    /// `Data` is the name of a driver: it contains devices.
    devices_in_data: bool,
    checksum: bool,
    checksum_of_no_claims: bool,
    version: bool,
    entries: bool,
    entries_of_claims: bool,
    pod_device_entries: bool,
    devices_below: bool,
    other_keys: bool,
    is_object: bool,
    is_null: bool,
}

/// The checksum that a kubelet assumes for a `dra_manager_state` without `Data`.
const CHECKSUM_OF_NO_CLAIMS: &str = "4010664294";

/// Returns the kind of a document. Its role decides unless the document is complete and clearly another file.
pub(crate) fn of(bytes: &[u8], role: Option<Role>) -> Result<FileKind, ReadError> {
    let mut signs = Signs::default();
    let mut reader = Reader::new(bytes);
    let ended = signs.gather(&mut reader);
    let content = signs.kind(ended.is_ok());
    match (role, content) {
        // In a broken document, one damaged byte can imitate the keys of another file.
        (Some(role), Ok(kind)) if kind.role() != role && (ended.is_err() || !signs.is_clear(kind)) => {
            Ok(role.newest())
        }
        (Some(role), Err(_)) => Ok(role.newest()),
        (_, Ok(kind)) => Ok(kind),
        (None, Err(unknown)) => match ended {
            Err(error) => Err(ReadError::syntax(bytes, error)),
            Ok(()) => Err(ReadError::UnknownKind(unknown)),
        },
    }
}

impl Role {
    fn newest(self) -> FileKind {
        match self {
            Self::DevicePlugin => FileKind::DevicePlugin,
            Self::DraManager => FileKind::DraEnvelope,
            Self::DraHealth => FileKind::DraHealth,
        }
    }
}

impl Signs {
    /// Classifies the document by its content alone.
    fn kind(&self, is_whole: bool) -> Result<FileKind, UnknownKind> {
        match self {
            Self {
                data: Some(Kind::String),
                ..
            } => Ok(FileKind::DraEnvelope),
            Self {
                data: None | Some(Kind::Null),
                checksum_of_no_claims: true,
                ..
            } => Ok(FileKind::DraEnvelope),
            Self { data: Some(_), .. } => Ok(FileKind::DevicePlugin),
            Self {
                pod_device_entries: true,
                ..
            } => Ok(FileKind::DevicePluginV0),
            Self { version: true, .. }
            | Self {
                entries: true,
                entries_of_claims: true,
                ..
            } => Ok(FileKind::DraFlat),
            Self {
                entries: true,
                checksum: false,
                ..
            } => Ok(FileKind::DevicePluginV0),
            Self {
                entries: true,
                checksum: true,
                ..
            } => Ok(FileKind::DraFlat),
            Self { checksum: true, .. } => Ok(FileKind::DevicePlugin),
            Self {
                devices_below: true, ..
            } => Ok(FileKind::DraHealth),
            // The only kubelet file that is ever written as `{}`.
            Self {
                is_object: true,
                other_keys: false,
                ..
            } if is_whole => Ok(FileKind::DraHealth),
            Self { is_null: true, .. } => Err(UnknownKind::Null),
            Self { is_object: false, .. } => Err(UnknownKind::NotAnObject),
            Self { .. } => Err(UnknownKind::NoKnownKey),
        }
    }

    /// Returns `true` if the evidence is more than names that any file could have.
    fn is_clear(&self, kind: FileKind) -> bool {
        match kind {
            FileKind::DevicePluginV0 => true,
            FileKind::DevicePlugin => self.data == Some(Kind::Object) && !self.devices_in_data,
            FileKind::DraFlat => self.entries_of_claims || self.version && self.checksum,
            FileKind::DraEnvelope => self.data == Some(Kind::String),
            FileKind::DraHealth => self.devices_below,
        }
    }

    fn gather(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        let kind = reader.kind()?;
        self.is_object = kind == Kind::Object;
        self.is_null = kind == Kind::Null;
        if !self.is_object {
            reader.skip()?;
            return reader.end();
        }
        if reader.enter(b'}')? {
            loop {
                let (key, _) = reader.key()?;
                self.top_key(&key, reader)?;
                if !reader.next(b'}')? {
                    break;
                }
            }
        }
        reader.end()
    }

    fn top_key(&mut self, key: &str, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        let kind = reader.kind()?;
        // No other file has an object there: this is a driver with a misleading name.
        let may_be_driver = kind == Kind::Object;
        if folds_to(key, "Data") {
            // `null` does not decide; a later key may.
            if kind != Kind::Null || self.data.is_none() {
                self.data = Some(kind);
            }
            if may_be_driver {
                let before = std::mem::take(&mut self.devices_below);
                self.driver(reader)?;
                self.devices_in_data = std::mem::replace(&mut self.devices_below, before);
                return Ok(());
            }
        } else if folds_to(key, "PodDeviceEntries") || folds_to(key, "RegisteredDevices") {
            self.pod_device_entries = true;
        } else if may_be_driver {
            self.other_keys = true;
            return self.driver(reader);
        } else if folds_to(key, "Checksum") {
            self.checksum = true;
            if kind == Kind::Number {
                self.checksum_of_no_claims = reader.number()? == CHECKSUM_OF_NO_CLAIMS;
                return Ok(());
            }
        } else if folds_to(key, "version") {
            self.version = true;
        } else if folds_to(key, "entries") {
            self.entries = true;
            return self.first_entry(reader);
        } else {
            self.other_keys = true;
        }
        reader.skip()
    }

    /// Records whether the entries are claims, judged by the first one.
    fn first_entry(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        if reader.kind()? != Kind::Array {
            return reader.skip();
        }
        if !reader.enter(b']')? {
            return Ok(());
        }
        self.keys_of(reader, |signs, key| {
            signs.entries_of_claims |= folds_to(key, "ClaimUID");
        })?;
        while reader.next(b']')? {
            reader.skip()?;
        }
        Ok(())
    }

    /// Records whether this is a driver of the health file.
    fn driver(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        self.keys_of(reader, |signs, key| {
            signs.devices_below |= folds_to(key, "Devices");
        })
    }

    fn keys_of(
        &mut self,
        reader: &mut Reader<'_>,
        mut note: impl FnMut(&mut Self, &str),
    ) -> Result<(), SyntaxError> {
        if reader.kind()? != Kind::Object {
            return reader.skip();
        }
        if !reader.enter(b'}')? {
            return Ok(());
        }
        loop {
            let (key, _) = reader.key()?;
            note(self, &key);
            reader.skip()?;
            if !reader.next(b'}')? {
                return Ok(());
            }
        }
    }
}
