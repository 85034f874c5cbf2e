use std::collections::BTreeSet;
use std::sync::Mutex;

use devlet_core::dra::claims::{AllocatedDevice, AllocationResult};
use devlet_core::{ClaimReference, ContainerKind, ContainerRequest, PodMetadata, PodName, Source};

use super::*;

/// A keeper of claims that remembers what it was asked.
#[derive(Default)]
struct Keeper {
    claims: Vec<ResourceClaim>,
    asked: Mutex<Vec<String>>,
}

impl ClaimSource for Keeper {
    type Error = &'static str;

    async fn claim(&self, key: &ClaimKey) -> Result<ResourceClaim, &'static str> {
        self.asked.lock().unwrap().push(key.to_string());
        tokio::task::yield_now().await;
        let found = self.claims.iter().find(|claim| claim.key == *key);
        found.cloned().ok_or("the API server is away")
    }
}

fn claim(name: &str) -> ResourceClaim {
    let result = AllocationResult {
        driver: "gpu.acme.com".into(),
        device: AllocatedDevice {
            request: "gpu".into(),
            pool: "node".into(),
            device: name.to_owned(),
            share: None,
            admin_access: false,
        },
        skip: Vec::new(),
    };
    ResourceClaim {
        key: ClaimKey {
            namespace: "default".into(),
            name: name.into(),
        },
        uid: format!("uid-{name}").into(),
        controller: None,
        requests: vec!["gpu".into()],
        reserved_for: vec![Consumer {
            resource: "pods".into(),
            name: "job".into(),
            uid: "pod-1".into(),
            ..Consumer::default()
        }],
        allocation: Some(vec![result]),
    }
}

fn pod(claims: &[(&str, ClaimOrigin)]) -> UnresolvedPod {
    let reference = |(name, _): &(&str, ClaimOrigin)| ClaimReference {
        claim: (*name).to_owned(),
        request: None,
    };
    let container = ContainerRequest {
        name: "main".into(),
        kind: ContainerKind::App,
        wants: BTreeMap::new(),
        claims: claims.iter().map(reference).collect(),
    };
    let claim = |(name, origin): &(&str, ClaimOrigin)| PodResourceClaim {
        name: (*name).to_owned(),
        origin: origin.clone(),
    };
    UnresolvedPod {
        request: PodRequest {
            uid: "pod-1".into(),
            name: PodName {
                namespace: "default".into(),
                name: "job".into(),
            },
            source: Source::Api,
            fingerprint: 1,
            metadata: PodMetadata::default(),
            containers: vec![container],
            claims: Vec::new(),
        },
        claims: claims.iter().map(claim).collect(),
        extended: None,
        group: None,
    }
}

fn named(name: &str) -> ClaimOrigin {
    ClaimOrigin::Named(name.to_owned())
}

#[tokio::test]
async fn each_claim_is_asked_for_once_and_those_that_are_left_out_never() {
    let keeper = Keeper {
        claims: vec![claim("a"), claim("b")],
        ..Keeper::default()
    };
    let pod = pod(&[
        ("one", named("a")),
        ("two", named("b")),
        ("same", named("a")),
        ("none", ClaimOrigin::Omitted),
    ]);
    let request = pod.resolve(&keeper).await.unwrap();
    let asked: BTreeSet<String> = keeper.asked.lock().unwrap().iter().cloned().collect();
    assert_eq!(asked.len(), keeper.asked.lock().unwrap().len());
    assert_eq!(asked.into_iter().collect::<Vec<_>>(), ["default/a", "default/b"]);
    let names: Vec<&str> = request.claims.iter().map(|each| each.name.as_str()).collect();
    assert_eq!(names, ["one", "two", "same"]);
    let used: Vec<&str> = request.containers[0]
        .claims
        .iter()
        .map(|each| &*each.claim)
        .collect();
    assert_eq!(used, ["one", "two", "same"]);
}

#[tokio::test]
async fn a_keeper_that_has_no_answer_is_quoted() {
    let keeper = Keeper {
        claims: vec![claim("a")],
        ..Keeper::default()
    };
    let refused = pod(&[("one", named("a")), ("two", named("b"))])
        .resolve(&keeper)
        .await;
    assert_eq!(
        refused.unwrap_err().to_string(),
        "fetch ResourceClaim b: the API server is away"
    );
}

#[tokio::test]
async fn a_name_that_leads_nowhere_is_told_before_anybody_is_asked() {
    let keeper = Keeper::default();
    let refused = pod(&[("one", named("a")), ("two", ClaimOrigin::NotCreated)])
        .resolve(&keeper)
        .await;
    assert!(refused.unwrap_err().to_string().contains("not created yet"));
    assert!(keeper.asked.lock().unwrap().is_empty());
}
