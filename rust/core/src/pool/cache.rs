//! Full blocks get their hashes.

use super::block_pool::{BlockPool, Events};
use super::blocks::{CACHED, MARKED};
use super::emit::{Stored, extra_list};
use super::request::Request;
use super::retained::Record;
use crate::error::PoolError;
use crate::events::ExtraKeys;

/// `{"already_resident": true}`: how residency tells an announced hit from a new block.
const ALREADY_RESIDENT: &[u8] = b"\x81\xb0already_resident\xc3";

/// The part of a request that a call is about, in blocks of its group.
#[derive(Clone, Copy)]
struct Span {
    group: u16,
    /// Tokens in a block of the group.
    size: usize,
    /// Hashes in a block of the group; the last one names the block.
    scale: usize,
}

impl Span {
    fn hash<'a>(&self, r: &Request<'a>, block: usize) -> &'a [u8] {
        r.hashes.get((block + 1) * self.scale - 1)
    }
}

/// Blocks in a row that one event announces.
#[derive(Default)]
struct Run {
    start: usize,
    end: usize,
    /// One entry, or one nil, per block.
    extra: Vec<u8>,
    has_extra: bool,
}

impl BlockPool {
    fn span(&self, group: usize) -> Result<Span, PoolError> {
        let size = self.group(group)?.block_size;
        Ok(Span { group: group as u16, size: size as usize, scale: (size / self.config.block_size) as usize })
    }

    /// Whether the request has what blocks below `full` of the group need.
    fn check_request(&self, r: &Request<'_>, s: Span, full: usize) -> Result<(), PoolError> {
        let needed = full.saturating_mul(s.scale);
        if r.hashes.end() < needed {
            return Err(PoolError::TooFewHashes { given: r.hashes.end(), needed });
        }
        self.check_form(r)?;
        let needed = full.saturating_mul(s.size);
        let given = r.first_token + r.tokens.len();
        if self.events.is_some() && given < needed {
            return Err(PoolError::TooFewTokens { given, needed });
        }
        Ok(())
    }

    pub(super) fn check_form(&self, r: &Request<'_>) -> Result<(), PoolError> {
        match self.keys.form() {
            Some(form) if form != r.hashes.form => Err(PoolError::HashForm(format!(
                "this pool's hashes are {}, saw {}",
                form.describe(),
                r.hashes.form.describe()
            ))),
            _ => Ok(()),
        }
    }

    /// Each block can take its hash, and none stands twice. Nothing is changed.
    fn check_blocks(
        &mut self,
        r: &Request<'_>,
        s: Span,
        blocks: &[u32],
        first: usize,
    ) -> Result<(), PoolError> {
        let mut marked = 0;
        let mut result = Ok(());
        for (i, &block) in blocks.iter().enumerate() {
            result = self.check_block(r, s, block, first + i);
            if result.is_err() {
                break;
            }
            self.blocks.node_mut(block).flags |= MARKED;
            marked = i + 1;
        }
        for &block in &blocks[..marked] {
            self.blocks.node_mut(block).flags &= !MARKED;
        }
        result
    }

    #[inline]
    fn check_block(&self, r: &Request<'_>, s: Span, block: u32, index: usize) -> Result<(), PoolError> {
        if block == 0 {
            return Ok(());
        }
        self.check_id(index, block)?;
        let node = self.blocks.node(block);
        if node.refs == 0 {
            return Err(PoolError::NotInUse { index, block });
        }
        if node.has(MARKED) {
            return Err(PoolError::Twice { index, block });
        }
        if node.has(CACHED) {
            let tokens = self.keys.key(block).num_tokens as usize;
            if tokens >= (index + 1) * s.size && !self.holds(block, s.hash(r, index), s.group) {
                return Err(PoolError::AlreadyCached { index, block, tokens });
            }
        }
        Ok(())
    }

    /// Whether the block's own hash is this one.
    pub(super) fn holds(&self, block: u32, hash: &[u8], group: u16) -> bool {
        self.keys.key(block).group == group && self.keys.digest(block) == hash
    }

    /// Gives blocks `cached..full` of a request their hashes; `blocks` holds the ids of exactly these.
    /// The null block marks a hole and is skipped. A block that has the hash of a boundary inside it
    /// is promoted; one that has this hash already stays as it is.
    ///
    /// # Errors
    /// Any [`PoolError`] of arguments; nothing was changed then.
    pub fn cache_full_blocks(
        &mut self,
        r: &Request<'_>,
        blocks: &[u32],
        cached: usize,
        full: usize,
        group: usize,
    ) -> Result<(), PoolError> {
        let s = self.span(group)?;
        if cached > full {
            return Err(PoolError::Range { cached, full });
        }
        if cached == full || !self.config.enable_caching {
            return Ok(());
        }
        let given = cached.saturating_add(blocks.len());
        if given < full {
            return Err(PoolError::TooFewBlocks { given, needed: full });
        }
        let blocks = &blocks[..full - cached];
        self.check_request(r, s, full)?;
        self.check_blocks(r, s, blocks, cached)?;

        self.keys.set_form(r.hashes.form);
        self.fingerprints.clear();
        for i in cached..full {
            self.fingerprints.push(self.keys.fingerprint(s.hash(r, i), s.group));
        }
        if self.keys.num_slots() >= 1 << 14 {
            std::hint::black_box(self.keys.warm(&self.fingerprints));
        }
        let meta = match &mut self.events {
            Some(e) => e.retained.begin(r, s.group, s.size as u32),
            None => 0,
        };
        let every_copy = self.events.as_ref().is_some_and(|e| e.every_copy);
        let mut run = Run { start: cached, end: cached, ..Run::default() };
        // Hashes of an `every_copy` event, which may skip blocks.
        let mut listed = Vec::new();
        for (i, &block) in (cached..full).zip(blocks) {
            let is_new = block != 0 && self.put_full(r, s, block, i, cached, meta, &mut run);
            if every_copy {
                if is_new {
                    listed.extend_from_slice(s.hash(r, i));
                }
                run.end = i + 1;
            } else if is_new {
                run.end = i + 1;
            } else {
                self.announce(r, s, meta, &mut run, None);
                run.start = i + 1;
                run.end = i + 1;
            }
        }
        if every_copy {
            self.announce_copies(r, s, meta, &run, &listed);
        } else {
            self.announce(r, s, meta, &mut run, None);
        }
        self.finish(meta);
        Ok(())
    }

    /// The end of a call that used `meta`.
    pub(super) fn finish(&mut self, meta: u32) {
        self.flush();
        if let Some(e) = &mut self.events
            && e.retained.done(meta)
        {
            e.emit.forget_meta(meta);
        }
    }

    /// One block gets its hash. Whether an event has to say so.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    fn put_full(
        &mut self,
        r: &Request<'_>,
        s: Span,
        block: u32,
        index: usize,
        first: usize,
        meta: u32,
        run: &mut Run,
    ) -> bool {
        let hash = s.hash(r, index);
        if self.blocks.node(block).has(CACHED) {
            if self.holds(block, hash, s.group) {
                return false;
            }
            // What the block was known by leaves; in residency, stores so far come before that.
            if self.events.as_ref().is_some_and(|e| !e.every_copy) {
                self.announce(r, s, meta, run, None);
                run.start = index;
            }
            self.forget(block);
        }
        let fingerprint = self.fingerprints[index - first];
        let tokens = index * s.size..(index + 1) * s.size;
        let is_first = self.keys.insert(block, fingerprint, hash, s.group, block, tokens.end as u32);
        self.blocks.node_mut(block).flags |= CACHED;
        self.counters.stored += u64::from(is_first);
        let Some(e) = &mut self.events else { return false };
        let announced = is_first || e.every_copy;
        let mut extra = None;
        if let Some(source) = r.extra {
            self.bytes.clear();
            if source.write_entry(tokens.clone(), &mut self.bytes) {
                extra = Some(&*self.bytes);
            }
            if announced {
                run.extra.extend_from_slice(extra.unwrap_or(&[0xc0]));
                run.has_extra |= extra.is_some();
            }
        }
        let parent = index.checked_sub(1).map(|i| s.hash(r, i));
        let record = Record { meta, tokens: r.tokens_of(tokens), extra };
        let kept = e.retained.put(block, s.group, &record);
        self.keys.keep(block, kept, parent);
        announced
    }

    /// The event of a run of new blocks, if it is not empty; the run is empty after it.
    #[inline]
    fn announce(&mut self, r: &Request<'_>, s: Span, meta: u32, run: &mut Run, metadata: Option<&[u8]>) {
        if run.start == run.end {
            return;
        }
        let Some(e) = &mut self.events else { return };
        let blocks = run.start..run.end;
        let w = r.hashes.form.width();
        let hashes: &[u8] = if s.scale == 1 {
            let at = (run.start - r.hashes.first) * w;
            &r.hashes.data[at..at + blocks.len() * w]
        } else {
            self.bytes.clear();
            blocks.clone().for_each(|i| self.bytes.extend_from_slice(s.hash(r, i)));
            &self.bytes
        };
        let parent = run.start.checked_sub(1).map(|i| s.hash(r, i));
        let tokens = r.tokens_of(run.start * s.size..run.end * s.size);
        let mut list = Vec::new();
        let extra = extra_of(blocks.len(), run, &mut list);
        emit(e, r, &Stored { meta, parent, hashes, tokens, extra, metadata, chain: false });
        run.extra.clear();
        run.has_extra = false;
        run.start = run.end;
    }

    /// vLLM's event: all tokens of the call, and hashes only of blocks that are not holes.
    fn announce_copies(&mut self, r: &Request<'_>, s: Span, meta: u32, run: &Run, hashes: &[u8]) {
        let Some(e) = &mut self.events else { return };
        let blocks = hashes.len() / r.hashes.form.width();
        let mut list = Vec::new();
        let extra = if blocks == 0 { ExtraKeys::Absent } else { extra_of(blocks, run, &mut list) };
        let parent = run.start.checked_sub(1).map(|i| s.hash(r, i));
        let tokens = r.tokens_of(run.start * s.size..run.end * s.size);
        emit(e, r, &Stored { meta, parent, hashes, tokens, extra, metadata: None, chain: false });
    }

    /// Announces the first `num_cached` blocks of a request again, as vLLM's full report does for
    /// blocks that were hit. Only with `report_hits`. In residency only what is resident is announced,
    /// marked by `metadata`, so that readers that keep a set are not disturbed.
    ///
    /// # Errors
    /// Any [`PoolError`] of arguments.
    pub fn emit_cached_block_events(
        &mut self,
        r: &Request<'_>,
        num_cached: usize,
        group: usize,
    ) -> Result<(), PoolError> {
        let s = self.span(group)?;
        if num_cached == 0 || !self.config.report_hits || self.events.is_none() {
            return Ok(());
        }
        self.check_request(r, s, num_cached)?;
        let Some(e) = &mut self.events else { return Ok(()) };
        let every_copy = e.every_copy;
        let meta = e.retained.begin(r, s.group, s.size as u32);
        let mut run = Run::default();
        let mut entry = Vec::new();
        for i in 0..num_cached {
            let hash = s.hash(r, i);
            if !every_copy && self.keys.get(hash, s.group).is_none() {
                self.announce(r, s, meta, &mut run, Some(ALREADY_RESIDENT));
                run.start = i + 1;
            } else if let Some(source) = r.extra {
                entry.clear();
                let some = source.write_entry(i * s.size..(i + 1) * s.size, &mut entry);
                run.extra.extend_from_slice(if some { &entry } else { &[0xc0] });
                run.has_extra |= some;
            }
            run.end = i + 1;
        }
        self.announce(r, s, meta, &mut run, (!every_copy).then_some(ALREADY_RESIDENT));
        self.finish(meta);
        Ok(())
    }
}

/// The extra keys of an event over `run`; `list` gets their bytes.
#[inline]
fn extra_of<'a>(blocks: usize, run: &Run, list: &'a mut Vec<u8>) -> ExtraKeys<'a> {
    if !run.has_extra {
        return ExtraKeys::AllNil;
    }
    extra_list(blocks, &run.extra, list);
    ExtraKeys::Raw(list)
}

#[inline]
fn emit(e: &mut Events, r: &Request<'_>, stored: &Stored<'_>) {
    if let Some(m) = e.retained.meta(stored.meta) {
        e.emit.stored(r.hashes.form, m, stored);
    }
}
