//! Decodes answers and health reports of drivers from the wire into core types.
//!
//! A few bytes on the wire can become much more memory. Messages are therefore read field by field ([`FieldIter`]), and
//! each field is checked before it is decoded.

use std::collections::BTreeMap;

use devlet_core::ClaimUid;
use devlet_core::dra::claims::{ClaimKey, PreparedDevice};
use devlet_core::dra::health::{DeviceHealth, HealthReport, PoolDevice};
use devlet_kubelet_api::dra::v1;
use devlet_kubelet_api::dra_health::v1 as health;
use prost::Message as _;
use prost::bytes::Bytes;

use super::services::NodeService;
use super::{Prepared, Unprepared};
use crate::grpc::call::InvalidAnswer;
use crate::grpc::fields::FieldIter;
use crate::limits::{Limit, Limits, check_entries, check_name, check_path, truncate_quoted};
use crate::peer_text::shorten;

/// Estimated memory in bytes of a device or name, besides its text.
const ENTRY_BYTES: usize = 64;

/// Encodes a request for claims. Requests to prepare and to unprepare are the same on the wire.
pub(super) fn encode_request(claims: &[(ClaimUid, ClaimKey)]) -> Bytes {
    let claim = |(uid, key): &(ClaimUid, ClaimKey)| v1::Claim {
        namespace: key.namespace.clone(),
        uid: uid.to_string(),
        name: key.name.clone(),
    };
    let claims = claims.iter().map(claim).collect();
    v1::NodePrepareResourcesRequest { claims }.encode_to_vec().into()
}

/// Decodes an answer to `NodePrepareResources` for `requested` claims. Stops after one claim more than that.
pub(super) fn decode_prepared(
    answer: Bytes,
    service: NodeService,
    requested: usize,
    limits: &Limits,
) -> Result<Prepared, InvalidAnswer> {
    let (mut all, mut count) = (BTreeMap::new(), 0);
    for claim in ClaimEntries::of(answer) {
        let (uid, about) = claim?;
        let (mut devices, mut entries, mut error) = (Vec::new(), 0, String::new());
        let bytes = about.len();
        for field in FieldIter::of(about, 2) {
            match field? {
                (1, device) => {
                    count += 1;
                    check_entries(count, || format!("the answer has {count} devices or more"))?;
                    devices.push(prepared_device(device, service, &mut entries)?);
                }
                (2, text) => error = shorten(string(&text)?),
                _ => {}
            }
        }
        let memory = bytes + (devices.len() + entries) * ENTRY_BYTES;
        Limit::CLAIM_BYTES.check(memory, limits.claim_bytes, || {
            format!(
                "the answer for claim {} takes {memory} bytes of memory",
                truncate_quoted(uid.as_str())
            )
        })?;
        let outcome = match error.is_empty() {
            true => Ok(devices),
            false => Err(error),
        };
        all.insert(uid, outcome);
        if all.len() > requested {
            break;
        }
    }
    Ok(all)
}

/// Decodes an answer to `NodeUnprepareResources` for `requested` claims. Stops after one claim more than that.
pub(super) fn decode_unprepared(answer: Bytes, requested: usize) -> Result<Unprepared, InvalidAnswer> {
    let mut all = BTreeMap::new();
    for claim in ClaimEntries::of(answer) {
        let (uid, about) = claim?;
        let mut outcome = Ok(());
        for field in FieldIter::of(about, 1) {
            if let (1, text) = field? {
                let error = shorten(string(&text)?);
                outcome = if error.is_empty() { Ok(()) } else { Err(error) };
            }
        }
        all.insert(uid, outcome);
        if all.len() > requested {
            break;
        }
    }
    Ok(all)
}

/// Decodes a device. `entries` counts the names of its claim.
fn prepared_device(
    device: Bytes,
    service: NodeService,
    entries: &mut usize,
) -> Result<PreparedDevice, InvalidAnswer> {
    for field in FieldIter::of(device.clone(), 5) {
        let (tag, text) = field?;
        let text = String::from_utf8_lossy(&text);
        match tag {
            4 => check_path(&text)?,
            _ => check_name("the name", &text)?,
        }
        *entries += usize::from(tag == 1 || tag == 4);
        let number = *entries;
        check_entries(number, || {
            format!("the answer for a claim names {number} requests and CDI devices or more")
        })?;
    }
    let device = v1::Device::decode(device)?;
    Ok(PreparedDevice {
        requests: device.request_names,
        pool: device.pool_name,
        device: device.device_name,
        share: device.share_id.filter(|_| service.has_shares()),
        cdi_devices: device.cdi_device_ids,
    })
}

/// Decodes a message of `NodeWatchResources`. The second value is the number of devices without a name.
pub(super) fn decode_reports(
    message: Bytes,
    limits: &Limits,
) -> Result<(Vec<HealthReport>, usize), InvalidAnswer> {
    let (mut all, mut nameless) = (Vec::new(), 0);
    for field in FieldIter::of(message, 1) {
        let (1, device) = field? else {
            continue;
        };
        let device = health::DeviceHealth::decode(device)?;
        let status = device.health();
        let Some(name) = device.device.filter(|name| !name.device_name.is_empty()) else {
            nameless += 1;
            continue;
        };
        for text in [&name.pool_name, &name.device_name] {
            check_name("the name", text)?;
        }
        let count = all.len() + 1;
        Limit::DEVICES_PER_RESOURCE.check(count, limits.devices_per_resource, || {
            format!("the message has {count} devices or more")
        })?;
        let seconds = u64::try_from(device.health_check_timeout_seconds).unwrap_or(0);
        all.push(HealthReport {
            device: PoolDevice {
                pool: name.pool_name,
                device: name.device_name,
            },
            health: match status {
                health::HealthStatus::Unknown => DeviceHealth::Unknown,
                health::HealthStatus::Healthy => DeviceHealth::Healthy,
                health::HealthStatus::Unhealthy => DeviceHealth::Unhealthy,
            },
            message: device.message,
            lease_ms: seconds.saturating_mul(1000),
        });
    }
    Ok((all, nameless))
}

/// Iterates over a map from the UIDs of claims to encoded messages.
struct ClaimEntries(FieldIter);

impl ClaimEntries {
    fn of(answer: Bytes) -> Self {
        Self(FieldIter::of(answer, 1))
    }
}

impl Iterator for ClaimEntries {
    type Item = Result<(ClaimUid, Bytes), InvalidAnswer>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.0.next()? {
                Ok((1, entry)) => return Some(claim(entry)),
                Ok(_) => {}
                Err(error) => return Some(Err(error.into())),
            }
        }
    }
}

fn claim(entry: Bytes) -> Result<(ClaimUid, Bytes), InvalidAnswer> {
    let (mut uid, mut about) = (String::new(), Bytes::new());
    for field in FieldIter::of(entry, 2) {
        match field? {
            (1, text) => uid = string(&text)?,
            (2, message) => about = message,
            _ => {}
        }
    }
    Ok((uid.into(), about))
}

fn string(bytes: &Bytes) -> Result<String, InvalidAnswer> {
    let text = str::from_utf8(bytes).map_err(|error| InvalidAnswer::Damaged(error.to_string()))?;
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: NodeService = NodeService::V1;

    fn answer(claims: &[(&str, v1::NodePrepareResourceResponse)]) -> Bytes {
        let claims = claims
            .iter()
            .map(|(uid, answer)| ((*uid).to_owned(), answer.clone()));
        let answer = v1::NodePrepareResourcesResponse {
            claims: claims.collect(),
        };
        answer.encode_to_vec().into()
    }

    fn device() -> v1::Device {
        v1::Device {
            request_names: vec!["one".into(), "two/big".into()],
            pool_name: "pool".into(),
            device_name: "gpu-0".into(),
            cdi_device_ids: vec!["acme.com/gpu=0".into()],
            share_id: Some("half".into()),
        }
    }

    fn devices(devices: Vec<v1::Device>) -> v1::NodePrepareResourceResponse {
        v1::NodePrepareResourceResponse {
            devices,
            error: String::new(),
        }
    }

    fn failed(error: &str) -> v1::NodePrepareResourceResponse {
        v1::NodePrepareResourceResponse {
            devices: vec![device()],
            error: error.into(),
        }
    }

    fn read(answer: &Bytes, limits: &Limits) -> Result<Prepared, String> {
        decode_prepared(answer.clone(), SERVICE, 256, limits).map_err(|error| error.to_string())
    }

    #[test]
    fn each_claim_has_its_devices_or_its_error() {
        let answer = answer(&[
            ("a", devices(vec![device()])),
            ("b", failed("no")),
            ("c", devices(vec![])),
        ]);
        let known = PreparedDevice {
            requests: vec!["one".into(), "two/big".into()],
            pool: "pool".into(),
            device: "gpu-0".into(),
            share: Some("half".into()),
            cdi_devices: vec!["acme.com/gpu=0".into()],
        };
        let wanted = [
            ("a".into(), Ok(vec![known.clone()])),
            ("b".into(), Err("no".to_owned())),
            ("c".into(), Ok(Vec::new())),
        ];
        assert_eq!(read(&answer, &Limits::default()).unwrap(), BTreeMap::from(wanted));
        // Answers of the older services do not contain shares.
        for service in [NodeService::V1beta1, NodeService::V1alpha3] {
            let older = decode_prepared(answer.clone(), service, 256, &Limits::default()).unwrap();
            let known = PreparedDevice {
                share: None,
                ..known.clone()
            };
            assert_eq!(older[&ClaimUid::from("a")], Ok(vec![known]));
        }
    }

    #[test]
    fn errors_of_claims_are_shortened() {
        let long = "x".repeat(100_000);
        let answer = answer(&[("a", failed(&long))]);
        let error = read(&answer, &Limits::default()).unwrap()[&ClaimUid::from("a")].clone();
        assert!(error.is_err_and(|error| error.len() <= 1024 && error.ends_with("(100000 bytes)")));
        let answer = v1::NodeUnprepareResourcesResponse {
            claims: [("a".to_owned(), v1::NodeUnprepareResourceResponse { error: long })].into(),
        };
        let error =
            decode_unprepared(answer.encode_to_vec().into(), 1).unwrap()[&ClaimUid::from("a")].clone();
        assert!(error.is_err_and(|error| error.len() <= 1024 && error.ends_with("(100000 bytes)")));
    }

    #[test]
    fn an_empty_error_means_that_the_claim_is_unprepared() {
        let error = |error: &str| v1::NodeUnprepareResourceResponse { error: error.into() };
        let claims = [("a".to_owned(), error("")), ("b".to_owned(), error("busy"))];
        let answer = v1::NodeUnprepareResourcesResponse {
            claims: claims.into(),
        };
        let wanted = [("a".into(), Ok(())), ("b".into(), Err("busy".to_owned()))];
        let read = decode_unprepared(answer.encode_to_vec().into(), 2).unwrap();
        assert_eq!(read, BTreeMap::from(wanted));
    }

    #[test]
    fn an_answer_over_a_limit_is_rejected() {
        let limits = Limits {
            claim_bytes: usize::MAX,
            ..Limits::default()
        };
        let with = |change: fn(&mut v1::Device)| {
            let mut device = device();
            change(&mut device);
            read(&answer(&[("a", devices(vec![device]))]), &limits)
        };
        assert!(with(|_| {}).is_ok());
        let error = with(|device| device.pool_name = "x".repeat(1025)).unwrap_err();
        assert!(error.ends_with("has 1025 bytes, devlet allows 1024"), "{error}");
        let error = with(|device| device.cdi_device_ids = vec!["x".repeat(4096)]).unwrap_err();
        assert!(error.ends_with("has 4096 bytes, devlet allows 4095"), "{error}");
        let error = with(|device| device.cdi_device_ids = vec![String::new(); 16_385]).unwrap_err();
        assert!(
            error.ends_with("CDI devices or more, devlet allows 16384"),
            "{error}"
        );
        let many = answer(&[
            ("a", devices(vec![v1::Device::default(); 8_192])),
            ("b", devices(vec![v1::Device::default(); 8_193])),
        ]);
        assert_eq!(
            read(&many, &limits).unwrap_err(),
            "the answer has 16385 devices or more, devlet allows 16384"
        );
    }

    #[test]
    fn memory_for_the_answer_about_a_claim_is_limited() {
        let limits = Limits {
            claim_bytes: 400,
            ..Limits::default()
        };
        let mut large = device();
        assert!(read(&answer(&[("a", devices(vec![large.clone()]))]), &limits).is_ok());
        large.cdi_device_ids = vec!["acme.com/gpu=0".into(); 3];
        let error = read(&answer(&[("a", devices(vec![large]))]), &limits).unwrap_err();
        assert!(
            error.starts_with("the answer for claim \"a\" takes ")
                && error.ends_with(", limits.claimBytes allows 400"),
            "{error}"
        );
    }

    #[test]
    fn unrequested_claims_are_read_up_to_the_first() {
        let uids: Vec<String> = (0..100).map(|number| number.to_string()).collect();
        let claims: Vec<_> = uids.iter().map(|uid| (uid.as_str(), devices(vec![]))).collect();
        let read = decode_prepared(answer(&claims), SERVICE, 2, &Limits::default()).unwrap();
        assert_eq!(
            read.len(),
            3,
            "one more than requested shows that the answer is wrong"
        );
    }

    #[test]
    fn damaged_answers_do_not_cause_a_panic() {
        let whole = answer(&[("a", devices(vec![device()])), ("b", failed("no"))]);
        let limits = Limits::default();
        for end in 0..whole.len() {
            let cut = read(&whole.slice(..end), &limits);
            assert!(cut.is_err() || cut.unwrap().len() <= 2, "{end}");
            let mut damaged = whole.to_vec();
            for byte in [0x00, 0x0c, 0x7f, 0x80, 0xff] {
                damaged[end] = byte;
                let damaged = Bytes::from(damaged.clone());
                let _ = read(&damaged, &limits);
                let _ = decode_unprepared(damaged.clone(), 2);
                let _ = decode_reports(damaged, &limits);
            }
        }
        let error = read(&Bytes::from_static(&[0x0a, 0x7f, 0x00]), &limits).unwrap_err();
        assert_eq!(error, "the answer is damaged: field 1 is longer than its message");
    }

    fn message(devices: Vec<health::DeviceHealth>) -> Bytes {
        health::NodeWatchResourcesResponse { devices }
            .encode_to_vec()
            .into()
    }

    fn device_health(device: &str, status: i32, seconds: i64) -> health::DeviceHealth {
        health::DeviceHealth {
            device: Some(health::DeviceIdentifier {
                pool_name: "pool".into(),
                device_name: device.into(),
            }),
            health: status,
            last_updated_time: 1,
            health_check_timeout_seconds: seconds,
            message: "hot".into(),
        }
    }

    // TestToDeviceHealthStatus, TestBuildDeviceHealth, TestConversionNilSafe
    #[test]
    fn reports_contain_the_health_of_a_device_and_its_lease() {
        let unnamed = health::DeviceHealth {
            device: None,
            ..device_health("", 1, 0)
        };
        let sent = vec![
            device_health("a", 1, 7),
            device_health("b", 2, 0),
            device_health("c", 0, -7),
            device_health("d", 99, i64::MAX),
            unnamed,
        ];
        let (reports, nameless) = decode_reports(message(sent), &Limits::default()).unwrap();
        assert_eq!(nameless, 1);
        let short: Vec<_> = reports
            .iter()
            .map(|report| (report.device.device.as_str(), report.health, report.lease_ms))
            .collect();
        let wanted = [
            ("a", DeviceHealth::Healthy, 7_000),
            ("b", DeviceHealth::Unhealthy, 0),
            ("c", DeviceHealth::Unknown, 0),
            ("d", DeviceHealth::Unknown, u64::MAX),
        ];
        assert_eq!(short, wanted);
        assert_eq!(reports[0].message, "hot");
    }

    #[test]
    fn a_message_about_too_many_devices_is_rejected() {
        let limits = Limits {
            devices_per_resource: 2,
            ..Limits::default()
        };
        let sent = (0..3).map(|number| device_health(&number.to_string(), 1, 0));
        let error = decode_reports(message(sent.collect()), &limits).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the message has 3 devices or more, limits.devicesPerResource allows 2"
        );
    }
}
