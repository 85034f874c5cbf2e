//! The kubelet's `dra_manager_state`: read as claims and pods, and written as a mirror.
//!
//! The file has claims, the devices that drivers prepared for them, and the pods that hold them. It has neither allocations
//! nor the names of claims in pods' specs. A known pod keeps what the file does not contain.

use std::collections::{BTreeMap, BTreeSet};

use devlet_core::dra::claims::{Claim, ClaimKey, Preparation, PreparationState, PreparedDevice};
use devlet_core::{ClaimUid, DriverName, Pod, PodClaim, PodMetadata, PodName, PodUid, Source};
use devlet_kubelet_files::dra::{self, envelope};
use devlet_kubelet_files::salvage::INCOMPLETE_POD;
use devlet_kubelet_files::{Document, Format, Role};

use super::import_report::{Difference, ImportReport, UnreadableFile};
use super::load_error::LoadError;
use super::tables::Snapshot;

/// The content of a file about claims.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ImportedClaims {
    pub(crate) format: Format,
    pub(crate) claims: BTreeMap<ClaimUid, Claim>,
    /// The claims of each pod.
    pub(crate) pods: BTreeMap<PodUid, Vec<PodClaim>>,
    /// Claims that a later one of the same name replaces, as in a kubelet.
    pub(crate) replaced_entries: usize,
    /// The file is the readable rest of a damaged one.
    pub(crate) is_incomplete: bool,
}

impl ImportedClaims {
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, UnreadableFile> {
        let file = devlet_kubelet_files::read(bytes, Some(Role::DraManager))?;
        let format = file.format;
        let imported = Self::new(format, file.verified()?)?;
        match imported.is_incomplete {
            true => Err(UnreadableFile::Incomplete),
            false => Ok(imported),
        }
    }

    pub(crate) fn new(format: Format, document: Document) -> Result<Self, UnreadableFile> {
        let claims: Vec<dra::Claim> = match document {
            Document::DraFlat(checkpoint) => {
                let claims = checkpoint.claims.into_iter().flatten();
                claims.map(dra::flat::FlatClaim::into_claim).collect()
            }
            // A kubelet reads this as no claims, but they may be lost.
            Document::DraEnvelope(checkpoint) if !checkpoint.has_claim_list => {
                return Err(UnreadableFile::NoClaims);
            }
            Document::DraEnvelope(checkpoint) => checkpoint.claims.unwrap_or_default(),
            Document::DevicePlugin(_) => return Err(UnreadableFile::DevicesNotClaims),
            Document::DraHealth(_) => return Err(UnreadableFile::Health),
        };
        let all = claims.len();
        let by_key = claims.into_iter().map(|claim| (claim.key(), claim));
        let by_key: BTreeMap<String, dra::Claim> = by_key.collect();
        let mut imported = Self {
            format,
            replaced_entries: all - by_key.len(),
            claims: BTreeMap::new(),
            pods: BTreeMap::new(),
            is_incomplete: false,
        };
        for claim in by_key.into_values() {
            imported.add(claim);
        }
        Ok(imported)
    }

    fn add(&mut self, claim: dra::Claim) {
        if claim.uid == INCOMPLETE_POD {
            self.is_incomplete = true;
            return;
        }
        let key = ClaimKey {
            namespace: claim.namespace,
            name: claim.name,
        };
        let uid = ClaimUid::from(claim.uid);
        let pods: Vec<PodUid> = claim.pods.into_iter().flatten().map(PodUid::from).collect();
        let last = pods.last().cloned().unwrap_or_else(|| PodUid::from(""));
        for pod in pods {
            self.pods.entry(pod).or_default().push(PodClaim {
                name: String::new(),
                key: key.clone(),
                uid: uid.clone(),
            });
        }
        let drivers = claim.drivers.into_iter().flatten().map(|(name, driver)| {
            let skip = driver.skip_node_operations.into_iter().flatten().collect();
            let devices = driver.devices.into_iter().flatten().map(prepared).collect();
            (DriverName::from(name), skip, devices)
        });
        let claim = Claim::imported(key, uid.clone(), last, drivers);
        self.claims.insert(uid, claim);
    }

    /// Returns a pod with exactly the claims of the file. Known claims stay as they are. `None` if the pod holds nothing
    /// then.
    pub(crate) fn pod(&self, pod: &Pod) -> Option<Pod> {
        let listed = self.pods.get(&pod.uid).map_or(&[][..], Vec::as_slice);
        let is_listed = |claim: &PodClaim| listed.iter().any(|each| each.uid == claim.uid);
        let mut claims: Vec<PodClaim> = pod
            .claims
            .iter()
            .filter(|claim| is_listed(claim))
            .cloned()
            .collect();
        add(&mut claims, listed);
        let is_there = |name: &str| claims.iter().any(|claim| claim.name == name);
        let claim_uses = pod.claim_uses.iter().filter(|usage| is_there(&usage.claim));
        let claim_uses = claim_uses.cloned().collect();
        let has_something = !claims.is_empty() || !pod.allocations.is_empty() || pod.claims.is_empty();
        has_something.then(|| Pod {
            claims,
            claim_uses,
            ..pod.clone()
        })
    }

    /// Removes a claim.
    pub(crate) fn leave_out(&mut self, uid: &ClaimUid) {
        self.claims.remove(uid);
        self.pods.retain(|_, claims| {
            claims.retain(|claim| claim.uid != *uid);
            !claims.is_empty()
        });
    }

    pub(crate) fn report(&self, difference: Difference) -> ImportReport {
        ImportReport {
            format: self.format,
            difference,
            doubly_held: Vec::new(),
            incomplete: self.is_incomplete,
            undecodable: Vec::new(),
            replaced_entries: self.replaced_entries,
            claims: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Returns a pod of which only the claims are known.
    pub(crate) fn new_pod(&self, uid: &PodUid) -> Pod {
        Pod {
            uid: uid.clone(),
            name: PodName::default(),
            source: Source::Imported,
            fingerprint: 0,
            metadata: PodMetadata::default(),
            before_reboot: false,
            containers: Vec::new(),
            allocations: Vec::new(),
            claims: self.pods.get(uid).cloned().unwrap_or_default(),
            claim_uses: Vec::new(),
        }
    }

    /// Returns a pod with the claims of the file in addition to its own.
    pub(crate) fn pod_with_more(&self, pod: &Pod) -> Pod {
        let mut more = pod.clone();
        add(
            &mut more.claims,
            self.pods.get(&pod.uid).map_or(&[][..], Vec::as_slice),
        );
        more
    }
}

fn add(claims: &mut Vec<PodClaim>, listed: &[PodClaim]) {
    for claim in listed {
        if !claims.iter().any(|each| each.uid == claim.uid) {
            claims.push(claim.clone());
        }
    }
}

fn prepared(device: dra::Device) -> PreparedDevice {
    PreparedDevice {
        requests: device.requests.unwrap_or_default(),
        pool: device.pool,
        device: device.name,
        share: device.share_id,
        cdi_devices: device.cdi_devices.unwrap_or_default(),
    }
}

/// Returns the content of the mirror; `None` if there are no claims.
pub(crate) fn mirror(snapshot: &Snapshot) -> Result<Option<String>, LoadError> {
    let claims = snapshot.claims()?;
    if claims.is_empty() {
        return Ok(None);
    }
    let mut holders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    snapshot.pods(|pod, record| {
        for claim in record.claims {
            holders.entry(claim.uid).or_default().insert(pod.to_owned());
        }
    })?;
    let hidden = hidden(&claims, |uid| holders.contains_key(uid.as_str()));
    let claims = claims.into_iter().filter(|(uid, _)| !hidden.contains(uid));
    let claims = claims.map(|(_, claim)| {
        // A kubelet unprepares a claim only for a pod that is gone, so one must be listed.
        let pods = holders.remove(claim.uid.as_str());
        let is_held = pods.is_some();
        let pods = pods.unwrap_or_else(|| BTreeSet::from([claim.pod.as_str().to_owned()]));
        written(claim, pods, is_held)
    });
    let claims: Vec<dra::Claim> = claims.collect();
    Ok(Some(envelope::write(Some(&claims))))
}

/// Returns the claims to leave out. Of several entries of one name, readers keep only the last. So the file has one entry
/// per name: that of the claim with the highest priority.
fn hidden(claims: &BTreeMap<ClaimUid, Claim>, is_held: impl Fn(&ClaimUid) -> bool) -> BTreeSet<ClaimUid> {
    let mut chosen: BTreeMap<&ClaimKey, (Priority, &ClaimUid)> = BTreeMap::new();
    let mut hidden = BTreeSet::new();
    for (uid, claim) in claims {
        let this = (priority(claim, is_held(uid)), uid);
        let loser = match chosen.get(&claim.key) {
            Some((other, _)) if *other > this.0 => Some(this),
            _ => chosen.insert(&claim.key, this),
        };
        hidden.extend(loser.map(|(_, uid)| uid.clone()));
    }
    hidden
}

/// Priority of a claim among those of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Priority {
    /// An operator abandoned it.
    Abandoned,
    /// No pod on record holds it: it is being prepared or unprepared.
    Free,
    Held,
}

fn priority(claim: &Claim, is_held: bool) -> Priority {
    let mut preparations = claim.preparations.values();
    if is_held {
        Priority::Held
    } else if preparations.any(|each| each.state == PreparationState::Abandoned) {
        Priority::Abandoned
    } else {
        Priority::Free
    }
}

/// Returns the content of a file without claims.
pub(crate) fn empty() -> String {
    envelope::write(None)
}

/// Returns `true` if the file lists a driver, which a kubelet would then call. An abandoned preparation is left out if pods
/// use the claim again.
fn is_listed(preparation: &Preparation, is_held: bool) -> bool {
    match preparation.state {
        PreparationState::Unprepared => false,
        PreparationState::Abandoned => !is_held,
        PreparationState::Pending | PreparationState::Prepared => true,
    }
}

fn written(claim: Claim, pods: BTreeSet<String>, is_held: bool) -> dra::Claim {
    let drivers = claim.preparations.into_iter();
    let drivers = drivers.filter(|(_, preparation)| is_listed(preparation, is_held));
    let drivers = drivers.map(|(name, preparation)| {
        // A pending preparation is written without devices: readers treat one with devices as prepared.
        let is_pending = preparation.state == PreparationState::Pending;
        let devices: Vec<dra::Device> = preparation.devices.into_iter().map(device).collect();
        let skip: Vec<String> = preparation.skip.into_iter().collect();
        let driver = dra::Driver {
            devices: Some(devices).filter(|devices| !devices.is_empty() && !is_pending),
            skip_node_operations: Some(skip).filter(|skip| !skip.is_empty()),
        };
        (name.as_str().to_owned(), driver)
    });
    dra::Claim {
        uid: claim.uid.as_str().to_owned(),
        name: claim.key.name,
        namespace: claim.key.namespace,
        pods: Some(pods),
        drivers: Some(drivers.collect()),
    }
}

fn device(device: PreparedDevice) -> dra::Device {
    // A kubelet writes null instead of an empty list, too.
    let list = |texts: Vec<String>| Some(texts).filter(|texts| !texts.is_empty());
    dra::Device {
        pool: device.pool,
        name: device.device,
        share_id: device.share,
        requests: list(device.requests),
        cdi_devices: list(device.cdi_devices),
    }
}
