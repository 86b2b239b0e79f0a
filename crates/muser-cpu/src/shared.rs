//! A buffer that the units of one job write disjoint parts of.

use std::marker::PhantomData;

/// A mutable slice that threads share.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    at: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are handed out under the contract of `part`, as exclusive slices.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `all` for as long as it is borrowed.
    pub fn new(all: &'a mut [T]) -> Self {
        SharedMut { at: all.as_mut_ptr(), len: all.len(), borrow: PhantomData }
    }

    /// Elements `start .. start + len`. Panics where the buffer has fewer.
    ///
    /// # Safety
    /// No other part that overlaps it is in use.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside its buffer");
        // SAFETY: inside the buffer, which `new` borrowed mutably; not aliased, says the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(start), len) }
    }
}
