//! Reading a header front to back; every read is checked against the end of the file.

use std::fmt::Arguments;

use crate::FormatError;

/// Longest name of a key or a tensor, by the GGUF specification.
pub(super) const MAX_NAME: usize = 65_535;

pub(super) struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a str, bytes: &'a [u8]) -> Self {
        Self { file, bytes, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The next `need` bytes; `what` names them for the error.
    pub(super) fn take(&mut self, need: u64, what: Arguments<'_>) -> Result<&'a [u8], FormatError> {
        let taken = usize::try_from(need)
            .ok()
            .and_then(|need| self.at.checked_add(need))
            .and_then(|end| Some((end, self.bytes.get(self.at..end)?)));
        match taken {
            Some((end, bytes)) => {
                self.at = end;
                Ok(bytes)
            }
            None => Err(FormatError::Truncated {
                file: self.file.into(),
                what: what.to_string(),
                offset: self.at as u64,
                need,
                size: self.bytes.len() as u64,
            }),
        }
    }

    pub(super) fn array<const N: usize>(&mut self, what: Arguments<'_>) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: Arguments<'_>) -> Result<u32, FormatError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: Arguments<'_>) -> Result<u64, FormatError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `each` bytes of the file apiece: refused before anything is reserved for
    /// them where the rest of the file can't hold them.
    pub(super) fn count(&mut self, each: u64, what: Arguments<'_>) -> Result<usize, FormatError> {
        let offset = self.at as u64;
        let count = self.u64(what)?;
        let left = (self.bytes.len() - self.at) as u64;
        match (count.checked_mul(each), usize::try_from(count)) {
            (Some(need), Ok(count)) if need <= left => Ok(count),
            (need, _) => Err(FormatError::Truncated {
                file: self.file.into(),
                what: format!("{what} ({count})"),
                offset,
                need: need.unwrap_or(u64::MAX),
                size: self.bytes.len() as u64,
            }),
        }
    }

    /// A length and as many bytes of UTF-8.
    pub(super) fn str(&mut self, what: Arguments<'_>) -> Result<&'a str, FormatError> {
        let length = self.u64(format_args!("the length of {what}"))?;
        let start = self.at;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|error| FormatError::Invalid {
            file: self.file.into(),
            what: what.to_string(),
            problem: format!("not UTF-8 at offset {}", start + error.valid_up_to()),
        })
    }

    /// A string that names something: not empty and not too long.
    pub(super) fn name(&mut self, what: Arguments<'_>) -> Result<&'a str, FormatError> {
        let start = self.at;
        let name = self.str(what)?;
        if name.is_empty() || name.len() > MAX_NAME {
            let problem = format!("{} bytes at offset {start}; 1 to {MAX_NAME} are allowed", name.len());
            return Err(self.invalid(what, problem));
        }
        Ok(name)
    }

    pub(super) fn invalid(&self, what: Arguments<'_>, problem: impl Into<String>) -> FormatError {
        FormatError::Invalid { file: self.file.into(), what: what.to_string(), problem: problem.into() }
    }
}
