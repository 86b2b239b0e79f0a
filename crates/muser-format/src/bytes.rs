//! The bytes of one file: mapped, or owned when they come from memory.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::FormatError;

pub(crate) enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a whole file for reading.
    pub(crate) fn map(path: &Path) -> Result<Self, FormatError> {
        let failed = |error| FormatError::Open { path: path.to_owned(), error };
        let file = File::open(path).map_err(failed)?;
        // An empty file can't be mapped on every system, and a directory opens on some.
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_dir() {
            return Err(failed(std::io::Error::from(std::io::ErrorKind::IsADirectory)));
        }
        if metadata.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: the mapping is private to this process and never written through. Another process that changes
        // the file while it is mapped changes the numbers we read, as with every engine that maps its weights;
        // one that shortens it raises SIGBUS. All lengths and offsets were copied out and checked before use.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self::Mapped(map))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
