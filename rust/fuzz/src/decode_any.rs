//! Any bytes as a payload.

use kvevents_core::codec::{Timestamp, decode, decode_into};
use kvevents_core::error::DecodeError;
use kvevents_core::events::{EventData, EventList, REASONS};

/// Bytes of columns that one byte of a payload may cost: an event of two bytes that names other attributes
/// than the one before costs a row and an entry of the table.
const COST: usize = 128;
/// What an empty list costs.
const FIXED: usize = 4096;

/// Whether two stamps are the same, not-a-number included.
pub fn same_time(a: Timestamp, b: Timestamp) -> bool {
    match (a, b) {
        (Timestamp::Float(a), Timestamp::Float(b)) => a.to_bits() == b.to_bits(),
        _ => a == b,
    }
}

/// See the module.
pub fn decode_any(data: &[u8]) {
    let strict = decode(data, true);
    let lenient = match decode(data, false) {
        Ok(batch) => batch,
        Err(e) => {
            assert!(matches!(e, DecodeError::NotABatch { .. }), "{e}");
            assert!(strict.is_err(), "strict reads more");
            return;
        }
    };
    let events = &lenient.events;
    assert!(events.nbytes() <= FIXED + COST * data.len(), "{} bytes of {}", events.nbytes(), data.len());
    assert!(events.skipped().iter().all(|s| REASONS.contains(&s.reason)));
    assert_eq!(events.irregular(), events.iter().filter(|v| v.is_irregular()).count());
    match strict {
        Ok(batch) => {
            assert!(events.skipped().is_empty(), "strict passed over {:?}", events.skipped());
            assert!(batch.events.same(events));
            assert!(same_time(batch.ts, lenient.ts) && batch.rank == lenient.rank);
        }
        Err(DecodeError::Event { index, reason, .. }) => {
            let first = &events.skipped()[0];
            assert_eq!((first.index, first.reason), (index, reason));
        }
        Err(e) => panic!("only strict finds: {e}"),
    }

    // Columns that held something else before hold the same now.
    let mut used = EventData::new();
    let before = [0x92, 0x01, 0x92, 0xc0, 0x92, 0xac];
    _ = decode_into(&[&before[..], b"BlockRemoved\x91\x07"].concat(), false, &mut used);
    let (ts, rank) = decode_into(data, false, &mut used).expect("read before");
    assert!(same_time(ts, lenient.ts) && rank == lenient.rank);
    let again = EventList::from(used);
    assert!(again.same(events));
    assert_eq!(again.skipped(), events.skipped());
}
