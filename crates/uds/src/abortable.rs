//! A connection that can be aborted, that signals its end, and whose reads can be throttled.
//!
//! tonic neither closes a connection on demand nor reports that one has ended. A connection has one token for each:
//! cancelling `abort` makes every read and write fail, and dropping the connection cancels `closed`.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};

use crate::read_limit::ReadThrottle;

pub(crate) struct Abortable<T> {
    inner: T,
    abort: Pin<Box<WaitForCancellationFutureOwned>>,
    throttle: Option<ReadThrottle>,
    _closed: DropGuard,
}

impl<T> Abortable<T> {
    pub(crate) fn new(
        inner: T,
        abort: CancellationToken,
        closed: CancellationToken,
        throttle: Option<ReadThrottle>,
    ) -> Self {
        Self {
            inner,
            abort: Box::pin(abort.cancelled_owned()),
            throttle,
            _closed: closed.drop_guard(),
        }
    }

    /// Returns the connection, or an error if it was aborted.
    fn check_open(&mut self, cx: &mut Context<'_>) -> io::Result<Pin<&mut T>>
    where
        T: Unpin,
    {
        if self.abort.as_mut().poll(cx).is_ready() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the connection was aborted on this side",
            ));
        }
        Ok(Pin::new(&mut self.inner))
    }
}

impl<T: fmt::Debug> fmt::Debug for Abortable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Abortable").field(&self.inner).finish()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Abortable<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check_open(cx)?;
        let Some(throttle) = &mut this.throttle else {
            return Pin::new(&mut this.inner).poll_read(cx, buf);
        };
        ready!(throttle.poll_ready(cx));
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        throttle.read(buf.filled().len() - before);
        polled
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Abortable<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().check_open(cx)?.poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().check_open(cx)?.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().check_open(cx)?.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().check_open(cx)?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
