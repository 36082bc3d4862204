//! Any bytes as a payload, read, written and read again, in every dialect.

use kvevents_core::codec::{Decoded, Dialect, EncodeOptions, decode, encode};

use super::same_time;

/// See the module.
pub fn roundtrip(data: &[u8]) {
    let Ok(batch) = decode(data, false) else { return };
    for dialect in Dialect::ALL {
        for metadata in [false, true] {
            stays(&batch, dialect, EncodeOptions { lossy: true, metadata });
        }
        // What is written without loss is the same events.
        let exact = EncodeOptions { lossy: false, metadata: true };
        if let Ok(written) = encode(&batch.events, batch.ts, batch.rank, dialect, exact) {
            let read = decode(&written, true).expect("its own");
            assert!(
                read.events.same(&batch.events),
                "{}: {:?} {:?}",
                dialect.name(),
                read.events,
                batch.events
            );
            assert_eq!(read.rank, batch.rank, "{}", dialect.name());
        }
    }
}

/// What was written once is written again to the byte.
fn stays(batch: &Decoded, dialect: Dialect, options: EncodeOptions) {
    let name = dialect.name();
    let written = encode(&batch.events, batch.ts, batch.rank, dialect, options)
        .unwrap_or_else(|e| panic!("{name} refuses what may be left out: {e}"));
    let read = decode(&written, true).unwrap_or_else(|e| panic!("{name} does not read its own: {e}"));
    assert!(same_time(read.ts, batch.ts), "{name}");
    assert_eq!(read.events.len(), batch.events.len(), "{name}");
    for (a, b) in read.events.iter().zip(batch.events.iter()) {
        assert_eq!(a.kind(), b.kind(), "{name}");
        assert!(a.hashes().eq(b.hashes()), "{name}");
    }
    let again = encode(&read.events, read.ts, read.rank, dialect, options)
        .unwrap_or_else(|e| panic!("{name} refuses its own: {e}"));
    assert_eq!(again, written, "{name}");
}
