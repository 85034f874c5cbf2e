//! A connection that detects when an answer was sent, and can be closed.
//!
//! A gRPC library does not report this. So this module counts the written frames: the last frame of an answer is
//! the `HEADERS` frame with the trailers, which ends its stream.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

use super::Driver;
use crate::events::{Event, emit};

/// Action after an answer was sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AfterAnswer {
    Die,
    KillCaller,
}

/// Handle of a call to its connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionHandle(Arc<Mutex<Option<AfterAnswer>>>);

impl ConnectionHandle {
    fn after_answer(&self) -> MutexGuard<'_, Option<AfterAnswer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_after_answer(&self, after_answer: AfterAnswer) {
        *self.after_answer() = Some(after_answer);
    }
}

pub(crate) struct Connection {
    stream: UnixStream,
    handle: ConnectionHandle,
    frames: Frames,
    closed: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, driver: &Arc<Driver>) -> Self {
        let mut disconnects = driver.disconnects.subscribe();
        Self {
            stream,
            handle: ConnectionHandle::default(),
            frames: Frames::default(),
            closed: Box::pin(async move {
                let _ = disconnects.changed().await;
            }),
        }
    }

    fn answered(&self) {
        let after_answer = self.handle.after_answer().take();
        match after_answer {
            Some(AfterAnswer::Die) => std::process::abort(),
            Some(AfterAnswer::KillCaller) => {
                let caller = self.stream.peer_cred().ok().and_then(|peer| peer.pid());
                let caller = caller.and_then(rustix::process::Pid::from_raw);
                let caller = caller.expect("a caller on this machine is a process");
                let killed = rustix::process::kill_process(caller, rustix::process::Signal::KILL);
                killed.expect("the caller may be killed");
                emit(&Event::KilledCaller {
                    pid: caller.as_raw_nonzero().get(),
                });
            }
            None => {}
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = ConnectionHandle;

    fn connect_info(&self) -> ConnectionHandle {
        self.handle.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
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

/// Parser state in a sequence of HTTP/2 frames.
#[derive(Debug, Default)]
struct Frames {
    head: Vec<u8>,
    /// Remaining bytes of the payload of the current frame.
    left: usize,
    ends_an_answer: bool,
}

impl Frames {
    const HEAD: usize = 9;

    /// Returns `true` if the bytes complete the last frame of an answer.
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

    /// Headers, message and trailers of an answer.
    const FRAMES: &[u8] = &[
        0, 0, 1, 1, 4, 0, 0, 0, 1, 0x88, // headers
        0, 0, 3, 0, 0, 0, 0, 0, 1, 1, 5, 9, // data
        0, 0, 2, 1, 5, 0, 0, 0, 1, 0xff, 0xff, // trailers
    ];

    #[test]
    fn an_answer_is_sent_with_the_last_byte_of_its_trailers() {
        for cut in 0..FRAMES.len() {
            let mut frames = Frames::default();
            assert!(!frames.written(&FRAMES[..cut]), "after {cut} bytes");
            assert!(frames.written(&FRAMES[cut..]), "cut at {cut}");
        }
    }
}
