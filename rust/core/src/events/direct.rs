//! For the decoder: events whose hashes and token ids are written straight into the columns, and whose
//! row is added when the whole event was found to be good.

use super::data::{AttrId, EventData, flag};
use super::view::{EventKind, ExtraKeys, HashForm, Rare};
use crate::msgpack;

/// Where the columns ended before an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    hashes: usize,
    tokens: usize,
}

/// How the hashes were written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    /// Not [`HashForm::Mixed`].
    pub form: HashForm,
    /// Bytes of each.
    pub width: u8,
    /// How many.
    pub count: usize,
}

/// How the parent was written, before the hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    /// Not at all.
    None,
    /// 8 bytes.
    Uint,
    /// 8 bytes, negative.
    Int,
    /// So many bytes.
    Bytes(u8),
}

impl EventData {
    /// The hash and token columns.
    #[inline]
    pub(crate) fn columns(&mut self) -> (&mut Vec<u8>, &mut Vec<u32>) {
        (&mut self.hashes, &mut self.tokens)
    }

    #[inline]
    pub(crate) fn mark(&self) -> Mark {
        Mark { hashes: self.hashes.len(), tokens: self.tokens.len() }
    }

    /// Takes back what was written since.
    pub(crate) fn roll_back(&mut self, mark: Mark) {
        self.hashes.truncate(mark.hashes);
        self.tokens.truncate(mark.tokens);
    }

    /// Ends a store. The caller made sure that the columns stay below 2^32.
    #[inline]
    pub(crate) fn close_stored(
        &mut self,
        attrs: AttrId,
        hashes: Written,
        parent: Parent,
        tokens: usize,
        extra_keys: ExtraKeys<'_>,
    ) {
        let (parent_form, parent_width) = match parent {
            Parent::None => (0, 0),
            Parent::Uint => (1, 8),
            Parent::Int => (2, 8),
            Parent::Bytes(width) => (3, width),
        };
        let mut flags = EventKind::Stored as u16
            | parent_form << flag::PARENT_SHIFT
            | (hashes.form as u16) << flag::FORM_SHIFT;
        let mut regular = true;
        match extra_keys {
            ExtraKeys::Absent => {}
            ExtraKeys::AllNil => flags |= flag::EXTRA_NIL,
            ExtraKeys::Raw(raw) => {
                flags |= self.push_rare(Rare::ExtraKeys, Some(raw));
                regular = msgpack::array_header(raw, 0).is_some_and(|(n, _)| n == hashes.count);
            }
        }
        let block_size = self.attrs[attrs.0 as usize].block_size as usize;
        regular &= hashes.count > 0 && block_size > 0 && hashes.count.checked_mul(block_size) == Some(tokens);
        if !regular {
            flags |= flag::IRREGULAR;
        }
        self.push_row(attrs, flags, hashes.width, parent_width);
    }

    /// Ends a removal. The caller made sure that the columns stay below 2^32.
    #[inline]
    pub(crate) fn close_removed(&mut self, attrs: AttrId, hashes: Written) {
        let mut flags = EventKind::Removed as u16 | (hashes.form as u16) << flag::FORM_SHIFT;
        if hashes.count == 0 {
            flags |= flag::IRREGULAR;
        }
        self.push_row(attrs, flags, hashes.width, 0);
    }
}
