//! Blocks as the allocator sees them: reference counts and the queue of free blocks.
//!
//! The queue is an intrusive doubly linked ring in an array, with one more node as its head: freeing,
//! touching and allocating a block are a few stores each, whatever the size of the pool.

/// The block owns at least one hash.
pub(super) const CACHED: u32 = 1;
/// Seen in this call; set and cleared within one validation.
pub(super) const MARKED: u32 = 1 << 1;
/// Released by `unpin_blocks`; somebody wants to know when it is used again.
pub(super) const WATCHED: u32 = 1 << 2;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Node {
    prev: u32,
    next: u32,
    pub refs: u32,
    pub flags: u32,
}

impl Node {
    #[inline]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// All blocks of a pool. Block 0, the null block, is never free.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    nodes: Vec<Node>,
    free: usize,
}

impl Blocks {
    /// `n` blocks, at least one, all but block 0 free in the order of their numbers.
    pub fn new(n: u32) -> Self {
        let last = n - 1;
        let mut nodes: Vec<Node> =
            (0..=n).map(|i| Node { prev: i.wrapping_sub(1), next: i + 1, ..Node::default() }).collect();
        let head = n as usize;
        nodes[head] = Node { prev: if last == 0 { n } else { last }, next: 1.min(n), ..Node::default() };
        if n > 1 {
            nodes[1].prev = n;
        }
        Self { nodes, free: last as usize }
    }

    /// Number of blocks, the null block included.
    pub fn len(&self) -> usize {
        self.nodes.len() - 1
    }

    /// Number of blocks in the queue.
    pub const fn num_free(&self) -> usize {
        self.free
    }

    #[inline]
    fn head(&self) -> u32 {
        (self.nodes.len() - 1) as u32
    }

    #[inline]
    pub fn node(&self, block: u32) -> &Node {
        &self.nodes[block as usize]
    }

    #[inline]
    pub fn node_mut(&mut self, block: u32) -> &mut Node {
        &mut self.nodes[block as usize]
    }

    /// Takes `n` blocks, which must be free, from the head of the queue.
    #[inline]
    pub fn pop(&mut self, n: usize, out: &mut Vec<u32>) {
        debug_assert!(n <= self.free);
        let head = self.head();
        let mut at = self.node(head).next;
        out.reserve(n);
        for _ in 0..n {
            out.push(at);
            at = self.node(at).next;
        }
        self.node_mut(head).next = at;
        self.node_mut(at).prev = head;
        self.free -= n;
    }

    /// Takes a free block out of the queue.
    #[inline]
    pub fn unlink(&mut self, block: u32) {
        let Node { prev, next, .. } = *self.node(block);
        self.node_mut(prev).next = next;
        self.node_mut(next).prev = prev;
        self.free -= 1;
    }

    /// Puts `block` into the queue right behind `after`.
    #[inline]
    fn link_after(&mut self, after: u32, block: u32) {
        let next = self.node(after).next;
        self.node_mut(after).next = block;
        self.node_mut(next).prev = block;
        let node = self.node_mut(block);
        node.prev = after;
        node.next = next;
        self.free += 1;
    }

    /// Puts a block at the tail: it is evicted last.
    #[inline]
    pub fn push_back(&mut self, block: u32) {
        let tail = self.node(self.head()).prev;
        self.link_after(tail, block);
    }

    /// Releases blocks: those with a hash go to the tail, the others together to the head, each in
    /// the given order.
    #[inline]
    pub fn release(&mut self, blocks: &[u32]) {
        let mut front = self.head();
        for &block in blocks {
            if self.node(block).has(CACHED) {
                self.push_back(block);
            } else {
                self.link_after(front, block);
                front = block;
            }
        }
    }

    /// The free block after a free one, or the first one.
    #[inline]
    pub fn next_free(&self, after: Option<u32>) -> Option<u32> {
        let next = self.node(after.unwrap_or_else(|| self.head())).next;
        (next != self.head()).then_some(next)
    }

    /// The free blocks from head to tail.
    pub fn free_order(&self) -> Vec<u32> {
        let mut out = Vec::with_capacity(self.free);
        let mut at = self.node(self.head()).next;
        while at != self.head() {
            out.push(at);
            at = self.node(at).next;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_without_a_hash_go_first_in_the_given_order() {
        let mut b = Blocks::new(7);
        let mut taken = Vec::new();
        b.pop(5, &mut taken);
        assert_eq!(taken, [1, 2, 3, 4, 5]);
        b.node_mut(2).flags |= CACHED;
        b.node_mut(4).flags |= CACHED;
        b.release(&[5, 4, 3, 2, 1]);
        assert_eq!(b.free_order(), [5, 3, 1, 6, 4, 2]);
        b.unlink(6);
        assert_eq!(b.num_free(), 5);
        b.push_back(6);
        assert_eq!(b.free_order(), [5, 3, 1, 4, 2, 6]);
    }

    #[test]
    fn a_pool_of_the_null_block_alone_has_nothing_to_give() {
        let b = Blocks::new(1);
        assert_eq!((b.num_free(), b.free_order()), (0, vec![]));
    }
}
