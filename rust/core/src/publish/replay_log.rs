//! The last batches of a stream as they went out, by sequence number.
//!
//! Payloads lie one after the other in a ring of fixed chunks, so a payload may span chunks and no chunk
//! has slack; an index entry of 16 bytes says where each ends. Chunks are freed as their last batch leaves.

use std::collections::VecDeque;

use crate::error::ReplayLogError;

/// Bytes of a chunk of payloads. At most two are partly used, which is what a log costs beyond its index.
const CHUNK: usize = 16 * 1024;
/// Entries of a piece of the index (4 KiB).
const PIECE: usize = 256;

/// One batch: its number, and where its payload ends in the ring (absolute, from the log's beginning).
#[derive(Debug, Clone, Copy)]
struct Entry {
    seq: u64,
    end: u64,
}

/// Payloads by sequence number, bounded by their count and by their bytes.
///
/// Numbers grow; holes are allowed (batches that were dropped or lost have none).
#[derive(Debug)]
pub struct ReplayLog {
    max_batches: usize,
    max_bytes: usize,
    /// Payload bytes; every chunk but the last is full.
    chunks: VecDeque<Box<[u8; CHUNK]>>,
    /// Absolute position of the first byte of the first chunk.
    base: u64,
    /// Absolute position of the oldest payload.
    start: u64,
    /// Absolute position behind the newest payload.
    end: u64,
    /// Every piece but the last is full; the first `head` entries of the first are gone.
    pieces: VecDeque<Vec<Entry>>,
    head: usize,
    len: usize,
    newest: Option<u64>,
    evicted: u64,
}

/// One payload inside the log: one slice, or several where it spans chunks.
#[derive(Debug, Clone, Copy)]
pub struct Payload<'a> {
    log: &'a ReplayLog,
    start: u64,
    end: u64,
}

impl Payload<'_> {
    /// Bytes of the payload.
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether the payload has no bytes.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Copies the payload; `out` must have its length.
    ///
    /// # Panics
    /// Panics if `out` has another length.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len(), "the output must have the payload's length");
        let mut at = (self.start - self.log.base) as usize;
        let mut out = out;
        while !out.is_empty() {
            let part = &self.log.chunks[at / CHUNK][at % CHUNK..];
            let n = part.len().min(out.len());
            out[..n].copy_from_slice(&part[..n]);
            out = &mut out[n..];
            at += n;
        }
    }

    /// The payload in a vector of its own.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        self.copy_to(&mut out);
        out
    }
}

impl ReplayLog {
    /// An empty log that keeps at most `max_batches` payloads of at most `max_bytes` bytes together.
    ///
    /// With 0 for either it keeps nothing.
    pub fn new(max_batches: usize, max_bytes: usize) -> Self {
        Self {
            max_batches,
            max_bytes,
            chunks: VecDeque::new(),
            base: 0,
            start: 0,
            end: 0,
            pieces: VecDeque::new(),
            head: 0,
            len: 0,
            newest: None,
            evicted: 0,
        }
    }

    /// Adds a batch, and lets the oldest go until both bounds hold. `false` if the payload alone is over
    /// the bound of bytes: then it is not kept, and nothing older is let go for it.
    pub fn append(&mut self, seq: u64, payload: &[u8]) -> Result<bool, ReplayLogError> {
        if seq == u64::MAX {
            return Err(ReplayLogError::Reserved);
        }
        if let Some(newest) = self.newest.filter(|&n| seq <= n) {
            return Err(ReplayLogError::NotNewer { seq, newest });
        }
        self.newest = Some(seq);
        if payload.len() > self.max_bytes || self.max_batches == 0 {
            self.evicted += 1;
            return Ok(false);
        }
        while self.len >= self.max_batches || self.payload_bytes() + payload.len() > self.max_bytes {
            self.evict();
        }
        self.write(payload);
        let entry = Entry { seq, end: self.end };
        match self.pieces.back_mut() {
            Some(piece) if piece.len() < PIECE => piece.push(entry),
            _ => {
                let mut piece = Vec::with_capacity(PIECE);
                piece.push(entry);
                push(&mut self.pieces, piece);
            }
        }
        self.len += 1;
        Ok(true)
    }

    /// The payload of one batch, if it is still here.
    pub fn get(&self, seq: u64) -> Option<Payload<'_>> {
        let i = self.position(seq);
        (i < self.len && self.entry(i).seq == seq).then(|| self.payload(i))
    }

    /// The batches from `seq` on, oldest first.
    pub fn from(&self, seq: u64) -> impl Iterator<Item = (u64, Payload<'_>)> {
        (self.position(seq)..self.len).map(|i| (self.entry(i).seq, self.payload(i)))
    }

    /// Number of the oldest batch that can be replayed.
    pub fn oldest(&self) -> Option<u64> {
        (self.len > 0).then(|| self.entry(0).seq)
    }

    /// Number of the newest batch that was added, kept or not.
    pub fn newest(&self) -> Option<u64> {
        self.newest
    }

    /// Batches that can be replayed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing can be replayed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Batches that were let go, or were too large to be kept.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Bytes of the payloads.
    pub fn payload_bytes(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Bytes allocated: payloads, index and what is not used of both.
    pub fn nbytes(&self) -> usize {
        let pieces: usize = self.pieces.iter().map(Vec::capacity).sum();
        size_of::<Self>()
            + self.chunks.len() * CHUNK
            + self.chunks.capacity() * size_of::<Box<[u8; CHUNK]>>()
            + pieces * size_of::<Entry>()
            + self.pieces.capacity() * size_of::<Vec<Entry>>()
    }

    fn entry(&self, i: usize) -> Entry {
        let at = self.head + i;
        self.pieces[at / PIECE][at % PIECE]
    }

    fn payload(&self, i: usize) -> Payload<'_> {
        let start = if i == 0 { self.start } else { self.entry(i - 1).end };
        Payload { log: self, start, end: self.entry(i).end }
    }

    /// Index of the first batch whose number is `seq` or larger.
    fn position(&self, seq: u64) -> usize {
        let (mut low, mut high) = (0, self.len);
        while low < high {
            let middle = low.midpoint(high);
            if self.entry(middle).seq < seq {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    fn evict(&mut self) {
        self.start = self.entry(0).end;
        self.head += 1;
        self.len -= 1;
        self.evicted += 1;
        if self.head == PIECE {
            self.pieces.pop_front();
            self.head = 0;
        }
        while self.start - self.base >= CHUNK as u64 {
            self.chunks.pop_front();
            self.base += CHUNK as u64;
        }
    }

    fn write(&mut self, payload: &[u8]) {
        let mut rest = payload;
        while !rest.is_empty() {
            let at = (self.end - self.base) as usize;
            if at == self.chunks.len() * CHUNK {
                push(&mut self.chunks, Box::new([0; CHUNK]));
            }
            let chunk = &mut self.chunks[at / CHUNK][at % CHUNK..];
            let n = rest.len().min(chunk.len());
            chunk[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            self.end += n as u64;
        }
    }
}

/// Grows by a quarter, not to the double: what is reserved counts as the log's.
fn push<T>(deque: &mut VecDeque<T>, item: T) {
    if deque.len() == deque.capacity() {
        deque.reserve_exact(4.max(deque.len() / 4));
    }
    deque.push_back(item);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn contents(log: &ReplayLog) -> Vec<(u64, Vec<u8>)> {
        log.from(0).map(|(seq, p)| (seq, p.to_vec())).collect()
    }

    #[test]
    fn bounded_by_count() {
        let mut log = ReplayLog::new(3, 1 << 20);
        for seq in 0..10 {
            assert!(log.append(seq, &[seq as u8; 5]).unwrap());
        }
        assert_eq!((log.oldest(), log.newest(), log.len()), (Some(7), Some(9), 3));
        assert_eq!(log.payload_bytes(), 15);
        assert_eq!(log.evicted(), 7);
        assert_eq!(log.get(8).unwrap().to_vec(), [8; 5]);
        assert!(log.get(6).is_none());
        assert!(log.get(10).is_none());
    }

    #[test]
    fn bounded_by_bytes() {
        let mut log = ReplayLog::new(1000, 10_000);
        for seq in 0..50 {
            log.append(seq, &[0; 3000]).unwrap();
        }
        assert_eq!((log.oldest(), log.len(), log.payload_bytes()), (Some(47), 3, 9000));
    }

    #[test]
    fn too_large_is_not_kept_and_costs_nothing_else() {
        let mut log = ReplayLog::new(1000, 100);
        log.append(0, &[1; 50]).unwrap();
        assert!(!log.append(1, &[1; 101]).unwrap());
        assert_eq!((log.oldest(), log.newest(), log.len()), (Some(0), Some(1), 1));
        assert!(matches!(log.append(1, b"x"), Err(ReplayLogError::NotNewer { seq: 1, newest: 1 })));
    }

    #[test]
    fn holes_are_stepped_over() {
        let mut log = ReplayLog::new(10, 1000);
        for seq in [3, 4, 9, 10] {
            log.append(seq, b"p").unwrap();
        }
        assert!(log.get(5).is_none());
        assert_eq!(log.from(5).map(|(seq, _)| seq).collect::<Vec<_>>(), [9, 10]);
        assert_eq!(log.from(11).count(), 0);
    }

    #[test]
    fn the_reserved_number_is_refused_and_its_neighbours_work() {
        let mut log = ReplayLog::new(10, 1000);
        for seq in [u64::MAX - 2, u64::MAX - 1] {
            log.append(seq, b"p").unwrap();
        }
        assert!(matches!(log.append(u64::MAX, b"p"), Err(ReplayLogError::Reserved)));
        assert_eq!(log.from(u64::MAX - 1).count(), 1);
        assert_eq!(log.from(u64::MAX).count(), 0);
    }

    #[test]
    fn keeps_nothing_when_told_so() {
        let mut log = ReplayLog::new(0, 1000);
        assert!(!log.append(0, b"p").unwrap());
        assert!(log.is_empty());
    }

    #[test]
    fn costs_at_most_24_bytes_a_batch() {
        for size in [40, 400, 5000] {
            let mut log = ReplayLog::new(10_000, 1 << 30);
            for seq in 0..25_000 {
                log.append(seq, &vec![0; size]).unwrap();
            }
            let beyond = log.nbytes() - log.payload_bytes();
            assert!(beyond <= 24 * log.len(), "{} a batch of {size}", beyond / log.len());
        }
    }

    proptest! {
        #[test]
        fn same_as_a_plain_list(
            max_batches in 1usize..600,
            max_bytes in 1usize..100_000,
            sizes in proptest::collection::vec((1u64..4, 0usize..40_000), 1..60),
            small in proptest::collection::vec(0usize..30, 0..700),
        ) {
            let mut log = ReplayLog::new(max_batches, max_bytes);
            let mut plain: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
            let mut seq = 0;
            for (step, size) in sizes.into_iter().chain(small.into_iter().map(|s| (1, s))) {
                seq += step;
                let payload: Vec<u8> = (0..size).map(|i| (i as u64 * 7 + seq) as u8).collect();
                log.append(seq, &payload).unwrap();
                if size <= max_bytes {
                    plain.push_back((seq, payload));
                    while plain.len() > max_batches || plain.iter().map(|p| p.1.len()).sum::<usize>() > max_bytes {
                        plain.pop_front();
                    }
                }
            }
            prop_assert_eq!(contents(&log), Vec::from(plain));
        }
    }
}
