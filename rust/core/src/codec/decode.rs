//! One payload: the batch around the events, and what an unreadable event costs.

use crate::error::DecodeError;
use crate::events::{EventData, EventList, Skipped};
use crate::msgpack;

use super::Timestamp;
use super::fast::{self, Fast};
use super::fields::{self, PushError};
use super::reader::{self, Int};
use super::shape::{self, Fault};

/// A batch that claims this many events and has fewer bytes is no batch that was cut, it is nonsense.
const ABSURD: usize = 1 << 20;

/// So many events that were left out are told one by one; the rest is one entry per reason.
const TOLD: usize = 1024;

/// A batch that is a map has three keys; a bound on how many are looked at.
const MAX_KEYS: usize = 64;

/// What a payload held.
#[derive(Clone, Debug)]
pub struct Decoded {
    /// When the batch was made, by the engine's clock.
    pub ts: Timestamp,
    /// The data-parallel rank, where it was named.
    pub rank: Option<i64>,
    /// The events; those that were left out are in [`EventList::skipped`].
    pub events: EventList,
}

fn not_a_batch(buf: &[u8], what: &'static str, offset: usize) -> DecodeError {
    DecodeError::NotABatch { what, offset, seen: reader::preview(buf, offset) }
}

fn timestamp(buf: &[u8], at: usize) -> Option<(Timestamp, usize)> {
    if let Some((v, end)) = reader::float(buf, at) {
        return Some((Timestamp::Float(v), end));
    }
    reader::int(buf, at).map(|(v, end)| match v.signed() {
        Some(v) => (Timestamp::Int(v), end),
        None => match v {
            Int::Uint(v) => (Timestamp::Uint(v), end),
            Int::Neg(v) => (Timestamp::Int(v), end),
        },
    })
}

/// Reads one payload. An event that cannot be read is left out and noted in
/// [`EventList::skipped`]; with `strict` it is the error. A payload that is cut gives the events before
/// the cut.
pub fn decode(buf: &[u8], strict: bool) -> Result<Decoded, DecodeError> {
    let mut events = EventData::new();
    let (ts, rank) = decode_into(buf, strict, &mut events)?;
    events.shrink();
    Ok(Decoded { ts, rank, events: events.into() })
}

/// The same into columns that were used before, whose memory serves again; nothing is given back. Returns
/// time and rank.
pub fn decode_into(
    buf: &[u8],
    strict: bool,
    into: &mut EventData,
) -> Result<(Timestamp, Option<i64>), DecodeError> {
    into.clear();
    let mut batch = Batch { buf, strict, out: into, told: 0, more: Vec::new() };
    let (ts, rank) = match (msgpack::array_header(buf, 0), reader::map_header(buf, 0)) {
        (Some((items, at)), _) => batch.array(items, at)?,
        (None, Some((keys, at))) => batch.map(keys, at)?,
        (None, None) => return Err(not_a_batch(buf, "an array [ts, events, rank] was expected", 0)),
    };
    for (reason, index, count) in std::mem::take(&mut batch.more) {
        let detail = format!("{count} events from this one on, which are not told one by one");
        batch.out.push_skipped(Skipped { index, reason, detail });
    }
    Ok((ts, rank))
}

struct Batch<'a> {
    buf: &'a [u8],
    strict: bool,
    out: &'a mut EventData,
    /// Events left out that are told one by one.
    told: usize,
    /// The others: reason, position of the first, how many.
    more: Vec<(&'static str, usize, usize)>,
}

impl Batch<'_> {
    /// `[ts, events, rank, ...]`; the rank may be missing.
    fn array(&mut self, items: usize, at: usize) -> Result<(Timestamp, Option<i64>), DecodeError> {
        let buf = self.buf;
        if items < 2 {
            return Err(not_a_batch(buf, "an array of at least two items was expected", 0));
        }
        if items > buf.len() {
            return Err(not_a_batch(buf, "an array with fewer items than bytes was expected", 0));
        }
        let (ts, at) = self.timestamp(at)?;
        let (claimed, first) = self.claim(at)?;
        let mut rank = None;
        if let Some(at) = self.events(claimed, first)? {
            rank = self.tail(claimed, items - 2, at)?;
        }
        Ok((ts, rank))
    }

    /// `{ts, events, data_parallel_rank}` in any order: what vLLM's main branch wrote for a short time.
    fn map(&mut self, keys: usize, mut at: usize) -> Result<(Timestamp, Option<i64>), DecodeError> {
        let buf = self.buf;
        if keys > MAX_KEYS {
            return Err(not_a_batch(buf, "a map with few keys was expected", 0));
        }
        let (mut ts, mut rank, mut claimed) = (None, None, None);
        // Where the map ends, unless the payload does before it.
        let mut ended = true;
        for _ in 0..keys {
            let Some((key, value)) = reader::raw_str(buf, at) else {
                if reader::skip(buf, at).is_some() {
                    return Err(not_a_batch(buf, "a str was expected as a key of the batch", at));
                }
                self.cut(claimed.unwrap_or(0), "batch", at)?;
                ended = false;
                break;
            };
            let end = match key {
                b"ts" => {
                    let (stamp, end) = self.timestamp(value)?;
                    ts = Some(stamp);
                    Some(end)
                }
                b"events" if claimed.is_none() => {
                    let (count, first) = self.claim(value)?;
                    claimed = Some(count);
                    let Some(end) = self.events(count, first)? else {
                        // Which of the events is cut was told.
                        ended = false;
                        break;
                    };
                    Some(end)
                }
                b"events" => return Err(not_a_batch(buf, "one list of events was expected", at)),
                _ => reader::skip(buf, value),
            };
            let Some(end) = end else {
                self.cut(claimed.unwrap_or(0), "batch", at)?;
                ended = false;
                break;
            };
            if key == b"data_parallel_rank" {
                rank = self.rank(claimed.unwrap_or(0), value)?;
            }
            at = end;
        }
        let (Some(ts), Some(claimed)) = (ts, claimed) else {
            return Err(not_a_batch(buf, "a map with ts and events was expected", 0));
        };
        if ended {
            self.end(claimed, at)?;
        }
        Ok((ts, rank))
    }

    fn timestamp(&self, at: usize) -> Result<(Timestamp, usize), DecodeError> {
        timestamp(self.buf, at)
            .ok_or_else(|| not_a_batch(self.buf, "a number was expected as the time stamp", at))
    }

    /// The number of events that is claimed, with room for as many as there can be.
    fn claim(&mut self, at: usize) -> Result<(usize, usize), DecodeError> {
        let (claimed, first) = msgpack::array_header(self.buf, at)
            .ok_or_else(|| not_a_batch(self.buf, "an array of events was expected", at))?;
        let room = self.buf.len() - first;
        if claimed > room && claimed >= ABSURD {
            return Err(not_a_batch(self.buf, "an array with fewer events than bytes was expected", at));
        }
        self.out.reserve(claimed.min(room / 16 + 1), room / 8, room / 4);
        Ok((claimed, first))
    }

    /// All events; the position after the last, or `None` where the payload ends before it.
    fn events(&mut self, claimed: usize, mut at: usize) -> Result<Option<usize>, DecodeError> {
        let mut fast = Fast::default();
        let small = self.buf.len() <= fast::MAX_PAYLOAD;
        for index in 0..claimed {
            if small && let Some(end) = fast.event(self.buf, at, self.out) {
                at = end;
                continue;
            }
            let Some(end) = reader::skip(self.buf, at) else {
                let what = format!("{index} of {claimed} events are whole");
                self.skip(index, &Fault::new("truncated", "event", what, at))?;
                return Ok(None);
            };
            let added = self.event(at, end);
            match added {
                Ok(()) => {}
                Err(PushError::Fault(fault)) => self.skip(index, &fault)?,
                Err(PushError::Columns(e)) => return Err(e.into()),
            }
            at = end;
        }
        Ok(Some(at))
    }

    /// The event from `at` to `end`. One that stands packed inside a byte string (llm-d's storage backend)
    /// is read in place; one level of that, so nothing recurses.
    fn event(&mut self, at: usize, end: usize) -> Result<(), PushError> {
        let (mut from, event) = (at, &self.buf[..end]);
        if let Some((packed, _)) = reader::bin(event, at) {
            from = end - packed.len();
            if reader::skip(event, from) != Some(end) {
                let what = "a byte string with exactly one packed event was expected";
                return Err(Fault::new("not_an_event", "event", what, at).into());
            }
        }
        fields::push(event, &shape::fields(event, from)?, self.out)
    }

    /// The rank, and what newer engines may have put behind it.
    fn tail(&mut self, index: usize, items: usize, mut at: usize) -> Result<Option<i64>, DecodeError> {
        let mut rank = None;
        for i in 0..items {
            let Some(end) = reader::skip(self.buf, at) else {
                self.cut(index, "data_parallel_rank", at)?;
                return Ok(rank);
            };
            if i == 0 {
                rank = self.rank(index, at)?;
            }
            at = end;
        }
        self.end(index, at)?;
        Ok(rank)
    }

    fn rank(&mut self, index: usize, at: usize) -> Result<Option<i64>, DecodeError> {
        if self.buf[at] == 0xc0 {
            return Ok(None);
        }
        let rank = reader::int(self.buf, at).and_then(|(v, _)| v.signed());
        if rank.is_none() {
            self.skip(index, &Fault::bad("data_parallel_rank", "an integer or nil was expected", at))?;
        }
        Ok(rank)
    }

    fn cut(&mut self, index: usize, field: &'static str, at: usize) -> Result<(), DecodeError> {
        self.skip(index, &Fault::new("truncated", field, "the batch ends early", at))
    }

    /// The batch ends at `at`, and so should the payload.
    fn end(&mut self, index: usize, at: usize) -> Result<(), DecodeError> {
        if at < self.buf.len() {
            let what = format!("{} bytes stand behind the batch", self.buf.len() - at);
            self.skip(index, &Fault::new("trailing_bytes", "batch", what, at))?;
        }
        Ok(())
    }

    fn skip(&mut self, index: usize, fault: &Fault) -> Result<(), DecodeError> {
        if !self.strict && self.told >= TOLD {
            match self.more.iter_mut().find(|(reason, _, _)| *reason == fault.reason) {
                Some((_, _, count)) => *count += 1,
                None => self.more.push((fault.reason, index, 1)),
            }
            return Ok(());
        }
        self.told += 1;
        let seen = reader::preview(self.buf, fault.at);
        if self.strict {
            return Err(DecodeError::Event {
                index,
                reason: fault.reason,
                field: fault.field.to_string(),
                what: fault.what.to_string(),
                offset: fault.at,
                seen,
            });
        }
        self.out.push_skipped(Skipped {
            index,
            reason: fault.reason,
            detail: format!("{}: {} at byte {}, saw {seen}", fault.field, fault.what, fault.at),
        });
        Ok(())
    }
}
