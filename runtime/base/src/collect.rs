//! Collecting with little code: `collect` into an ordered map or set sorts its items first, by 4 KB of code for each type of items, and there
//! were thirty of them in the daemon.

/// Collects items into a map or a set by inserting one after the other.
pub fn ordered<T, C: Default + Extend<T>>(items: impl IntoIterator<Item = T>) -> C {
    let mut collected = C::default();
    collected.extend(items);
    collected
}
