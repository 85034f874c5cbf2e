//! The rights to call the API of a devlet beside a kubelet.

use devlet_client::shield_v1 as v1;
use devlet_client::shield_v1::shield_server::Shield as _;
use devlet_uds::PeerCred;
use tonic::{Code, Request};

use super::*;
use crate::config::Shield;

#[tokio::test(flavor = "multi_thread")]
async fn only_root_and_devlets_own_user_may_change_leases() {
    let root = tempfile::tempdir().unwrap();
    let mut config = Config::new(root.path().join("devlet"));
    config.access.admit = vec![1002];
    config.access.own_uid = rustix::process::geteuid().as_raw();
    config.shield = Some(Shield::new(root.path().join("kubelet"), "devlet"));
    let (agent, report) = Agent::start(config).await.unwrap();
    let service = DevletService::new(agent.clone(), &report);
    for (uid, is_allowed) in [(0, true), (1002, false), (1003, false)] {
        let peer = PeerCred {
            uid,
            gid: uid,
            pid: Some(1),
        };
        fn from<T>(peer: &PeerCred, message: T) -> Request<T> {
            let mut request = Request::new(message);
            request.extensions_mut().insert(*peer);
            request
        }
        let starting = v1::ContainerStartingRequest::default();
        let answers = [
            service.container_starting(from(&peer, starting)).await.map(drop),
            service
                .container_ended(from(&peer, v1::ContainerEndedRequest::default()))
                .await
                .map(drop),
            service.adopt(from(&peer, v1::AdoptRequest {})).await.map(drop),
            service.leave(from(&peer, v1::LeaveRequest {})).await.map(drop),
        ];
        for answer in answers {
            let is_refused = answer.is_err_and(|status| status.code() == Code::PermissionDenied);
            assert_eq!(is_refused, !is_allowed, "{uid}");
        }
    }
    agent.stop().await.unwrap();
}
