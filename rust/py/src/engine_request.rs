//! What a call of an engine's pool reads from the engine's own request, in place by index.

use std::ops::Range;
use std::sync::Arc;

use kvevents_core::pool::{ExtraKeySource, Request};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice};

use crate::pool_args::{Entries, Scratch, argument, column};
use crate::raw;

/// What stores say beside hashes and tokens.
#[derive(Default)]
pub struct Said {
    lora_name: Option<Arc<str>>,
    lora_id: Option<i64>,
    session_id: Option<String>,
    entries: Option<Entries>,
    first_hash: usize,
    first_token: usize,
}

impl Said {
    pub fn set_entries(&mut self, entries: Option<Entries>) {
        self.entries = entries;
    }

    /// The request as the core takes it.
    pub fn request<'a>(
        &'a self,
        scratch: &'a Scratch,
    ) -> Result<Request<'a>, kvevents_core::error::PoolError> {
        Ok(Request {
            hashes: column(&scratch.hashes, self.first_hash)?,
            tokens: &scratch.tokens,
            first_token: self.first_token,
            extra: self.entries.as_ref().map(|e| e as &dyn ExtraKeySource),
            lora_name: self.lora_name.as_ref(),
            lora_id: self.lora_id,
            session_id: self.session_id.as_deref(),
        })
    }
}

/// Hashes of the range, into `scratch`.
pub fn read_hashes(request: &Bound<'_, PyAny>, range: Range<usize>, scratch: &mut Scratch) -> PyResult<Said> {
    let hashes = request.getattr(intern!(request.py(), "block_hashes"))?;
    let Ok(list) = hashes.cast::<PyList>() else {
        return Err(PyTypeError::new_err(format!(
            "block_hashes: a list was expected, saw {}",
            raw::preview(&hashes)
        )));
    };
    let first_hash = range.start.min(list.len());
    let read = raw::read_hashes(&hashes, Some(range), 32, &mut scratch.hashes);
    argument("block_hashes", "a hash of the same form as the others", &hashes, read)?;
    Ok(Said { first_hash, ..Said::default() })
}

/// Tokens of the range, into `scratch`, and what else a store says. Whether blocks have extra keys: then
/// the caller asks the engine's own code for them.
pub fn read_rest(
    request: &Bound<'_, PyAny>,
    tokens: Range<usize>,
    scratch: &mut Scratch,
    said: &mut Said,
) -> PyResult<bool> {
    let py = request.py();
    let get = |name| request.getattr(name);
    said.first_token = tokens.start;
    read_tokens(&get(intern!(py, "all_token_ids"))?, tokens.clone(), scratch)?;
    let session_id = get(intern!(py, "session_id"))?;
    if !session_id.is_none() {
        said.session_id = Some(session_id.extract()?);
    }
    let lora = get(intern!(py, "lora_request"))?;
    let has_lora = lora.is_truthy()?;
    if has_lora {
        said.lora_id = Some(lora.getattr(intern!(py, "adapter_id"))?.extract()?);
        said.lora_name = Some(lora.getattr(intern!(py, "name"))?.extract::<String>()?.into());
    }
    Ok(has_lora
        || get(intern!(py, "mm_features"))?.is_truthy()?
        || !get(intern!(py, "prompt_embeds"))?.is_none()
        || tokens.start == 0 && get(intern!(py, "cache_salt"))?.is_truthy()?)
}

/// vLLM shows a request's list through a read-only view, which holds the list under `_x`.
fn read_tokens(view: &Bound<'_, PyAny>, range: Range<usize>, scratch: &mut Scratch) -> PyResult<()> {
    let list = match view.cast::<PyList>() {
        Ok(list) => list.clone(),
        Err(_) => match view.getattr_opt(intern!(view.py(), "_x"))?.map(Bound::cast_into::<PyList>) {
            Some(Ok(list)) => list,
            _ => {
                let (start, stop) = (range.start.cast_signed(), range.end.cast_signed());
                let part = view.get_item(PySlice::new(view.py(), start, stop, 1))?;
                return argument(
                    "all_token_ids",
                    "0 to 2^32-1",
                    view,
                    raw::read_u32s(&part, None, &mut scratch.tokens),
                );
            }
        },
    };
    argument(
        "all_token_ids",
        "0 to 2^32-1",
        view,
        raw::read_u32s(list.as_any(), Some(range), &mut scratch.tokens),
    )
}
