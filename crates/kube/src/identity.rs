//! The user that the API server sees, for `status`.

use devlet_agent::agent::Agent;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::Api;
use kube::api::PostParams;

use crate::connection::Connection;
use crate::task::Task;

/// Asks for the user at the start and after each change of the credentials.
pub(crate) async fn run(agent: Agent, connection: Connection) {
    let mut task = Task::new("identity", &agent);
    let mut clients = connection.subscribe();
    let stop = agent.stopping();
    loop {
        clients.mark_unchanged();
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
        let user = review.status.and_then(|status| status.user_info);
        let name = user.and_then(|user| user.username).unwrap_or_default();
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
