//! The formats of 1.27 to 1.30, with a hash over the printed value of the whole document.
//!
//! | dialect | an entry has | a handle prints as |
//! | --- | --- | --- |
//! | 1.27 | no `ResourceHandles` | |
//! | 1.28, 1.29 | `ResourceHandles` | `DriverName`, `Data` |
//! | 1.30 | `ResourceHandles` | `DriverName`, `Data`, `StructuredData` |
//!
//! A kubelet ignores keys that its dialect does not have, so the same bytes may be valid in several dialects. The
//! checksum identifies the dialect that wrote them. Kubelets since 1.31 read none of these: they refuse to start.

use std::collections::{BTreeMap, BTreeSet};

use super::envelope::decode_pods;
use super::{Claim, Device, Driver};
use crate::file::{Checksum, File, ReadError, Salvaged, document, salvage_with};
use crate::format::Format;
use crate::go_json::decode::{self, Shape};
use crate::go_json::{DroppedList, Kind, Reader, SyntaxError};
use crate::go_print::{Fnv1a32, Print};

const CHECKPOINT: Shape = Shape::new("state.DRAManagerCheckpoint", &["version", "entries", "checksum"]);
const CLAIM: Shape = Shape::new(
    "state.ClaimInfoState",
    &[
        "DriverName",
        "ClassName",
        "ClaimUID",
        "ClaimName",
        "Namespace",
        "PodUIDs",
        "CDIDevices",
        "ResourceHandles",
    ],
);
const CLAIM_1_27: Shape = Shape::new(
    "state.ClaimInfoState",
    &[
        "DriverName",
        "ClassName",
        "ClaimUID",
        "ClaimName",
        "Namespace",
        "PodUIDs",
        "CDIDevices",
    ],
);
const HANDLE: Shape = Shape::new(
    "v1alpha2.ResourceHandle",
    &["driverName", "data", "structuredData"],
);
const HANDLE_1_28: Shape = Shape::new("v1alpha2.ResourceHandle", &["driverName", "data"]);
const STRUCTURED: Shape = Shape::new(
    "v1alpha2.StructuredResourceHandle",
    &[
        "vendorClassParameters",
        "vendorClaimParameters",
        "nodeName",
        "results",
    ],
);
const RESULT: Shape = Shape::promoted(
    "v1alpha2.DriverAllocationResult",
    &["vendorRequestParameters", "namedResources"],
    &["vendorRequestParameters", "AllocationResultModel.namedResources"],
);
const NAMED: Shape = Shape::new("v1alpha2.NamedResourcesAllocationResult", &["name"]);

/// The content of a flat file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Always `v1` in files that kubelets wrote.
    pub version: String,
    /// In the order of the file. `None` is Go's `nil`.
    pub claims: Option<Vec<FlatClaim>>,
}

/// A claim in the format of kubelets 1.27 to 1.30.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlatClaim {
    /// The driver that allocated the claim.
    pub driver: String,
    /// The resource class.
    pub class: String,
    /// The ResourceClaim's UID.
    pub uid: String,
    pub name: String,
    pub namespace: String,
    /// UIDs of the pods that use it.
    pub pods: Option<BTreeSet<String>>,
    /// Data for the drivers, since 1.28.
    pub handles: Option<Vec<ResourceHandle>>,
    /// CDI devices by driver; `None` until they are prepared.
    pub cdi_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// Data from a driver's controller for its node plugin.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResourceHandle {
    /// The driver that the data is for.
    pub driver: String,
    /// Opaque data.
    pub data: String,
    /// For drivers with structured parameters, since 1.30.
    pub structured: Option<StructuredHandle>,
}

/// The allocation of structured parameters in 1.30.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StructuredHandle {
    /// JSON, as in the file.
    pub class_parameters: Option<Vec<u8>>,
    /// JSON, as in the file.
    pub claim_parameters: Option<Vec<u8>>,
    /// The node with the allocated devices.
    pub node: String,
    /// The allocated devices.
    pub results: Option<Vec<AllocationResult>>,
}

/// One allocated device of a [`StructuredHandle`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllocationResult {
    /// JSON, as in the file.
    pub request_parameters: Option<Vec<u8>>,
    pub named_resource: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    K1_27,
    K1_28,
    K1_30,
}

impl Dialect {
    /// 1.27 first: a file that is valid in two dialects is called by the older one.
    const ALL: [Self; 3] = [Self::K1_27, Self::K1_28, Self::K1_30];

    fn format(self) -> Format {
        match self {
            Self::K1_27 => Format::DraFlat1_27,
            Self::K1_28 => Format::DraFlat1_28,
            Self::K1_30 => Format::DraFlat1_30,
        }
    }
}

/// Reads a `dra_manager_state` of 1.27 to 1.30.
pub fn read(bytes: &[u8]) -> Result<File<Checkpoint>, ReadError> {
    for dialect in Dialect::ALL {
        if let Ok(file) = read_dialect(bytes, dialect)
            && file.checksum.is_some_and(Checksum::is_valid)
        {
            return Ok(file);
        }
    }
    let dialect = looks_like(bytes);
    let mut draft = Draft::new(dialect);
    let warnings = document(bytes, |reader| draft.decode(reader))?;
    let checksum = draft.checksum();
    Ok(File::new(
        dialect.format(),
        Some(checksum),
        warnings,
        draft.checkpoint,
    ))
}

/// Returns the kubelets that load the file, by the format that they write.
///
/// 1.28 to 1.30 also load a file with a checksum that is right without its handles, for any version.
pub(crate) fn loaded_by(bytes: &[u8]) -> Vec<Format> {
    let loads = |dialect: &Dialect| {
        let mut draft = Draft::new(*dialect);
        let decodes = document(bytes, |reader| draft.decode(reader)).is_ok();
        decodes
            && (draft.stored == draft.sum() || *dialect != Dialect::K1_27 && draft.stored == draft.old_sum())
    };
    Dialect::ALL
        .into_iter()
        .filter(loads)
        .map(Dialect::format)
        .collect()
}

/// Reads as the kubelets that wrote `format` did: ignores keys that `format` does not have, and computes its
/// checksum. Returns `None` if `format` is not one of the three here.
pub fn read_as(bytes: &[u8], format: Format) -> Option<Result<File<Checkpoint>, ReadError>> {
    let dialect = Dialect::ALL
        .into_iter()
        .find(|dialect| dialect.format() == format)?;
    Some(read_dialect(bytes, dialect))
}

fn read_dialect(bytes: &[u8], dialect: Dialect) -> Result<File<Checkpoint>, ReadError> {
    let mut draft = Draft::new(dialect);
    let warnings = document(bytes, |reader| draft.decode(reader))?;
    let (stored, computed) = (draft.stored, draft.sum());
    let checksum = Checksum { stored, computed };
    Ok(File::new(
        dialect.format(),
        Some(checksum),
        warnings,
        draft.checkpoint,
    ))
}

/// Reads a damaged file as far as possible, whole claims only.
pub(crate) fn salvage(bytes: &[u8]) -> Salvaged<(Checkpoint, Checksum, Format)> {
    if let Ok(file) = read(bytes)
        && let (format, Some(checksum), Ok(checkpoint)) = (file.format, file.checksum, file.verified())
    {
        return Salvaged::sound((checkpoint, checksum, format));
    }
    let dialect = looks_like(bytes);
    let mut draft = Draft::new(dialect);
    let salvaged = match document(bytes, |reader| Draft::new(dialect).decode(reader)) {
        Err(error @ ReadError::Syntax { .. }) => Salvaged::scanned((), error, bytes.len(), draft.scan(bytes)),
        _ => salvage_with(bytes, |reader| draft.decode(reader)),
    };
    salvaged.map(|()| {
        let checksum = draft.checksum();
        (draft.checkpoint, checksum, dialect.format())
    })
}

/// Returns the oldest dialect that has all the keys in the file.
fn looks_like(bytes: &[u8]) -> Dialect {
    let mut draft = Draft::new(Dialect::K1_30);
    // A broken file is classified by its whole claims.
    let salvaged = salvage_with(bytes, |reader| draft.decode(reader));
    if salvaged.broken_off.is_some() {
        draft.scan(bytes);
    }
    if draft.saw_structured {
        Dialect::K1_30
    } else if draft.saw_handles {
        Dialect::K1_28
    } else {
        Dialect::K1_27
    }
}

struct Draft {
    checkpoint: Checkpoint,
    stored: u64,
    dialect: Dialect,
    saw_handles: bool,
    saw_structured: bool,
}

impl Draft {
    fn new(dialect: Dialect) -> Self {
        let checkpoint = Checkpoint {
            version: "v1".into(),
            claims: Some(Vec::new()),
        };
        Self {
            checkpoint,
            stored: 0,
            dialect,
            saw_handles: false,
            saw_structured: false,
        }
    }

    fn checksum(&self) -> Checksum {
        let (stored, computed, old) = (self.stored, self.sum(), self.old_sum());
        Checksum {
            stored,
            computed: if old == stored { old } else { computed },
        }
    }

    fn sum(&self) -> u64 {
        Fnv1a32::of(|out| self.checkpoint.print(self.dialect, out))
    }

    /// Computes the sum that 1.28 to 1.30 try if the first is wrong: without handles, with version `v1`, and with an
    /// empty list in place of a missing one.
    fn old_sum(&self) -> u64 {
        let claims = Some(self.checkpoint.claims.as_deref().unwrap_or_default());
        Fnv1a32::of(|out| print("v1", claims, Dialect::K1_27, out))
    }

    /// Reads the whole claims of a document with broken syntax.
    fn scan(&mut self, bytes: &[u8]) -> DroppedList {
        let Self {
            dialect,
            saw_handles,
            saw_structured,
            ..
        } = self;
        let mut dropped = DroppedList::default();
        let claims = decode::find_whole(bytes, "DriverName", &UNIT, &mut dropped, |reader, claim| {
            decode_claim(reader, claim, *dialect, saw_handles, saw_structured)
        });
        self.checkpoint.claims = Some(claims);
        dropped
    }

    fn decode(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        let Self {
            checkpoint,
            stored,
            dialect,
            saw_handles,
            saw_structured,
        } = self;
        decode::object(reader, &CHECKPOINT, |field, reader| match field {
            0 => decode::text(reader, &mut checkpoint.version, "string"),
            1 => {
                let go_type = "state.ClaimInfoStateList";
                decode::units(reader, &mut checkpoint.claims, go_type, &UNIT, |reader, claim| {
                    decode_claim(reader, claim, *dialect, saw_handles, saw_structured)
                })
            }
            _ => decode::unsigned(reader, stored, u64::MAX, "checksum.Checksum"),
        })
    }
}

/// A claim as a unit of salvage.
const UNIT: decode::Unit<FlatClaim> = decode::Unit {
    describe: FlatClaim::describe,
    is_kept: |_| false,
};

fn decode_claim(
    reader: &mut Reader<'_>,
    claim: &mut FlatClaim,
    dialect: Dialect,
    saw_handles: &mut bool,
    saw_structured: &mut bool,
) -> Result<(), SyntaxError> {
    let shape = if dialect == Dialect::K1_27 {
        &CLAIM_1_27
    } else {
        &CLAIM
    };
    decode::object(reader, shape, |field, reader| match field {
        0 => decode::text(reader, &mut claim.driver, "string"),
        1 => decode::text(reader, &mut claim.class, "string"),
        2 => decode::text(reader, &mut claim.uid, "types.UID"),
        3 => decode::text(reader, &mut claim.name, "string"),
        4 => decode::text(reader, &mut claim.namespace, "string"),
        5 => decode_pods(reader, &mut claim.pods),
        6 => decode::map(
            reader,
            &mut claim.cdi_devices,
            "map[string][]string",
            |reader, ids| {
                decode::list(reader, ids, "[]string", |reader, id| {
                    decode::text(reader, id, "string")
                })
            },
        ),
        _ => {
            *saw_handles = true;
            decode::list(
                reader,
                &mut claim.handles,
                "[]v1alpha2.ResourceHandle",
                |reader, handle| decode_handle(reader, handle, dialect, saw_structured),
            )
        }
    })
}

fn decode_handle(
    reader: &mut Reader<'_>,
    handle: &mut ResourceHandle,
    dialect: Dialect,
    saw_structured: &mut bool,
) -> Result<(), SyntaxError> {
    let shape = if dialect == Dialect::K1_30 {
        &HANDLE
    } else {
        &HANDLE_1_28
    };
    decode::object(reader, shape, |field, reader| match field {
        0 => decode::text(reader, &mut handle.driver, "string"),
        1 => decode::text(reader, &mut handle.data, "string"),
        _ => {
            *saw_structured = true;
            if reader.kind()? == Kind::Null {
                handle.structured = None;
                return reader.literal("null");
            }
            decode_structured(reader, handle.structured.get_or_insert_default())
        }
    })
}

fn decode_structured(reader: &mut Reader<'_>, handle: &mut StructuredHandle) -> Result<(), SyntaxError> {
    decode::object(reader, &STRUCTURED, |field, reader| match field {
        0 => decode_raw(reader, &mut handle.class_parameters),
        1 => decode_raw(reader, &mut handle.claim_parameters),
        2 => decode::text(reader, &mut handle.node, "string"),
        _ => decode::list(
            reader,
            &mut handle.results,
            "[]v1alpha2.DriverAllocationResult",
            decode_result,
        ),
    })
}

fn decode_result(reader: &mut Reader<'_>, result: &mut AllocationResult) -> Result<(), SyntaxError> {
    decode::object(reader, &RESULT, |field, reader| match field {
        0 => decode_raw(reader, &mut result.request_parameters),
        _ => {
            if reader.kind()? == Kind::Null {
                result.named_resource = None;
                return reader.literal("null");
            }
            let name = result.named_resource.get_or_insert_default();
            decode::object(reader, &NAMED, |_, reader| decode::text(reader, name, "string"))
        }
    })
}

/// Decodes a Go `runtime.RawExtension`: the value's own bytes; `null` changes nothing.
fn decode_raw(reader: &mut Reader<'_>, raw: &mut Option<Vec<u8>>) -> Result<(), SyntaxError> {
    let kind = reader.kind()?;
    let start = reader.offset();
    reader.skip()?;
    if kind != Kind::Null {
        *raw = Some(reader.slice(start, reader.offset()).to_vec());
    }
    Ok(())
}

impl Checkpoint {
    fn print(&self, dialect: Dialect, out: &mut impl Print) {
        print(&self.version, self.claims.as_deref(), dialect, out);
    }
}

fn print(version: &str, claims: Option<&[FlatClaim]>, dialect: Dialect, out: &mut impl Print) {
    out.text("(*state.DRAManagerCheckpoint){Version:(string)");
    out.text(version);
    out.text(" Entries:(state.ClaimInfoStateList)");
    out.list(claims, |out, claim| claim.print(dialect, out));
    out.text(" Checksum:(checksum.Checksum)0}");
}

impl FlatClaim {
    fn print(&self, dialect: Dialect, out: &mut impl Print) {
        for (label, text) in [
            ("{DriverName:(string)", &self.driver),
            (" ClassName:(string)", &self.class),
            (" ClaimUID:(types.UID)", &self.uid),
            (" ClaimName:(string)", &self.name),
            (" Namespace:(string)", &self.namespace),
        ] {
            out.text(label);
            out.text(text);
        }
        out.text(" PodUIDs:(sets.Set[string])");
        out.map(
            self.pods.as_ref().map(|pods| pods.iter().map(|pod| (pod, ()))),
            |out, pod, ()| {
                out.text(pod);
                out.text(":{}");
            },
        );
        if dialect != Dialect::K1_27 {
            out.text(" ResourceHandles:([]v1alpha2.ResourceHandle)");
            out.list(self.handles.as_deref(), |out, handle| handle.print(dialect, out));
        }
        out.text(" CDIDevices:(map[string][]string)");
        out.map(
            self.cdi_devices.as_ref().map(|drivers| drivers.iter()),
            |out, driver, ids| {
                out.text(driver);
                out.text(":");
                out.strings(ids.as_deref());
            },
        );
        out.text("}");
    }

    fn describe(&self) -> String {
        super::describe_claim(&format!("{}/{}", self.namespace, self.name), self.pods.as_ref())
    }

    /// Converts the claim to today's form: each driver gets one device with all its CDI ids. The old form does not
    /// record their pool, device and request. Drivers that have not answered yet are kept, without devices.
    pub fn into_claim(self) -> Claim {
        let mut drivers = BTreeMap::new();
        let handles = self.handles.into_iter().flatten().map(|handle| handle.driver);
        for driver in handles.filter(|driver| !driver.is_empty()) {
            drivers.insert(driver, Driver::default());
        }
        for (driver, ids) in self.cdi_devices.into_iter().flatten() {
            let devices = match ids {
                Some(ids) if !ids.is_empty() => Some(vec![Device {
                    cdi_devices: Some(ids),
                    ..Device::default()
                }]),
                _ => None,
            };
            drivers.insert(
                driver,
                Driver {
                    devices,
                    skip_node_operations: None,
                },
            );
        }
        if drivers.is_empty() && !self.driver.is_empty() {
            drivers.insert(self.driver, Driver::default());
        }
        Claim {
            uid: self.uid,
            name: self.name,
            namespace: self.namespace,
            pods: self.pods,
            drivers: Some(drivers),
        }
    }
}

impl ResourceHandle {
    fn print(&self, dialect: Dialect, out: &mut impl Print) {
        out.text("{DriverName:(string)");
        out.text(&self.driver);
        out.text(" Data:(string)");
        out.text(&self.data);
        if dialect == Dialect::K1_30 {
            out.text(" StructuredData:(*v1alpha2.StructuredResourceHandle)");
            match &self.structured {
                None => out.nil(),
                Some(structured) => structured.print(out),
            }
        }
        out.text("}");
    }
}

impl StructuredHandle {
    fn print(&self, out: &mut impl Print) {
        out.text("{VendorClassParameters:");
        print_raw(out, self.class_parameters.as_deref());
        out.text(" VendorClaimParameters:");
        print_raw(out, self.claim_parameters.as_deref());
        out.text(" NodeName:(string)");
        out.text(&self.node);
        out.text(" Results:([]v1alpha2.DriverAllocationResult)");
        out.list(self.results.as_deref(), |out, result| {
            out.text("{VendorRequestParameters:");
            print_raw(out, result.request_parameters.as_deref());
            out.text(" AllocationResultModel:(v1alpha2.AllocationResultModel){NamedResources:");
            out.text("(*v1alpha2.NamedResourcesAllocationResult)");
            match &result.named_resource {
                None => out.nil(),
                Some(name) => {
                    out.text("{Name:(string)");
                    out.text(name);
                    out.text("}");
                }
            }
            out.text("}}");
        });
        out.text("}");
    }
}

fn print_raw(out: &mut impl Print, raw: Option<&[u8]>) {
    out.text("(runtime.RawExtension){Raw:([]uint8)");
    out.bytes(raw);
    out.text(" Object:(runtime.Object)<nil>}");
}

#[cfg(test)]
pub(super) fn printed(bytes: &[u8], format: Format) -> Vec<u8> {
    let dialect = Dialect::ALL
        .into_iter()
        .find(|dialect| dialect.format() == format);
    let dialect = dialect.expect("a flat format");
    let mut out = Vec::new();
    let file = read_dialect(bytes, dialect).expect("the file decodes");
    file.unverified().print(dialect, &mut out);
    out
}
