//! Ordered maps, sets and lists with little code: `collect` into a map or a set sorts all items before it makes one, and each type of
//! items that std sorts has its own copy of 4 KB of code, or of 2 KB where equal items may change places.

use std::cmp::Ordering;

/// Collects items into a map or a set by inserting one after the other.
pub fn ordered<T, C: Default + Extend<T>>(items: impl IntoIterator<Item = T>) -> C {
    let mut collected = C::default();
    collected.extend(items);
    collected
}

/// Sorts items as `slice::sort` does.
pub fn sort<T: Ord>(items: &mut [T]) {
    sort_by(items, T::cmp);
}

/// Sorts items as `slice::sort_by_key` does: those with equal keys stay in their order.
pub fn sort_by_key<T, K: Ord>(items: &mut [T], key: impl Fn(&T) -> K) {
    sort_by(items, |one, other| key(one).cmp(&key(other)));
}

/// Sorts items as `slice::sort_by` does: equal ones stay in their order.
pub fn sort_by<T>(items: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    let places = sorted_places(items.len(), &|one, other| compare(&items[one], &items[other]));
    rearrange(places, &mut |one, other| items.swap(one, other));
}

/// The places of items in the order of these: one sort for all types.
fn sorted_places(length: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut places: Vec<usize> = (0..length).collect();
    places.sort_unstable_by(|one, other| compare(*one, *other).then(one.cmp(other)));
    places
}

/// Brings to each place the item that is at `from[place]`.
fn rearrange(mut from: Vec<usize>, swap: &mut dyn FnMut(usize, usize)) {
    for first in 0..from.len() {
        // Each place of a cycle receives its item from the next one; the last one has then that of the first.
        let mut place = first;
        while from[place] != first {
            let next = from[place];
            swap(place, next);
            from[place] = place;
            place = next;
        }
        from[place] = place;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_sorted_as_by_std() {
        let mut seed = 1_u32;
        for length in (0..70).chain([1000]) {
            for distinct in [1, 2, 5, u32::MAX] {
                let mut next = || {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 8) % distinct
                };
                let given: Vec<(u32, String)> =
                    (0..length).map(|number| (next(), format!("item {number}"))).collect();
                let mut expected = given.clone();
                expected.sort_by_key(|(key, _)| *key);
                let mut sorted = given.clone();
                sort_by_key(&mut sorted, |(key, _)| *key);
                assert_eq!(sorted, expected);
                expected.sort_by(|one, other| other.cmp(one));
                sort_by(&mut sorted, |one, other| other.cmp(one));
                assert_eq!(sorted, expected);
                expected.sort();
                sort(&mut sorted);
                assert_eq!(sorted, expected);
            }
        }
    }
}
