//! The event half of a pool, for engines that have their own blocks.

use crate::error::EventsError;
use crate::events::{
    Attrs, CommonParts, EventData, EventKind, EventList, EventView, HashForm, Hashes, Rare, StoredParts,
};

/// A bounded queue of events. A store that continues the event before it (its parent is that event's
/// last hash, all attributes are equal) is joined to it, and so are removals of one scope.
///
/// When `max_events` pushes were not taken, what is queued is dropped and counted, and the next list
/// says so by [`EventList::overflowed`]: the owner then announces anew what is resident.
#[derive(Clone, Debug)]
pub struct EventQueue {
    data: EventData,
    max_events: usize,
    pushed: usize,
    overflows: u64,
    dropped: u64,
}

impl EventQueue {
    /// An empty queue; `max_events` is at least 1.
    pub fn new(max_events: usize) -> Self {
        let max_events = max_events.max(1);
        Self { data: EventData::new(), max_events, pushed: 0, overflows: 0, dropped: 0 }
    }

    /// Events that wait, joined ones counted once.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// How often the bound was reached, and how many pushes that dropped.
    pub const fn losses(&self) -> (u64, u64) {
        (self.overflows, self.dropped)
    }

    fn admit(&mut self) {
        if self.pushed >= self.max_events {
            self.overflows += 1;
            self.dropped += self.pushed as u64;
            self.pushed = 0;
            self.data = EventData::new();
            self.data.set_overflowed();
        }
        self.pushed += 1;
    }

    /// Blocks became resident.
    ///
    /// # Errors
    /// [`EventsError::TooLarge`] where the columns are full; the event is not queued then.
    pub fn push_stored(&mut self, attrs: &Attrs, parts: &StoredParts<'_>) -> Result<(), EventsError> {
        self.admit();
        let id = self.data.intern(attrs);
        if self.data.try_extend_stored(id, parts) {
            return Ok(());
        }
        self.data.push_stored(id, parts)
    }

    /// Blocks are no longer resident.
    ///
    /// # Errors
    /// As [`Self::push_stored`].
    pub fn push_removed(
        &mut self,
        attrs: &Attrs,
        hashes: Hashes<'_>,
        common: &CommonParts<'_>,
    ) -> Result<(), EventsError> {
        self.admit();
        let id = self.data.intern(attrs);
        let plain = common.metadata.is_none() && common.other.is_none();
        if plain && self.data.try_extend_removed(id, hashes) {
            return Ok(());
        }
        self.data.push_removed(id, hashes, common)
    }

    /// Nothing is resident any more.
    ///
    /// # Errors
    /// As [`Self::push_stored`].
    pub fn push_cleared(&mut self, common: &CommonParts<'_>) -> Result<(), EventsError> {
        self.admit();
        self.data.push_cleared(common)
    }

    /// An event of another list, joined to the one before it where that says the same.
    ///
    /// # Errors
    /// As [`Self::push_stored`].
    pub fn push_view(&mut self, v: EventView<'_>) -> Result<(), EventsError> {
        let (form, width, data) = v.raw_hashes();
        let hashes = match form {
            HashForm::Bytes => Hashes::Bytes { width, data },
            HashForm::Uint => Hashes::IntBytes { signed: false, data },
            HashForm::Int | HashForm::Mixed => {
                self.admit();
                return self.data.push_view(v);
            }
        };
        let common = CommonParts { metadata: v.rare(Rare::Metadata), other: v.rare(Rare::Other) };
        match v.kind() {
            EventKind::Removed => self.push_removed(v.attrs(), hashes, &common),
            EventKind::Cleared => self.push_cleared(&common),
            EventKind::Stored => self.push_stored(
                v.attrs(),
                &StoredParts {
                    hashes,
                    parent: v.parent(),
                    tokens: v.tokens(),
                    extra_keys: v.extra_keys(),
                    lookahead: v.rare(Rare::Lookahead),
                    common,
                },
            ),
        }
    }

    /// Events of another list, each as by [`Self::push_view`].
    ///
    /// # Errors
    /// As [`Self::push_stored`].
    pub fn extend(&mut self, events: &EventList) -> Result<(), EventsError> {
        let (hash_bytes, tokens) = events.column_sizes();
        self.data.reserve(events.len(), hash_bytes, tokens);
        events.iter().try_for_each(|v| self.push_view(v))
    }

    /// Everything since the last call.
    pub fn take(&mut self) -> EventList {
        self.pushed = 0;
        std::mem::take(&mut self.data).into()
    }
}
