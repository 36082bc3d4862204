//! An index as bytes, for the restart of a router without a cold start.
//!
//! Little endian: magic, checksum of the rest, seed, time, a note of the caller's, tiers, then every source. A source is written a
//! few rows at a time and may change meanwhile: its number is that from before, so that whoever applies
//! the batches after it once more has the exact set again (the last word on every block is among them).
//! Orphans' tokens are not kept: such a source is not complete until its next snapshot. Bytes from
//! anywhere are safe to load; what is not a dump of this version is refused.

use super::bytes::{Reader, Result, corrupt, put_opt, put_str, put_u32, put_u64};
use super::counters::Bounds;
use super::directory::{Directory, Source};
use super::expiry::Expiry;
use super::prefix::PrefixIndex;
use super::profile::{GroupInfo, GroupKind, Profile, ScopeInfo, SourceId};
use super::shard::{MAX_SCOPES, Shard};
use super::store::{Id, Layout, PIECES, Store, mask};
use super::tiers::{MAX_TIERS, Tiers};
use crate::error::IndexError;
use crate::events::Scope;
use crate::hash::MAX_HASH_BYTES;
use crate::resident::Digest;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"KVINDEX3";
const HEADER: usize = 16;
/// Rows that are written under one lock.
const ROWS_PER_LOCK: usize = 512;
const END: u8 = 0xff;

impl PrefixIndex {
    /// The index as bytes, at the caller's time, with a note that [`Self::load`] gives back. No source is
    /// locked for longer than a few rows take.
    pub fn dump(&self, now: u32, note: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[0; 8]);
        put_u64(&mut out, self.seed);
        put_u32(&mut out, now);
        put_u32(&mut out, note.len() as u32);
        out.extend_from_slice(note);
        // Before the tiers: what they know by then knows every scope that was written.
        let mut sources = Vec::new();
        let all = self.all();
        put_u32(&mut sources, all.len() as u32);
        for source in all.iter() {
            put_source(&mut sources, source);
        }
        let names = self.tier_names();
        put_u32(&mut out, names.len() as u32);
        for name in &names {
            put_str(&mut out, Some(name));
        }
        out.append(&mut sources);
        let sum = xxh3_64(&out[HEADER..]).to_le_bytes();
        out[8..HEADER].copy_from_slice(&sum);
        out
    }

    /// Reads what [`Self::dump`] wrote; also the time at which that was, and the note. `bounds` and `digests`
    /// are the new index's own. Every source is held back until [`Self::confirm`]: its publisher may be gone.
    pub fn load(bytes: &[u8], bounds: Bounds, digests: bool) -> Result<(Self, u32, Vec<u8>)> {
        if bytes.len() < HEADER || &bytes[..8] != MAGIC {
            return corrupt("the bytes do not start as a dump of this version does");
        }
        if bytes[8..HEADER] != xxh3_64(&bytes[HEADER..]).to_le_bytes() {
            return corrupt("the checksum does not match");
        }
        let mut r = Reader::new(&bytes[HEADER..]);
        let mut index = Self::new(r.u64()?, bounds, digests);
        let now = r.u32()?;
        let length = r.u32()? as usize;
        let note = r.take(length)?.to_vec();
        let names = r.count(MAX_TIERS)?;
        let names = (0..names).map(|_| r.string()).collect::<Result<Vec<_>>>()?;
        index.tiers = Tiers::of_names(names).ok_or(IndexError::Corrupt("unknown tiers".to_owned()))?.into();
        let mut directory = Directory::default();
        for _ in 0..r.u32()? {
            let id = SourceId { name: r.string()?, rank: r.u32()?, is_owner: r.bool()? };
            if directory.find(&id.name, id.rank, id.is_owner).is_some() {
                return corrupt("a source stands in it twice");
            }
            let shard = Shard::new(index.seed, bounds, digests, id.is_owner, &index.wanted);
            let mut shard = read_shard(&mut r, shard)?;
            shard.hold_back();
            directory.add(id, shard);
        }
        if !r.is_empty() {
            return corrupt("there is more than a dump");
        }
        index.directory = directory.into();
        Ok((index, now, note))
    }
}

fn put_source(out: &mut Vec<u8>, source: &Source) {
    put_str(out, Some(&source.id.name));
    put_u32(out, source.id.rank);
    out.push(u8::from(source.id.is_owner));
    let (version, valid, last_seq) = {
        let shard = source.read();
        (shard.version, shard.digest().is_some(), shard.last_seq)
    };
    put_opt(out, last_seq);
    let mut s = 0;
    while put_rows(out, source, s) {
        s += 1;
    }
    out.push(END);
    let shard = source.read();
    let profile = shard.profile();
    let same = shard.version == version;
    // What changed meanwhile is exact again once the batches after `last_seq` were applied anew.
    let sure = same || last_seq.is_some();
    let complete = shard.unconfirmed.unwrap_or(profile.complete);
    put_profile(out, &profile, sure && complete && shard.waiting() == 0);
    put_opt(out, shard.expiry.map(|e| u64::from(e.ttl) << 32 | u64::from(e.tiers)));
    put_u32(out, shard.last_seen);
    let digest = shard.digest().filter(|_| valid && sure && shard.waiting() == 0);
    out.push(match digest {
        None => 0,
        Some(_) if same => 1,
        Some(_) => 2,
    });
    out.extend_from_slice(&digest.unwrap_or_default());
}

/// The resident rows of a source's store with this place; whether there is one.
fn put_rows(out: &mut Vec<u8>, source: &Source, s: usize) -> bool {
    let Some(layout) = source.read().stores.get(s).map(|store| store.layout) else { return false };
    out.push(u8::from(layout.is_int));
    put_u32(out, layout.width as u32);
    out.push(u8::from(layout.timed));
    put_u32(out, layout.unit);
    for piece in 0..PIECES {
        let mut from = 0;
        loop {
            let shard = source.read();
            // After a clear the stores may be others: then the batches that are applied anew say it all.
            let Some(store) = shard.stores.get(s).filter(|store| store.layout == layout) else { break };
            let to = store.rows_in(piece).min(from + ROWS_PER_LOCK);
            if from >= to {
                break;
            }
            out.push(piece as u8);
            let count_at = out.len();
            put_u32(out, 0);
            let mut count = 0u32;
            for row in (from..to).map(|i| store.row(Id::new(piece, i))).filter(|row| mask(row) != 0) {
                out.extend_from_slice(row);
                count += 1;
            }
            out[count_at..count_at + 4].copy_from_slice(&count.to_le_bytes());
            from = to;
        }
    }
    out.push(END);
    true
}

fn put_profile(out: &mut Vec<u8>, profile: &Profile, complete: bool) {
    put_u32(out, profile.scopes.len() as u32);
    for s in &profile.scopes {
        put_str(out, s.scope.medium.as_deref());
        put_opt(out, s.scope.group_idx.map(i64::cast_unsigned));
        put_str(out, s.scope.locality.as_deref());
        put_str(out, s.scope.ownership.as_deref());
        out.push(s.tier as u8);
        out.push(u8::from(s.shared));
    }
    put_u32(out, profile.groups.len() as u32);
    for g in &profile.groups {
        put_opt(out, g.group.map(i64::cast_unsigned));
        let window = match g.kind {
            GroupKind::Full => None,
            GroupKind::Window(w) => Some(u64::from(w)),
        };
        put_opt(out, window);
        put_u32(out, g.block_size);
    }
    out.push(u8::from(complete));
}

fn read_profile(r: &mut Reader<'_>) -> Result<Profile> {
    let mut profile = Profile::default();
    for _ in 0..r.count(MAX_SCOPES)? {
        let scope = Scope {
            medium: r.opt_str()?.map(Into::into),
            group_idx: r.opt()?.map(u64::cast_signed),
            locality: r.opt_str()?.map(Into::into),
            ownership: r.opt_str()?.map(Into::into),
        };
        let tier = usize::from(r.u8()?);
        if tier >= MAX_TIERS {
            return corrupt("a tier is out of range");
        }
        profile.scopes.push(ScopeInfo { scope, tier, shared: r.bool()? });
    }
    for _ in 0..r.count(MAX_SCOPES)? {
        let group = r.opt()?.map(u64::cast_signed);
        let window = r.opt()?.map(|w| u32::try_from(w).unwrap_or(u32::MAX));
        let kind = window.map_or(GroupKind::Full, GroupKind::Window);
        let block_size = r.u32()?;
        if block_size == 0 {
            return corrupt("a block size is 0");
        }
        profile.groups.push(GroupInfo { group, kind, block_size });
    }
    profile.complete = r.bool()?;
    Ok(profile)
}

fn read_shard(r: &mut Reader<'_>, mut shard: Shard) -> Result<Shard> {
    shard.last_seq = r.opt()?;
    loop {
        let is_int = match r.u8()? {
            END => break,
            b => b != 0,
        };
        let (width, timed, unit) = (r.u32()? as usize, r.bool()?, r.u32()?);
        if width > MAX_HASH_BYTES || is_int && width != 8 {
            return corrupt("a hash is too long");
        }
        let layout = Layout { is_int, width, timed, unit };
        let mut store = Store::new(layout, shard.seed);
        loop {
            let piece = usize::from(r.u8()?);
            if piece == usize::from(END) {
                break;
            }
            if piece >= PIECES {
                return corrupt("a piece is out of range");
            }
            let n = r.u32()? as usize;
            store.restore_rows(piece, r.take(n.saturating_mul(layout.stride()))?);
        }
        store.index_rows();
        shard.stores.push(store);
    }
    let profile = read_profile(r)?;
    let known = if profile.scopes.len() == 32 { u32::MAX } else { (1 << profile.scopes.len()) - 1 };
    if shard.stores.iter().any(|s| s.all_scopes() & !known != 0) {
        return corrupt("a block is resident in an unknown scope");
    }
    shard.expiry = r.opt()?.map(|e| Expiry { ttl: (e >> 32) as u32, tiers: e as u32 });
    shard.restore_profile(profile);
    shard.last_seen = r.u32()?;
    let (kind, sum) = (r.u8()?, Digest::from(u128::from_be_bytes(r.array()?)));
    shard.digest = match kind {
        0 => None,
        1 => Some(sum),
        _ => Some(shard.digest_of_rows()),
    };
    Ok(shard)
}
