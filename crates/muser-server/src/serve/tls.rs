//! HTTPS: a listener that hands over connections once their handshake is done.

use super::ServeError;
use super::stall::{Stalling, Watched};
use axum::serve::Listener;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, channel};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};
use tokio_rustls::server::TlsStream;

/// A handshake must be done by then.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Connections that may wait to be served.
const BACKLOG: usize = 64;

/// HTTPS with a certificate.
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads PEM files: the certificate with those that lead to a root, and its private key.
    pub fn new(cert: &Path, key: &Path) -> Result<Self, ServeError> {
        acceptor(cert, key).map(Tls)
    }

    pub(super) fn listen(self, listener: Watched<TcpListener>) -> std::io::Result<TlsListener> {
        TlsListener::new(listener, self.0)
    }
}

fn acceptor(cert: &Path, key_file: &Path) -> Result<TlsAcceptor, ServeError> {
    let bad = |path: &Path, why: String| ServeError::Tls { path: path.to_path_buf(), why };
    let read = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = read.map_err(|e| bad(cert, why(e)))?;
    if chain.is_empty() {
        return Err(bad(cert, "no certificate is in it; give a PEM file".into()));
    }
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(|e| bad(key_file, why(e)))?;
    let provider = Arc::new(crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|e| bad(key_file, e.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn why(error: PemError) -> String {
    match error {
        PemError::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

/// Handshakes run beside each other, so that no slow client keeps others waiting.
pub(super) struct TlsListener {
    address: SocketAddr,
    ready: Receiver<(TlsStream<Stalling<TcpStream>>, SocketAddr)>,
}

impl TlsListener {
    fn new(listener: Watched<TcpListener>, acceptor: TlsAcceptor) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let (sender, ready) = channel(BACKLOG);
        let mut listener = listener;
        tokio::spawn(async move {
            loop {
                let (stream, peer) = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = sender.closed() => return,
                };
                let (acceptor, sender) = (acceptor.clone(), sender.clone());
                tokio::spawn(async move {
                    match tokio::time::timeout(HANDSHAKE_TIME, acceptor.accept(stream)).await {
                        Ok(Ok(stream)) => drop(sender.send((stream, peer)).await),
                        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                        Err(_) => tracing::debug!("a TLS handshake did not end in time"),
                    }
                });
            }
        });
        Ok(TlsListener { address, ready })
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<Stalling<TcpStream>>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            // The accepting task has ended with the runtime.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        Ok(self.address)
    }
}
