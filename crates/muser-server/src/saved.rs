//! Sessions on disk: one file each, which only the model and the kind of device that wrote it will read.
//!
//! A file is the magic, the version (u32), the fingerprint, the number of tokens and of bytes of state (u64), the tokens
//! (u32 each), the state, and the SHA-256 of all that, every number with its lowest byte first.

use muser_core::{DeviceInfo, Model};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

const MAGIC: &[u8; 8] = b"muserses";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 32 + 8 + 8;
const CHECKSUM: usize = 32;
/// Bytes of each weight that the fingerprint reads.
const SAMPLE: usize = 4096;

/// What is wrong with a saved session or its name.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum SavedError {
    #[error("filename {0:?} is not a plain name: no separators, no leading dot, at most 200 bytes")]
    Name(String),
    #[error("there is no saved session {0:?}")]
    Missing(String),
    #[error("saved session {name:?}: {why}; send the prompt again and save anew")]
    Bad { name: String, why: &'static str },
    #[error("saved session {name:?}: {source}")]
    Io { name: String, source: std::io::Error },
}

/// A session as it stands in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct SavedSession {
    /// Tokens in its caches.
    pub tokens: Vec<u32>,
    /// What the engine saved.
    pub state: Vec<u8>,
}

/// The folder of saved sessions.
pub struct SavedSessions {
    folder: PathBuf,
    fingerprint: [u8; 32],
}

/// Tells models, drafters, lanes and kinds of devices apart: shapes and types of all weights, and the beginning of each.
fn fingerprint(model: &Model, device: &DeviceInfo) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(&device.kind);
    hash.update(format!("{:?} {:?} {:?}", device.lane, model.geometry(), model.plans.caches));
    // Target and drafter have slots of the same name.
    let name = |slot: &muser_core::plan::Slot| format!("{:?} {slot}", slot.net);
    let mut slots: Vec<_> = model.slots.iter().map(|(slot, shape)| (name(slot), slot, shape)).collect();
    slots.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, slot, (dtype, rows, cols)) in slots {
        hash.update(format!("{name} {} {rows} {cols}\n", dtype.name()));
        if let Ok(tensor) = model.tensor(*slot) {
            hash.update(&tensor.data[..tensor.data.len().min(SAMPLE)]);
        }
    }
    hash.finalize().into()
}

impl SavedSessions {
    /// Sessions of this model on this kind of device, in `folder`, which is made if it is missing.
    pub fn new(folder: &Path, model: &Model, device: &DeviceInfo) -> std::io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        Ok(SavedSessions { folder: folder.to_path_buf(), fingerprint: fingerprint(model, device) })
    }

    fn path(&self, name: &str) -> Result<PathBuf, SavedError> {
        let plain = |c: char| !matches!(c, '/' | '\\' | ':') && !c.is_control();
        if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.chars().all(plain) {
            return Err(SavedError::Name(name.chars().take(200).collect()));
        }
        Ok(self.folder.join(name))
    }

    /// Checks a name.
    pub fn check(&self, name: &str) -> Result<(), SavedError> {
        self.path(name).map(drop)
    }

    /// Writes a session; another of that name is replaced once the new one is complete. Returns the file's bytes.
    pub fn write(&self, name: &str, session: &SavedSession) -> Result<usize, SavedError> {
        let path = self.path(name)?;
        let io = |source| SavedError::Io { name: name.into(), source };
        let mut head = [MAGIC, &VERSION.to_le_bytes()[..], &self.fingerprint].concat();
        head.extend((session.tokens.len() as u64).to_le_bytes());
        head.extend((session.state.len() as u64).to_le_bytes());
        head.extend(session.tokens.iter().flat_map(|t| t.to_le_bytes()));
        let checksum = Sha256::new().chain_update(&head).chain_update(&session.state).finalize();
        // A name that no session has: theirs do not begin with a dot.
        let partial = self.folder.join(crate::app::unique(".partial-"));
        let write = || {
            let mut file = create(&partial)?;
            for part in [&head, &session.state, &checksum[..]] {
                file.write_all(part)?;
            }
            file.sync_all()?;
            std::fs::rename(&partial, &path)
        };
        if let Err(source) = write() {
            let _ = std::fs::remove_file(&partial);
            return Err(io(source));
        }
        Ok(head.len() + session.state.len() + CHECKSUM)
    }

    /// Reads a session of at most `context` tokens, and its file's bytes. Nothing is believed before it is checked.
    pub fn read(&self, name: &str, context: usize) -> Result<(SavedSession, usize), SavedError> {
        let path = self.path(name)?;
        let io = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::NotFound => SavedError::Missing(name.into()),
            _ => SavedError::Io { name: name.into(), source },
        };
        let bad = |why| SavedError::Bad { name: name.into(), why };
        // Other things than files, a pipe say, would be waited for.
        let meta = std::fs::metadata(&path).map_err(io)?;
        if !meta.is_file() {
            return Err(bad("it is not a file"));
        }
        let file = File::open(&path).map_err(io)?;
        let mut head = vec![];
        (&file).take(HEADER as u64).read_to_end(&mut head).map_err(io)?;
        if !head.starts_with(MAGIC) {
            return Err(bad("it is not a session that muser saved"));
        }
        let Some(fields) = head.get(8..).filter(|f| f.len() == HEADER - 8) else {
            return Err(bad("it is truncated"));
        };
        let (version, fields) = fields.split_at(4);
        if version != VERSION.to_le_bytes() {
            return Err(bad("another version of muser wrote it"));
        }
        let (fingerprint, counts) = fields.split_at(32);
        if fingerprint != self.fingerprint {
            return Err(bad("it is of another model, drafter, lane or kind of device"));
        }
        let count = |at: usize| {
            let bytes = counts.get(at..at + 8).and_then(|b| <[u8; 8]>::try_from(b).ok()).unwrap_or_default();
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        let (Some(tokens), Some(state)) = (count(0), count(8)) else { return Err(bad("it is damaged")) };
        let rest = tokens.checked_mul(4).and_then(|t| t.checked_add(state)?.checked_add(CHECKSUM));
        if rest.and_then(|r| r.checked_add(HEADER)).is_none_or(|all| all as u64 != meta.len()) {
            return Err(bad("it is truncated, or longer than it says"));
        }
        if tokens > context {
            return Err(bad("it has more tokens than a slot's context"));
        }
        let rest = rest.unwrap_or_default();
        let mut body = vec![];
        file.take(rest as u64).read_to_end(&mut body).map_err(io)?;
        if body.len() != rest {
            return Err(bad("it is truncated"));
        }
        let checksum = body.split_off(rest - CHECKSUM);
        if Sha256::new().chain_update(&head).chain_update(&body).finalize()[..] != checksum {
            return Err(bad("it is damaged: its checksum is wrong"));
        }
        let state = body.split_off(4 * tokens);
        let tokens = body.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        Ok((SavedSession { tokens, state }, HEADER + rest))
    }
}

/// Conversations are private to who runs the server.
fn create(path: &Path) -> std::io::Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}
