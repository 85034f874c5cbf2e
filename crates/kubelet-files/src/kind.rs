//! Telling the kubelet's files apart.
//!
//! No format names itself at the top, so the keys there decide, and for two of them the kind of value behind
//! the key. A file that breaks off is judged by what comes before the break.

use crate::file::{ReadError, UnknownKind};
use crate::go_json::decode::folds_to;
use crate::go_json::{Kind, Reader, SyntaxError};

/// Which of the kubelet's files a name stands for.
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
    /// The role of a file with this name, if it is one of the kubelet's own names.
    pub fn of_file_name(name: &str) -> Option<Self> {
        match name {
            "kubelet_internal_checkpoint" => Some(Self::DevicePlugin),
            "dra_manager_state" => Some(Self::DraManager),
            "dra_health_state" => Some(Self::DraHealth),
            _ => None,
        }
    }
}

/// Which reader a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    DevicePluginV0,
    DevicePlugin,
    DraFlat,
    DraEnvelope,
    DraHealth,
}

/// What the top of a document shows.
#[derive(Debug, Default)]
struct Signs {
    data: Option<Kind>,
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

/// What a kubelet assumes for a `dra_manager_state` without `Data`.
const CHECKSUM_OF_NO_CLAIMS: &str = "4010664294";

/// The kind of a document. `role` decides where the content does not.
pub(crate) fn of(bytes: &[u8], role: Option<Role>) -> Result<FileKind, ReadError> {
    let content = by_content(bytes);
    let says_nothing = bytes.iter().all(|byte| b"{} \t\r\n".contains(byte))
        || matches!(content, Err(ReadError::UnknownKind(_)));
    match role {
        Some(role) if says_nothing => Ok(match role {
            Role::DevicePlugin => FileKind::DevicePlugin,
            Role::DraManager => FileKind::DraEnvelope,
            Role::DraHealth => FileKind::DraHealth,
        }),
        _ => content,
    }
}

fn by_content(bytes: &[u8]) -> Result<FileKind, ReadError> {
    let mut signs = Signs::default();
    let mut reader = Reader::new(bytes);
    let ended = signs.gather(&mut reader);
    let unknown = match signs {
        Signs {
            data: Some(Kind::String),
            ..
        } => return Ok(FileKind::DraEnvelope),
        Signs {
            data: None | Some(Kind::Null),
            checksum_of_no_claims: true,
            ..
        } => {
            return Ok(FileKind::DraEnvelope);
        }
        Signs { data: Some(_), .. } => return Ok(FileKind::DevicePlugin),
        Signs {
            pod_device_entries: true,
            ..
        } => return Ok(FileKind::DevicePluginV0),
        Signs { version: true, .. }
        | Signs {
            entries: true,
            entries_of_claims: true,
            ..
        } => {
            return Ok(FileKind::DraFlat);
        }
        Signs {
            entries: true,
            checksum: false,
            ..
        } => return Ok(FileKind::DevicePluginV0),
        Signs {
            entries: true,
            checksum: true,
            ..
        } => return Ok(FileKind::DraFlat),
        Signs { checksum: true, .. } => return Ok(FileKind::DevicePlugin),
        Signs {
            devices_below: true, ..
        } => return Ok(FileKind::DraHealth),
        // The one file of a kubelet that is ever written as `{}`.
        Signs {
            is_object: true,
            other_keys: false,
            ..
        } if ended.is_ok() => return Ok(FileKind::DraHealth),
        Signs { is_null: true, .. } => UnknownKind::Null,
        Signs { is_object: false, .. } => UnknownKind::NotAnObject,
        Signs { .. } => UnknownKind::NoKnownKey,
    };
    match ended {
        Err(error) => Err(ReadError::syntax(bytes, error)),
        Ok(()) => Err(ReadError::UnknownKind(unknown)),
    }
}

impl Signs {
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
        if folds_to(key, "Data") {
            let kind = reader.kind()?;
            // `null` says nothing; a later key may.
            if kind != Kind::Null || self.data.is_none() {
                self.data = Some(kind);
            }
        } else if folds_to(key, "Checksum") {
            self.checksum = true;
            if reader.kind()? == Kind::Number {
                self.checksum_of_no_claims = reader.number()? == CHECKSUM_OF_NO_CLAIMS;
                return Ok(());
            }
        } else if folds_to(key, "version") {
            self.version = true;
        } else if folds_to(key, "PodDeviceEntries") || folds_to(key, "RegisteredDevices") {
            self.pod_device_entries = true;
        } else if folds_to(key, "entries") {
            self.entries = true;
            return self.first_entry(reader);
        } else if reader.kind()? == Kind::Object {
            self.other_keys = true;
            return self.driver(reader);
        } else {
            self.other_keys = true;
        }
        reader.skip()
    }

    /// Whether the entries are claims: the first one tells.
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

    /// Whether this is a driver of the health file.
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
