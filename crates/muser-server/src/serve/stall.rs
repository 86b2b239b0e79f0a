//! Connections whose other end no longer reads.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// Writes fail once none has gone on for as long as this.
const STALL_TIME: Duration = Duration::from_secs(60);

/// A connection that gives up on a reader which takes nothing.
pub(super) struct Stalling<IO> {
    io: IO,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<IO> Stalling<IO> {
    pub(super) fn new(io: IO) -> Self {
        Stalling { io, waiting: None }
    }

    fn check<T>(&mut self, cx: &mut Context<'_>, result: Poll<Result<T>>) -> Poll<Result<T>> {
        if result.is_ready() {
            self.waiting = None;
            return result;
        }
        let sleep = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALL_TIME)));
        ready!(sleep.as_mut().poll(cx));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the other end does not read")))
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Stalling<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, to)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Stalling<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(cx, from);
        self.check(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, from);
        self.check(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(cx);
        self.check(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let result = Pin::new(&mut self.io).poll_shutdown(cx);
        self.check(cx, result)
    }
}
