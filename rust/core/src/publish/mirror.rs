//! What a publisher's stream says is resident, with all that a snapshot of it needs.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::attr_table::AttrTable;
use super::blocks::{Blocks, Kind, NewBlock, Probe, RareParts, flag};
use super::snapshot::Walk;
use crate::events::{EventKind, EventList, EventView, ExtraKeys, HashForm, Scope, Tokens};
use crate::hash::HashRef;
use crate::msgpack;
use crate::resident::Digest;

/// Digests of so many sequence numbers are remembered.
pub const HISTORY: usize = 4096;
/// Hashes that are looked at together.
const GROUP: usize = 64;
/// Empty tables are swept when there are more than this many, then at each doubling.
const SWEEP_AT: usize = 64;

/// The number of no attributes.
const NO_ATTRS: u32 = u32::MAX;

/// A parent of another kind than its block's, or of another sign, stands beside the record.
enum ParentBytes<'a> {
    None,
    Inline(&'a [u8]),
    Other(HashRef<'a>),
}

/// Tables by scope and kind of hash, and the attributes that their blocks name.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub list: Vec<Blocks>,
    pub attrs: AttrTable,
    by_scope: HashMap<(Scope, u16), u32, foldhash::fast::RandomState>,
}

/// The resident set of one stream, kept event by event, and its digest.
///
/// Applying is idempotent: a second store of a key changes nothing. Stores whose lengths fit are kept with
/// parent, tokens, attributes and extra keys; of all others only the hashes and the attributes are kept,
/// since only these may be used by readers.
#[derive(Debug)]
pub struct Mirror {
    keep_tokens: bool,
    tables: Tables,
    digest: Digest,
    /// The first sequence number that is not in it.
    next: u64,
    history: VecDeque<(u64, Digest)>,
    /// Events are missing, so nothing can be said until the next clear.
    lost: bool,
    sweep_at: usize,
    pub(super) generation: u32,
    pub(super) walk: Option<Box<Walk>>,
    probes: Vec<Probe>,
    /// By attributes of the list that is being applied: their table and number, with the kind of hash.
    cache: Vec<Option<(Kind, u32, u32)>>,
}

impl Mirror {
    /// An empty mirror of a stream that starts at sequence number `first`. Without `keep_tokens` its
    /// snapshots name hashes and parents, and cost a third of the memory.
    pub fn new(first: u64, keep_tokens: bool) -> Self {
        Self {
            keep_tokens,
            tables: Tables::default(),
            digest: Digest::default(),
            next: first,
            history: VecDeque::new(),
            lost: false,
            sweep_at: SWEEP_AT,
            generation: 0,
            walk: None,
            probes: Vec::new(),
            cache: Vec::new(),
        }
    }

    /// Number of resident keys.
    pub fn len(&self) -> usize {
        self.tables.list.iter().map(Blocks::len).sum()
    }

    /// Whether nothing is resident.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The digest of the set at [`Self::resume_seq`]; see [`crate::resident`].
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The first sequence number that is not in it: where a reader goes on that has all of this.
    pub fn resume_seq(&self) -> u64 {
        self.next
    }

    /// The digest of the set as it was behind the batch `seq`, if that was one of the last
    /// [`HISTORY`] ones. Numbers that were skipped count with the one before.
    pub fn digest_at(&self, seq: u64) -> Option<Digest> {
        if seq >= self.next {
            return None;
        }
        let at = self.history.partition_point(|&(s, _)| s <= seq);
        at.checked_sub(1).map(|at| self.history[at].1)
    }

    /// Whether it holds all of the stream. `false` after [`Self::lose`], until the next clear.
    pub fn is_known(&self) -> bool {
        !self.lost
    }

    /// Bytes allocated, without a snapshot that is being made.
    pub fn nbytes(&self) -> usize {
        self.tables.list.iter().map(Blocks::nbytes).sum::<usize>()
            + self.tables.attrs.nbytes()
            + self.history.capacity() * size_of::<(u64, Digest)>()
    }

    /// Applies batch `seq`, without the events at the positions `except` (ascending).
    pub fn record(&mut self, seq: u64, events: &EventList, except: &[usize]) {
        self.apply(events, except);
        self.advance(seq);
    }

    /// The batch `seq`, or a number that is skipped, changes nothing more.
    pub fn advance(&mut self, seq: u64) {
        self.next = self.next.max(seq.saturating_add(1));
        if self.lost {
            return;
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((seq, self.digest));
    }

    /// Events were lost before they could be applied: from now on nothing is said, until a clear makes
    /// the set known again.
    pub fn lose(&mut self) {
        self.lost = true;
        self.history.clear();
    }

    fn apply(&mut self, events: &EventList, except: &[usize]) {
        self.cache.clear();
        self.cache.resize(events.attrs_table().len(), None);
        let mut except = except.iter().copied().peekable();
        for (i, view) in events.iter().enumerate() {
            if except.next_if_eq(&i).is_some() {
                continue;
            }
            match view.kind() {
                EventKind::Cleared => self.clear(),
                EventKind::Stored => self.stored(&view),
                EventKind::Removed => self.removed(&view),
            }
        }
        if self.walk.is_none() {
            self.sweep();
        }
    }

    fn clear(&mut self) {
        self.digest = Digest::default();
        self.lost = false;
        self.cache.fill(None);
        let tables = std::mem::take(&mut self.tables);
        if let Some(walk) = &mut self.walk {
            walk.freeze(tables);
        }
    }

    /// Forgets scopes that came and went.
    fn sweep(&mut self) {
        self.tables.attrs.sweep();
        if self.tables.list.len() > self.sweep_at {
            self.tables.list.retain(|b| b.len() > 0);
            let list = self.tables.list.iter().enumerate();
            self.tables.by_scope =
                list.map(|(at, b)| ((b.scope.clone(), kind_key(b.kind)), at as u32)).collect();
            self.sweep_at = SWEEP_AT.max(self.tables.list.len() * 2);
        }
    }

    /// Table and number of attributes for the hashes of an event. A removal makes no table; its
    /// attributes only name its scope, and get no number.
    fn place(&mut self, view: &EventView<'_>, kind: Kind) -> Option<(usize, u32)> {
        let removal = view.kind() == EventKind::Removed;
        if let Some((k, table, id)) = self.cache[view.attrs_index()]
            && k == kind
            && (removal || id != NO_ATTRS)
        {
            return Some((table as usize, id));
        }
        let tables = &mut self.tables;
        let attrs = view.attrs();
        let found = if tables.list.len() <= 8 {
            tables.list.iter().position(|b| b.kind == kind && attrs.in_scope(&b.scope))
        } else {
            tables.by_scope.get(&(attrs.scope(), kind_key(kind))).map(|&at| at as usize)
        };
        if found.is_none() && removal {
            return None;
        }
        let at = found.unwrap_or_else(|| {
            let at = tables.list.len();
            tables.by_scope.insert((attrs.scope(), kind_key(kind)), at as u32);
            tables.list.push(Blocks::new(attrs.scope(), kind));
            at
        });
        let id = if removal { NO_ATTRS } else { tables.attrs.find_or_add(attrs) };
        self.cache[view.attrs_index()] = Some((kind, at as u32, id));
        Some((at, id))
    }

    fn stored(&mut self, view: &EventView<'_>) {
        let (form, width, bytes) = view.raw_hashes();
        let kind = match form {
            HashForm::Mixed => {
                for h in view.hashes() {
                    let Some((table, attrs)) = self.place(view, Kind::of(h)) else { continue };
                    let flags = if h.is_negative() { flag::SIGNED } else { 0 };
                    with_bytes(h, |b| self.store_hashes(table, attrs, b, flags));
                }
                return;
            }
            HashForm::Bytes => Kind::Bytes(width as u8),
            HashForm::Uint | HashForm::Int => Kind::Int,
        };
        if bytes.is_empty() {
            return;
        }
        let Some((table, attrs)) = self.place(view, kind) else { return };
        let signed = if form == HashForm::Int { flag::SIGNED } else { 0 };
        if view.is_irregular() {
            self.store_hashes(table, attrs, bytes, signed);
        } else {
            self.store_run(table, attrs, view, bytes, signed);
        }
    }

    /// Blocks of which nothing but the hash may be used.
    fn store_hashes(&mut self, table: usize, attrs: u32, hashes: &[u8], flags: u32) {
        let blocks = &mut self.tables.list[table];
        let arena = blocks.arena(None);
        let width = blocks.kind.width();
        let mut stored = 0;
        // A hash of no bytes still is one.
        for group in hashes.chunks(GROUP * width.max(1)).chain(hashes.is_empty().then_some(hashes)) {
            blocks.reserve(GROUP);
            blocks.probe(group, &mut self.probes);
            for (i, &probe) in self.probes.iter().enumerate() {
                let hash = &group[i * width..(i + 1) * width];
                if let Some(vacancy) = blocks.vacancy(probe, hash) {
                    let new = NewBlock { hash, parent: None, tokens: &[], flags, attrs };
                    blocks.insert(vacancy, arena, self.generation, new);
                    self.digest.add(probe.digest);
                    stored += 1;
                }
            }
        }
        self.tables.attrs.hold(attrs, stored);
    }

    /// A chain of blocks with all that belongs to them.
    fn store_run(&mut self, table: usize, attrs: u32, view: &EventView<'_>, hashes: &[u8], signed: u32) {
        let size = view.attrs().block_size as usize;
        let blocks = &mut self.tables.list[table];
        let (tokens, wide) = match view.tokens() {
            Tokens::Plain(t) if self.keep_tokens => (t, None),
            Tokens::Wide(raw) if self.keep_tokens => (&[][..], Some(raw)),
            _ => (&[][..], None),
        };
        let arena = blocks.arena(Some(if tokens.is_empty() { 0 } else { size as u32 }));
        if !blocks.is_chained(arena) {
            return self.store_hashes(table, attrs, hashes, signed);
        }
        let mut extra = match view.extra_keys() {
            ExtraKeys::Raw(raw) => Entries::new(raw),
            _ => Entries::default(),
        };
        let mut wide = wide.map_or_else(Entries::default, Entries::new);
        let plain = extra.is_done() && wide.is_done();
        let base = signed | if view.extra_keys() == ExtraKeys::Absent { 0 } else { flag::EXTRA };
        let buffer: [u8; 8];
        let first = match view.parent() {
            None => ParentBytes::None,
            Some(HashRef::Bytes(b)) if blocks.kind == Kind::Bytes(b.len() as u8) => ParentBytes::Inline(b),
            Some(h) if blocks.kind == Kind::Int && h.bits().is_some() && sign_fits(h, signed) => {
                buffer = h.bits().unwrap_or_default().to_le_bytes();
                ParentBytes::Inline(&buffer)
            }
            Some(h) => ParentBytes::Other(h),
        };
        let width = blocks.kind.width();
        let step = if tokens.is_empty() { 0 } else { size };
        let mut stored = 0;
        let mut index = 0;
        for group in hashes.chunks(GROUP * width) {
            blocks.reserve(GROUP);
            blocks.probe(group, &mut self.probes);
            for &probe in &self.probes {
                let hash = &hashes[index * width..][..width];
                let mut rare = if plain {
                    None
                } else {
                    Some(RareParts {
                        parent: None,
                        extra: extra.take(1).filter(|e| **e != [0xc0]).map(Into::into),
                        tokens: wide.take(size).map(Into::into),
                    })
                };
                if let Some(vacancy) = blocks.vacancy(probe, hash) {
                    let parent = match (index, &first) {
                        (0, ParentBytes::None) => None,
                        (0, ParentBytes::Inline(b)) => Some(*b),
                        (0, ParentBytes::Other(h)) => {
                            rare.get_or_insert_default().parent = Some(h.to_owned());
                            None
                        }
                        _ => Some(&hashes[(index - 1) * width..][..width]),
                    };
                    let flags = base | if parent.is_some() { flag::PARENT } else { 0 };
                    let tokens = &tokens[index * step..(index + 1) * step];
                    let new = NewBlock { hash, parent, tokens, flags, attrs };
                    let address = blocks.insert(vacancy, arena, self.generation, new);
                    if let Some(rare) = rare.filter(|r| !r.is_empty()) {
                        blocks.set_rare(address, rare);
                    }
                    self.digest.add(probe.digest);
                    stored += 1;
                }
                index += 1;
            }
        }
        self.tables.attrs.hold(attrs, stored);
    }

    fn removed(&mut self, view: &EventView<'_>) {
        let (form, width, bytes) = view.raw_hashes();
        let kind = match form {
            HashForm::Mixed => {
                for h in view.hashes() {
                    if let Some((table, _)) = self.place(view, Kind::of(h)) {
                        with_bytes(h, |b| self.remove_hashes(table, b));
                    }
                }
                return;
            }
            HashForm::Bytes => Kind::Bytes(width as u8),
            HashForm::Uint | HashForm::Int => Kind::Int,
        };
        if bytes.is_empty() {
            return;
        }
        if let Some((table, _)) = self.place(view, kind) {
            self.remove_hashes(table, bytes);
        }
    }

    fn remove_hashes(&mut self, table: usize, hashes: &[u8]) {
        let width = self.tables.list[table].kind.width();
        let (mut last, mut count) = (NO_ATTRS, 0);
        for group in hashes.chunks(GROUP * width.max(1)).chain(hashes.is_empty().then_some(hashes)) {
            let mut probes = std::mem::take(&mut self.probes);
            let blocks = &mut self.tables.list[table];
            blocks.probe(group, &mut probes);
            blocks.fetch_records(&probes);
            for (i, &probe) in probes.iter().enumerate() {
                let hash = &group[i * width..(i + 1) * width];
                let blocks = &mut self.tables.list[table];
                if let Some(walk) = &mut self.walk
                    && !walk.is_frozen()
                    && let Some(address) = blocks.find(probe, hash)
                {
                    // It belongs to the snapshot that is being made, and will not be here when the walk comes.
                    walk.emit_chain(blocks, table, address, &self.tables.attrs);
                }
                if let Some(attrs) = blocks.remove(probe, hash) {
                    self.digest.sub(probe.digest);
                    if attrs != last {
                        if count > 0 {
                            self.tables.attrs.release(last, count);
                        }
                        (last, count) = (attrs, 0);
                    }
                    count += 1;
                }
            }
            self.probes = probes;
        }
        if count > 0 {
            self.tables.attrs.release(last, count);
        }
    }

    pub(super) fn walk_parts(&mut self) -> (&mut Option<Box<Walk>>, &mut Tables) {
        (&mut self.walk, &mut self.tables)
    }
}

/// The entries of a msgpack array, one value after the other.
#[derive(Default)]
struct Entries<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> Entries<'a> {
    fn new(raw: &'a [u8]) -> Self {
        let at = msgpack::array_header(raw, 0).map_or(raw.len(), |(_, at)| at);
        Self { raw, at }
    }

    fn is_done(&self) -> bool {
        self.at >= self.raw.len()
    }

    /// The bytes of the next `n` values; `None` behind the last, and for damaged ones.
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        if self.is_done() {
            return None;
        }
        let start = self.at;
        for _ in 0..n {
            self.at = msgpack::skip_value(self.raw, self.at).unwrap_or(self.raw.len());
        }
        Some(&self.raw[start..self.at])
    }
}

fn kind_key(kind: Kind) -> u16 {
    match kind {
        Kind::Int => u16::MAX,
        Kind::Bytes(w) => u16::from(w),
    }
}

/// Whether a parent is written the same by the sign of its block's form.
fn sign_fits(parent: HashRef<'_>, signed: u32) -> bool {
    if signed == 0 {
        !parent.is_negative()
    } else {
        parent.is_negative() || parent.bits().is_some_and(|v| i64::try_from(v).is_ok())
    }
}

/// The bytes of a hash as they stand in columns.
fn with_bytes(hash: HashRef<'_>, f: impl FnOnce(&[u8])) {
    match hash {
        HashRef::Bytes(b) => f(b),
        h => f(&h.bits().unwrap_or_default().to_le_bytes()),
    }
}
