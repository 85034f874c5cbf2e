use alloc::vec;
use alloc::vec::Vec;

use super::BitSet;

#[test]
fn places_are_in_order_across_words() {
    let mut bits = BitSet::none(200);
    for place in [199, 0, 63, 64, 128] {
        bits.insert(place);
    }

    assert_eq!(bits.iter().collect::<Vec<_>>(), vec![0, 63, 64, 128, 199]);
    assert_eq!(bits.count(), 5);
}

#[test]
fn places_beyond_the_list_are_ignored() {
    let mut bits = BitSet::none(3);

    bits.insert(3);
    bits.insert(usize::MAX);
    bits.remove(usize::MAX);

    assert_eq!(bits, BitSet::none(3));
    assert!(!bits.contains(usize::MAX));
}

#[test]
fn common_indexes_of_two_sets_are_counted_and_listed() {
    let (mut one, mut other) = (BitSet::none(130), BitSet::none(70));
    for place in [1, 64, 65, 129] {
        one.insert(place);
    }
    for place in [0, 1, 65] {
        other.insert(place);
    }

    assert_eq!(one.count_common(&other), 2);
    assert_eq!(one.iter_common(&other).collect::<Vec<_>>(), vec![1, 65]);
}

#[test]
fn a_set_of_nothing_is_empty() {
    let bits = BitSet::none(0);

    assert_eq!((bits.length(), bits.count(), bits.iter().next()), (0, 0, None));
}
