//! Python event objects to columns.
//!
//! A msgspec Struct, of this package or of an engine, gives all its fields in one call (`astuple`), and where
//! they stand is looked up once a class. Anything else is read attribute by attribute.

use std::sync::{Arc, Mutex, PoisonError};

use kvevents_core::events::{
    AttrId, Attrs, CommonParts, EventData, EventKind, EventList, ExtraKeys, Hashes, StoredParts, Tokens,
};
use kvevents_core::hash::HashRef;
use kvevents_core::msgpack;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyInt, PyList, PyString, PyTuple, PyType};

use crate::errors::{Exc, events_error};
use crate::events::{PyEventList, classes};
use crate::raw::{self, OwnedHash};

macro_rules! fields {
    ($($field:ident = $name:literal),+ $(,)?) => {
        /// The fields that an event can have.
        #[derive(Clone, Copy)]
        enum Field { $($field),+ }

        const NAMES: &[&str] = &[$($name),+];
    };
}

fields! {
    BlockHashes = "block_hashes", Parent = "parent_block_hash", TokenIds = "token_ids",
    ExtraKeys = "extra_keys", Lookahead = "lookahead_token_ids", Metadata = "metadata", Other = "other_fields",
    Medium = "medium", GroupIdx = "group_idx", Locality = "locality", Ownership = "ownership",
    BlockSize = "block_size", LoraId = "lora_id", LoraName = "lora_name", SpecKind = "kv_cache_spec_kind",
    Window = "kv_cache_spec_sliding_window", SessionId = "session_id", CacheSalt = "cache_salt",
}

const COUNT: usize = NAMES.len();
/// From this field on they are attributes, which most events share; those of removals come first.
const ATTRS: usize = Field::Medium as usize;
const ATTRS_OF_REMOVALS: usize = Field::Ownership as usize + 1;

/// Where the value of a field is.
#[derive(Clone, Copy)]
enum Place {
    /// In the tuple.
    At(usize),
    /// An attribute that is no field of the Struct: a property, or of the class.
    Attribute,
    /// Nowhere: the (older, foreign) class does not have it.
    Nowhere,
}

/// What is known of a class of Structs.
struct Plan {
    class: Py<PyType>,
    kind: EventKind,
    places: [Place; COUNT],
}

/// Classes whose plans are kept; more than a process has.
const KEPT_PLANS: usize = 32;

fn names(py: Python<'_>) -> &'static [Py<PyString>; COUNT] {
    static INTERNED: PyOnceLock<[Py<PyString>; COUNT]> = PyOnceLock::new();
    INTERNED.get_or_init(py, || std::array::from_fn(|i| PyString::intern(py, NAMES[i]).unbind()))
}

fn astuple(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static ASTUPLE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    ASTUPLE.import(py, "msgspec.structs", "astuple")
}

/// The plan of an event's class; `None` where its attributes have to be asked one by one.
fn plan_of(event: &Bound<'_, PyAny>, class: &Bound<'_, PyType>) -> PyResult<Option<Arc<Plan>>> {
    static PLANS: Mutex<Vec<Arc<Plan>>> = Mutex::new(Vec::new());
    let known = || PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(plan) = known().iter().find(|p| class.is(&p.class)) {
        return Ok(Some(Arc::clone(plan)));
    }
    let Some(plan) = make_plan(event, class)?.map(Arc::new) else { return Ok(None) };
    let mut plans = known();
    if plans.len() < KEPT_PLANS {
        plans.push(Arc::clone(&plan));
    }
    Ok(Some(plan))
}

fn make_plan(event: &Bound<'_, PyAny>, class: &Bound<'_, PyType>) -> PyResult<Option<Plan>> {
    let py = event.py();
    let structs = py.import("msgspec")?.getattr("Struct")?;
    let own = |name| PyResult::Ok(class.getattr(name)?.is(&py.get_type::<PyAny>().getattr(name)?));
    // With a dictionary of its own, an instance can have attributes that its class does not name.
    if !class.is_subclass(&structs)?
        || class.getattr("__dictoffset__")?.extract::<isize>()? != 0
        || class.hasattr("__getattr__")?
        || !own("__getattribute__")?
    {
        return Ok(None);
    }
    let Some(kind) = kind_of(event)? else { return Ok(None) };
    let fields = class.getattr("__struct_fields__")?.cast_into::<PyTuple>()?;
    let mut places = [Place::Nowhere; COUNT];
    for (place, name) in places.iter_mut().zip(names(py)) {
        let name = name.bind(py);
        *place = match fields.index(name) {
            Ok(at) => Place::At(at),
            Err(_) if class.hasattr(name)? => Place::Attribute,
            Err(_) => Place::Nowhere,
        };
    }
    Ok(Some(Plan { class: class.clone().unbind(), kind, places }))
}

/// One event object, and its position for error messages.
struct Event<'a, 'py> {
    object: &'a Bound<'py, PyAny>,
    index: usize,
    /// Its fields, where its class has a plan.
    row: Option<(&'a Plan, Bound<'py, PyTuple>)>,
}

impl<'py> Event<'_, 'py> {
    fn bad(&self, field: &str, what: &str) -> PyErr {
        Exc::EventError.err(format!("event {}: {field}: {what}", self.index))
    }

    fn bad_type(&self, field: &str, what: &str) -> PyErr {
        Exc::EventTypeError.err(format!("event {}: {field}: {what}", self.index))
    }

    /// The field, or `None` where it is nil or the class does not have it.
    fn get(&self, field: Field) -> PyResult<Option<Bound<'py, PyAny>>> {
        let attribute =
            || self.object.getattr_opt(names(self.object.py())[field as usize].bind(self.object.py()));
        let value = match &self.row {
            None => attribute()?,
            Some((plan, row)) => match plan.places[field as usize] {
                Place::At(i) => Some(row.get_item(i)?),
                Place::Attribute => attribute()?,
                Place::Nowhere => None,
            },
        };
        Ok(value.filter(|v| !v.is_none()))
    }

    /// Whether the attributes of both are the very same objects, in events of one class.
    fn shares_attrs(&self, before: &Plan, row_before: &Bound<'py, PyTuple>) -> bool {
        let Some((plan, row)) = &self.row else { return false };
        let end = if plan.kind == EventKind::Stored { COUNT } else { ATTRS_OF_REMOVALS };
        plan.class.is(&before.class)
            && plan.places[ATTRS..end].iter().all(|place| match *place {
                Place::At(i) => match (row.get_borrowed_item(i), row_before.get_borrowed_item(i)) {
                    (Ok(a), Ok(b)) => a.is(b),
                    _ => false,
                },
                Place::Attribute => false,
                Place::Nowhere => true,
            })
    }

    fn opt_int(&self, field: Field) -> PyResult<Option<i64>> {
        let Some(v) = self.get(field)? else { return Ok(None) };
        v.extract().map(Some).map_err(|_| {
            self.bad_type(
                NAMES[field as usize],
                &format!("a 64-bit integer or None was expected, saw {}", raw::preview(&v)),
            )
        })
    }

    fn opt_str(&self, field: Field) -> PyResult<Option<Arc<str>>> {
        let Some(v) = self.get(field)? else { return Ok(None) };
        let name = NAMES[field as usize];
        match v.cast::<PyString>() {
            // Half of a surrogate pair is a `str` and has no UTF-8.
            Ok(s) => s.to_cow().map(|s| Some(Arc::from(&*s))).map_err(|_| {
                self.bad(name, &format!("text in UTF-8 was expected, saw {}", raw::preview(&v)))
            }),
            Err(_) => {
                Err(self.bad_type(name, &format!("a str or None was expected, saw {}", raw::preview(&v))))
            }
        }
    }

    /// A value that is kept as msgpack bytes.
    fn raw(&self, field: Field) -> PyResult<Option<Vec<u8>>> {
        let Some(v) = self.get(field)? else { return Ok(None) };
        to_msgpack(&v)?.map(Some).map_err(|what| self.bad(NAMES[field as usize], &what))
    }

    fn raw_map(&self, field: Field) -> PyResult<Option<Vec<u8>>> {
        let Some(v) = self.get(field)? else { return Ok(None) };
        if v.cast::<PyDict>().is_err() {
            return Err(self.bad_type(
                NAMES[field as usize],
                &format!("a dict or None was expected, saw {}", raw::preview(&v)),
            ));
        }
        self.raw(field)
    }

    fn raw_list(&self, field: Field) -> PyResult<Option<Vec<u8>>> {
        let raw = self.raw(field)?;
        match &raw {
            Some(r) if msgpack::array_header(r, 0).is_none() => {
                Err(self.bad_type(NAMES[field as usize], "a list or None was expected"))
            }
            _ => Ok(raw),
        }
    }

    fn hashes(&self, v: &Bound<'py, PyAny>) -> PyResult<Vec<OwnedHash>> {
        let no_list = || {
            self.bad_type("block_hashes", &format!("a list of hashes was expected, saw {}", raw::preview(v)))
        };
        if v.is_instance_of::<PyBytes>()
            || v.is_instance_of::<PyByteArray>()
            || v.is_instance_of::<PyString>()
        {
            return Err(no_list());
        }
        let mut out = Vec::new();
        for (i, item) in v.try_iter().map_err(|_| no_list())?.enumerate() {
            let hash =
                raw::read_hash(&item?).map_err(|what| self.bad(&format!("block_hashes[{i}]"), &what))?;
            out.push(hash);
        }
        Ok(out)
    }

    fn attrs(&self, stored: bool) -> PyResult<Attrs> {
        let mut a = Attrs {
            medium: self.opt_str(Field::Medium)?,
            group_idx: self.opt_int(Field::GroupIdx)?,
            locality: self.opt_str(Field::Locality)?,
            ownership: self.opt_str(Field::Ownership)?,
            ..Attrs::default()
        };
        if stored {
            let size = self.opt_int(Field::BlockSize)?.unwrap_or(0);
            a.block_size = u32::try_from(size)
                .map_err(|_| self.bad("block_size", &format!("0 to 2^32-1 was expected, saw {size}")))?;
            a.lora_id = self.opt_int(Field::LoraId)?;
            a.lora_name = self.opt_str(Field::LoraName)?;
            a.spec_kind = self.opt_str(Field::SpecKind)?;
            a.sliding_window = self.opt_int(Field::Window)?;
            a.session_id = self.opt_str(Field::SessionId)?;
            a.cache_salt = self.opt_str(Field::CacheSalt)?;
        }
        Ok(a)
    }

    /// The extra keys of `blocks` blocks; a list of nothing but `None` costs no encoding.
    fn extra_keys(&self, blocks: usize) -> PyResult<Option<Extra>> {
        let Some(v) = self.get(Field::ExtraKeys)? else { return Ok(None) };
        if let Ok(list) = v.cast_exact::<PyList>()
            && list.len() == blocks
            && list.iter().all(|key| key.is_none())
        {
            return Ok(Some(Extra::AllNil));
        }
        let raw = self.raw_list(Field::ExtraKeys)?;
        Ok(raw.map(|raw| match msgpack::array_header(&raw, 0) {
            Some((n, at)) if n == blocks && raw[at..].iter().all(|&b| b == 0xc0) => Extra::AllNil,
            _ => Extra::Raw(raw),
        }))
    }

    /// Plain ids into `plain`; anything else that is legal on the wire as msgpack bytes.
    fn tokens(&self, plain: &mut Vec<u32>) -> PyResult<Option<Vec<u8>>> {
        let py = self.object.py();
        let Some(v) = self.get(Field::TokenIds)? else { return Ok(None) };
        if v.is_instance_of::<PyString>() {
            return Err(self.bad_type("token_ids", &format!("a list was expected, saw {}", raw::preview(&v))));
        }
        let bad = match raw::read_u32s(&v, None, plain) {
            Ok(Ok(())) => return Ok(None),
            Ok(Err(bad)) => bad,
            Err(e) if e.is_instance_of::<PyTypeError>(py) => {
                return Err(self.bad_type(
                    "token_ids",
                    &format!("a list of token ids was expected, saw {}", raw::preview(&v)),
                ));
            }
            Err(e) => return Err(e),
        };
        plain.clear();
        for (i, item) in v.try_iter()?.enumerate().skip(bad.index) {
            let item = item?;
            if !is_wide_token(&item) {
                return Err(self.bad(
                    &format!("token_ids[{i}]"),
                    &format!(
                        "an integer of 64 bits, a pair of them or a str was expected, saw {}",
                        raw::preview(&item)
                    ),
                ));
            }
        }
        let ints = v.try_iter()?.map(|x| plain_int(&x?)).collect::<PyResult<Vec<_>>>()?;
        let list = PyList::new(py, ints)?;
        to_msgpack(&list)?.map(Some).map_err(|what| self.bad("token_ids", &what))
    }
}

enum Extra {
    AllNil,
    Raw(Vec<u8>),
}

/// An event, and the number of its attributes in the list.
type Before<'py> = (Arc<Plan>, Bound<'py, PyTuple>, AttrId);

/// Reads events one after the other; what they share with the one before is not read again.
#[derive(Default)]
pub struct EventReader<'py> {
    plan: Option<Arc<Plan>>,
    /// The last removal and the last store whose attributes are known.
    before: [Option<Before<'py>>; 2],
    tokens: Vec<u32>,
    column: raw::HashColumn,
}

impl<'py> EventReader<'py> {
    /// Appends one event object to `out`, the same list for all events of a reader; `index` is for the error
    /// message.
    pub fn push(&mut self, event: &Bound<'py, PyAny>, index: usize, out: &mut EventData) -> PyResult<()> {
        let class = event.get_type();
        if !self.plan.as_ref().is_some_and(|p| class.is(&p.class)) {
            self.plan = plan_of(event, &class)?;
        }
        let plan = self.plan.clone();
        // A Struct that misses a field is read one by one, which says which.
        let row = plan.as_deref().and_then(|plan| {
            let row = astuple(event.py()).and_then(|f| f.call1((event,))).ok()?;
            Some((plan, row.cast_into::<PyTuple>().ok()?))
        });
        let kind = match &row {
            Some((plan, _)) => Some(plan.kind),
            None => kind_of(event)?,
        };
        let Some(kind) = kind else {
            return Err(Exc::EventTypeError.err(format!(
                "event {index}: BlockStored, BlockRemoved or AllBlocksCleared was expected, saw {}",
                raw::preview(event)
            )));
        };
        self.push_row(&Event { object: event, index, row }, kind, out)
    }

    fn push_row(&mut self, e: &Event<'_, 'py>, kind: EventKind, out: &mut EventData) -> PyResult<()> {
        let metadata = e.raw_map(Field::Metadata)?;
        let other = e.raw_map(Field::Other)?;
        let common = CommonParts { metadata: metadata.as_deref(), other: other.as_deref() };
        if kind == EventKind::Cleared {
            return out.push_cleared(&common).map_err(|e| events_error(&e));
        }
        let stored = kind == EventKind::Stored;
        let attrs = self.attrs(e, stored)?;
        let mixed: Vec<OwnedHash>;
        let refs: Vec<HashRef<'_>>;
        let given = e
            .get(Field::BlockHashes)?
            .ok_or_else(|| e.bad_type("block_hashes", "a list was expected, saw None"))?;
        let column = &mut self.column;
        let regular = given.is_instance_of::<PyList>()
            && matches!(raw::read_hashes(&given, None, 1, column), Ok(Ok(())))
            && !column.negative
            && column.len() > 0;
        let (hashes, n) = if regular {
            (column.hashes(0), column.len())
        } else {
            mixed = e.hashes(&given)?;
            refs = mixed.iter().map(as_ref).collect();
            (Hashes::Mixed(&refs), refs.len())
        };
        let intern = |attrs: &Interned, out: &mut EventData| match attrs {
            Interned::Known(id) => *id,
            Interned::New(attrs) => out.intern(attrs),
        };
        if !stored {
            let id = intern(&attrs, out);
            out.push_removed(id, hashes, &common).map_err(|e| events_error(&e))?;
            self.remember(e, stored, id);
            return Ok(());
        }
        let parent = e
            .get(Field::Parent)?
            .map(|v| raw::read_hash(&v).map_err(|what| e.bad("parent_block_hash", &what)))
            .transpose()?;
        let extra = e.extra_keys(n)?;
        let lookahead = e.raw_list(Field::Lookahead)?;
        self.tokens.clear();
        let wide = e.tokens(&mut self.tokens)?;
        let size = match &attrs {
            Interned::Known(id) => out.attrs_of(*id).block_size,
            Interned::New(attrs) => attrs.block_size,
        };
        if size == 0 && (wide.is_some() || !self.tokens.is_empty()) {
            return Err(e.bad("block_size", &format!("0 with {} token ids", self.tokens.len())));
        }
        let id = intern(&attrs, out);
        let parts = StoredParts {
            hashes,
            parent: parent.as_ref().map(as_ref),
            tokens: wide.as_deref().map_or(Tokens::Plain(&self.tokens), Tokens::Wide),
            extra_keys: match &extra {
                None => ExtraKeys::Absent,
                Some(Extra::AllNil) => ExtraKeys::AllNil,
                Some(Extra::Raw(raw)) => ExtraKeys::Raw(raw),
            },
            lookahead: lookahead.as_deref(),
            common,
        };
        out.push_stored(id, &parts).map_err(|e| events_error(&e))?;
        self.remember(e, stored, id);
        Ok(())
    }

    /// The attributes; their number where the last event of this kind has the same.
    fn attrs(&self, e: &Event<'_, 'py>, stored: bool) -> PyResult<Interned> {
        if let Some((plan, row, id)) = &self.before[usize::from(stored)]
            && e.shares_attrs(plan, row)
        {
            return Ok(Interned::Known(*id));
        }
        e.attrs(stored).map(Interned::New)
    }

    fn remember(&mut self, e: &Event<'_, 'py>, stored: bool, id: AttrId) {
        let before = &mut self.before[usize::from(stored)];
        match (&e.row, &self.plan) {
            (Some((_, row)), Some(plan)) => {
                if before.as_ref().is_none_or(|b| b.2 != id || !b.0.class.is(&plan.class)) {
                    *before = Some((Arc::clone(plan), row.clone(), id));
                }
            }
            _ => *before = None,
        }
    }
}

/// Attributes, or their number in the list.
enum Interned {
    Known(AttrId),
    New(Attrs),
}

/// Any value as msgpack bytes; the inner error says why it cannot be.
pub fn to_msgpack(v: &Bound<'_, PyAny>) -> PyResult<Result<Vec<u8>, String>> {
    let py = v.py();
    let bytes = match classes(py)?.encode.bind(py).call1((v,)) {
        Ok(bytes) => bytes,
        Err(e) => return Ok(Err(format!("cannot be encoded as msgpack: {}", e.value(py)))),
    };
    let bytes = bytes.cast::<PyBytes>()?.as_bytes().to_vec();
    if msgpack::skip_value(&bytes, 0) != Ok(bytes.len()) {
        return Ok(Err(format!("nested deeper than {} levels", msgpack::MAX_DEPTH)));
    }
    Ok(Ok(bytes))
}

fn as_ref(h: &OwnedHash) -> HashRef<'_> {
    match h {
        OwnedHash::Uint(v) => HashRef::Uint(*v),
        OwnedHash::Int(v) => HashRef::Int(*v),
        OwnedHash::Bytes(b) => HashRef::Bytes(b),
    }
}

fn is_int64(v: &Bound<'_, PyAny>) -> bool {
    v.extract::<u64>().is_ok() || v.extract::<i64>().is_ok()
}

fn is_wide_token(v: &Bound<'_, PyAny>) -> bool {
    if v.is_instance_of::<PyString>() || is_int64(v) {
        return true;
    }
    let items = v.cast::<PyTuple>().map(|t| t.to_list());
    let items = items.as_ref().ok().or_else(|| v.cast::<PyList>().ok());
    items.is_some_and(|l| l.iter().all(|x| is_int64(&x)))
}

/// numpy's and other integers as `int`; the rest as it is.
fn plain_int<'py>(v: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if v.is_instance_of::<PyInt>() || !is_int64(v) {
        return Ok(v.clone());
    }
    v.extract::<u64>()
        .map_or_else(|_| v.extract::<i64>()?.into_bound_py_any(v.py()), |u| u.into_bound_py_any(v.py()))
}

/// Which event an object is: one of ours, or (an engine's own Structs) by the name of its class.
fn kind_of(event: &Bound<'_, PyAny>) -> PyResult<Option<EventKind>> {
    let py = event.py();
    let c = classes(py)?;
    let class = event.get_type();
    for (kind, known, name) in [
        (EventKind::Stored, &c.stored, intern!(py, "BlockStored")),
        (EventKind::Removed, &c.removed, intern!(py, "BlockRemoved")),
        (EventKind::Cleared, &c.cleared, intern!(py, "AllBlocksCleared")),
    ] {
        if class.is(known)
            || event.is_instance(known.bind(py))?
            || PyAnyMethods::eq(class.name()?.as_any(), name)?
        {
            return Ok(Some(kind));
        }
    }
    Ok(None)
}

/// Appends one event object; `index` is for the error message.
pub fn push_event(event: &Bound<'_, PyAny>, index: usize, out: &mut EventData) -> PyResult<()> {
    EventReader::default().push(event, index, out)
}

/// Events from an `EventList` or any iterable of events.
pub fn extract_events(obj: &Bound<'_, PyAny>) -> PyResult<EventList> {
    if let Ok(list) = obj.cast::<PyEventList>() {
        return Ok(list.get().inner.clone());
    }
    let mut data = EventData::new();
    let mut reader = EventReader::default();
    for (i, event) in obj.try_iter()?.enumerate() {
        reader.push(&event?, i, &mut data)?;
    }
    Ok(data.into())
}

/// A list of this one event, or `None` where it is no event: such a thing equals nothing.
pub fn single(value: &Bound<'_, PyAny>) -> Option<EventList> {
    let mut data = EventData::new();
    push_event(value, 0, &mut data).ok().map(|()| data.into())
}
