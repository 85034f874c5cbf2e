//! Decoding of long messages: one at a time, on a blocking thread, followed by a cooldown of the sender.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinError;

/// Messages of at least this many bytes are long: decoding one inline would delay other tasks of the runtime.
pub(crate) const LONG_MESSAGE: usize = 64 << 10;

/// Cooldown of the sender, as a multiple of the decode time: a sender of long messages gets a fifth of a core.
const COOLDOWN_FACTOR: u32 = 4;
const MAX_COOLDOWN: Duration = Duration::from_secs(30);

/// Returns the cooldown after a decode of this duration.
pub(crate) fn cooldown(took: Duration) -> Duration {
    (took * COOLDOWN_FACTOR).min(MAX_COOLDOWN)
}

/// Decodes long messages.
#[derive(Debug, Clone)]
pub(crate) struct LongDecoder(Arc<Semaphore>);

impl Default for LongDecoder {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl LongDecoder {
    /// Runs `decode` to its end, even if the caller is dropped. Returns its result and the sender's cooldown, during which the
    /// caller must not read the next message.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        decode: impl FnOnce() -> T + Send + 'static,
    ) -> Result<(T, Duration), JoinError> {
        let permit = Arc::clone(&self.0).acquire_owned().await;
        tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            let decoded = decode();
            drop(permit);
            (decoded, cooldown(started.elapsed()))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn decodes_run_one_at_a_time_and_to_their_end() {
        let decoder = LongDecoder::default();
        let (enter, entered) = mpsc::channel();
        let (proceed, may_proceed) = mpsc::channel::<()>();
        let first = tokio::spawn({
            let (decoder, enter) = (decoder.clone(), enter.clone());
            async move {
                let decode = move || {
                    enter.send(1).unwrap();
                    may_proceed.recv().unwrap();
                };
                decoder.run(decode).await
            }
        });
        assert_eq!(
            tokio::task::spawn_blocking(move || (entered.recv().unwrap(), entered))
                .await
                .unwrap()
                .0,
            1
        );
        let mut second = std::pin::pin!(decoder.run(move || drop(enter)));
        assert!(futures_util::poll!(&mut second).is_pending());
        first.abort();
        assert!(
            futures_util::poll!(&mut second).is_pending(),
            "the first has not ended"
        );
        proceed.send(()).unwrap();
        second.await.unwrap();
    }
}
