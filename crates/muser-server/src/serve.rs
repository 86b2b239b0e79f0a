//! Listening, and stopping without losing what runs.

mod accept;
mod stall;
#[cfg(feature = "tls")]
mod tls;

#[cfg(feature = "tls")]
pub use tls::Tls;

use crate::app::App;
use crate::routes::router;
use stall::Watched;
use std::net::SocketAddr;
#[cfg(not(feature = "tls"))]
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket};
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
    /// A certificate or key that cannot be used.
    #[error("{}: cannot be used for TLS: {why}", path.display())]
    #[allow(missing_docs)]
    Tls { path: PathBuf, why: String },
    /// A program without TLS was asked for it.
    #[error("this muser was built without TLS; build it with `--features tls`")]
    NoTls,
    /// The system.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// HTTPS is not part of this build; there is no value of this type.
#[cfg(not(feature = "tls"))]
pub enum Tls {}

#[cfg(not(feature = "tls"))]
impl Tls {
    /// Refuses.
    pub fn new(_: &Path, _: &Path) -> Result<Self, ServeError> {
        Err(ServeError::NoTls)
    }
}

/// Bytes of a connection that the system takes before they are sent. Left alone it takes megabytes, and says that a write may go on
/// only once a third of that is free: a slow reader would look like one that does not read.
const SEND_BUFFER: u32 = 64 << 10;

/// Listens; accepted connections inherit the buffer's size.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Serves until SIGTERM or SIGINT, then lets running generations go on for at most `grace`; HTTPS where `tls` is given.
/// `ready` is called with the address once the server listens.
pub fn run(
    app: Arc<App>,
    address: SocketAddr,
    grace: Duration,
    tls: Option<Tls>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    if !address.ip().is_loopback() && app.options.keys.is_empty() {
        return Err(ServeError::Open(address));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        let listener = listen(address).map_err(|source| ServeError::Bind { address, source })?;
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        ready(listener.local_addr()?);
        let listener = Watched(listener);
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let router = router(app.clone());
        let server = match tls {
            None => tokio::spawn(accept::serve(listener, router, stopped)),
            #[cfg(feature = "tls")]
            Some(tls) => tokio::spawn(accept::serve(tls.listen(listener)?, router, stopped)),
        };
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn accepted_connections_have_a_small_send_buffer() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let accepted = TcpSocket::from_std_stream(accepted.into_std().unwrap());
        // Linux doubles what is asked for, for what it keeps beside the bytes.
        assert!(accepted.send_buffer_size().unwrap() <= 2 * SEND_BUFFER);
    }
}
