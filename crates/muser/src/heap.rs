//! The allocator's settings for a server, which runs for weeks.
//!
//! glibc gives each thread an arena of its own (eight a core) and learns from the largest block ever freed how large a block may
//! be before it is mapped by itself: after one grammar of 13 MB every arena keeps up to 26 MB. Memory then grows with each
//! further thread that has once compiled a grammar or held a saved session. Two arenas and fixed limits end that.

/// Arenas: one for the engine's thread, one for the others, by and large.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS: i32 = 2;
/// Blocks of this size are mapped by themselves, and go back to the system when they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED: i32 = 1 << 20;
/// Free memory that an arena keeps at its end.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: i32 = 2 << 20;

/// Sets the limits; to be called before threads are started. Does nothing where the allocator is not glibc's.
pub fn bound() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (name, value) in
        [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, MAPPED), (libc::M_TRIM_THRESHOLD, KEPT)]
    {
        // SAFETY: mallopt takes two numbers by value and locks the allocator itself. A refusal leaves the default.
        unsafe { libc::mallopt(name, value) };
    }
}
