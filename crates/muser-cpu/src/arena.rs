//! One piece of anonymous memory for all packed weights, on 2 MB pages where the system gives them.

use memmap2::MmapMut;

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

/// Memory that the system could give now, if it says so.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kb: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kb * 1024)
}
