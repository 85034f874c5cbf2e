//! Compares the results of our readers with those of the kubelets.

use std::collections::BTreeMap;

use devlet_kubelet_files::device_plugin::{self, Devices, response};
use devlet_kubelet_files::dra::{envelope, flat, health};
use devlet_kubelet_files::verify::{Problem, Verdict};
use devlet_kubelet_files::{Document, File, Format, ReadError, Role, convert, read, salvage, verify};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

const CORRUPTED: &str = "checkpoint is corrupted";
const NOT_LOADED: &str = "create ResourceClaim cache: GetOrCreate() on checkpoint state: failed to get checkpoint dra_manager_state: ";
const NO_ENTRIES: &str = "create ResourceClaim cache: GetEntries() on checkpoint: ";
const FLAT_NOT_LOADED: &str =
    "error calling GetOrCreate() on checkpoint state: failed to get checkpoint dra_manager_state: ";
/// The error of every V2 reader for a V1 entry, and the other way round.
const FLAT_IN_V2: &str = "json: cannot unmarshal array into Go struct field PodDevicesEntry.Data.PodDeviceEntries.DeviceIDs of type checkpoint.DevicesPerNUMA";
const NUMA_IN_V1: &str = "json: cannot unmarshal object into Go struct field PodDevicesEntry.Data.PodDeviceEntries.DeviceIDs of type []string";

/// A difference between us and a kubelet: its subject, and both results.
#[derive(Debug, Clone)]
pub(crate) struct Difference {
    pub(crate) what: &'static str,
    pub(crate) detail: String,
}

#[derive(Debug, Default)]
pub(crate) struct Differences(pub(crate) Vec<Difference>);

impl Differences {
    fn add(&mut self, what: &'static str, detail: impl Into<String>) {
        let detail = detail.into();
        self.0.push(Difference { what, detail });
    }

    #[expect(clippy::needless_pass_by_value, reason = "references and small values alike")]
    fn same<T: PartialEq + std::fmt::Debug>(&mut self, what: &'static str, ours: T, go: T) {
        if ours != go {
            self.add(what, format!("ours: {ours:?}\n    go:   {go:?}"));
        }
    }
}

/// An answer about a device manager's file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DevicesAnswer {
    error: String,
    decoded: bool,
    stored_checksum: u64,
    computed_checksum: u64,
    entries: Option<Vec<Entry>>,
    entries_nil: bool,
    registered: Option<BTreeMap<String, Option<Vec<String>>>>,
    registered_nil: bool,
    restored: Vec<usize>,
    written: Option<String>,
    #[serde(default)]
    v1: bool,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(rename = "podUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "deviceIDs")]
    device_ids: Option<BTreeMap<String, Option<Vec<String>>>>,
    #[serde(default, rename = "flatDeviceIDs")]
    flat_device_ids: Vec<String>,
    alloc_resp: Option<String>,
}

/// An answer about DRA claims, of any release.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimsAnswer {
    error: String,
    decoded: bool,
    stored_checksum: u64,
    computed_checksum: u64,
    computed_checksum_without_resource_handles: Option<u64>,
    version: Option<String>,
    claims: Option<Box<RawValue>>,
    #[serde(default)]
    claims_nil: bool,
    cache: Option<BTreeMap<String, usize>>,
    written: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct HealthAnswer {
    error: String,
    devices: Option<Value>,
    written: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ResponseAnswer {
    error: String,
    json: Option<Value>,
}

/// The answers of all releases about one file.
#[derive(Debug)]
pub(crate) struct Answers {
    pub(crate) devices: DevicesAnswer,
    pub(crate) claims: ClaimsAnswer,
    pub(crate) health: HealthAnswer,
    pub(crate) devices_1_30: DevicesAnswer,
    pub(crate) devices_1_19: DevicesAnswer,
    pub(crate) claims_1_30: ClaimsAnswer,
    pub(crate) claims_1_28: ClaimsAnswer,
    pub(crate) claims_1_27: ClaimsAnswer,
}

pub(crate) fn files(bytes: &[u8], go: &Answers) -> Differences {
    let mut differences = Differences::default();
    let out = &mut differences;
    devices(bytes, go, out);
    claims(bytes, &go.claims, out);
    for (format, answer) in [
        (Format::DraFlat1_27, &go.claims_1_27),
        (Format::DraFlat1_28, &go.claims_1_28),
        (Format::DraFlat1_30, &go.claims_1_30),
    ] {
        flat_claims(bytes, format, answer, out);
    }
    health_state(bytes, &go.health, out);
    for role in [
        None,
        Some(Role::DevicePlugin),
        Some(Role::DraManager),
        Some(Role::DraHealth),
    ] {
        verdict(bytes, role, go, out);
        rescue(bytes, role, out);
    }
    differences
}

fn devices(bytes: &[u8], answers: &Answers, out: &mut Differences) {
    let (go, go_1_30, go_1_19) = (&answers.devices, &answers.devices_1_30, &answers.devices_1_19);
    match device_plugin::read(bytes) {
        // A kubelet reads a file as V2 or as V1, and reports this as a type error in both.
        Err(ReadError::Mixed { .. }) => {
            out.same("mixed file is refused by V2", true, !go.error.is_empty());
            out.same("mixed file is refused by V1", true, !go_1_30.error.is_empty());
        }
        Err(error) => {
            let ours = error.kubelet_text().unwrap_or_default();
            let as_v2 = ours == go.error;
            // A V2 reader stops at the first V1 entry. Ours continues as a V1 reader, unless that stops at a V2 entry.
            let as_v1 = go.error == FLAT_IN_V2 && (ours == go_1_19.error || go_1_19.error == NUMA_IN_V1);
            if !as_v2 && !as_v1 {
                out.same("device file: error text", ours, &go.error);
            }
            out.same(
                "device file refused: by 1.30 too",
                true,
                !go_1_30.error.is_empty(),
            );
        }
        Ok(file) if file.format == Format::DevicePluginV1 => {
            let checksum = file.checksum.unwrap_or(devlet_kubelet_files::Checksum {
                stored: 0,
                computed: 0,
            });
            out.same("V1: decoded by 1.19", true, go_1_19.decoded);
            out.same(
                "V1: computed checksum",
                checksum.computed,
                go_1_19.computed_checksum,
            );
            out.same("V1: stored checksum", checksum.stored, go_1_19.stored_checksum);
            out.same(
                "V1: loaded by 1.19",
                checksum.is_valid(),
                go_1_19.error.is_empty(),
            );
            out.same("V1: loaded by 1.30", checksum.is_valid(), go_1_30.v1);
            out.same("V1: refused by the current release", true, !go.error.is_empty());
            content(file.unverified(), go_1_19, out);
            // Without entries 1.30 writes `null` for an empty list in the file; we keep it empty.
            if go_1_30.v1
                && go_1_30
                    .entries
                    .as_ref()
                    .is_some_and(|entries| !entries.is_empty())
            {
                let written = device_plugin::write(file.unverified());
                out.same("V1: written as V2", Some(&written), go_1_30.written.as_ref());
            }
        }
        Ok(file) => {
            let checksum = file.checksum.unwrap_or(devlet_kubelet_files::Checksum {
                stored: 0,
                computed: 0,
            });
            if !go.decoded {
                return out.add("V2: refused by Go only", &*go.error);
            }
            out.same("V2: computed checksum", checksum.computed, go.computed_checksum);
            out.same("V2: stored checksum", checksum.stored, go.stored_checksum);
            let error = if checksum.is_valid() { "" } else { CORRUPTED };
            out.same("V2: loaded", error, &go.error);
            out.same(
                "V2: loaded by 1.30",
                checksum.is_valid(),
                go_1_30.error.is_empty(),
            );
            content(file.unverified(), go, out);
            let written = device_plugin::write(file.unverified());
            out.same("V2: written", Some(&written), go.written.as_ref());
        }
    }
}

fn content(checkpoint: &device_plugin::Checkpoint, go: &DevicesAnswer, out: &mut Differences) {
    use base64::Engine as _;
    let entry = |entry: &device_plugin::Entry| {
        let (device_ids, flat_device_ids) = match &entry.devices {
            Devices::PerNuma(nodes) => (
                nodes.as_ref().map(|nodes| {
                    let text = |(node, ids): (&i64, &Option<Vec<String>>)| (node.to_string(), ids.clone());
                    nodes.iter().map(text).collect()
                }),
                Vec::new(),
            ),
            Devices::Flat(ids) => (None, ids.clone().unwrap_or_default()),
        };
        Entry {
            pod_uid: entry.pod_uid.clone(),
            container_name: entry.container.clone(),
            resource_name: entry.resource.clone(),
            device_ids,
            flat_device_ids,
            alloc_resp: entry
                .alloc_resp
                .as_ref()
                .map(|bytes| base64::engine::general_purpose::STANDARD.encode(bytes)),
        }
    };
    let entries: Vec<Entry> = checkpoint.entries.iter().flatten().map(entry).collect();
    out.same("entries", &entries, go.entries.as_ref().unwrap_or(&Vec::new()));
    out.same("entries are nil", checkpoint.entries.is_none(), go.entries_nil);
    out.same("registered devices", &checkpoint.registered, &go.registered);
    out.same(
        "registered devices are nil",
        checkpoint.registered.is_none(),
        go.registered_nil,
    );
}

fn claims(bytes: &[u8], go: &ClaimsAnswer, out: &mut Differences) {
    match envelope::read(bytes) {
        Err(error) => {
            let ours = error.kubelet_text().unwrap_or_default();
            if go.error == format!("{NOT_LOADED}{CORRUPTED}") && go.decoded {
                // A kubelet does not decode a document with a wrong checksum. We do, and report the error in
                // it rather than the checksum.
                return;
            }
            let prefix = if go.decoded { NO_ENTRIES } else { NOT_LOADED };
            out.same("claims: error text", &format!("{prefix}{ours}"), &go.error);
        }
        Ok(file) => {
            let checksum = file.checksum.unwrap_or(devlet_kubelet_files::Checksum {
                stored: 0,
                computed: 0,
            });
            if !go.decoded {
                return out.add("claims: refused by Go only", &*go.error);
            }
            out.same(
                "claims: computed checksum",
                checksum.computed,
                go.computed_checksum,
            );
            out.same("claims: stored checksum", checksum.stored, go.stored_checksum);
            if !checksum.is_valid() {
                return out.same(
                    "claims: corrupted",
                    &format!("{NOT_LOADED}{CORRUPTED}"),
                    &go.error,
                );
            }
            out.same("claims: loaded", "", &go.error);
            let written = envelope::write(file.unverified().claims.as_deref());
            out.same("claims: written", Some(&written), go.written.as_ref());
            let list = file.unverified().claims.as_deref().unwrap_or_default();
            let keys = list.iter().map(|claim| claim.key()).zip(0..);
            out.same("claims: cache", Some(&keys.collect()), go.cache.as_ref());
        }
    }
}

fn flat_claims(bytes: &[u8], format: Format, go: &ClaimsAnswer, out: &mut Differences) {
    let Some(read) = flat::read_as(bytes, format) else {
        return out.add("flat: no such format", format.name());
    };
    let file = match read {
        Err(error) => {
            let ours = error.kubelet_text().unwrap_or_default();
            return out.same("flat: error text", &format!("{FLAT_NOT_LOADED}{ours}"), &go.error);
        }
        Ok(file) => file,
    };
    if !go.decoded {
        return out.add("flat: refused by Go only", &*go.error);
    }
    let checksum = file.checksum.unwrap_or(devlet_kubelet_files::Checksum {
        stored: 0,
        computed: 0,
    });
    out.same("flat: stored checksum", checksum.stored, go.stored_checksum);
    out.same("flat: computed checksum", checksum.computed, go.computed_checksum);
    let accepted =
        checksum.is_valid() || go.computed_checksum_without_resource_handles == Some(checksum.stored);
    out.same("flat: loaded", accepted, go.error.is_empty());
    out.same(
        "flat: version",
        Some(&file.unverified().version),
        go.version.as_ref(),
    );
    out.same(
        "flat: claims are nil",
        file.unverified().claims.is_none(),
        go.claims_nil,
    );
    let ours: Vec<Value> = file
        .unverified()
        .claims
        .iter()
        .flatten()
        .map(|claim| flat_claim(claim, format))
        .collect();
    // Deep parameters exceed the nesting limit of this reader of answers; the checksum covers them.
    if let Some(Ok(theirs)) = go
        .claims
        .as_ref()
        .map(|claims| serde_json::from_str::<Value>(claims.get()))
    {
        let mut theirs = if theirs.is_null() { json!([]) } else { theirs };
        strip_parameters(&mut theirs);
        out.same("flat: claims", Value::Array(ours), theirs);
    }
}

/// Returns a claim as the release prints it, without parameters.
fn flat_claim(claim: &flat::FlatClaim, format: Format) -> Value {
    let pods = claim.pods.as_ref().map(|pods| {
        pods.iter()
            .map(|pod| (pod.clone(), json!({})))
            .collect::<BTreeMap<_, _>>()
    });
    let mut value = json!({
        "DriverName": claim.driver, "ClassName": claim.class, "ClaimUID": claim.uid, "ClaimName": claim.name,
        "Namespace": claim.namespace, "PodUIDs": pods, "CDIDevices": claim.cdi_devices,
    });
    if format != Format::DraFlat1_27 {
        let handle = |handle: &flat::ResourceHandle| {
            let mut value = serde_json::Map::new();
            if !handle.driver.is_empty() {
                value.insert("driverName".into(), json!(handle.driver));
            }
            if !handle.data.is_empty() {
                value.insert("data".into(), json!(handle.data));
            }
            if let Some(structured) = &handle.structured {
                let result = |result: &flat::AllocationResult| match &result.named_resource {
                    Some(name) => json!({"namedResources": {"name": name}}),
                    None => json!({}),
                };
                let results = structured
                    .results
                    .as_ref()
                    .map(|results| results.iter().map(result).collect::<Vec<_>>());
                let mut inner = json!({ "results": results });
                if !structured.node.is_empty() {
                    inner["nodeName"] = json!(structured.node);
                }
                value.insert("structuredData".into(), inner);
            }
            Value::Object(value)
        };
        let handles = claim
            .handles
            .as_ref()
            .map(|handles| handles.iter().map(handle).collect::<Vec<_>>());
        value["ResourceHandles"] = json!(handles);
    }
    value
}

/// Removes the parameters from every handle: the checksum covers them.
fn strip_parameters(claims: &mut Value) {
    for claim in claims.as_array_mut().into_iter().flatten() {
        for handle in claim
            .get_mut("ResourceHandles")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let Some(structured) = handle.get_mut("structuredData").and_then(Value::as_object_mut) else {
                continue;
            };
            structured.remove("vendorClassParameters");
            structured.remove("vendorClaimParameters");
            for result in structured
                .get_mut("results")
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                result
                    .as_object_mut()
                    .map(|result| result.remove("vendorRequestParameters"));
            }
        }
    }
}

fn health_state(bytes: &[u8], go: &HealthAnswer, out: &mut Differences) {
    match health::read(bytes) {
        Err(error) => {
            let ours = error.kubelet_text().unwrap_or_default();
            // Go's text about a bad time is long and describes its layout; ours differs.
            let about_time =
                go.error.starts_with("parsing time ") && ours.ends_with("is not an RFC 3339 time");
            if !about_time {
                out.same("health: error text", ours, &go.error);
            }
        }
        Ok(file) => {
            out.same("health: loaded", "", &go.error);
            let Some(theirs) = go
                .devices
                .as_ref()
                .filter(|_| go.written.is_some() && go.error.is_empty())
            else {
                // Go reads zones of 24 hours and more, but does not write them.
                return;
            };
            let device = |device: &health::DeviceHealth| {
                json!({
                    "PoolName": device.pool, "DeviceName": device.device, "Health": device.health,
                    "LastUpdated": go_time(&device.last_updated), "HealthCheckTimeout": device.timeout_ns,
                    "Message": device.message,
                })
            };
            let driver = |driver: &health::DriverHealth| {
                let devices = driver.devices.as_ref().map(|devices| {
                    let devices = devices
                        .iter()
                        .map(|(name, health)| (name.clone(), device(health)));
                    devices.collect::<BTreeMap<_, _>>()
                });
                json!({ "Devices": devices })
            };
            let ours = file.unverified().drivers.as_ref().map(|drivers| {
                let drivers = drivers
                    .iter()
                    .map(|(name, health)| (name.clone(), driver(health)));
                drivers.collect::<BTreeMap<_, _>>()
            });
            out.same("health: devices", &json!(ours), theirs);
        }
    }
}

/// Returns a time as Go prints it: two digits for the hour, no trailing zeros in the fraction, `Z` for no offset.
fn go_time(text: &str) -> String {
    if text.is_empty() {
        return "0001-01-01T00:00:00Z".into();
    }
    let (date, rest) = text.split_at(11.min(text.len()));
    let rest = if rest.as_bytes().get(1) == Some(&b':') {
        format!("0{rest}")
    } else {
        rest.to_owned()
    };
    let (time, rest) = rest.split_at(8.min(rest.len()));
    let digits = rest.bytes().skip(1).take_while(u8::is_ascii_digit).count();
    let (fraction, zone) = match rest.as_bytes().first() {
        Some(b'.' | b',') => (&rest[1..=digits.min(9)], &rest[1 + digits..]),
        _ => ("", rest),
    };
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    let zone = if zone.ends_with("00:00") { "Z" } else { zone };
    // An offset of sixty minutes is the next hour.
    let zone = match (
        zone.strip_suffix(":60"),
        zone.get(1..3).and_then(|hours| hours.parse::<u32>().ok()),
    ) {
        (Some(start), Some(hours)) => format!("{}{:02}:00", &start[..1], hours + 1),
        _ => zone.to_owned(),
    };
    format!("{date}{time}{point}{fraction}{zone}")
}

fn verdict(bytes: &[u8], role: Option<Role>, go: &Answers, out: &mut Differences) {
    let verdict = verify(bytes, role);
    let fine = verdict.is_fine();
    if let [Problem::OtherFile { .. }, ..] = verdict.problems[..] {
        // Intended: Go cannot detect that a file has the content of another one, and may load nothing of it.
        return;
    }
    match verdict.format {
        Some(Format::DevicePluginV2) => {
            let entries = go.devices.entries.as_ref().map_or(0, Vec::len);
            if go.devices.error.is_empty() {
                let lost = |problem: &Problem| match problem {
                    Problem::DroppedEntry { index, .. } | Problem::Replaced { index, .. } => Some(*index),
                    _ => None,
                };
                let lost: Vec<usize> = verdict.problems.iter().filter_map(lost).collect();
                let restored: Vec<usize> = (0..entries).filter(|index| !lost.contains(index)).collect();
                out.same("restored entries", &restored, &go.devices.restored);
            }
            let all = go.devices.error.is_empty() && go.devices.restored.len() == entries;
            out.same("V2 is fine", fine, all);
        }
        Some(Format::DevicePluginV0 | Format::DevicePluginV1) => {
            out.same("an old format is not fine", false, fine);
            let by_accident = matches!(verdict.problems[..], [Problem::EmptyByAccident(_), ..]);
            match error_of(&verdict) {
                Some(error) => out.same("old device format: Go's error", error, &go.devices.error),
                None => out.same(
                    "old device format: read as empty",
                    by_accident,
                    go.devices.error.is_empty(),
                ),
            }
        }
        Some(Format::DraEnvelopeV1) => {
            let all = go.claims.error.is_empty()
                && go.claims.cache.as_ref().map_or(0, BTreeMap::len) == claim_count(&go.claims);
            let by_accident = matches!(verdict.problems[..], [Problem::EmptyByAccident(_), ..]);
            if by_accident {
                // Loaded as empty: a problem for us, but not an error in Go.
                out.same(
                    "claims by accident: loaded as none",
                    (true, 0),
                    (all, claim_count(&go.claims)),
                );
            } else {
                out.same("claims are fine", fine, all);
            }
        }
        Some(Format::DraFlat1_27 | Format::DraFlat1_28 | Format::DraFlat1_30) => {
            out.same("a flat format is not fine", false, fine);
            if let Some(error) = error_of(&verdict) {
                let error = error.trim_end_matches(" (the kubelet does not start)");
                out.same(
                    "flat: error of the current release",
                    &format!("{NOT_LOADED}{error}"),
                    &go.claims.error,
                );
            }
            let older = [
                (&go.claims_1_27, "1.27"),
                (&go.claims_1_28, "1.28"),
                (&go.claims_1_30, "1.30"),
            ];
            // A claim that another one replaces is lost there too.
            let loads = older.map(|(answer, _)| {
                answer.error.is_empty()
                    && answer.cache.as_ref().map_or(0, BTreeMap::len) == claim_count(answer)
            });
            let expected = match loads {
                [true, true, true] => Some("1.27 to 1.30"),
                [true, true, false] => Some("1.27 to 1.29"),
                [true, false, true] => Some("1.27 and 1.30"),
                [true, false, false] => Some("1.27"),
                [false, true, true] => Some("1.28 to 1.30"),
                [false, true, false] => Some("1.28 and 1.29"),
                [false, false, true] => Some("1.30"),
                [false, false, false] => None,
            };
            out.same("flat: loaded by older", verdict.loaded_by_older, expected);
        }
        Some(Format::DraHealth) => {
            let panics = verdict
                .problems
                .iter()
                .any(|problem| matches!(problem, Problem::Panics { .. }));
            out.same("health is fine", fine || panics, go.health.error.is_empty());
        }
        _ => {
            out.same("a file of no format is not fine", false, fine);
            let by_accident = |problem: &Problem| {
                matches!(
                    problem,
                    Problem::EmptyByAccident(_) | Problem::Unreadable(ReadError::UnknownKind(_))
                )
            };
            if verdict.problems.iter().any(by_accident) {
                return;
            }
            // A kubelet reads the file according to its role. If we reject it as another kind, it does not contain
            // anything for this kubelet either.
            match role {
                Some(Role::DevicePlugin) => {
                    let some = go
                        .devices
                        .entries
                        .as_ref()
                        .is_some_and(|entries| !entries.is_empty());
                    out.same(
                        "unreadable: nothing for the device manager",
                        false,
                        go.devices.error.is_empty() && some,
                    );
                }
                Some(Role::DraManager) => {
                    let some = claim_count(&go.claims) > 0;
                    out.same("unreadable: no claims", false, go.claims.error.is_empty() && some);
                }
                _ => {}
            }
        }
    }
}

fn error_of(verdict: &Verdict) -> Option<&str> {
    verdict.problems.iter().find_map(|problem| match problem {
        Problem::TooOld { error } => Some(error.as_str()),
        _ => None,
    })
}

fn claim_count(go: &ClaimsAnswer) -> usize {
    go.claims
        .as_ref()
        .and_then(|claims| serde_json::from_str::<Option<Vec<&RawValue>>>(claims.get()).ok())
        .flatten()
        .map_or(0, |claims| claims.len())
}

/// Checks that our own output is fine, for any input.
fn rescue(bytes: &[u8], role: Option<Role>, out: &mut Differences) {
    if let Ok(saved) = salvage(bytes, role) {
        let again = verify(saved.text.as_bytes(), None);
        if !again.is_fine() {
            out.add("salvage: the result is fine", format!("{:?}", again.problems));
        }
        out.same("salvage: format of the result", Some(saved.format), again.format);
        let sound = verify(bytes, role);
        // A kubelet reads a file without the key `Data` as an empty one. The repair looks for entries and claims in it.
        let is_empty = |file: &File<Document>| match file.unverified() {
            Document::DraEnvelope(checkpoint) => checkpoint.claims.as_ref().is_none_or(Vec::is_empty),
            Document::DraFlat(checkpoint) => checkpoint.claims.as_ref().is_none_or(Vec::is_empty),
            Document::DevicePlugin(checkpoint) => checkpoint.entries.as_ref().is_none_or(Vec::is_empty),
            Document::DraHealth(_) => false,
        };
        let is_read_as_empty = read(bytes, role).as_ref().is_ok_and(is_empty);
        if sound.is_fine() && !saved.is_undamaged() && !is_read_as_empty {
            out.add(
                "salvage: a fine file is undamaged",
                format!("{:?} {:?}", saved.dropped, saved.checksum),
            );
        }
    }
    if let Ok(file) = read(bytes, role) {
        let found = file.format;
        let entries = |document: &Document| match document {
            Document::DevicePlugin(checkpoint) => checkpoint.entries.as_ref().map_or(0, Vec::len),
            Document::DraFlat(checkpoint) => checkpoint.claims.as_ref().map_or(0, Vec::len),
            Document::DraEnvelope(checkpoint) => checkpoint.claims.as_ref().map_or(0, Vec::len),
            Document::DraHealth(_) => 0,
        };
        let count = entries(file.unverified());
        if let Ok(converted) = convert(file) {
            let again = read(converted.text.as_bytes(), role).map(|file| {
                (
                    file.format,
                    file.checksum.is_some_and(|checksum| checksum.is_valid()),
                    entries(file.unverified()),
                )
            });
            out.same(
                "convert: the result reads",
                again.ok(),
                Some((converted.format, true, count)),
            );
            if found == converted.format {
                out.same("convert: stays in its format", found, converted.format);
            }
        }
    }
}

pub(crate) fn response(bytes: &[u8], go: &ResponseAnswer) -> Differences {
    let mut differences = Differences::default();
    let out = &mut differences;
    match response::decode(bytes) {
        Err(error) => {
            let utf8 = matches!(error, response::InvalidResponse::InvalidUtf8 { .. });
            out.same("response: refused", true, !go.error.is_empty());
            if !go.error.is_empty() {
                out.same(
                    "response: because of UTF-8",
                    utf8,
                    go.error.contains("invalid UTF-8"),
                );
            }
        }
        Ok(ours) => {
            let Some(theirs) = go.json.as_ref().filter(|_| go.error.is_empty()) else {
                out.add("response: refused by Go only", &*go.error);
                return differences;
            };
            let mut value = serde_json::Map::new();
            let mut put = |name: &str, present: bool, part: Value| {
                if present {
                    value.insert(name.to_owned(), part);
                }
            };
            let object = |parts: &[(&str, &str)]| {
                let filled = parts.iter().filter(|(_, text)| !text.is_empty());
                Value::Object(
                    filled
                        .map(|(name, text)| ((*name).to_owned(), json!(text)))
                        .collect(),
                )
            };
            put("envs", !ours.envs.is_empty(), json!(ours.envs));
            put(
                "annotations",
                !ours.annotations.is_empty(),
                json!(ours.annotations),
            );
            let mounts = ours.mounts.iter().map(|mount| {
                let mut value = object(&[
                    ("container_path", &mount.container_path),
                    ("host_path", &mount.host_path),
                ]);
                if mount.read_only {
                    value["read_only"] = json!(true);
                }
                value
            });
            put("mounts", !ours.mounts.is_empty(), mounts.collect());
            let devices = ours.devices.iter().map(|device| {
                object(&[
                    ("container_path", &device.container_path),
                    ("host_path", &device.host_path),
                    ("permissions", &device.permissions),
                ])
            });
            put("devices", !ours.devices.is_empty(), devices.collect());
            let cdi = ours
                .cdi_devices
                .iter()
                .map(|device| object(&[("name", &device.name)]));
            put("cdi_devices", !ours.cdi_devices.is_empty(), cdi.collect());
            out.same("response: fields", &Value::Object(value), theirs);
        }
    }
    differences
}
