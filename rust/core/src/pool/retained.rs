//! What a pool keeps of resident blocks so that it can announce them again: tokens, extra keys, `LoRA`
//! and session (the parent stands beside the digest). Only while events are on.

use std::hash::Hash;
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::request::{NIL, Request};

/// What many blocks share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Meta {
    pub group: u16,
    /// Tokens that one hash stands for; for a boundary inside a block, its span.
    pub block_size: u32,
    pub lora_id: Option<i64>,
    pub lora_name: Option<Arc<str>>,
    pub session_id: Option<Arc<str>>,
}

/// Values with a count of users, by number.
#[derive(Clone, Debug)]
struct Interned<T> {
    values: Vec<Option<(T, u32)>>,
    index: HashMap<T, u32, RandomState>,
    spare: Vec<u32>,
}

impl<T: Clone + Eq + Hash> Interned<T> {
    fn new() -> Self {
        Self { values: Vec::new(), index: HashMap::default(), spare: Vec::new() }
    }

    /// The number of a value, with one more user.
    fn acquire(&mut self, value: T) -> u32 {
        if let Some(&id) = self.index.get(&value) {
            self.add(id, 1);
            return id;
        }
        let id = self.spare.pop().unwrap_or_else(|| {
            self.values.push(None);
            (self.values.len() - 1) as u32
        });
        self.values[id as usize] = Some((value.clone(), 1));
        self.index.insert(value, id);
        id
    }

    #[inline]
    fn add(&mut self, id: u32, users: u32) {
        if let Some((_, n)) = &mut self.values[id as usize] {
            *n += users;
        }
    }

    #[inline]
    fn release(&mut self, id: u32) -> bool {
        let Some((_, n)) = &mut self.values[id as usize] else { return false };
        *n -= 1;
        *n == 0 && self.drop_value(id)
    }

    #[cold]
    fn drop_value(&mut self, id: u32) -> bool {
        if let Some((value, _)) = self.values[id as usize].take() {
            self.index.remove(&value);
            self.spare.push(id);
        }
        true
    }

    fn get(&self, id: u32) -> Option<&T> {
        self.values.get(id as usize).and_then(Option::as_ref).map(|(v, _)| v)
    }
}

/// Tokens of blocks of one size. The cell that was given back last is used first: it is warm.
#[derive(Clone, Debug)]
struct TokenCells {
    size: usize,
    data: Vec<u32>,
    spare: Vec<u32>,
}

impl TokenCells {
    #[inline]
    fn put(&mut self, tokens: &[u32]) -> u32 {
        if let Some(cell) = self.spare.pop() {
            let to = &mut self.data[cell as usize * self.size..][..self.size];
            if let (Ok(a), Ok(b)) = (<&mut [u32; 16]>::try_from(&mut *to), <&[u32; 16]>::try_from(tokens)) {
                *a = *b;
            } else {
                to.copy_from_slice(tokens);
            }
            return cell;
        }
        let cell = self.data.len() / self.size;
        self.data.extend_from_slice(tokens);
        cell as u32
    }
}

/// Where the record of a slot is; stands beside the slot's key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    meta: u32,
    extra: u32,
    /// A cell of the group, or `NIL` for a span of another length.
    cell: u32,
}

impl Default for Kept {
    fn default() -> Self {
        Self { meta: NIL, extra: NIL, cell: NIL }
    }
}

/// All that is kept.
#[derive(Clone, Debug)]
pub(super) struct Retained {
    metas: Interned<Meta>,
    extras: Interned<Box<[u8]>>,
    cells: Vec<TokenCells>,
    /// Tokens of spans, by slot.
    spans: HashMap<u32, Box<[u32]>, RandomState>,
    /// The meta of the last call; requests of one kind come in a row.
    last: u32,
}

/// One slot's record, to announce it again.
pub(super) struct Record<'a> {
    pub meta: u32,
    pub tokens: &'a [u32],
    pub extra: Option<&'a [u8]>,
}

impl Retained {
    /// For groups with blocks of these sizes.
    pub fn new(block_sizes: impl Iterator<Item = u32>) -> Self {
        let cells = block_sizes.map(|s| TokenCells { size: s as usize, data: Vec::new(), spare: Vec::new() });
        Self {
            metas: Interned::new(),
            extras: Interned::new(),
            cells: cells.collect(),
            spans: HashMap::default(),
            last: NIL,
        }
    }

    /// One more group.
    pub fn add_group(&mut self, block_size: u32) {
        self.cells.push(TokenCells { size: block_size as usize, data: Vec::new(), spare: Vec::new() });
    }

    /// The number of the meta of a call, with one user: the call itself, until [`Self::done`].
    #[inline]
    pub fn begin(&mut self, r: &Request<'_>, group: u16, block_size: u32) -> u32 {
        if let Some(m) = self.metas.get(self.last)
            && m.group == group
            && m.block_size == block_size
            && m.lora_id == r.lora_id
            && m.lora_name.as_deref() == r.lora_name.map(|s| &**s)
            && m.session_id.as_deref() == r.session_id
        {
            self.metas.add(self.last, 1);
            return self.last;
        }
        self.last = self.metas.acquire(Meta {
            group,
            block_size,
            lora_id: r.lora_id,
            lora_name: r.lora_name.cloned(),
            session_id: r.session_id.map(Arc::from),
        });
        self.last
    }

    /// The call that began with `meta` is over. Returns whether nothing uses the number any more.
    #[inline]
    pub fn done(&mut self, meta: u32) -> bool {
        self.metas.release(meta)
    }

    pub fn meta(&self, id: u32) -> Option<&Meta> {
        self.metas.get(id)
    }

    /// Keeps a slot's record.
    #[inline]
    pub fn put(&mut self, slot: u32, group: u16, record: &Record<'_>) -> Kept {
        let cells = &mut self.cells[usize::from(group)];
        let cell = if record.tokens.len() == cells.size {
            cells.put(record.tokens)
        } else {
            self.spans.insert(slot, record.tokens.into());
            NIL
        };
        let extra = record.extra.map_or(NIL, |e| self.extras.acquire(e.into()));
        self.metas.add(record.meta, 1);
        Kept { meta: record.meta, extra, cell }
    }

    /// Forgets a slot's record. Returns the meta's number if nothing uses it any more.
    #[inline]
    pub fn remove(&mut self, slot: u32, group: u16, kept: Kept) -> Option<u32> {
        if kept.meta == NIL {
            return None;
        }
        if kept.cell == NIL {
            self.spans.remove(&slot);
        } else {
            self.cells[usize::from(group)].spare.push(kept.cell);
        }
        if kept.extra != NIL {
            self.extras.release(kept.extra);
        }
        self.metas.release(kept.meta).then_some(kept.meta)
    }

    /// A slot's record belongs to another slot now.
    pub fn rename(&mut self, from: u32, to: u32) {
        if let Some(span) = self.spans.remove(&from) {
            self.spans.insert(to, span);
        }
    }

    /// A slot's record.
    pub fn record(&self, slot: u32, group: u16, kept: Kept) -> Record<'_> {
        let cells = &self.cells[usize::from(group)];
        let tokens = if kept.cell == NIL {
            self.spans.get(&slot).map_or(&[][..], |s| s)
        } else {
            &cells.data[kept.cell as usize * cells.size..][..cells.size]
        };
        Record { meta: kept.meta, tokens, extra: self.extras.get(kept.extra).map(|e| &**e) }
    }

    /// Forgets all records.
    pub fn clear(&mut self) {
        let sizes: Vec<u32> = self.cells.iter().map(|c| c.size as u32).collect();
        *self = Self::new(sizes.into_iter());
    }
}
