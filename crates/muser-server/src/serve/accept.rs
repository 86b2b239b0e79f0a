//! Connections: at most so many, each with limits on the time for a request's head and on a write that does not go on.

use crate::app::Peer;
use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// Connections that may be open; more wait to be accepted. Few enough for the usual limit of 1024 files.
const CONNECTIONS: usize = 512;
/// A request's head must have come by then, the next one on a kept connection too.
const HEAD_TIME: Duration = Duration::from_secs(30);

/// Bytes of a connection that are read ahead or wait to be written, heads included.
const BUFFER: usize = 64 << 10;

/// Accepts until `closing`, then lets the open connections end their requests.
pub(super) async fn serve<L>(mut listener: L, router: Router, mut closing: watch::Receiver<bool>)
where
    L: Listener<Addr = SocketAddr>,
{
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let service = TowerToHyperService::new(router);
    loop {
        let accept = async {
            let permit = free.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, (io, peer)) = tokio::select! {
            accepted = accept => accepted,
            _ = closing.wait_for(|closing| *closing) => break,
        };
        let service = service.clone();
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(Peer(peer)));
            let request: Request = request.map(Body::new);
            service.call(request)
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(BUFFER);
        let connection = graceful.watch(http.serve_connection(TokioIo::new(io), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection broke");
            }
            drop(permit);
        });
    }
    graceful.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::stall::Watched;
    use axum::body::Bytes;
    use axum::routing::get;
    use std::convert::Infallible;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
    use tokio::time::Instant;

    struct Pipes(UnboundedReceiver<DuplexStream>);

    impl Listener for Pipes {
        type Io = DuplexStream;
        type Addr = SocketAddr;
        async fn accept(&mut self) -> (DuplexStream, SocketAddr) {
            match self.0.recv().await {
                Some(pipe) => (pipe, SocketAddr::from(([127, 0, 0, 1], 1))),
                None => std::future::pending().await,
            }
        }
        fn local_addr(&self) -> std::io::Result<SocketAddr> {
            Ok(SocketAddr::from(([127, 0, 0, 1], 2)))
        }
    }

    /// An answer without end, as a generation's; `held` is let go with it. The clock runs where nothing else does.
    #[tokio::test(start_paused = true)]
    async fn who_never_reads_is_let_go_and_who_reads_slowly_is_not() {
        let held = Arc::new(());
        let answer = held.clone();
        let endless = move || {
            let held = answer.clone();
            let next = move || {
                let _held = &held;
                Some(Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 1000])))
            };
            async move { Body::from_stream(tokio_stream::iter(std::iter::from_fn(next))) }
        };
        let (connect, pipes) = unbounded_channel();
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(serve(Watched(Pipes(pipes)), Router::new().route("/", get(endless)), stopped));
        let ask = || {
            let (ours, theirs) = duplex(2000);
            connect.send(theirs).unwrap();
            ours
        };
        let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        let mut slow = ask();
        slow.write_all(request).await.unwrap();
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_secs(59)).await;
            slow.read_u8().await.unwrap();
        }
        assert_eq!(Arc::strong_count(&held), 3, "the slow reader's answer goes on");
        drop(slow);
        let mut never = ask();
        never.write_all(request).await.unwrap();
        let start = Instant::now();
        while Arc::strong_count(&held) > 2 || start.elapsed().is_zero() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!((60..=62).contains(&start.elapsed().as_secs()), "a minute by the test's own clock");
        let mut rest = vec![];
        never.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest.len(), 2000, "what the pipe held");
    }
}
