//! Claims in the API of devlet. Their devices need no preparation, so that no driver has to run.

use devlet_agent::agent::Agent;
use devlet_agent::api;
use devlet_agent::config::Config;
use devlet_client::v1::admit_event::Event;
use devlet_client::{Client, Code, Status, v1};
use tempfile::TempDir;

/// A node and a client of its API.
struct Running {
    _root: TempDir,
    _agent: Agent,
    client: Client,
}

const POD: &str = "
metadata: {name: job, uid: pod-1}
spec:
  resourceClaims: [{name: mine, resourceClaimName: gpu}]
  containers:
  - {name: main, resources: {claims: [{name: mine}]}}
  - {name: log}
";

const CLAIM: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: gpu, uid: claim-1}
status:
  reservedFor: [{resource: pods, name: job, uid: pod-1}]
  allocation: {devices: {results: [
    {request: big, driver: gpu.acme.com, pool: node, device: gpu-0, skipNodeOperations: ['*']}]}}
";

/// Returns [`CLAIM`] with a device that its driver must prepare.
fn claim_of_a_driver() -> String {
    CLAIM.replace(", skipNodeOperations: ['*']", "")
}

impl Running {
    async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut config = Config::new(root.path());
        change(&mut config);
        let (agent, report) = Agent::start(config).await.unwrap();
        api::serve(&agent, &report).unwrap();
        let client = Client::connect(agent.config().api_socket()).await.unwrap();
        Self {
            _root: root,
            _agent: agent,
            client,
        }
    }

    /// Admits a pod, and returns the result and the events of waiting.
    async fn admit(&self, texts: &[&str], wait_ms: u64) -> (Result<v1::Pod, Status>, Vec<v1::Waiting>) {
        let mut texts = texts.iter().map(|text| (*text).to_owned());
        let request = v1::AdmitRequest {
            manifest: texts.next().unwrap_or_default(),
            wait_ms: Some(wait_ms),
            manifests: texts.collect(),
            names: Vec::new(),
        };
        let mut waits = Vec::new();
        let mut events = match self.client.admit(request).await {
            Ok(events) => events,
            Err(status) => return (Err(status), waits),
        };
        loop {
            match events.message().await {
                Ok(event) => match event.unwrap().event {
                    Some(Event::Admitted(pod)) => return (Ok(pod), waits),
                    Some(Event::Waiting(waiting)) => waits.push(waiting),
                    None => {}
                },
                Err(status) => return (Err(status), waits),
            }
        }
    }

    async fn claims(&self, claim: &str) -> Result<Vec<v1::Claim>, Status> {
        let claim = claim.to_owned();
        Ok(self
            .client
            .list_claims(v1::ListClaimsRequest { claim })
            .await?
            .claims)
    }

    async fn drivers(&self, driver: &str) -> Result<Vec<v1::Driver>, Status> {
        let driver = driver.to_owned();
        let drivers = self
            .client
            .list_drivers(v1::ListDriversRequest { driver })
            .await?;
        Ok(drivers.drivers)
    }

    async fn might_need_unprepare(&self, pod: &str) -> bool {
        let pod = pod.to_owned();
        let request = v1::MightNeedUnprepareRequest { pod };
        let answer = self.client.might_need_unprepare(request).await.unwrap();
        answer.might_need_unprepare
    }

    async fn remove(&self, pod: &str, abandon: &[&str]) -> Result<v1::RemovePodResponse, Status> {
        let request = v1::RemovePodRequest {
            pod: pod.to_owned(),
            wait_ms: Some(60_000),
            abandon_drivers: abandon.iter().map(|driver| (*driver).to_owned()).collect(),
        };
        self.client.remove_pod(request).await
    }
}

/// Returns the claim without its age, which changes between answers.
fn ageless(claim: v1::Claim) -> v1::Claim {
    v1::Claim { age_ms: 0, ..claim }
}

#[tokio::test]
async fn a_pod_is_admitted_with_its_claims_shown_and_removed() {
    let node = Running::start(|_| {}).await;
    let (pod, _) = node.admit(&[CLAIM, POD], 60_000).await;
    let pod = pod.unwrap();
    assert_eq!(pod.claims.len(), 1);
    assert_eq!(pod.claims[0].name, "mine");
    let claim = ageless(pod.claims[0].claim.clone().unwrap());
    assert_eq!(claim.phase(), v1::ClaimPhase::Prepared);
    assert_eq!(claim.pods[0].name, "job");
    assert_eq!(claim.drivers[0].allocated[0].device, "gpu-0");
    assert_eq!(claim.drivers[0].skip_node_operations, ["*"]);
    let containers: Vec<&str> = pod.containers.iter().map(|each| each.name.as_str()).collect();
    assert_eq!(containers, ["main", "log"]);

    // All ways to name the pod.
    for name in ["", "gpu", "default/gpu", "claim-1", "uid:claim-1"] {
        let named = node.claims(name).await.unwrap();
        let named: Vec<v1::Claim> = named.into_iter().map(ageless).collect();
        assert_eq!(named, std::slice::from_ref(&claim), "{name}");
    }
    let unknown = node.claims("other/gpu").await.unwrap_err();
    assert_eq!(
        (unknown.code(), unknown.message()),
        (Code::NotFound, "no such claim on this node: other/gpu")
    );
    let drivers = node.drivers("").await.unwrap();
    assert_eq!(
        (&*drivers[0].name, drivers[0].claims, drivers.len()),
        ("gpu.acme.com", 1, 1)
    );
    assert_eq!(
        node.drivers("nic.acme.com").await.unwrap_err().code(),
        Code::NotFound
    );
    let listed = node
        .client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap()
        .pods;
    assert_eq!(listed[0].claims.len(), 1);
    assert_eq!(listed[0].claims[0].name, "mine");
    assert_eq!(listed[0].claims[0].claim.clone().map(ageless), Some(claim));
    assert_eq!(listed[0].containers.len(), 1, "only those that use something");
    let status = node.client.status(v1::StatusRequest {}).await.unwrap();
    assert_eq!((status.claims, status.claims_waiting), (1, 0));

    for name in ["job", "pod-1"] {
        assert!(node.might_need_unprepare(name).await, "{name}");
    }
    let refused = node.remove("job", &["nic.acme.com"]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(
        refused.message(),
        "pod default/job (pod-1) does not have a claim with devices of driver nic.acme.com, only of gpu.acme.com"
    );
    node.remove("job", &[]).await.unwrap();
    assert!(!node.might_need_unprepare("pod-1").await);
    assert!(!node.might_need_unprepare("never-seen").await);
    assert_eq!(node.remove("job", &[]).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_driver_that_is_not_there_is_waited_for_by_name() {
    let node = Running::start(|_| {}).await;
    let (refused, waits) = node.admit(&[POD, &claim_of_a_driver()], 200).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded);
    assert!(
        refused
            .message()
            .contains("ResourceClaim default/gpu: DRA driver gpu.acme.com is not registered"),
        "{refused}"
    );
    assert_eq!(waits[0].driver, "gpu.acme.com");
    assert_eq!(
        waits[0].awaited,
        "a plugin of DRA driver gpu.acme.com, for ResourceClaim default/gpu"
    );
    assert!(!node.might_need_unprepare("pod-1").await, "nothing has happened");
    assert_eq!(node.claims("").await.unwrap(), []);
}

#[tokio::test]
async fn a_claim_that_was_allocated_anew_under_a_pod_is_noticed() {
    let node = Running::start(|_| {}).await;
    node.admit(&[POD, CLAIM], 60_000).await.0.unwrap();
    // The same devices, reserved for more pods and with more fields.
    let shared = CLAIM.replace(
        "reservedFor: [",
        "reservedFor: [{resource: pods, name: b, uid: b}, ",
    );
    node.admit(&[POD, &shared], 60_000).await.0.unwrap();
    let moved = CLAIM.replace("gpu-0", "gpu-1");
    let refused = node.admit(&[POD, &moved], 60_000).await.0.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(refused.message().contains("devlet remove "), "{refused}");
}

#[tokio::test]
async fn two_claims_with_one_uid_are_told_apart() {
    let node = Running::start(|_| {}).await;
    let other = CLAIM.replace("name: gpu,", "name: nic,");
    let refused = node.admit(&[POD, CLAIM, &other], 60_000).await.0.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(
        refused.message().contains(
            "ResourceClaims default/gpu and default/nic have the same UID, claim-1; give each its own"
        ),
        "{refused}"
    );
    // The other claim came with another pod.
    node.admit(&[POD, CLAIM], 60_000).await.0.unwrap();
    let pod = POD.replace("resourceClaimName: gpu", "resourceClaimName: nic");
    let pod = pod.replace("name: job, uid: pod-1", "name: other, uid: pod-2");
    let other = other.replace("name: job, uid: pod-1", "name: other, uid: pod-2");
    let refused = node.admit(&[&pod, &other], 60_000).await.0.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert_eq!(
        refused.message(),
        "ResourceClaim default/gpu has the same UID, claim-1; the UID of ResourceClaim default/nic must be another one"
    );
}

#[tokio::test]
async fn errors_in_manifests_are_reported_and_limited() {
    let node = Running::start(|config| config.limits.manifest_bytes = 2000).await;
    let refused = async |texts: &[&str]| {
        let status = node.admit(texts, 60_000).await.0.unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let (code, message) = refused(&[POD]).await;
    assert_eq!(code, Code::InvalidArgument);
    assert!(message.contains("add it with its status"), "{message}");
    let (code, message) = refused(&[POD, "kind: Secret"]).await;
    assert_eq!(
        (code, &*message),
        (
            Code::InvalidArgument,
            "manifest 2, line 1, column 7: expected a v1 Pod or ResourceClaim, found v1 Secret"
        )
    );
    let long = format!("# {}\n{CLAIM}", "x".repeat(2000 - POD.len()));
    let (code, message) = refused(&[POD, &long]).await;
    assert_eq!(code, Code::ResourceExhausted);
    assert!(message.contains("limits.manifestBytes allows 2000"), "{message}");
}
