//! Reading and writing the numbers and names of a dump.

use crate::error::IndexError;

pub(super) type Result<T> = std::result::Result<T, IndexError>;

pub(super) fn corrupt<T>(what: &str) -> Result<T> {
    Err(IndexError::Corrupt(what.to_owned()))
}

pub(super) fn put_u32(out: &mut Vec<u8>, v: u32) {
    out.extend_from_slice(&v.to_le_bytes());
}

pub(super) fn put_u64(out: &mut Vec<u8>, v: u64) {
    out.extend_from_slice(&v.to_le_bytes());
}

pub(super) fn put_str(out: &mut Vec<u8>, s: Option<&str>) {
    put_u32(out, s.map_or(u32::MAX, |s| s.len() as u32));
    out.extend_from_slice(s.unwrap_or_default().as_bytes());
}

pub(super) fn put_opt(out: &mut Vec<u8>, v: Option<u64>) {
    out.push(u8::from(v.is_some()));
    put_u64(out, v.unwrap_or_default());
}

/// What is left to read.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let Some((head, rest)) = self.bytes.split_at_checked(n) else {
            return corrupt("it ends too early");
        };
        self.bytes = rest;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut a = [0; N];
        a.copy_from_slice(self.take(N)?);
        Ok(a)
    }

    pub(super) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn bool(&mut self) -> Result<bool> {
        Ok(self.u8()? != 0)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn count(&mut self, most: usize) -> Result<usize> {
        let n = self.u32()? as usize;
        if n > most { corrupt("a count is out of range") } else { Ok(n) }
    }

    pub(super) fn opt(&mut self) -> Result<Option<u64>> {
        let set = self.bool()?;
        let v = self.u64()?;
        Ok(set.then_some(v))
    }

    pub(super) fn opt_str(&mut self) -> Result<Option<&'a str>> {
        let n = self.u32()?;
        if n == u32::MAX {
            return Ok(None);
        }
        match std::str::from_utf8(self.take(n as usize)?) {
            Ok(s) => Ok(Some(s)),
            Err(_) => corrupt("a name is not UTF-8"),
        }
    }

    pub(super) fn string(&mut self) -> Result<String> {
        Ok(self.opt_str()?.unwrap_or_default().to_owned())
    }
}
