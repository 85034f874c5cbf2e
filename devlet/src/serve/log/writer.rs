//! A log writer that never blocks: lines go through a bounded queue to a thread that writes them.
//!
//! If standard error blocks, such as a full pipe, log lines are dropped and devlet continues. Dropped lines are counted,
//! and reported once the queue has room again.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Maximum bytes of lines that wait for the reader.
const QUEUE_BYTES: usize = 1 << 20;

/// Maximum time that [`LogWriter::flush`] waits.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Clones share the queue.
#[derive(Debug, Clone)]
pub(crate) struct LogWriter {
    queue: Sender<Message>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    queued_bytes: AtomicUsize,
    dropped_lines: AtomicU64,
}

#[derive(Debug)]
enum Message {
    Line(Box<[u8]>),
    /// Answered once every line before it is written.
    Flush(Sender<()>),
}

impl LogWriter {
    /// Writes to standard error.
    pub(crate) fn stderr() -> io::Result<Self> {
        // A blocked write holds the lock of `io::stderr`, which nothing else in the daemon takes.
        Self::new(io::stderr(), |lines| tracing::warn!(lines, "log lines dropped"))
    }

    /// Writes to `output`. `report` is called with the number of lines dropped since its last call.
    fn new(output: impl Write + Send + 'static, report: impl Fn(u64) + Send + 'static) -> io::Result<Self> {
        let (queue, messages) = channel();
        let counts = Arc::new(Counts::default());
        let writer = Self {
            queue,
            counts: counts.clone(),
        };
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || write_messages(output, &messages, &counts, report))?;
        Ok(writer)
    }

    /// Queues a line, or drops it if the queue is full.
    pub(crate) fn line(&self, line: &[u8]) {
        let counts = &self.counts;
        let queued = counts.queued_bytes.fetch_add(line.len(), Ordering::Relaxed);
        let fits = queued + line.len() <= QUEUE_BYTES;
        if !fits || self.queue.send(Message::Line(line.into())).is_err() {
            counts.queued_bytes.fetch_sub(line.len(), Ordering::Relaxed);
            counts.dropped_lines.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number of lines dropped so far.
    pub(crate) fn dropped_lines(&self) -> u64 {
        self.counts.dropped_lines.load(Ordering::Relaxed)
    }

    /// Waits until all queued lines are written, for at most [`FLUSH_TIMEOUT`].
    pub(crate) fn flush(&self) {
        let (written, is_written) = channel();
        if self.queue.send(Message::Flush(written)).is_ok() {
            // After the timeout the reader is considered gone.
            let _ = is_written.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

fn write_messages(
    mut output: impl Write,
    messages: &Receiver<Message>,
    counts: &Counts,
    report: impl Fn(u64),
) {
    let mut reported = 0;
    for message in messages {
        match message {
            Message::Line(line) => {
                if output.write_all(&line).is_err() {
                    counts.dropped_lines.fetch_add(1, Ordering::Relaxed);
                    // Not reported: the report would fail as well, and cause the next one.
                    reported += 1;
                }
                let queued = counts.queued_bytes.fetch_sub(line.len(), Ordering::Relaxed) - line.len();
                let dropped = counts.dropped_lines.load(Ordering::Relaxed);
                // With half of the queue free, the report itself finds room.
                if dropped > reported && queued <= QUEUE_BYTES / 2 {
                    report(dropped - reported);
                    reported = dropped;
                }
            }
            Message::Flush(written) => {
                // The caller may have given up.
                let _ = written.send(());
            }
        }
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> &'a Self {
        self
    }
}

/// Each call of `write` is one line: the subscriber formats an event as a whole.
impl Write for &LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn lines_over_the_queue_are_dropped_and_reported_once_the_pipe_is_read() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let (report, reports) = channel();
        let report = move |lines| report.send(lines).unwrap();
        let writer = LogWriter::new(pipe, report).unwrap();
        let line = [b'x'; 1024];
        for _ in 0..QUEUE_BYTES / line.len() * 2 {
            writer.line(&line);
        }
        let dropped = writer.dropped_lines();
        assert!(dropped > 0);
        writer.flush();

        let reading = std::thread::spawn(move || {
            let mut written = Vec::new();
            reader.read_to_end(&mut written).map(|_| written.len())
        });
        assert_eq!(reports.recv_timeout(Duration::from_secs(60)), Ok(dropped));
        writer.line(b"last\n");
        writer.flush();
        assert_eq!(writer.dropped_lines(), dropped);
        drop(writer);
        let kept = QUEUE_BYTES / line.len() * 2 - usize::try_from(dropped).unwrap();
        assert_eq!(reading.join().unwrap().unwrap(), kept * line.len() + 5);
    }
}
