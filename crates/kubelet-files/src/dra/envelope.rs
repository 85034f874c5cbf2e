//! The format of 1.31 and later: a document in a string, and the CRC-32 of that string.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::scan::{Scan, scan};
use super::{Claim, Device, Driver};
use crate::file::{Checksum, File, ReadError, Salvaged, document};
use crate::format::Format;
use crate::go_json::decode::{self, Shape};
use crate::go_json::{Kind, Reader, SyntaxError, unescape, write as json};

const CHECKPOINT: Shape = Shape::new("state.Checkpoint", &["Data", "Checksum"]);
const DATA: Shape = Shape::promoted(
    "state.CheckpointData",
    &["kind", "apiVersion", "ClaimInfoStateList"],
    &["TypeMeta.kind", "TypeMeta.apiVersion", "ClaimInfoStateList"],
);
const CLAIM: Shape = Shape::new(
    "state.ClaimInfoState",
    &["ClaimUID", "ClaimName", "Namespace", "PodUIDs", "DriverState"],
);
const DRIVER: Shape = Shape::new("state.DriverState", &["Devices", "skipNodeOperations"]);
const DEVICE: Shape = Shape::new(
    "state.Device",
    &[
        "PoolName",
        "DeviceName",
        "ShareID",
        "RequestNames",
        "CDIDeviceIDs",
    ],
);

/// The first key of each claim.
const CLAIM_UID: &[u8] = b"ClaimUID";

/// `kind` of the inner document. Kubelets write it and ignore it when they read.
pub const KIND: &str = "DRACheckpoint";
/// `apiVersion` of the inner document. Kubelets write it and ignore it when they read.
pub const API_VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// The content of an envelope.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checkpoint {
    /// As in the file.
    pub kind: String,
    /// As in the file.
    pub api_version: String,
    /// The claims, in the order of the file.
    pub claims: Option<Vec<Claim>>,
    /// `true` if the file has a list of claims. Without one, a kubelet reads the file as an empty state.
    pub has_claim_list: bool,
}

impl Checkpoint {
    /// Returns a checkpoint of today's version.
    pub fn new(claims: Option<Vec<Claim>>) -> Self {
        let (kind, api_version) = (KIND.to_owned(), API_VERSION.to_owned());
        Self {
            kind,
            api_version,
            claims,
            has_claim_list: true,
        }
    }
}

/// Reads a `dra_manager_state` of 1.31 or later.
pub fn read(bytes: &[u8]) -> Result<File<Checkpoint>, ReadError> {
    let mut outer = Outer::new();
    let mut warnings = document(bytes, |reader| outer.decode(reader))?;
    let checksum = outer.checksum();
    if !checksum.is_valid() && !outer.has_data {
        // Kubelets do not decode an absent document.
        return Ok(File::new(
            Format::DraEnvelopeV1,
            Some(checksum),
            warnings,
            Checkpoint::default(),
        ));
    }
    let mut draft = Checkpoint::default();
    let inner = document(outer.data.as_bytes(), |reader| draft.decode(reader));
    warnings.append(inner.map_err(|error| error.inside("Data"))?, "Data");
    draft.has_claim_list &= outer.has_data;
    Ok(File::new(Format::DraEnvelopeV1, Some(checksum), warnings, draft))
}

/// Reads a damaged file as far as possible. Of a damaged claim, it keeps the devices.
pub(crate) fn salvage(bytes: &[u8]) -> Salvaged<(Checkpoint, Checksum)> {
    let error = match read(bytes) {
        Ok(file) => {
            let is_empty = !file.unverified().has_claim_list;
            if let (Some(checksum), Ok(checkpoint)) = (file.checksum, file.verified())
                // Without `Data` and `Checksum`, the file is read as an empty one.
                && !(is_empty && bytes.windows(CLAIM_UID.len()).any(|text| text == CLAIM_UID))
            {
                return Salvaged::sound((checkpoint, checksum));
            }
            None
        }
        Err(error) => Some(error),
    };
    let mut outer = Outer::new();
    let ended = document(bytes, |reader| outer.decode(reader));
    let is_broken = matches!(ended, Err(ReadError::Syntax { .. }));
    if is_broken || !outer.has_data {
        // The string with the claims cannot be found, so the whole file is scanned. Its outer keys do not look like claims.
        outer.data = unescape(bytes).0;
    }
    let (data, checksum) = (&outer.data, outer.checksum());
    let length = if is_broken { bytes.len() } else { data.len() };
    let Scan { claims, dropped, .. } = scan(data.as_bytes());
    let has_claim_list = !claims.is_empty() || data.contains("\"ClaimInfoStateList\"");
    let checkpoint = Checkpoint {
        has_claim_list,
        ..Checkpoint::new(Some(claims))
    };
    let content = (checkpoint, checksum);
    match error {
        Some(error) => Salvaged::scanned(content, error, length, dropped),
        None => Salvaged {
            dropped,
            ..Salvaged::sound(content)
        },
    }
}

struct Outer {
    data: String,
    stored: u64,
    has_data: bool,
}

impl Outer {
    /// Kubelets decode onto a valid empty checkpoint, so `{}` and `null` are read as one.
    fn new() -> Self {
        let data = inner_document(None::<std::iter::Empty<_>>);
        Self {
            stored: u64::from(crc32fast::hash(data.as_bytes())),
            data,
            has_data: false,
        }
    }

    fn checksum(&self) -> Checksum {
        Checksum {
            stored: self.stored,
            computed: u64::from(crc32fast::hash(self.data.as_bytes())),
        }
    }

    fn decode(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        decode::object(reader, &CHECKPOINT, |field, reader| match field {
            0 => {
                self.has_data |= reader.kind()? == Kind::String;
                decode::text(reader, &mut self.data, "string")
            }
            _ => decode::unsigned(reader, &mut self.stored, u64::from(u32::MAX), "uint32"),
        })
    }
}

impl Checkpoint {
    fn decode(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        decode::object(reader, &DATA, |field, reader| match field {
            0 => decode::text(reader, &mut self.kind, "string"),
            1 => decode::text(reader, &mut self.api_version, "string"),
            _ => {
                self.has_claim_list = true;
                decode::list(reader, &mut self.claims, "state.ClaimInfoStateList", decode_claim)
            }
        })
    }
}

pub(super) fn decode_claim(reader: &mut Reader<'_>, claim: &mut Claim) -> Result<(), SyntaxError> {
    decode::object(reader, &CLAIM, |field, reader| match field {
        0 => decode::text(reader, &mut claim.uid, "types.UID"),
        1 => decode::text(reader, &mut claim.name, "string"),
        2 => decode::text(reader, &mut claim.namespace, "string"),
        3 => decode_pods(reader, &mut claim.pods),
        _ => decode::map(
            reader,
            &mut claim.drivers,
            "map[string]state.DriverState",
            decode_driver,
        ),
    })
}

/// Decodes a Go `sets.Set[string]`: an object with empty structs as values.
pub(super) fn decode_pods(
    reader: &mut Reader<'_>,
    pods: &mut Option<BTreeSet<String>>,
) -> Result<(), SyntaxError> {
    let mut map = pods
        .take()
        .map(|pods| pods.into_iter().map(|pod| (pod, ())).collect());
    let nothing = Shape::new("sets.Empty", &[]);
    let ended = decode::map(reader, &mut map, "sets.Set[string]", |reader, ()| {
        decode::object(reader, &nothing, |_, reader| reader.skip())
    });
    *pods = map.map(|map| map.into_keys().collect());
    ended
}

fn decode_driver(reader: &mut Reader<'_>, driver: &mut Driver) -> Result<(), SyntaxError> {
    decode::object(reader, &DRIVER, |field, reader| match field {
        0 => decode::list(reader, &mut driver.devices, "[]state.Device", decode_device),
        _ => {
            let operations = &mut driver.skip_node_operations;
            decode::list(
                reader,
                operations,
                "[]v1.SkipNodeOperation",
                |reader, operation| decode::text(reader, operation, "v1.SkipNodeOperation"),
            )
        }
    })
}

fn decode_device(reader: &mut Reader<'_>, device: &mut Device) -> Result<(), SyntaxError> {
    let strings = |reader: &mut Reader<'_>, list: &mut Option<Vec<String>>| {
        decode::list(reader, list, "[]string", |reader, item| {
            decode::text(reader, item, "string")
        })
    };
    decode::object(reader, &DEVICE, |field, reader| match field {
        0 => decode::text(reader, &mut device.pool, "string"),
        1 => decode::text(reader, &mut device.name, "string"),
        2 => decode::optional_text(reader, &mut device.share_id, "types.UID"),
        3 => strings(reader, &mut device.requests),
        _ => strings(reader, &mut device.cdi_devices),
    })
}

/// Returns the file that a kubelet of today writes for these claims in this order. `kind` and `apiVersion` are
/// always [`KIND`] and [`API_VERSION`], as in a kubelet.
pub fn write(claims: Option<&[Claim]>) -> String {
    write_all(claims.map(|claims| claims.iter().map(Cow::Borrowed)))
}

/// Writes claims that an iterator produces one at a time.
pub(crate) fn write_all<'a>(claims: Option<impl Iterator<Item = Cow<'a, Claim>>>) -> String {
    let mut data = inner_document(claims);
    data.shrink_to_fit();
    // Each quote is escaped: about one character in eight.
    let mut out = String::with_capacity(data.len() + data.len() / 4 + 64);
    out.push_str("{\"Data\":");
    json::string(&mut out, &data);
    out.push_str(",\"Checksum\":");
    out.push_str(&crc32fast::hash(data.as_bytes()).to_string());
    out.push('}');
    out
}

fn inner_document<'a>(claims: Option<impl Iterator<Item = Cow<'a, Claim>>>) -> String {
    let mut out = format!("{{\"kind\":\"{KIND}\",\"apiVersion\":\"{API_VERSION}\",\"ClaimInfoStateList\":");
    json::items(&mut out, claims, |out, claim| write_claim(out, &claim));
    out.push('}');
    out
}

fn write_claim(out: &mut String, claim: &Claim) {
    for (key, value) in [
        ("{\"ClaimUID\":", &claim.uid),
        (",\"ClaimName\":", &claim.name),
        (",\"Namespace\":", &claim.namespace),
    ] {
        out.push_str(key);
        json::string(out, value);
    }
    out.push_str(",\"PodUIDs\":");
    let pods = claim.pods.as_ref().map(|pods| pods.iter().map(|pod| (pod, ())));
    json::object(out, pods, |out, ()| out.push_str("{}"));
    out.push_str(",\"DriverState\":");
    json::object(
        out,
        claim.drivers.as_ref().map(|drivers| drivers.iter()),
        write_driver,
    );
    out.push('}');
}

fn write_driver(out: &mut String, driver: &Driver) {
    out.push_str("{\"Devices\":");
    json::list(out, driver.devices.as_deref(), write_device);
    if let Some(operations @ [_, ..]) = driver.skip_node_operations.as_deref() {
        out.push_str(",\"skipNodeOperations\":");
        json::strings(out, Some(operations));
    }
    out.push('}');
}

fn write_device(out: &mut String, device: &Device) {
    out.push_str("{\"PoolName\":");
    json::string(out, &device.pool);
    out.push_str(",\"DeviceName\":");
    json::string(out, &device.name);
    out.push_str(",\"ShareID\":");
    match &device.share_id {
        None => out.push_str("null"),
        Some(share_id) => json::string(out, share_id),
    }
    out.push_str(",\"RequestNames\":");
    json::strings(out, device.requests.as_deref());
    out.push_str(",\"CDIDeviceIDs\":");
    json::strings(out, device.cdi_devices.as_deref());
    out.push('}');
}
