//! A list and watch of objects, with errors that the caller sees.
//!
//! Every error leads to a new list: a restored API server may be at an older revision, which a watch cannot notice. Only a
//! watch that the API server ends by itself is resumed. A list page and the start of a watch have deadlines; a watch
//! without events and bookmarks for [`IDLE_TIMEOUT`] counts as broken.

use std::fmt::Debug;
use std::time::Duration;

use devlet_agent::agent::Agent;
use futures_util::{Stream, TryStreamExt as _};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::connection::{CALL_TIMEOUT, CallError, Connection};
use crate::task::Task;

/// Objects on a page of a list.
const PAGE: u32 = 500;

/// Time after which a silent watch counts as broken. API servers send a bookmark each minute.
const IDLE_TIMEOUT: Duration = Duration::from_secs(150);

/// Duration of a watch. An earlier end is an error: a broken connection looks like an end, and what follows may be another
/// revision.
const WATCH_SECONDS: u32 = 290;

const SHORT: &str = "the watch ended early";

const SILENT: &str = "the watch was silent for too long: the connection to the API server may be broken";

/// A change of the watched objects.
#[derive(Debug)]
pub(crate) enum Change<K> {
    /// A list begins. Objects that do not follow as [`Change::Present`] before [`Change::ListEnd`] are gone.
    ListBegin,
    /// The list is complete.
    ListEnd,
    /// An object of the list, or one that was added or modified.
    Present(K),
    /// An object that was deleted, in its last state.
    Deleted(K),
}

/// The reason why a watch ended.
enum Ended {
    /// By the API server, at this resource version.
    Cleanly(String),
    /// The API server is another one.
    Moved,
    /// The receiver of changes has gone.
    Closed,
}

/// Lists and watches the objects with these fields, and sends every change, until the node stops or the receiver is gone.
pub(crate) async fn follow<K>(
    name: &'static str,
    agent: Agent,
    connection: Connection,
    fields: String,
    changes: mpsc::Sender<Change<K>>,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let stop = agent.stopping();
    let watch = Watch {
        connection,
        fields,
        changes,
        idle_timeout: IDLE_TIMEOUT,
    };
    let mut task = Task::new(name, &agent);
    let watching = async {
        loop {
            let error = match watch.list_and_watch(&mut task).await {
                Ok(()) => return,
                Err(error) => error,
            };
            let pause = task.failed(&error);
            if !task.pause(pause).await {
                return;
            }
        }
    };
    tokio::select! {
        () = watching => {}
        () = stop.cancelled() => {}
    }
}

struct Watch<K> {
    connection: Connection,
    fields: String,
    changes: mpsc::Sender<Change<K>>,
    idle_timeout: Duration,
}

impl<K> Watch<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Lists, and watches from there. Returns `Ok` if the receiver of changes is gone.
    async fn list_and_watch(&self, task: &mut Task) -> Result<(), CallError> {
        loop {
            let endpoint = self.connection.endpoint();
            let Some(mut version) = self.list().await? else {
                return Ok(());
            };
            task.progressed();
            loop {
                let watching = self.watch(&version, task);
                let ended = tokio::select! {
                    ended = watching => ended?,
                    () = self.connection.moved(&endpoint) => Ended::Moved,
                };
                match ended {
                    Ended::Cleanly(last) => version = last,
                    Ended::Moved => break,
                    Ended::Closed => return Ok(()),
                }
            }
        }
    }

    /// Returns the resource version of the list, or `None` if the receiver of changes is gone.
    async fn list(&self) -> Result<Option<String>, CallError> {
        if self.changes.send(Change::ListBegin).await.is_err() {
            return Ok(None);
        }
        let mut page = ListParams::default().fields(&self.fields).limit(PAGE);
        loop {
            let list = self
                .connection
                .call(async |client| Api::<K>::all(client).list(&page).await);
            let list = list.await?;
            for object in list.items {
                if self.changes.send(Change::Present(object)).await.is_err() {
                    return Ok(None);
                }
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => {
                    let sent = self.changes.send(Change::ListEnd).await;
                    return Ok(sent
                        .ok()
                        .map(|()| list.metadata.resource_version.unwrap_or_default()));
                }
            }
        }
    }

    async fn watch(&self, version: &str, task: &mut Task) -> Result<Ended, CallError> {
        let params = WatchParams::default().fields(&self.fields).timeout(WATCH_SECONDS);
        let api = Api::<K>::all(self.connection.client()?);
        let started = timeout(CALL_TIMEOUT, api.watch(&params, version)).await;
        let events = started.map_err(|_| CallError::Timeout)?;
        let events = events.map_err(|error| self.connection.failed(error))?;
        task.recovered();
        let began = Instant::now();
        let ended = self.forward(events, version.to_owned(), task).await?;
        // The clocks of both sides differ a little.
        let is_early = began.elapsed() + CALL_TIMEOUT < Duration::from_secs(WATCH_SECONDS.into());
        match ended {
            Ended::Cleanly(_) if is_early => Err(CallError::Transport(SHORT.to_owned())),
            ended => Ok(ended),
        }
    }

    async fn forward(
        &self,
        events: impl Stream<Item = Result<WatchEvent<K>, kube::Error>>,
        mut version: String,
        task: &mut Task,
    ) -> Result<Ended, CallError> {
        tokio::pin!(events);
        loop {
            let event = timeout(self.idle_timeout, events.try_next()).await;
            let event = event.map_err(|_| CallError::Transport(SILENT.to_owned()))?;
            let change = match event.map_err(|error| self.connection.failed(error))? {
                None => return Ok(Ended::Cleanly(version)),
                Some(WatchEvent::Error(status)) => {
                    return Err(self.connection.failed(kube::Error::Api(status)));
                }
                Some(WatchEvent::Bookmark(bookmark)) => {
                    version = bookmark.metadata.resource_version;
                    task.succeeded();
                    continue;
                }
                Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => Change::Present(object),
                Some(WatchEvent::Deleted(object)) => Change::Deleted(object),
            };
            if let Change::Present(object) | Change::Deleted(object) = &change {
                version = object.resource_version().unwrap_or(version);
            }
            task.succeeded();
            if self.changes.send(change).await.is_err() {
                return Ok(Ended::Closed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use k8s_openapi::api::core::v1::Node;

    use super::*;
    use crate::connection::tests::{agent, unused};

    #[tokio::test]
    async fn a_silent_watch_is_an_error() {
        let (agent, _root) = agent().await;
        let watch = Watch::<Node> {
            connection: unused().await,
            fields: String::new(),
            changes: mpsc::channel(1).0,
            idle_timeout: Duration::ZERO,
        };
        let mut task = Task::new("node", &agent);
        let ended = watch.forward(stream::pending(), String::new(), &mut task).await;
        let error = ended.err().unwrap();
        assert_eq!(error, CallError::Transport(SILENT.to_owned()));
        agent.stop().await.unwrap();
    }
}
