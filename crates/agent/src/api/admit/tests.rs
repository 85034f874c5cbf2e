use devlet_core::dra::claims::ClaimKey;
use futures_util::{FutureExt as _, StreamExt as _};

use super::*;
use crate::config::Config;
use crate::manifest;

#[test]
fn the_awaited_event_completes_a_sentence() {
    let reason = ReserveError::NotServed {
        resource: "acme.com/gpu".into(),
        last: None,
    };
    let event = waiting(&reason, Duration::from_millis(1500));
    assert_eq!(event.awaited, "a plugin that offers acme.com/gpu");
    assert_eq!(event.reason, "no device plugin offers acme.com/gpu");
    assert_eq!(event.resource, "acme.com/gpu");
    assert_eq!(event.waited_ms, 1500);
}

async fn parse(service: &DevletService, bytes: usize, wait: Duration) -> Result<PodRequest, Status> {
    let note = "x".repeat(bytes);
    let metadata = format!("metadata: {{name: plain, annotations: {{note: {note}}}}}");
    let text = format!("{metadata}\nspec: {{containers: [{{name: main}}]}}");
    let name = String::new();
    service
        .parse(vec![NamedText { name, text }], Instant::now() + wait)
        .await
}

const SHORT: usize = 1 << 10;
const LONG: usize = 512 << 10;
const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_long_manifest_does_not_delay_other_calls() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let service = DevletService::new(agent.clone(), &report);
    // Each is polled once, on the only thread.
    assert!(parse(&service, SHORT, SOON).now_or_never().is_some());
    let mut long = Box::pin(parse(&service, LONG, SOON));
    assert!((&mut long).now_or_never().is_none());
    assert!(long.await.is_ok());
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_long_manifest_waits_only_while_another_is_parsed() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let service = DevletService::new(agent.clone(), &report);
    for _ in 0..5 {
        // Without any time to wait for its turn.
        assert!(parse(&service, LONG, Duration::ZERO).await.is_ok());
    }
    let other = service.parsing.clone().acquire_owned().await.unwrap();
    assert!(parse(&service, SHORT, SOON).await.is_ok());
    let late = parse(&service, LONG, Duration::ZERO).await.unwrap_err();
    assert_eq!(late.code(), tonic::Code::DeadlineExceeded);
    assert_eq!(late.message(), LONG_MANIFEST);
    let mut waits = Box::pin(parse(&service, LONG, SOON));
    assert!((&mut waits).now_or_never().is_none());
    drop(other);
    assert!(waits.await.is_ok());
    agent.stop().await.unwrap();
}

#[test]
fn an_admission_ends_with_its_answer() {
    let event = |event| v1::AdmitEvent { event: Some(event) };
    let waiting = event(Event::Waiting(v1::Waiting::default()));
    let admitted = event(Event::Admitted(v1::Pod::default()));
    for last in [Ok(admitted), Err(Status::aborted("no"))] {
        let (sender, receiver) = mpsc::channel(1);
        let mut events = Box::pin(until_admitted(waiting.clone(), receiver));
        let mut next = || events.next().now_or_never();
        assert!(matches!(next(), Some(Some(Ok(event))) if event == waiting));
        assert!(next().is_none());
        sender.try_send(last.clone()).unwrap();
        assert_eq!(next().flatten().unwrap().ok(), last.ok());
        // Although the channel is still open.
        assert!(matches!(next(), Some(None)));
        assert!(sender.is_closed());
    }
}

/// A source with one claim, which pod `job` may use.
#[derive(Debug)]
struct OneClaim;

impl manifest::ClaimSource for OneClaim {
    type Error = String;

    async fn claim(&self, key: &ClaimKey) -> Result<manifest::ResourceClaim, String> {
        if key.name != "known" {
            return Err(format!("{} is not found", key.name));
        }
        let object = serde_json::json!({
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": "claim-1"},
            "status": {"reservedFor": [{"resource": "pods", "name": "job", "uid": "pod-1"}], "allocation": {}},
        });
        let object: manifest::ClaimObject = serde_json::from_value(object).unwrap();
        object
            .try_into()
            .map_err(|invalid: manifest::InvalidManifest| invalid.to_string())
    }
}

#[tokio::test]
async fn claims_that_are_not_among_the_manifests_are_looked_up() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let service = DevletService::new(agent.clone(), &report);
    let parse = async |claim: &str| {
        let pod = format!(
            "metadata: {{name: job, uid: pod-1}}\nspec:\n  resourceClaims: [{{name: gpu, resourceClaimName: {claim}}}]\n  \
             containers: [{{name: main}}]"
        );
        let given = "kind: ResourceClaim\nmetadata: {name: given, uid: claim-2}\n\
                     status: {reservedFor: [{resource: pods, name: job}], allocation: {}}";
        let texts = [pod.as_str(), given].map(|text| NamedText {
            name: "job.yaml".to_owned(),
            text: text.to_owned(),
        });
        let parsed = service.parse(texts.into(), Instant::now() + SOON).await;
        parsed
            .map(|request| request.claims[0].claim.uid.to_string())
            .map_err(|status| status.message().to_owned())
    };
    let refused = parse("known").await.unwrap_err();
    assert!(refused.contains("is not among the manifests"), "{refused}");
    agent.set_claim_source(std::sync::Arc::new(OneClaim));
    assert_eq!(parse("known").await, Ok("claim-1".to_owned()));
    assert_eq!(parse("given").await, Ok("claim-2".to_owned()));
    let refused = parse("other").await.unwrap_err();
    assert!(
        refused.contains("fetch ResourceClaim other: other is not found"),
        "{refused}"
    );
    agent.stop().await.unwrap();
}
