//! Ordered maps and sets with little code: `collect` sorts all items before it makes one, with 4 KB of code for each type of items.

/// Collects items into a map or a set by inserting one after the other.
pub fn ordered<T, C: Default + Extend<T>>(items: impl IntoIterator<Item = T>) -> C {
    let mut collected = C::default();
    collected.extend(items);
    collected
}
