//! A list, and what becomes of it.

use tonic::{Status, Streaming};

/// The messages of a watch: the whole list, now and after each change.
#[derive(Debug)]
pub struct Watch<T> {
    first: Option<T>,
    updates: Streaming<T>,
}

impl<T> Watch<T> {
    /// Returns with the first message, which devlet sends at once.
    pub(crate) async fn new(mut updates: Streaming<T>) -> Result<Self, Status> {
        let first = updates.message().await?;
        Ok(Self { first, updates })
    }

    /// The next message; none once devlet has stopped.
    pub async fn message(&mut self) -> Result<Option<T>, Status> {
        match self.first.take() {
            Some(first) => Ok(Some(first)),
            None => self.updates.message().await,
        }
    }
}
