//! Writing into a buffer that is known to be long enough.
//!
//! Room for the worst case is made once an event ([`super::encode`]), so integers are written without
//! branches: all bytes that any width needs, then the position moves by the width that it was.

use crate::hash::HashRef;

/// Every write may touch this many bytes behind what it leaves.
pub const SLACK: usize = 64;

/// Bytes that are copied at once by [`Writer::blocks`]: a copy of a length that the compiler knows.
pub const BLOCK: usize = 32;

/// A position in a buffer.
pub struct Writer<'a> {
    pub buf: &'a mut [u8],
    pub at: usize,
}

impl Writer<'_> {
    /// Bytes of any length.
    #[inline]
    pub fn bytes(&mut self, b: &[u8]) {
        self.buf[self.at..self.at + b.len()].copy_from_slice(b);
        self.at += b.len();
    }

    #[inline]
    pub fn byte(&mut self, b: u8) {
        self.buf[self.at] = b;
        self.at += 1;
    }

    /// Bytes that stand at the start of blocks of [`BLOCK`], of which only `len` count.
    #[inline]
    pub fn blocks(&mut self, blocks: &[[u8; BLOCK]], len: usize) {
        let mut at = self.at;
        for block in blocks {
            self.buf[at..at + BLOCK].copy_from_slice(block);
            at += BLOCK;
        }
        self.at += len;
    }

    #[inline]
    fn word(&mut self, tag: u8, rest: u64) {
        let mut nine = [0; 9];
        nine[0] = tag;
        nine[1..].copy_from_slice(&rest.to_be_bytes());
        self.buf[self.at..self.at + 9].copy_from_slice(&nine);
    }

    /// An unsigned integer, shortest form.
    #[inline]
    pub fn uint(&mut self, v: u64) {
        if v > u64::from(u32::MAX) {
            self.word(0xcf, v);
            self.at += 9;
        } else {
            self.u32(v as u32);
        }
    }

    /// A signed integer, shortest form.
    #[inline]
    pub fn int(&mut self, v: i64) {
        if v >= 0 {
            return self.uint(v.cast_unsigned());
        }
        // Left-aligned behind the tag, so that one store serves every width.
        let bits = v.cast_unsigned();
        let (tag, rest, size) = if v >= -32 {
            (v as u8, 0, 1)
        } else if v >= i64::from(i8::MIN) {
            (0xd0, bits << 56, 2)
        } else if v >= i64::from(i16::MIN) {
            (0xd1, bits << 48, 3)
        } else if v >= i64::from(i32::MIN) {
            (0xd2, bits << 32, 5)
        } else {
            (0xd3, bits, 9)
        };
        self.word(tag, rest);
        self.at += size;
    }

    /// An unsigned integer of 32 bits, shortest form.
    #[inline]
    pub fn u32(&mut self, v: u32) {
        let (word, size) = super::tokens::coding(v);
        self.buf[self.at..self.at + 8].copy_from_slice(&word.to_be_bytes());
        self.at += size;
    }

    /// An array header.
    #[inline]
    pub fn array(&mut self, n: usize) {
        if n < 16 {
            self.byte(0x90 | n as u8);
        } else if n <= 0xffff {
            self.byte(0xdc);
            self.bytes(&(n as u16).to_be_bytes());
        } else {
            self.byte(0xdd);
            self.bytes(&(n as u32).to_be_bytes());
        }
    }

    /// A map header.
    pub fn map(&mut self, n: usize) {
        if n < 16 {
            self.byte(0x80 | n as u8);
        } else {
            self.map16(n);
        }
    }

    /// A map header of three bytes (of five above 65,535).
    #[inline]
    pub fn map16(&mut self, n: usize) {
        if n <= 0xffff {
            self.byte(0xde);
            self.bytes(&(n as u16).to_be_bytes());
        } else {
            self.byte(0xdf);
            self.bytes(&(n as u32).to_be_bytes());
        }
    }

    /// A digest of 32 bytes.
    #[inline]
    pub fn digest(&mut self, digest: &[u8; 32]) {
        let mut all = [0; 34];
        all[..2].copy_from_slice(&[0xc4, 32]);
        all[2..].copy_from_slice(digest);
        self.buf[self.at..self.at + 34].copy_from_slice(&all);
        self.at += 34;
    }

    /// A block hash, in the form in which it came.
    #[inline]
    pub fn hash(&mut self, h: HashRef<'_>) {
        match h {
            HashRef::Uint(v) => self.uint(v),
            HashRef::Int(v) => self.int(v),
            HashRef::Bytes(b) => {
                self.buf[self.at] = 0xc4;
                self.buf[self.at + 1] = b.len() as u8;
                self.at += 2;
                self.bytes(b);
            }
        }
    }
}
