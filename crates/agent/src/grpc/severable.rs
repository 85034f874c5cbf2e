//! A connection that can be cut from outside, that tells when it is gone, and of which only so much chatter is heard.
//!
//! tonic neither closes a connection on demand nor says that one has ended. Both ends are tied to one token
//! each: cancelling the first makes every read and write fail, and dropping the connection, whatever the
//! reason, cancels the second.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};

use super::chatter::Chatter;

pub(super) struct Severable<T> {
    inner: T,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    chatter: Chatter,
    _gone: DropGuard,
}

impl<T> Severable<T> {
    /// Ties a connection to `cut`, and `gone` to the connection, of whose chatter only so much is heard.
    pub(super) fn new(inner: T, cut: CancellationToken, gone: CancellationToken, chatter: Chatter) -> Self {
        Self {
            inner,
            cut: Box::pin(cut.cancelled_owned()),
            chatter,
            _gone: gone.drop_guard(),
        }
    }

    /// The connection, unless it has been cut.
    fn whole(&mut self, cx: &mut Context<'_>) -> io::Result<Pin<&mut T>>
    where
        T: Unpin,
    {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the connection was cut on this side",
            ));
        }
        Ok(Pin::new(&mut self.inner))
    }
}

impl<T: fmt::Debug> fmt::Debug for Severable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Severable").field(&self.inner).finish()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Severable<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.whole(cx)?;
        ready!(this.chatter.poll_turn(cx));
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        this.chatter.heard(&buf.filled()[before..]);
        polled
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Severable<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().whole(cx)?.poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().whole(cx)?.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().whole(cx)?.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().whole(cx)?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
