//! The pool's own event queue: what happened becomes rows of columns.

use std::sync::Arc;

use super::config::{Config, Group};
use super::request::KeyForm;
use super::retained::Meta;
use crate::events::{
    AttrId, Attrs, CommonParts, EventData, EventList, ExtraKeys, Hashes, StoredParts, Tokens,
};
use crate::hash::HashRef;
use crate::msgpack;

/// Beyond this many tokens a queue that nobody drains costs more than announcing everything anew.
const TOKEN_SLACK: usize = 1 << 20;

/// Blocks that are to be announced by one event.
pub(super) struct Stored<'a> {
    pub meta: u32,
    pub parent: Option<&'a [u8]>,
    /// Hashes, back to back in the key's form.
    pub hashes: &'a [u8],
    pub tokens: &'a [u32],
    pub extra: ExtraKeys<'a>,
    pub metadata: Option<&'a [u8]>,
    /// Whether the event may continue the one before it.
    pub chain: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Emitter {
    queue: EventData,
    medium: Arc<str>,
    groups: Vec<Group>,
    narrow: bool,
    coalesce: bool,
    /// Numbers of attributes in this queue: of removals by group, of stores by meta.
    removal_attrs: Vec<Option<AttrId>>,
    stored_attrs: Vec<Option<AttrId>>,
    /// What left in this call, as events carry it.
    pending: Vec<u8>,
    pending_ints: Vec<u64>,
    pending_group: u16,
    scratch: Vec<u64>,
    max_events: usize,
    max_tokens: usize,
    lost: bool,
    resyncs: u64,
    dropped: u64,
    room: (usize, usize, usize),
}

impl Emitter {
    pub fn new(config: &Config, coalesce: bool) -> Self {
        let resident = config.num_blocks.saturating_mul(config.block_size as usize);
        Self {
            queue: EventData::new(),
            medium: Arc::clone(&config.medium),
            groups: config.groups.clone(),
            narrow: config.narrow,
            coalesce,
            removal_attrs: vec![None; config.groups.len()],
            stored_attrs: Vec::new(),
            pending: Vec::new(),
            pending_ints: Vec::new(),
            pending_group: 0,
            scratch: Vec::new(),
            max_events: config.max_queued_events,
            max_tokens: resident.saturating_mul(4).saturating_add(TOKEN_SLACK),
            lost: false,
            resyncs: 0,
            dropped: 0,
            room: (0, 0, 0),
        }
    }

    /// Events that wait; 0 after the bound was reached.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Groups were added or are better known.
    pub fn set_groups(&mut self, groups: &[Group]) {
        self.groups = groups.to_vec();
        self.removal_attrs.resize(groups.len(), None);
        self.stored_attrs.fill(None);
    }

    /// How often the queue was replaced by a resync mark, and how many events that dropped.
    pub const fn losses(&self) -> (u64, u64) {
        (self.resyncs, self.dropped)
    }

    /// Whether the queue was replaced by a resync mark.
    pub const fn is_lost(&self) -> bool {
        self.lost
    }

    fn lose(&mut self) {
        self.dropped += self.queue.len() as u64;
        self.resyncs += 1;
        self.lost = true;
        self.start();
    }

    fn start(&mut self) -> EventData {
        self.removal_attrs.fill(None);
        self.stored_attrs.fill(None);
        let taken = std::mem::take(&mut self.queue);
        // The next step is probably as busy as this one was.
        let room = (taken.len(), taken.num_hash_bytes(), taken.num_tokens());
        let limit = (1 << 12, 1 << 17, 1 << 16);
        self.room = (room.0.min(limit.0), room.1.min(limit.1), room.2.min(limit.2));
        taken
    }

    /// Everything so far.
    pub fn take(&mut self) -> EventList {
        if self.queue.is_empty() {
            return EventList::default();
        }
        self.start().into()
    }

    /// The owner has announced everything anew.
    pub fn recovered(&mut self) {
        self.lost = false;
    }

    /// A queue of the same pool that takes a whole announcement.
    pub fn unbounded(config: &Config) -> Self {
        let mut emitter = Self::new(config, true);
        (emitter.max_events, emitter.max_tokens) = (usize::MAX, usize::MAX);
        emitter
    }

    /// A number of a meta was given up; another meta may get it.
    #[inline]
    pub fn forget_meta(&mut self, meta: u32) {
        if let Some(a) = self.stored_attrs.get_mut(meta as usize) {
            *a = None;
        }
    }

    #[inline]
    fn admit(&mut self) -> bool {
        if self.lost {
            return false;
        }
        if self.queue.is_empty() {
            self.queue.reserve(self.room.0, self.room.1, self.room.2);
        }
        if self.queue.len() >= self.max_events || self.queue.num_tokens() >= self.max_tokens {
            self.lose();
            return false;
        }
        true
    }

    /// A hash as events carry it.
    #[inline]
    pub fn event_hash<'a>(&self, form: KeyForm, key: &'a [u8]) -> HashRef<'a> {
        let h = form.hash(key);
        if self.narrow { HashRef::Uint(h.narrow_low()) } else { h }
    }

    /// Fills `scratch` if events carry integers.
    #[inline]
    fn narrow_all(&mut self, form: KeyForm, keys: &[u8]) -> bool {
        if form != KeyForm::Int && !self.narrow {
            return false;
        }
        self.scratch.clear();
        self.scratch.extend(keys.chunks_exact(form.width()).map(|k| narrow(form, k)));
        true
    }

    /// A hash left. With coalescing the event is made by [`Self::flush`].
    #[inline]
    pub fn removed(&mut self, form: KeyForm, key: &[u8], group: u16) {
        if self.pending_group != group {
            self.flush(form);
            self.pending_group = group;
        }
        if self.narrow || form == KeyForm::Int {
            self.pending_ints.push(narrow(form, key));
        } else {
            self.pending.extend_from_slice(key);
        }
        if !self.coalesce {
            self.flush(form);
        }
    }

    /// Makes the event of the hashes that left.
    #[inline]
    pub fn flush(&mut self, form: KeyForm) {
        if !self.pending.is_empty() || !self.pending_ints.is_empty() {
            self.push_removed(form);
        }
    }

    fn push_removed(&mut self, form: KeyForm) {
        if self.admit() {
            let attrs = self.removal_attr(self.pending_group);
            let hashes = if self.pending.is_empty() {
                Hashes::Uint(&self.pending_ints)
            } else {
                Hashes::Bytes { width: form.width(), data: &self.pending }
            };
            // The only failure is a full column.
            if self.queue.push_removed(attrs, hashes, &CommonParts::default()).is_err() {
                self.lose();
            }
        }
        self.pending.clear();
        self.pending_ints.clear();
    }

    fn removal_attr(&mut self, group: u16) -> AttrId {
        if let Some(id) = self.removal_attrs[usize::from(group)] {
            return id;
        }
        let id = self.queue.intern(&Attrs {
            medium: Some(Arc::clone(&self.medium)),
            group_idx: Some(i64::from(group)),
            ..Attrs::default()
        });
        self.removal_attrs[usize::from(group)] = Some(id);
        id
    }

    fn stored_attr(&mut self, number: u32, meta: &Meta) -> AttrId {
        let at = number as usize;
        if let Some(Some(id)) = self.stored_attrs.get(at) {
            return *id;
        }
        if self.stored_attrs.len() <= at {
            self.stored_attrs.resize(at + 1, None);
        }
        let group = &self.groups[usize::from(meta.group)];
        let id = self.queue.intern(&Attrs {
            block_size: meta.block_size,
            lora_id: meta.lora_id,
            group_idx: Some(i64::from(meta.group)),
            sliding_window: group.sliding_window.map(i64::from),
            medium: Some(Arc::clone(&self.medium)),
            lora_name: meta.lora_name.clone(),
            spec_kind: (!group.kind.is_empty()).then(|| Arc::clone(&group.kind)),
            session_id: meta.session_id.clone(),
            ..Attrs::default()
        });
        self.stored_attrs[at] = Some(id);
        id
    }

    /// Announces blocks.
    #[inline]
    pub fn stored(&mut self, form: KeyForm, meta: &Meta, s: &Stored<'_>) {
        self.flush(form);
        if !self.admit() {
            return;
        }
        let attrs = self.stored_attr(s.meta, meta);
        let parent = s.parent.map(|p| self.event_hash(form, p));
        let hashes = if self.narrow_all(form, s.hashes) {
            Hashes::Uint(&self.scratch)
        } else {
            Hashes::Bytes { width: form.width(), data: s.hashes }
        };
        let parts = StoredParts {
            hashes,
            parent,
            tokens: Tokens::Plain(s.tokens),
            extra_keys: s.extra,
            lookahead: None,
            common: CommonParts { metadata: s.metadata, other: None },
        };
        if s.chain && self.queue.try_extend_stored(attrs, &parts) {
            return;
        }
        if self.queue.push_stored(attrs, &parts).is_err() {
            self.lose();
        }
    }

    /// Nothing is resident any more; all numbers of metas are given up.
    pub fn cleared(&mut self) {
        self.stored_attrs.fill(None);
        if self.admit() && self.queue.push_cleared(&CommonParts::default()).is_err() {
            self.lose();
        }
    }
}

/// The low 64 bits of a key: all of an integer, the last eight bytes of a digest.
#[inline]
fn narrow(form: KeyForm, key: &[u8]) -> u64 {
    match key.last_chunk() {
        Some(b) if form == KeyForm::Int => u64::from_le_bytes(*b),
        Some(b) => u64::from_be_bytes(*b),
        None => form.hash(key).narrow_low(),
    }
}

/// The extra keys of several blocks: `entries` holds each block's entry or one nil byte.
pub(super) fn extra_list(blocks: usize, entries: &[u8], out: &mut Vec<u8>) {
    out.clear();
    msgpack::write_array_header(out, blocks);
    out.extend_from_slice(entries);
}
