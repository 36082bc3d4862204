//! Bytes as choices.

/// What is left of an input. Where nothing is left every choice is the first one.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `data`.
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// A number below `n` (at most 256), from one byte.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    /// One of these, from one byte.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Whether a byte is one of the last of `n` values.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }
}
