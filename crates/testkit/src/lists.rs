//! A list that goes to whoever watches it, again after each change.

use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::SendError;
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::events::{Event, tell};

/// The list, and what its streams are to do.
#[derive(Debug)]
pub(crate) struct Lists<D> {
    pub(crate) now: watch::Sender<Vec<D>>,
    /// Grows when the streams are to end.
    ends: watch::Sender<u64>,
    /// Lists that every stream is to send, whether or not anything has changed.
    flood: watch::Sender<Flood>,
}

/// Something that has a health.
pub(crate) trait Listed: Clone + Send + Sync + 'static {
    fn set_health(&mut self, healthy: bool);
}

/// So many lists, so many a second; 0 is as many as are taken.
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

    /// The command `flood`.
    pub(crate) fn flood(&self, text: &str) -> Result<(), String> {
        let (lists, per_second) = two_numbers(text).ok_or("flood LISTS PER_SECOND")?;
        self.flood.send_replace(Flood { lists, per_second });
        Ok(())
    }

    /// All lists from now on, as messages.
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
                tell(&Event::ListSent { devices: list.len() });
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

/// Lists in a row, in which all devices fall ill and recover; the last one is as before.
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
    tell(&Event::Flooded { lists: flood.lists });
    Ok(())
}

pub(crate) fn two_numbers(text: &str) -> Option<(u32, u32)> {
    let (one, other) = text.split_once(' ')?;
    Some((one.parse().ok()?, other.parse().ok()?))
}

/// The pause between things that happen so often; none for 0.
pub(crate) fn pause(per_second: u32) -> Option<tokio::time::Interval> {
    let period = Duration::from_secs(1).checked_div(per_second)?;
    Some(tokio::time::interval(period))
}
