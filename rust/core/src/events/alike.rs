//! Equality of whole lists: of their bytes, and of what they say block by block.

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::list::EventList;
use super::view::{EventKind, EventView, HashForm, Tokens};

impl EventList {
    /// Whether the columns of both are the same bytes; where events came from does not count. `false` says
    /// nothing: other columns may say the same. Token ids of lists that were read from bytes are compared by
    /// the checksum of those bytes.
    pub(crate) fn is_twin(&self, other: &Self) -> bool {
        let ((a, of_a), (b, of_b)) = (self.parts(), other.parts());
        if std::ptr::eq(a, b) {
            return of_a == of_b;
        }
        let same_tokens = match (self.sum(), other.sum()) {
            (Some(sum), Some(other)) if sum != other => return false,
            (Some(_), Some(_)) => a.tokens.len() == b.tokens.len(),
            _ => a.tokens == b.tokens,
        };
        same_tokens
            && of_a == of_b
            && of_a == (0..a.len())
            && of_b == (0..b.len())
            && a.hashes == b.hashes
            && bytemuck::cast_slice::<_, u8>(&a.rows) == bytemuck::cast_slice::<_, u8>(&b.rows)
            && a.attrs == b.attrs
            && bytemuck::cast_slice::<_, u8>(&a.rare) == bytemuck::cast_slice::<_, u8>(&b.rare)
            && a.rare_bytes == b.rare_bytes
    }

    /// Whether both store the same blocks in the same order, with the same parents, tokens and attributes,
    /// however they are cut into events. `false` for lists with anything but regular stores, or with values
    /// that are kept as bytes: for those it is not looked at.
    pub fn same_blocks(&self, other: &Self) -> bool {
        let (mut left, mut right) = (Blocks::of(self), Blocks::of(other));
        loop {
            match (left.event(), right.event()) {
                (None, None) => return true,
                (Some(a), Some(b)) => {
                    let n = (a.num_hashes() - left.at).min(b.num_hashes() - right.at);
                    if !(is_plain(a) && is_plain(b) && same_part(a, left.at, b, right.at, n)) {
                        return false;
                    }
                    left.advance(a, n);
                    right.advance(b, n);
                }
                _ => return false,
            }
        }
    }
}

impl EventList {
    /// For each event the row of an equal one in `other`, where there is one.
    pub fn rows_in(&self, other: &Self) -> Vec<Option<usize>> {
        // By kind and first hash; of several with the same the first is meant, and an equal one later is not
        // found: nothing is lost by that but an object that could have been used again.
        let key = |v: EventView<'_>| (v.kind() as u8, (v.num_hashes() > 0).then(|| v.hash_at(0).to_owned()));
        let mut rows = HashMap::with_hasher(RandomState::default());
        for (i, v) in other.iter().enumerate() {
            rows.entry(key(v)).or_insert(i);
        }
        self.iter().map(|v| rows.get(&key(v)).copied().filter(|&i| v.same(&other.view(i)))).collect()
    }
}

/// A place between two blocks of a list.
struct Blocks<'a> {
    list: &'a EventList,
    row: usize,
    at: usize,
}

impl<'a> Blocks<'a> {
    fn of(list: &'a EventList) -> Self {
        Self { list, row: 0, at: 0 }
    }

    fn event(&self) -> Option<EventView<'a>> {
        (self.row < self.list.len()).then(|| self.list.view(self.row))
    }

    fn advance(&mut self, event: EventView<'_>, n: usize) {
        self.at += n;
        if self.at == event.num_hashes() {
            (self.row, self.at) = (self.row + 1, 0);
        }
    }
}

fn is_plain(v: EventView<'_>) -> bool {
    v.kind() == EventKind::Stored && !v.is_irregular() && !v.has_rare() && v.raw_hashes().0 != HashForm::Mixed
}

/// Whether `n` blocks of two plain stores are the same.
fn same_part(a: EventView<'_>, at: usize, b: EventView<'_>, bt: usize, n: usize) -> bool {
    let (form, width, hashes) = a.raw_hashes();
    let (other_form, other_width, others) = b.raw_hashes();
    let size = a.attrs().block_size as usize;
    let (Tokens::Plain(tokens), Tokens::Plain(other_tokens)) = (a.tokens(), b.tokens()) else { return false };
    form == other_form
        && width == other_width
        && a.attrs() == b.attrs()
        && a.extra_keys() == b.extra_keys()
        && a.parent_of(at) == b.parent_of(bt)
        && hashes[at * width..(at + n) * width] == others[bt * width..(bt + n) * width]
        && tokens[at * size..(at + n) * size] == other_tokens[bt * size..(bt + n) * size]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Attrs, CommonParts, EventData, ExtraKeys, Hashes, StoredParts};
    use crate::hash::HashRef;

    fn attrs(medium: &str) -> Attrs {
        Attrs { block_size: 2, medium: Some(medium.into()), ..Attrs::default() }
    }

    /// A chain of blocks 1, 2, ... cut into events of these lengths.
    fn chain(cuts: &[u64], medium: &str) -> EventData {
        let mut data = EventData::new();
        let mut first = 1;
        for &n in cuts {
            let hashes: Vec<u64> = (first..first + n).collect();
            let tokens: Vec<u32> = hashes.iter().flat_map(|&h| [h as u32, 7]).collect();
            let id = data.intern(&attrs(medium));
            let parts = StoredParts {
                hashes: Hashes::Uint(&hashes),
                parent: (first > 1).then_some(HashRef::Uint(first - 1)),
                tokens: Tokens::Plain(&tokens),
                extra_keys: ExtraKeys::Absent,
                lookahead: None,
                common: CommonParts::default(),
            };
            data.push_stored(id, &parts).unwrap();
            first += n;
        }
        data
    }

    fn list(cuts: &[u64]) -> EventList {
        chain(cuts, "CPU").into()
    }

    #[test]
    fn cuts_do_not_count_for_blocks_and_do_for_bytes() {
        assert!(list(&[6]).same_blocks(&list(&[1, 3, 2])));
        assert!(list(&[2, 4]).same_blocks(&list(&[1, 3, 2])));
        assert!(!list(&[2, 4]).is_twin(&list(&[1, 3, 2])));
        assert!(list(&[2, 4]).is_twin(&list(&[2, 4])));
        assert!(EventList::default().same_blocks(&EventList::default()));
    }

    #[test]
    fn lists_from_bytes_are_told_apart_by_any_token() {
        let (bytes, mut data) = (list(&[2, 4]).to_bytes(), chain(&[2, 4], "CPU"));
        let read = |bytes: &[u8]| EventList::from_bytes(bytes).unwrap();
        assert!(read(&bytes).is_twin(&read(&bytes)));
        assert!(read(&bytes).is_twin(&list(&[2, 4])));
        *data.columns().1.last_mut().unwrap() += 1;
        let other: EventList = data.into();
        assert!(!read(&bytes).is_twin(&other));
        assert!(!read(&bytes).is_twin(&read(&other.to_bytes())));
    }

    #[test]
    fn equal_events_are_found_wherever_they_stand() {
        let all = list(&[1, 2, 3]);
        let some = all.select([2, 0]).unwrap();
        assert_eq!(some.rows_in(&all), [Some(2), Some(0)]);
        assert_eq!(list(&[1, 5]).rows_in(&all), [Some(0), None]);
    }

    #[test]
    fn any_difference_counts() {
        assert!(!list(&[6]).same_blocks(&list(&[3, 2])), "a block less");
        assert!(!list(&[3, 2]).same_blocks(&list(&[6])));
        assert!(!list(&[6]).same_blocks(&chain(&[6], "GPU").into()));
        let whole = list(&[2, 4]);
        assert!(!whole.slice(1..2).same_blocks(&whole.slice(0..1)));
        assert!(whole.slice(1..2).same_blocks(&list(&[2, 4]).slice(1..2)));
        assert!(!whole.slice(1..2).is_twin(&list(&[4])));
        let mut removed = chain(&[2], "CPU");
        let id = removed.intern(&attrs("CPU"));
        removed.push_removed(id, Hashes::Uint(&[9]), &CommonParts::default()).unwrap();
        let removed: EventList = removed.into();
        assert!(!removed.same_blocks(&removed), "not looked at");
        assert!(removed.is_twin(&removed.clone()));
        assert!(!removed.is_twin(&list(&[2])));
    }
}
