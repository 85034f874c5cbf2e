//! Bit set of indexes into a device list.

use alloc::vec::Vec;

/// A set of indexes into a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BitSet {
    words: Vec<u64>,
    length: usize,
}

impl BitSet {
    /// Returns an empty set for a list of this length.
    pub fn none(length: usize) -> Self {
        Self {
            words: alloc::vec![0; length.div_ceil(64)],
            length,
        }
    }

    /// Returns the length of the list.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns `true` if `index` is in the set.
    pub fn contains(&self, index: usize) -> bool {
        self.words
            .get(index / 64)
            .is_some_and(|word| word & (1 << (index % 64)) != 0)
    }

    /// Adds `index`; indexes beyond the list are ignored.
    pub fn insert(&mut self, index: usize) {
        if index < self.length
            && let Some(word) = self.words.get_mut(index / 64)
        {
            *word |= 1 << (index % 64);
        }
    }

    /// Removes `index`.
    pub fn remove(&mut self, index: usize) {
        if let Some(word) = self.words.get_mut(index / 64) {
            *word &= !(1 << (index % 64));
        }
    }

    /// Returns the number of indexes in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the number of indexes in both sets.
    pub fn count_common(&self, other: &Self) -> usize {
        self.words
            .iter()
            .zip(&other.words)
            .map(|(one, two)| (one & two).count_ones() as usize)
            .sum()
    }

    /// Returns all indexes in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        let words = self.words.iter().enumerate();
        words.flat_map(|(word_index, &word)| ones(word).map(move |bit| word_index * 64 + bit))
    }

    /// Returns all indexes in both sets, ascending.
    pub fn iter_common(&self, other: &Self) -> impl Iterator<Item = usize> {
        let words = self.words.iter().zip(&other.words).enumerate();
        words.flat_map(|(word_index, (one, two))| ones(one & two).map(move |bit| word_index * 64 + bit))
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
