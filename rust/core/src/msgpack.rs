//! The few msgpack writers and the bounded skipper that several layers share.
//!
//! Integers are always written in their shortest form, as msgspec writes them.

/// Deepest nesting that [`skip_value`] follows.
pub const MAX_DEPTH: usize = 32;

/// Appends an unsigned integer in its shortest form.
pub fn write_uint(out: &mut Vec<u8>, v: u64) {
    if v < 0x80 {
        out.push(v as u8);
    } else if v <= 0xff {
        out.extend_from_slice(&[0xcc, v as u8]);
    } else if v <= 0xffff {
        out.push(0xcd);
        out.extend_from_slice(&(v as u16).to_be_bytes());
    } else if v <= 0xffff_ffff {
        out.push(0xce);
        out.extend_from_slice(&(v as u32).to_be_bytes());
    } else {
        out.push(0xcf);
        out.extend_from_slice(&v.to_be_bytes());
    }
}

/// Appends a signed integer in its shortest form.
pub fn write_int(out: &mut Vec<u8>, v: i64) {
    if v >= 0 {
        return write_uint(out, v.cast_unsigned());
    }
    if v >= -32 {
        out.push(v as u8);
    } else if v >= i64::from(i8::MIN) {
        out.extend_from_slice(&[0xd0, v as u8]);
    } else if v >= i64::from(i16::MIN) {
        out.push(0xd1);
        out.extend_from_slice(&(v as i16).to_be_bytes());
    } else if v >= i64::from(i32::MIN) {
        out.push(0xd2);
        out.extend_from_slice(&(v as i32).to_be_bytes());
    } else {
        out.push(0xd3);
        out.extend_from_slice(&v.to_be_bytes());
    }
}

/// Appends `nil`.
pub fn write_nil(out: &mut Vec<u8>) {
    out.push(0xc0);
}

/// Appends a string.
pub fn write_str(out: &mut Vec<u8>, s: &str) {
    let n = s.len();
    if n < 32 {
        out.push(0xa0 | n as u8);
    } else if n <= 0xff {
        out.extend_from_slice(&[0xd9, n as u8]);
    } else if n <= 0xffff {
        out.push(0xda);
        out.extend_from_slice(&(n as u16).to_be_bytes());
    } else {
        out.push(0xdb);
        out.extend_from_slice(&(n as u32).to_be_bytes());
    }
    out.extend_from_slice(s.as_bytes());
}

/// Appends a byte string.
pub fn write_bin(out: &mut Vec<u8>, b: &[u8]) {
    let n = b.len();
    if n <= 0xff {
        out.extend_from_slice(&[0xc4, n as u8]);
    } else if n <= 0xffff {
        out.push(0xc5);
        out.extend_from_slice(&(n as u16).to_be_bytes());
    } else {
        out.push(0xc6);
        out.extend_from_slice(&(n as u32).to_be_bytes());
    }
    out.extend_from_slice(b);
}

/// Appends an array header.
pub fn write_array_header(out: &mut Vec<u8>, n: usize) {
    if n < 16 {
        out.push(0x90 | n as u8);
    } else if n <= 0xffff {
        out.push(0xdc);
        out.extend_from_slice(&(n as u16).to_be_bytes());
    } else {
        out.push(0xdd);
        out.extend_from_slice(&(n as u32).to_be_bytes());
    }
}

/// Appends a map header.
pub fn write_map_header(out: &mut Vec<u8>, n: usize) {
    if n < 16 {
        out.push(0x80 | n as u8);
    } else if n <= 0xffff {
        out.push(0xde);
        out.extend_from_slice(&(n as u16).to_be_bytes());
    } else {
        out.push(0xdf);
        out.extend_from_slice(&(n as u32).to_be_bytes());
    }
}

/// Why a value could not be skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipError {
    /// The buffer ends inside the value.
    Truncated,
    /// Nesting is deeper than [`MAX_DEPTH`].
    TooDeep,
    /// The reserved byte 0xc1.
    Reserved,
}

fn be(buf: &[u8], at: usize, n: usize) -> Result<usize, SkipError> {
    let bytes = buf.get(at..at + n).ok_or(SkipError::Truncated)?;
    Ok(bytes.iter().fold(0usize, |acc, &b| acc << 8 | usize::from(b)))
}

/// The position after the value that starts at `at`. Uses no recursion, allocates nothing, and
/// never believes a claimed length.
pub fn skip_value(buf: &[u8], mut at: usize) -> Result<usize, SkipError> {
    // One counter of values that are still open per level.
    let mut open = [0u64; MAX_DEPTH];
    let mut depth = 0;
    open[0] = 1;
    loop {
        if open[depth] == 0 {
            if depth == 0 {
                return Ok(at);
            }
            depth -= 1;
            continue;
        }
        open[depth] -= 1;
        let tag = *buf.get(at).ok_or(SkipError::Truncated)?;
        at += 1;
        let mut children = 0u64;
        let skip = match tag {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 0,
            0x80..=0x8f => {
                children = u64::from(tag & 0x0f) * 2;
                0
            }
            0x90..=0x9f => {
                children = u64::from(tag & 0x0f);
                0
            }
            0xa0..=0xbf => usize::from(tag & 0x1f),
            0xc1 => return Err(SkipError::Reserved),
            0xc4 | 0xd9 => 1 + be(buf, at, 1)?,
            0xc5 | 0xda => 2 + be(buf, at, 2)?,
            0xc6 | 0xdb => 4 + be(buf, at, 4)?,
            0xc7 => 2 + be(buf, at, 1)?,
            0xc8 => 3 + be(buf, at, 2)?,
            0xc9 => 5 + be(buf, at, 4)?,
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            0xd4 => 2,
            0xd5 => 3,
            0xd6 => 5,
            0xd7 => 9,
            0xd8 => 17,
            0xdc => {
                children = be(buf, at, 2)? as u64;
                2
            }
            0xdd => {
                children = be(buf, at, 4)? as u64;
                4
            }
            0xde => {
                children = be(buf, at, 2)? as u64 * 2;
                2
            }
            0xdf => {
                children = be(buf, at, 4)? as u64 * 2;
                4
            }
        };
        at += skip;
        if at > buf.len() {
            return Err(SkipError::Truncated);
        }
        if children > 0 {
            // Every child takes at least one byte.
            if children > (buf.len() - at) as u64 {
                return Err(SkipError::Truncated);
            }
            if depth + 1 == MAX_DEPTH {
                return Err(SkipError::TooDeep);
            }
            depth += 1;
            open[depth] = children;
        }
    }
}

/// The number of items that an array header at `at` claims, and the position after the header.
pub fn array_header(buf: &[u8], at: usize) -> Option<(usize, usize)> {
    match *buf.get(at)? {
        t @ 0x90..=0x9f => Some((usize::from(t & 0x0f), at + 1)),
        0xdc => Some((be(buf, at + 1, 2).ok()?, at + 3)),
        0xdd => Some((be(buf, at + 1, 4).ok()?, at + 5)),
        _ => None,
    }
}

/// The string, where the bytes are exactly one msgpack string.
pub fn read_str(value: &[u8]) -> Option<&str> {
    let (n, at) = match *value.first()? {
        t @ 0xa0..=0xbf => (usize::from(t & 0x1f), 1),
        0xd9 => (be(value, 1, 1).ok()?, 2),
        0xda => (be(value, 1, 2).ok()?, 3),
        0xdb => (be(value, 1, 4).ok()?, 5),
        _ => return None,
    };
    let text = value.get(at..)?;
    if text.len() == n { std::str::from_utf8(text).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_what_it_wrote() {
        let mut b = Vec::new();
        write_map_header(&mut b, 2);
        write_str(&mut b, "a");
        write_array_header(&mut b, 3);
        write_int(&mut b, -40_000);
        write_uint(&mut b, u64::MAX);
        write_bin(&mut b, &[7; 300]);
        write_str(&mut b, "b");
        write_nil(&mut b);
        assert_eq!(skip_value(&b, 0), Ok(b.len()));
        for cut in 0..b.len() {
            assert_eq!(skip_value(&b[..cut], 0), Err(SkipError::Truncated), "cut at {cut}");
        }
    }

    #[test]
    fn absurd_lengths_and_depth_are_refused() {
        assert_eq!(skip_value(&[0xdd, 0xff, 0xff, 0xff, 0xff], 0), Err(SkipError::Truncated));
        assert_eq!(skip_value(&[0x91; 5000], 0), Err(SkipError::TooDeep));
    }
}
