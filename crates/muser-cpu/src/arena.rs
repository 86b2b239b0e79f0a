//! Anonymous memory on 2 MB pages where the system gives them: one piece for all packed weights, others for what passes
//! work on.

use crate::plain::{Plain, view, view_mut, zero};
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

const HUGE: usize = 2 << 20;

/// Bytes that begin at a multiple of 2 MB.
pub struct Arena {
    map: MmapMut,
    start: usize,
    len: usize,
}

impl Arena {
    /// `len` zero bytes. Pages come into being where they are first written, so on the writer's memory node.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let map = MmapMut::map_anon(len.max(1).saturating_add(HUGE))?;
        let start = map.as_ptr().align_offset(HUGE);
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            // Only advice: small pages serve too.
            let _ = map.advise_range(
                memmap2::Advice::HugePage,
                start,
                len.next_multiple_of(HUGE).min(map.len() - start),
            );
        }
        Ok(Arena { map, start, len })
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.start..self.start + self.len]
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..self.start + self.len]
    }
}

/// A slice that grows. Where it is long it stands on 2 MB pages: results go to rows many pages apart, and unpacked
/// weights then fall evenly on the sets of a cache.
pub struct Pages<T> {
    short: Vec<T>,
    long: Option<Arena>,
}

/// Bytes from which a slice is long.
const LONG: usize = HUGE / 8;

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Pages { short: vec![], long: None }
    }
}

impl<T: Plain> Pages<T> {
    /// Holds at least `len` elements from now on; new ones are zero.
    pub fn grow(&mut self, len: usize) {
        if len <= self.len() {
            return;
        }
        let bytes = len * size_of::<T>();
        let map = if bytes < LONG { None } else { Arena::new(bytes.next_multiple_of(HUGE)).ok() };
        match map {
            Some(mut map) => {
                view_mut(map.bytes_mut())[..self.len()].copy_from_slice(self);
                *self = Pages { short: vec![], long: Some(map) };
            }
            None => {
                let mut short = self.to_vec();
                short.resize(len, zero());
                *self = Pages { short, long: None };
            }
        }
    }
}

impl<T: Plain> Deref for Pages<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.long.as_ref().map_or(&self.short, |map| view(map.bytes()))
    }
}

impl<T: Plain> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.long {
            Some(map) => view_mut(map.bytes_mut()),
            None => &mut self.short,
        }
    }
}

/// Memory that the system could give now, if it says so.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kb: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kb * 1024)
}
