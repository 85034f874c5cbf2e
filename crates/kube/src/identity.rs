//! The API server, and the user that it sees, for `status`.

use devlet_agent::agent::Agent;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::watch;

use crate::connection::Connection;
use crate::task::Task;

/// Asks for the user at the start and after each change of the credentials. The name is published in `user`.
pub(crate) async fn run(agent: Agent, connection: Connection, user: watch::Sender<Option<String>>) {
    let mut task = Task::new("identity", &agent);
    let mut clients = connection.subscribe();
    let stop = agent.stopping();
    loop {
        clients.mark_unchanged();
        let server = connection.server();
        agent.cluster().update(|state| {
            if let Some(connection) = &mut state.connection {
                connection.server = server;
            }
        });
        let review = || {
            connection.call(async |client| {
                let reviews: Api<SelfSubjectReview> = Api::all(client);
                let empty = SelfSubjectReview::default();
                reviews.create(&PostParams::default(), &empty).await
            })
        };
        let Some(review) = task.retry(review).await else {
            return;
        };
        let info = review.status.and_then(|status| status.user_info);
        let name = info.and_then(|info| info.username).unwrap_or_default();
        user.send_replace(Some(name.clone()));
        agent.cluster().update(|state| {
            if let Some(connection) = &mut state.connection {
                connection.identity = name;
            }
        });
        tokio::select! {
            changed = clients.changed() => if changed.is_err() {
                return;
            },
            () = stop.cancelled() => return,
        }
    }
}
