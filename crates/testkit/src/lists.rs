//! A list that is sent to all watchers, again after each change.

use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::SendError;
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::events::{Event, emit};

/// The list, and the commands for its streams.
#[derive(Debug)]
pub(crate) struct Lists<D> {
    pub(crate) now: watch::Sender<Vec<D>>,
    /// Incremented to end all streams.
    ends: watch::Sender<u64>,
    /// Lists that every stream sends, even if nothing has changed.
    flood: watch::Sender<Flood>,
}

/// A list entry with a health.
pub(crate) trait Listed: Clone + Send + Sync + 'static {
    fn set_health(&mut self, healthy: bool);
}

/// Number of lists, and lists per second; 0 for no rate limit.
#[derive(Debug, Clone, Copy, Default)]
struct Flood {
    lists: u32,
    per_second: u32,
}

pub(crate) type Stream<T> = ReceiverStream<Result<T, Status>>;

impl<D: Listed> Lists<D> {
    pub(crate) fn new(first: Vec<D>) -> Self {
        Self {
            now: watch::Sender::new(first),
            ends: watch::Sender::new(0),
            flood: watch::Sender::new(Flood::default()),
        }
    }

    pub(crate) fn end_streams(&self) {
        self.ends.send_modify(|number| *number += 1);
    }

    /// Executes the command `flood`.
    pub(crate) fn flood(&self, text: &str) -> Result<(), String> {
        let (lists, per_second) = two_numbers(text).ok_or("flood LISTS PER_SECOND")?;
        self.flood.send_replace(Flood { lists, per_second });
        Ok(())
    }

    /// Returns a stream of the current list and all later ones, as messages.
    pub(crate) fn stream<T: Send + 'static>(
        &self,
        message: impl Fn(&[D]) -> T + Send + Sync + 'static,
    ) -> Stream<T> {
        let mut lists = self.now.subscribe();
        let mut ends = self.ends.subscribe();
        let mut floods = self.flood.subscribe();
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let list = lists.borrow_and_update().clone();
                if sender.send(Ok(message(&list))).await.is_err() {
                    return;
                }
                emit(&Event::ListSent { devices: list.len() });
                tokio::select! {
                    _ = lists.changed() => {}
                    _ = ends.changed() => return,
                    _ = floods.changed() => {
                        let flood = *floods.borrow_and_update();
                        if send_flood(flood, list, &message, &sender).await.is_err() {
                            return;
                        }
                    }
                    () = sender.closed() => return,
                }
            }
        });
        ReceiverStream::new(receiver)
    }
}

/// Sends lists in which the health of all devices alternates. The last list is equal to the first.
async fn send_flood<D: Listed, T>(
    flood: Flood,
    mut list: Vec<D>,
    message: impl Fn(&[D]) -> T,
    sender: &Sender<Result<T, Status>>,
) -> Result<(), SendError<Result<T, Status>>> {
    let mut pause = pause(flood.per_second);
    for left in (0..flood.lists).rev() {
        if let Some(pause) = &mut pause {
            pause.tick().await;
        }
        list.iter_mut()
            .for_each(|device| device.set_health(left % 2 == 0));
        sender.send(Ok(message(&list))).await?;
    }
    emit(&Event::Flooded { lists: flood.lists });
    Ok(())
}

pub(crate) fn two_numbers(text: &str) -> Option<(u32, u32)> {
    let (one, other) = text.split_once(' ')?;
    Some((one.parse().ok()?, other.parse().ok()?))
}

/// Returns the interval for this rate; `None` for 0.
pub(crate) fn pause(per_second: u32) -> Option<tokio::time::Interval> {
    let period = Duration::from_secs(1).checked_div(per_second)?;
    Some(tokio::time::interval(period))
}
