//! The order of the stores in an output, and copying their fields.

use super::Aggregator;
use super::run::{EMIT, WHOLE};
use super::space::{NONE, PLACED, Space, TO_STORE, hash_key};
use crate::error::EventsError;
use crate::events::{AttrId, EventData};
use crate::hash::HashRef;

/// What is being put together.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Drain,
    Snapshot,
}

/// The table entry that the last event used: most events share it.
#[derive(Default)]
struct LastAttrs {
    of: Option<(u32, usize)>,
    id: Option<AttrId>,
}

/// Consecutive blocks of a run that go out together.
#[derive(Clone, Copy)]
struct Piece {
    run: u32,
    from: u32,
    to: u32,
}

impl Aggregator {
    /// Puts the marked blocks of `runs`, parents first. A piece is a chain, so only its first block can
    /// have its parent in another piece, and a walk from piece to parent orders them; a piece is marked
    /// before its parent is looked at, so that a cycle of false hashes ends.
    pub(super) fn put_stores(
        &mut self,
        runs: &[u32],
        output: Output,
        out: &mut EventData,
    ) -> Result<(), EventsError> {
        let mut stack = Vec::new();
        let mut bare = Vec::new();
        let mut last = LastAttrs::default();
        for &run in runs {
            let len = if self.runs.get(run).is(WHOLE) { 1 } else { self.runs.get(run).len };
            for pos in 0..len {
                let mut next = self.take_piece(run, pos);
                while let Some(piece) = next {
                    stack.push(piece);
                    next = self.parent_of(piece).and_then(|(run, pos)| self.take_piece(run, pos));
                }
                while let Some(piece) = stack.pop() {
                    self.put_piece(piece, &mut last, &mut bare, out)?;
                }
            }
        }
        if output == Output::Drain {
            self.counters.without_content += bare.len() as u64;
        }
        self.put_bare(&bare, out)
    }

    /// The piece around a block that is to go out and was not taken yet.
    fn take_piece(&mut self, run: u32, pos: u32) -> Option<Piece> {
        let r = self.runs.get_mut(run);
        if r.is(WHOLE) {
            let todo = r.is(EMIT);
            r.flags &= !EMIT;
            return todo.then_some(Piece { run, from: 0, to: r.len });
        }
        let (r, space) = (&*r, &mut self.spaces[r.space as usize]);
        let wanted = |space: &Space, pos: u32| {
            let record = space.records[r.id(pos) as usize];
            record.run == run && record.pos() == pos && record.is(TO_STORE) && !record.is(PLACED)
        };
        if !wanted(space, pos) {
            return None;
        }
        let (mut from, mut to) = (pos, pos + 1);
        while from > 0 && wanted(space, from - 1) {
            from -= 1;
        }
        while to < r.len && wanted(space, to) {
            to += 1;
        }
        for pos in from..to {
            space.records[r.id(pos) as usize].meta |= PLACED;
        }
        Some(Piece { run, from, to })
    }

    /// Run and position of the block before a piece, where that has a run.
    fn parent_of(&self, piece: Piece) -> Option<(u32, u32)> {
        let r = self.runs.get(piece.run);
        let parent = self.runs.view(piece.run)?.parent_of((r.first + piece.from) as usize)?;
        let space = &self.spaces[r.space as usize];
        let bits = parent.bits().map(u64::to_le_bytes);
        let key = match (&bits, parent) {
            (Some(b), _) => &b[..],
            (None, HashRef::Bytes(b)) => b,
            (None, _) => return None,
        };
        if bits.is_some() != space.integers || key.len() != space.width {
            return None;
        }
        let record = space.records[space.find(hash_key(&self.state, key), key)? as usize];
        (record.run != NONE).then_some((record.run, record.pos()))
    }

    fn put_piece(
        &self,
        piece: Piece,
        last: &mut LastAttrs,
        bare: &mut Vec<(u32, u32)>,
        out: &mut EventData,
    ) -> Result<(), EventsError> {
        let r = self.runs.get(piece.run);
        let Some(view) = self.runs.view(piece.run) else {
            bare.extend((piece.from..piece.to).map(|pos| (r.space, r.id(pos))));
            return Ok(());
        };
        let of = Some((r.list, view.attrs_index()));
        let attrs = match last.id {
            Some(id) if last.of == of => id,
            _ => out.intern(view.attrs()),
        };
        *last = LastAttrs { of, id: Some(attrs) };
        let first = r.first as usize;
        out.push_part(attrs, view, first + piece.from as usize..first + piece.to as usize)
    }
}
