//! Finding an item of a list by its name, without a second copy of the names.

/// Positions of a list's items, sorted by name. The list must not change while the index is in use.
pub(super) struct NameIndex(Vec<usize>);

impl NameIndex {
    /// Indexes `items`; where two have the same name, the position of the later one is the error.
    pub(super) fn new<T>(items: &[T], name: impl Fn(&T) -> &String) -> Result<Self, usize> {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by(|&a, &b| name(&items[a]).cmp(name(&items[b])));
        for pair in order.windows(2) {
            if name(&items[pair[0]]) == name(&items[pair[1]]) {
                return Err(pair[1]);
            }
        }
        Ok(Self(order))
    }

    /// The position of the item called `wanted`.
    pub(super) fn find<T>(&self, items: &[T], name: impl Fn(&T) -> &String, wanted: &str) -> Option<usize> {
        self.0.binary_search_by(|&at| name(&items[at]).as_str().cmp(wanted)).ok().map(|at| self.0[at])
    }
}
