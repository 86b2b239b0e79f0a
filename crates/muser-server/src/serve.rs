//! Listening, and stopping without losing what runs.

use crate::app::{App, Peer};
use crate::routes::router;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Why the server does not run.
#[derive(Debug, Error)]
pub enum ServeError {
    /// An address that others can reach, without a key.
    #[error(
        "{0} can be reached from other machines, and no API key is set: give --api-key, or listen on 127.0.0.1"
    )]
    Open(SocketAddr),
    /// The address cannot be had.
    #[error("cannot listen on {address}: {source}; choose another with --host and --port")]
    #[allow(missing_docs)]
    Bind { address: SocketAddr, source: std::io::Error },
    /// The system.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Connected<IncomingStream<'_, TcpListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        Peer(*stream.remote_addr())
    }
}

/// Serves until SIGTERM or SIGINT, then lets running generations go on for at most `grace`. `ready` is called with the
/// address once the server listens.
pub fn run(
    app: Arc<App>,
    address: SocketAddr,
    grace: Duration,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    if !address.ip().is_loopback() && app.options.keys.is_empty() {
        return Err(ServeError::Open(address));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        let listener =
            TcpListener::bind(address).await.map_err(|source| ServeError::Bind { address, source })?;
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        ready(listener.local_addr()?);
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let mut closing = stopped.clone();
        let service = router(app.clone()).into_make_service_with_connect_info::<Peer>();
        let server = axum::serve(listener, service).with_graceful_shutdown(async move {
            let _ = closing.wait_for(|stopped| *stopped).await;
        });
        let server = tokio::spawn(server.into_future());
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        tracing::info!("shutting down; running generations have {} seconds", grace.as_secs());
        let _ = stop.send(true);
        let draining = app.clone();
        let drained = tokio::task::spawn_blocking(move || draining.generator.slots.shut_down(grace));
        // A second signal does not wait.
        tokio::select! {
            _ = async { drop(drained.await); drop(tokio::time::timeout(Duration::from_secs(5), server).await) } => {}
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        Ok(())
    });
    // Connections of readers that never read would keep it.
    runtime.shutdown_background();
    result
}
