//! Connections whose other end no longer reads.

use axum::serve::Listener;
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

/// A listener of such connections. TLS stands above them: its own writes and flushes wait until all is out, so they do not show
/// that some of it went.
pub(super) struct Watched<L>(pub(super) L);

impl<L: Listener> Listener for Watched<L> {
    type Io = Stalling<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, peer) = self.0.accept().await;
        (Stalling { io, waiting: None }, peer)
    }

    fn local_addr(&self) -> Result<Self::Addr> {
        self.0.local_addr()
    }
}

impl<IO> Stalling<IO> {
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
