//! A set of small numbers: places in a device list.

use alloc::vec::Vec;

/// A set of places in a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BitSet {
    words: Vec<u64>,
    length: usize,
}

impl BitSet {
    /// Nothing, of a list of `length`.
    pub fn none(length: usize) -> Self {
        Self {
            words: alloc::vec![0; length.div_ceil(64)],
            length,
        }
    }

    /// How long the list is.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether `place` is in the set.
    pub fn contains(&self, place: usize) -> bool {
        self.words
            .get(place / 64)
            .is_some_and(|word| word & (1 << (place % 64)) != 0)
    }

    /// Puts `place` in; places beyond the list are ignored.
    pub fn insert(&mut self, place: usize) {
        if place < self.length
            && let Some(word) = self.words.get_mut(place / 64)
        {
            *word |= 1 << (place % 64);
        }
    }

    /// Takes `place` out.
    pub fn remove(&mut self, place: usize) {
        if let Some(word) = self.words.get_mut(place / 64) {
            *word &= !(1 << (place % 64));
        }
    }

    /// How many are in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// How many are in both sets.
    pub fn count_common(&self, other: &Self) -> usize {
        self.words
            .iter()
            .zip(&other.words)
            .map(|(one, two)| (one & two).count_ones() as usize)
            .sum()
    }

    /// All places in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.words
            .iter()
            .enumerate()
            .flat_map(|(index, &word)| ones(word).map(move |bit| index * 64 + bit))
    }

    /// All places in both sets, ascending.
    pub fn iter_common(&self, other: &Self) -> impl Iterator<Item = usize> {
        let words = self.words.iter().zip(&other.words).enumerate();
        words.flat_map(|(index, (one, two))| ones(one & two).map(move |bit| index * 64 + bit))
    }
}

fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.checked_sub(1)?;
        Some(bit)
    })
}

#[cfg(test)]
mod tests;
