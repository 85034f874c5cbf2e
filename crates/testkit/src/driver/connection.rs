//! A connection that knows when an answer has left, and can be cut.
//!
//! A gRPC library does not tell. So the frames that are written are counted here: the last one of an answer is a
//! `HEADERS` frame, the trailers, that ends its stream.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

use super::Driver;
use crate::events::{Event, tell};

/// What happens once an answer is out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Afterwards {
    Die,
    KillCaller,
}

/// What a call knows of the connection that it came by.
#[derive(Debug, Clone, Default)]
pub(crate) struct LineEnd(Arc<Mutex<Option<Afterwards>>>);

impl LineEnd {
    fn afterwards(&self) -> MutexGuard<'_, Option<Afterwards>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn after_the_answer(&self, afterwards: Afterwards) {
        *self.afterwards() = Some(afterwards);
    }
}

pub(crate) struct Line {
    stream: UnixStream,
    end: LineEnd,
    frames: Frames,
    hung_up: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Line {
    pub(crate) fn new(stream: UnixStream, driver: &Arc<Driver>) -> Self {
        let mut hang_ups = driver.hang_ups.subscribe();
        Self {
            stream,
            end: LineEnd::default(),
            frames: Frames::default(),
            hung_up: Box::pin(async move {
                let _ = hang_ups.changed().await;
            }),
        }
    }

    fn answered(&self) {
        let afterwards = self.end.afterwards().take();
        match afterwards {
            Some(Afterwards::Die) => std::process::abort(),
            Some(Afterwards::KillCaller) => {
                let caller = self.stream.peer_cred().ok().and_then(|peer| peer.pid());
                let caller = caller.and_then(rustix::process::Pid::from_raw);
                let caller = caller.expect("a caller on this machine is a process");
                let killed = rustix::process::kill_process(caller, rustix::process::Signal::KILL);
                killed.expect("the caller may be killed");
                tell(&Event::KilledCaller {
                    pid: caller.as_raw_nonzero().get(),
                });
            }
            None => {}
        }
    }
}

impl Connected for Line {
    type ConnectInfo = LineEnd;

    fn connect_info(&self) -> LineEnd {
        self.end.clone()
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.hung_up.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        if self.frames.written(&bytes[..written]) {
            self.answered();
        }
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Where in a sequence of HTTP/2 frames a connection is.
#[derive(Debug, Default)]
struct Frames {
    head: Vec<u8>,
    /// Of the payload of the current frame.
    left: usize,
    ends_an_answer: bool,
}

impl Frames {
    const HEAD: usize = 9;

    /// Whether the last frame of an answer is among what was written, all of it.
    fn written(&mut self, bytes: &[u8]) -> bool {
        let mut answered = false;
        for &byte in bytes {
            if self.left > 0 {
                self.left -= 1;
            } else {
                self.head.push(byte);
                let [high, middle, low, kind, flags, ..] = self.head[..] else {
                    continue;
                };
                if self.head.len() < Self::HEAD {
                    continue;
                }
                self.head.clear();
                self.left = u32::from_be_bytes([0, high, middle, low]) as usize;
                self.ends_an_answer = kind == 1 && flags & 1 == 1;
            }
            answered |= self.left == 0 && std::mem::take(&mut self.ends_an_answer);
        }
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Headers of an answer, its message, another answer's trailers, and its own.
    const FRAMES: &[u8] = &[
        0, 0, 1, 1, 4, 0, 0, 0, 1, 0x88, // headers
        0, 0, 3, 0, 0, 0, 0, 0, 1, 1, 5, 9, // data
        0, 0, 2, 1, 5, 0, 0, 0, 1, 0xff, 0xff, // trailers
    ];

    #[test]
    fn an_answer_is_out_with_the_last_byte_of_its_trailers() {
        for cut in 0..FRAMES.len() {
            let mut frames = Frames::default();
            assert!(!frames.written(&FRAMES[..cut]), "after {cut} bytes");
            assert!(frames.written(&FRAMES[cut..]), "cut at {cut}");
        }
    }
}
