//! An index as bytes, for the restart of a router without a cold start.
//!
//! Little endian: magic, version, checksum of the rest, then the tiers and every source with its blocks.
//! Orphans' tokens are not kept: such a source is not complete until its next snapshot. Bytes from
//! anywhere are safe to load; what is not a dump of this version is refused.

use std::sync::{Arc, RwLock};

use xxhash_rust::xxh3::Xxh3Default;

use super::prefix::{PrefixIndex, Source};
use super::profile::{GroupInfo, GroupKind, Profile, ScopeInfo};
use super::shard::{Bounds, MAX_SCOPES, Shard};
use super::tiers::{MAX_TIERS, Tiers};
use crate::error::IndexError;
use crate::events::Scope;
use crate::hash::{HashRef, MAX_HASH_BYTES};
use crate::resident::Digest;

const MAGIC: &[u8; 8] = b"KVINDEX1";
const HEADER: usize = 16;

type Result<T> = std::result::Result<T, IndexError>;

fn corrupt<T>(what: &str) -> Result<T> {
    Err(IndexError::Corrupt(what.to_owned()))
}

fn put_u32(out: &mut Vec<u8>, v: u32) {
    out.extend_from_slice(&v.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, v: u64) {
    out.extend_from_slice(&v.to_le_bytes());
}

fn put_str(out: &mut Vec<u8>, s: Option<&str>) {
    put_u32(out, s.map_or(u32::MAX, |s| s.len() as u32));
    out.extend_from_slice(s.unwrap_or_default().as_bytes());
}

fn put_opt(out: &mut Vec<u8>, v: Option<u64>) {
    out.push(u8::from(v.is_some()));
    put_u64(out, v.unwrap_or_default());
}

fn checksum(bytes: &[u8]) -> [u8; 8] {
    let mut h = Xxh3Default::new();
    h.update(bytes);
    h.digest().to_le_bytes()
}

impl PrefixIndex {
    /// The index as bytes. Each source is locked for reading while it is written.
    pub fn dump(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[0; 8]);
        put_u64(&mut out, self.seed);
        let names = self.tier_names();
        put_u32(&mut out, names.len() as u32);
        for name in &names {
            put_str(&mut out, Some(name));
        }
        let sources = self.all();
        put_u32(&mut out, sources.len() as u32);
        for (_, source) in sources {
            put_str(&mut out, Some(&source.name));
            put_u32(&mut out, source.rank);
            out.push(u8::from(source.is_owner));
            let shard = source.shard.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            put_shard(&mut out, &shard);
        }
        let sum = checksum(&out[HEADER..]);
        out[8..16].copy_from_slice(&sum);
        out
    }

    /// Reads what [`Self::dump`] wrote. `bounds` and `digests` are the new index's own.
    pub fn load(bytes: &[u8], bounds: Bounds, digests: bool) -> Result<Self> {
        if bytes.len() < HEADER || &bytes[..8] != MAGIC {
            return corrupt("the bytes do not start as a dump of this version does");
        }
        if bytes[8..16] != checksum(&bytes[HEADER..]) {
            return corrupt("the checksum does not match");
        }
        let mut r = Reader { bytes: &bytes[HEADER..] };
        let mut index = Self::new(r.u64()?, bounds, digests);
        let names = r.count(MAX_TIERS)?;
        let names = (0..names).map(|_| r.string()).collect::<Result<Vec<_>>>()?;
        index.tiers = Tiers::of_names(names).ok_or(IndexError::Corrupt("unknown tiers".to_owned()))?.into();
        let sources = r.u32()?;
        let mut all = Vec::new();
        for _ in 0..sources {
            let (name, rank, is_owner) = (r.string()?, r.u32()?, r.u8()? != 0);
            let shard = r.shard(Shard::new(index.seed, bounds, digests, is_owner))?;
            all.push(Some(Arc::new(Source { name, rank, is_owner, shard: RwLock::new(shard) })));
        }
        if !r.bytes.is_empty() {
            return corrupt("there is more than a dump");
        }
        index.sources = RwLock::new(all);
        Ok(index)
    }
}

fn put_shard(out: &mut Vec<u8>, shard: &Shard) {
    let profile = shard.profile();
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
        put_opt(
            out,
            match g.kind {
                GroupKind::Full => None,
                GroupKind::Window(w) => Some(u64::from(w)),
            },
        );
        put_u32(out, g.block_size);
    }
    out.push(u8::from(profile.complete && shard.waiting() == 0));
    put_opt(out, shard.last_seq);
    put_u32(out, shard.last_seen);
    let digest = shard.digest();
    out.push(u8::from(digest.is_some()));
    out.extend_from_slice(&digest.unwrap_or_default());
    put_u64(out, shard.len() as u64);
    for (hash, content, mask, stored_at) in shard.entries() {
        put_u64(out, content);
        put_u32(out, mask);
        put_u32(out, stored_at);
        match hash {
            HashRef::Bytes(b) => {
                out.push(b.len() as u8);
                out.extend_from_slice(b);
            }
            h => {
                out.push(0xff);
                put_u64(out, h.bits().unwrap_or_default());
            }
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let Some((head, rest)) = self.bytes.split_at_checked(n) else {
            return corrupt("it ends too early");
        };
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut a = [0; N];
        a.copy_from_slice(self.take(N)?);
        Ok(a)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, most: usize) -> Result<usize> {
        let n = self.u32()? as usize;
        if n > most { corrupt("a count is out of range") } else { Ok(n) }
    }

    fn opt(&mut self) -> Result<Option<u64>> {
        let set = self.u8()? != 0;
        let v = self.u64()?;
        Ok(set.then_some(v))
    }

    fn opt_str(&mut self) -> Result<Option<&'a str>> {
        let n = self.u32()?;
        if n == u32::MAX {
            return Ok(None);
        }
        match std::str::from_utf8(self.take(n as usize)?) {
            Ok(s) => Ok(Some(s)),
            Err(_) => corrupt("a name is not UTF-8"),
        }
    }

    fn string(&mut self) -> Result<String> {
        Ok(self.opt_str()?.unwrap_or_default().to_owned())
    }

    fn profile(&mut self) -> Result<Profile> {
        let mut profile = Profile::default();
        for _ in 0..self.count(MAX_SCOPES)? {
            let scope = Scope {
                medium: self.opt_str()?.map(Into::into),
                group_idx: self.opt()?.map(u64::cast_signed),
                locality: self.opt_str()?.map(Into::into),
                ownership: self.opt_str()?.map(Into::into),
            };
            let tier = usize::from(self.u8()?);
            if tier >= MAX_TIERS {
                return corrupt("a tier is out of range");
            }
            profile.scopes.push(ScopeInfo { scope, tier, shared: self.u8()? != 0 });
        }
        for _ in 0..self.u32()? {
            let group = self.opt()?.map(u64::cast_signed);
            let kind = self.opt()?.map_or(GroupKind::Full, |w| GroupKind::Window(w as u32));
            let block_size = self.u32()?;
            if block_size == 0 {
                return corrupt("a block size is 0");
            }
            profile.groups.push(GroupInfo { group, kind, block_size });
        }
        profile.complete = self.u8()? != 0;
        Ok(profile)
    }

    fn shard(&mut self, mut shard: Shard) -> Result<Shard> {
        let profile = self.profile()?;
        let scopes = profile.scopes.len();
        let known = if scopes == 32 { u32::MAX } else { (1 << scopes) - 1 };
        shard.restore_profile(profile);
        shard.last_seq = self.opt()?;
        shard.last_seen = self.u32()?;
        let valid = self.u8()? != 0;
        let digest = u128::from_be_bytes(self.array()?);
        let blocks = self.u64()?;
        for _ in 0..blocks {
            let (content, mask, stored_at) = (self.u64()?, self.u32()?, self.u32()?);
            let hash = match self.u8()? {
                0xff => HashRef::Uint(self.u64()?),
                n if usize::from(n) <= MAX_HASH_BYTES => HashRef::Bytes(self.take(usize::from(n))?),
                _ => return corrupt("a hash is too long"),
            };
            if mask == 0 || mask & !known != 0 {
                return corrupt("a block is resident in an unknown scope");
            }
            shard.restore(hash, content, mask, stored_at);
        }
        shard.set_digest(valid.then(|| Digest::from(digest)));
        Ok(shard)
    }
}
