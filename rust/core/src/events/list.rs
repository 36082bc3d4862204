//! The handle that everybody passes around.

use std::ops::Range;
use std::sync::Arc;

use super::attrs::Attrs;
use super::data::{EventData, Origin, Skipped};
use super::view::EventView;
use crate::error::EventsError;

/// Finished events: immutable, shared, cheap to clone and to slice.
#[derive(Clone, Debug, Default)]
pub struct EventList {
    data: Arc<EventData>,
    start: usize,
    end: usize,
    /// Checksum of the bytes that the list was read from, all of which it is made of.
    sum: Option<u64>,
}

impl From<EventData> for EventList {
    fn from(data: EventData) -> Self {
        let end = data.len();
        Self { data: Arc::new(data), start: 0, end, sum: None }
    }
}

/// The events of each origin; `None` for those that do not say.
pub type Parts<K> = Vec<(Option<K>, EventList)>;

impl EventList {
    /// Fills the list anew: `fill` gets its columns, to keep their memory, or new ones where somebody else
    /// has these.
    pub fn refill<R>(&mut self, fill: impl FnOnce(&mut EventData) -> R) -> R {
        if Arc::get_mut(&mut self.data).is_none() {
            self.data = Arc::default();
        }
        let result = fill(Arc::make_mut(&mut self.data));
        (self.start, self.end, self.sum) = (0, self.data.len(), None);
        result
    }

    /// Number of events.
    #[inline]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The event at `index`.
    ///
    /// # Panics
    /// When `index` is not below [`Self::len`].
    #[inline]
    pub fn view(&self, index: usize) -> EventView<'_> {
        assert!(index < self.len(), "event {index} of {}", self.len());
        self.data.view(self.start + index)
    }

    /// All events, in order.
    #[inline]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = EventView<'_>> + DoubleEndedIterator {
        (self.start..self.end).map(|i| self.data.view(i))
    }

    /// The table that [`EventView::attrs_index`] points into.
    pub fn attrs_table(&self) -> &[Attrs] {
        &self.data.attrs
    }

    /// A part; shares the columns.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let end = self.start + range.end.min(self.len());
        let start = (self.start + range.start).min(end);
        let sum = self.sum.filter(|_| end - start == self.len());
        Self { data: Arc::clone(&self.data), start, end, sum }
    }

    /// The events of `self`, then those of `other`.
    pub fn concat(&self, other: &Self) -> Result<Self, EventsError> {
        if other.says_nothing() {
            return Ok(self.clone());
        }
        if self.says_nothing() {
            return Ok(other.clone());
        }
        let mut data = EventData::new();
        for v in self.iter().chain(other.iter()) {
            data.push_view(v)?;
        }
        data.overflowed = self.overflowed() || other.overflowed();
        data.skipped.extend_from_slice(self.skipped());
        // Two slices of one list both have what was left out of it.
        if !Arc::ptr_eq(&self.data, &other.data) {
            data.skipped.extend_from_slice(other.skipped());
        }
        Ok(data.into())
    }

    /// Copies of the events at `rows`, with what the list says of events that are missing in it.
    pub fn select(&self, rows: impl IntoIterator<Item = usize>) -> Result<Self, EventsError> {
        let mut data = EventData::new();
        for i in rows {
            data.push_view(self.view(i))?;
        }
        data.overflowed = self.overflowed();
        data.skipped.extend_from_slice(self.skipped());
        Ok(data.into())
    }

    /// The same events, all from `origin`.
    pub fn with_origin(&self, origin: &Origin) -> Result<Self, EventsError> {
        let mut data = EventData::new();
        for (i, v) in self.iter().enumerate() {
            data.push_view(v)?;
            data.set_origin(i, origin.clone());
        }
        data.overflowed = self.overflowed();
        data.skipped.extend_from_slice(self.skipped());
        Ok(data.into())
    }

    fn says_nothing(&self) -> bool {
        self.is_empty() && !self.overflowed() && self.skipped().is_empty()
    }

    /// Whether both hold equal events in the same order.
    pub fn same(&self, other: &Self) -> bool {
        let same_columns =
            Arc::ptr_eq(&self.data, &other.data) && self.start == other.start && self.end == other.end;
        same_columns || (self.len() == other.len() && self.iter().zip(other.iter()).all(|(a, b)| a.same(&b)))
    }

    /// Number of irregular events.
    pub fn irregular(&self) -> usize {
        if self.len() == self.data.len() {
            return self.data.irregular as usize;
        }
        self.iter().filter(EventView::is_irregular).count()
    }

    /// Events that the decoder left out. A slice has those of the whole list.
    pub fn skipped(&self) -> &[Skipped] {
        &self.data.skipped
    }

    /// Whether events are missing before the first of these.
    pub fn overflowed(&self) -> bool {
        self.data.overflowed
    }

    /// Whether any event says where it came from.
    pub fn has_origins(&self) -> bool {
        self.data.origins.is_some()
    }

    /// Bytes held in memory by the columns (shared with other handles of the same events).
    pub fn nbytes(&self) -> usize {
        self.data.nbytes()
    }

    /// The events of each worker, in their order; workers in the order in which they first appear,
    /// `None` for events that do not say. What is one worker's alone shares the columns.
    pub fn by_worker(&self) -> Result<Parts<u32>, EventsError> {
        self.split_by(|o| o.worker)
    }

    /// The same by source.
    pub fn by_source(&self) -> Result<Parts<Arc<str>>, EventsError> {
        self.split_by(|o| o.source.clone())
    }

    fn split_by<K: PartialEq>(&self, key: impl Fn(&Origin) -> Option<K>) -> Result<Parts<K>, EventsError> {
        if !self.has_origins() && !self.is_empty() {
            return Ok(vec![(None, self.clone())]);
        }
        let mut parts: Vec<(Option<K>, Vec<usize>)> = Vec::new();
        for (i, v) in self.iter().enumerate() {
            let k = v.origin().and_then(&key);
            match parts.iter_mut().rev().find(|(known, _)| *known == k) {
                Some((_, rows)) => rows.push(i),
                None => parts.push((k, vec![i])),
            }
        }
        let split = |rows: Vec<usize>| -> Result<Self, EventsError> {
            let (from, to) = (rows[0], rows[rows.len() - 1] + 1);
            if to - from == rows.len() {
                return Ok(self.slice(from..to));
            }
            self.select(rows)
        };
        parts.into_iter().map(|(k, rows)| Ok((k, split(rows)?))).collect()
    }

    /// The same events, said to come from `source`; their workers stay. With `nest` a source that an
    /// event has already becomes the end of the new one: `source/old`.
    pub fn with_source(&self, source: Option<&str>, nest: bool) -> Result<Self, EventsError> {
        let mut data = if self.len() == self.data.len() {
            EventData::clone(&self.data)
        } else {
            let mut data = EventData::new();
            for v in self.iter() {
                data.push_view(v)?;
            }
            data
        };
        let source: Option<Arc<str>> = source.map(Into::into);
        for (i, v) in self.iter().enumerate() {
            let old = v.origin().cloned().unwrap_or_default();
            let source = match (&source, &old.source) {
                (Some(new), Some(old)) if nest => Some(format!("{new}/{old}").into()),
                _ => source.clone(),
            };
            data.set_origin(i, Origin { source, ..old });
        }
        Ok(data.into())
    }

    /// Number of events that are kept in memory by this handle: those of the whole list for a slice.
    pub fn rows_in_memory(&self) -> usize {
        self.data.len()
    }

    /// Bytes of hashes, parents included, of these events.
    pub fn hash_bytes(&self) -> usize {
        let end = |i: usize| i.checked_sub(1).map_or(0, |i| self.data.rows[i].hash_end as usize);
        end(self.end) - end(self.start)
    }

    /// Bytes of hashes and parents, and number of plain token ids, that the events hold.
    pub(crate) fn column_sizes(&self) -> (usize, usize) {
        let end = |i: usize| {
            i.checked_sub(1).map_or((0, 0), |i| {
                let row = &self.data.rows[i];
                (row.hash_end as usize, row.token_end as usize)
            })
        };
        let (from, to) = (end(self.start), end(self.end));
        (to.0 - from.0, to.1 - from.1)
    }

    /// The list that was read from bytes with this checksum.
    pub(super) fn of_bytes(data: EventData, sum: u64) -> Self {
        Self { sum: Some(sum), ..data.into() }
    }

    pub(super) fn sum(&self) -> Option<u64> {
        self.sum
    }

    pub(super) fn parts(&self) -> (&EventData, Range<usize>) {
        (&self.data, self.start..self.end)
    }
}
