//! The codec on payloads that engines wrote, on the same payloads damaged, and on noise.

use kvevents_core::codec::{Dialect, EncodeOptions, decode, encode};
use kvevents_core::error::DecodeError;
use kvevents_core::events::REASONS;

const PAYLOADS: &str = include_str!("../../../tests/golden/payloads.txt");

fn payloads() -> impl Iterator<Item = (Option<Dialect>, Vec<u8>)> {
    PAYLOADS.lines().map(|line| {
        let (dialect, hex) = line.split_once(' ').expect("two columns");
        let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex");
        (Dialect::from_name(dialect), (0..hex.len()).step_by(2).map(byte).collect())
    })
}

fn step(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn every_payload_comes_back_to_the_byte() {
    let (mut read, mut written) = (0, 0);
    for (dialect, payload) in payloads() {
        let batch = decode(&payload, true).expect("an engine wrote it");
        read += 1;
        let Some(dialect) = dialect else { continue };
        let back = encode(&batch.events, batch.ts, batch.rank, dialect, EncodeOptions::default());
        assert_eq!(back.as_deref(), Ok(&payload[..]), "{}", dialect.name());
        written += 1;
    }
    assert!(read > written && written > 600, "{read} read, {written} written");
}

#[test]
fn a_cut_payload_gives_the_events_before_the_cut() {
    for (_, payload) in payloads().step_by(7) {
        let whole = decode(&payload, true).expect("an engine wrote it").events;
        for cut in 0..payload.len() {
            let part = &payload[..cut];
            match decode(part, false) {
                Err(e) => assert!(matches!(e, DecodeError::NotABatch { .. }), "{e}"),
                Ok(batch) => {
                    let n = batch.events.len();
                    assert!(batch.events.same(&whole.slice(0..n)), "cut at {cut}");
                    let skipped = batch.events.skipped();
                    assert_eq!(skipped.len(), 1, "cut at {cut}: {skipped:?}");
                    assert_eq!((skipped[0].reason, skipped[0].index), ("truncated", n));
                }
            }
            assert!(decode(part, true).is_err(), "cut at {cut}");
        }
    }
}

#[test]
fn damaged_payloads_and_noise_never_panic_and_stay_consistent() {
    let mut seed = 0x5eed_cafe_f00d_u64;
    for (_, payload) in payloads() {
        for _ in 0..20 {
            let mut bad = payload.clone();
            for _ in 0..=step(&mut seed) % 4 {
                let at = step(&mut seed) as usize % bad.len();
                bad[at] = step(&mut seed) as u8;
            }
            let Ok(batch) = decode(&bad, false) else { continue };
            assert!(batch.events.skipped().iter().all(|s| REASONS.contains(&s.reason)));
            // What was read can be written, and then says the same.
            let options = EncodeOptions { lossy: true, metadata: true };
            let again = encode(&batch.events, batch.ts, batch.rank, Dialect::VllmMap033, options)
                .expect("nothing is refused when fields may be left out");
            let back = decode(&again, true).expect("own bytes");
            assert_eq!(back.events.len(), batch.events.len());
            assert_eq!(back.rank, batch.rank);
        }
    }
    for n in 0..3000 {
        let noise: Vec<u8> = (0..n % 97).map(|_| step(&mut seed) as u8).collect();
        let mut framed = vec![0x93, 0x01, 0x91 + (n % 3) as u8];
        framed.extend_from_slice(&noise);
        let _ = decode(&noise, n % 2 == 0);
        let _ = decode(&framed, n % 2 == 0);
    }
}

#[test]
fn the_fast_and_the_general_reader_agree() {
    // A fourth element of the batch changes nothing; a first event of no known shape makes the reader
    // fall back once; both must give the columns of the untouched payload.
    for (dialect, payload) in payloads() {
        let want = decode(&payload, true).expect("an engine wrote it").events;
        let Some(Dialect::VllmMap032 | Dialect::VllmMap033 | Dialect::SglangMap) = dialect else { continue };
        let reordered = reorder(&payload);
        let got = decode(&reordered, true).expect("keys may stand in any order").events;
        assert!(got.same(&want), "{want:?} {got:?}");
        assert_eq!(got.irregular(), want.irregular());
    }
}

/// The same batch with the keys of every event in reverse.
fn reorder(payload: &[u8]) -> Vec<u8> {
    let skip = |at: usize| kvevents_core::msgpack::skip_value(payload, at).expect("whole");
    let header = |at: usize| match payload[at] {
        t @ (0x80..=0x9f) => (usize::from(t & 0x0f), at + 1),
        0xdc | 0xde => (usize::from(payload[at + 1]) << 8 | usize::from(payload[at + 2]), at + 3),
        t => panic!("no header: {t:x}"),
    };
    let events_at = skip(1);
    let (n, mut at) = header(events_at);
    let mut out = payload[..at].to_vec();
    for _ in 0..n {
        let (fields, mut field) = header(at);
        out.extend_from_slice(&payload[at..field]);
        let mut pairs = Vec::new();
        for _ in 0..fields {
            let end = skip(skip(field));
            pairs.push(&payload[field..end]);
            field = end;
        }
        pairs.reverse();
        out.extend(pairs.concat());
        at = field;
    }
    out.extend_from_slice(&payload[at..]);
    out
}

#[test]
fn absurd_lengths_cost_nothing() {
    let nonsense = [0xdd, 0xff, 0xff, 0xff, 0xff].repeat(64 << 20 >> 2);
    assert!(matches!(decode(&nonsense, false), Err(DecodeError::NotABatch { .. })));
    // A batch that claims 2^32-1 events and holds none.
    let claim = [&[0x93, 0xcb][..], &1.5f64.to_be_bytes(), &[0xdd, 0xff, 0xff, 0xff, 0xff]].concat();
    assert!(matches!(decode(&claim, false), Err(DecodeError::NotABatch { .. })));
    // Hashes and tokens that claim as many.
    for key in ["block_hashes", "token_ids"] {
        let mut b = vec![0x92, 0x01, 0x91, 0x82, 0xa4];
        b.extend_from_slice(b"type\xabBlockStored");
        b.push(0xa0 | key.len() as u8);
        b.extend_from_slice(key.as_bytes());
        b.extend_from_slice(&[0xdd, 0xff, 0xff, 0xff, 0xff]);
        let batch = decode(&b, false).expect("a cut batch");
        assert_eq!(batch.events.skipped()[0].reason, "truncated");
        assert!(batch.events.nbytes() < 4096);
    }
}

#[test]
fn what_was_left_out_is_bounded() {
    let n = 100_000u32;
    let mut b = vec![0x92, 0x01, 0xdd];
    b.extend_from_slice(&n.to_be_bytes());
    b.resize(b.len() + n as usize, 0xc0);
    let skipped = decode(&b, false).expect("a batch").events.skipped().to_vec();
    assert!(skipped.len() < 2000);
    let last = skipped.last().expect("many");
    assert_eq!((last.reason, last.index), ("not_an_event", 1024));
    assert!(last.detail.starts_with("98976 events"), "{}", last.detail);
}

#[test]
fn a_batch_as_a_map_may_claim_and_be_cut_anywhere() {
    let mut whole = vec![0x83];
    whole.extend_from_slice(b"\xa2ts\xcb");
    whole.extend_from_slice(&1.5f64.to_be_bytes());
    whole.extend_from_slice(b"\xa6events\x92\x81\xa4type\xb0AllBlocksCleared\x91\xb0AllBlocksCleared");
    whole.extend_from_slice(b"\xb2data_parallel_rank\x03");
    let batch = decode(&whole, true).expect("a batch");
    assert_eq!((batch.rank, batch.events.len()), (Some(3), 2));
    for cut in 0..whole.len() {
        match decode(&whole[..cut], false) {
            Ok(b) => {
                assert_eq!(b.events.skipped()[0].reason, "truncated", "{cut}");
                assert_eq!(b.events.skipped().len(), 1);
            }
            Err(e) => assert!(matches!(e, DecodeError::NotABatch { .. }), "{e}"),
        }
        assert!(decode(&whole[..cut], true).is_err());
    }
    let mut claim = whole[..13].to_vec();
    claim.extend_from_slice(b"\xa6events\xdd\xff\xff\xff\xff");
    assert!(matches!(decode(&claim, false), Err(DecodeError::NotABatch { .. })));
    assert!(matches!(decode(&[0xdf, 0xff, 0xff, 0xff, 0xff], false), Err(DecodeError::NotABatch { .. })));
}

#[test]
fn an_event_packed_inside_a_byte_string_is_read_one_level_deep() {
    let event = b"\x92\xacBlockRemoved\x91\x07";
    let packed = |inner: &[u8]| [&[0xc4, inner.len() as u8], inner].concat();
    let batch = |event: &[u8]| [&[0x92, 0x01, 0x91], event].concat();
    let read = decode(&batch(&packed(event)), true).expect("a batch");
    assert_eq!(read.events.len(), 1);
    let bad = [
        packed(&packed(event)),
        packed(&[]),
        packed(&event[..5]),
        packed(&[&event[..], &[0xc0]].concat()),
        packed(&[0xdd, 0xff, 0xff, 0xff, 0xff]),
    ];
    for bytes in bad {
        let read = decode(&batch(&bytes), false).expect("a batch");
        assert_eq!(read.events.len(), 0);
        assert_eq!(read.events.skipped()[0].reason, "not_an_event");
    }
}
