//! Views of bytes as structures that have no padding and no invalid values.

/// A structure that any bytes are a value of.
///
/// # Safety
/// `repr(C)` or an array, made only of integers, floats and other `Plain` types, without padding.
pub unsafe trait Plain: Copy + 'static {}

// SAFETY: integers and floats have no invalid values.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: arrays have no padding.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The value of zero bytes.
pub fn zero<T: Plain>() -> T {
    // SAFETY: any bytes are a value.
    unsafe { std::mem::zeroed() }
}

/// As many whole `T` as `from` holds. Panics where `from` is not aligned for `T`: the arena aligns to 64 bytes.
pub fn view<T: Plain, A: Plain>(from: &[A]) -> &[T] {
    let at = from.as_ptr().cast::<T>();
    assert!(at.is_aligned() && size_of::<T>() > 0, "storage is aligned");
    // SAFETY: the pointer is aligned, the length covers no more bytes than `from` has, and any bytes are valid.
    unsafe { std::slice::from_raw_parts(at, size_of_val(from) / size_of::<T>()) }
}

/// The same, to write.
pub fn view_mut<T: Plain, A: Plain>(from: &mut [A]) -> &mut [T] {
    let (at, len) = (from.as_mut_ptr().cast::<T>(), size_of_val(from) / size_of::<T>().max(1));
    assert!(at.is_aligned() && size_of::<T>() > 0, "storage is aligned");
    // SAFETY: as in `view`; the borrow of `from` is exclusive, and any bytes are valid for `A` too.
    unsafe { std::slice::from_raw_parts_mut(at, len) }
}
