//! Connections: at most so many, each with a limit on the time for a request's head.

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
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME);
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
