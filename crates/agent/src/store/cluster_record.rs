//! The Node and cluster whose pods are on record.

use super::completion::Completion;
use super::error::WriteError;
use super::row::Row;
use super::{Store, done};

/// The Node and cluster that an embedder's pods belong to.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ClusterRecord {
    /// Name of the Node object.
    #[prost(string, tag = "1")]
    pub node: String,
    /// URL of the API server.
    #[prost(string, tag = "2")]
    pub server: String,
}

impl Store {
    /// Returns the Node and cluster whose pods are on record.
    pub fn cluster(&self) -> Option<ClusterRecord> {
        self.shared.lock().cluster.clone()
    }

    /// Records the Node and cluster whose pods are on record. Returns when that is on disk.
    pub async fn record_cluster(&self, cluster: ClusterRecord) -> Result<(), WriteError> {
        let rows = vec![Row::Cluster(cluster.clone())];
        let change = Some((rows, Completion::Cluster(cluster)));
        done(self.begin(|_| Ok::<_, WriteError>(change))?).await
    }
}
