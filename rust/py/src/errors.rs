//! Core error to Python exception: one `match` per enum, no wildcard arm.
//!
//! The exceptions are Python classes in `kvevents.errors`, so that each is both ours and a builtin.
//! They are looked up once.

use kvevents_core::error::{
    AggregateError, DecodeError, EncodeError, EventsError, IndexError, PoolError, RecordError,
    ReplayLogError, TokensError,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

macro_rules! exceptions {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// The package's exceptions, by name.
        #[derive(Clone, Copy)]
        #[allow(clippy::enum_variant_names)] // named as in Python
        pub enum Exc { $($(#[$doc])* $name),+ }

        impl Exc {
            /// An exception of this class with this message.
            pub fn err(self, message: impl Into<String>) -> PyErr {
                let message = message.into();
                Python::attach(|py| match self {
                    $(Self::$name => {
                        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
                        match CLASS.import(py, "kvevents.errors", stringify!($name)) {
                            Ok(class) => PyErr::from_type(class.clone(), (message,)),
                            Err(e) => e,
                        }
                    }),+
                })
            }
        }
    };
}

exceptions! {
    AggregatorError,
    AggregatorTypeError,
    BlockError,
    BlockTypeError,
    ConfigError,
    DecodeError,
    EncodeError,
    EventError,
    EventTypeError,
    NoFreeBlocksError,
    PickleError,
    RecordError,
    SequenceError,
    TokenError,
    TokenTypeError,
    WorkerIndexError,
}

/// The Python exception for an error of the events layer.
pub fn events_error(e: &EventsError) -> PyErr {
    match e {
        EventsError::Field { .. } | EventsError::TooLarge { .. } => Exc::EventError.err(e.to_string()),
        EventsError::Corrupt(_) | EventsError::Version { .. } => Exc::PickleError.err(e.to_string()),
    }
}

/// The Python exception for an error of the replay log.
pub fn replay_log_error(e: &ReplayLogError) -> PyErr {
    match e {
        ReplayLogError::NotNewer { .. } | ReplayLogError::Reserved => Exc::SequenceError.err(e.to_string()),
    }
}

/// The Python exception for an error of a recorder.
pub fn record_error(e: &RecordError) -> PyErr {
    match e {
        RecordError::Ticket { .. }
        | RecordError::Blocks { .. }
        | RecordError::Order { .. }
        | RecordError::Medium { .. }
        | RecordError::TooMany { .. } => Exc::RecordError.err(e.to_string()),
        RecordError::Columns(e) => events_error(e),
    }
}

/// The Python exception for an error of the index.
pub fn index_error(e: &IndexError) -> PyErr {
    match e {
        IndexError::Corrupt(_) => Exc::PickleError.err(e.to_string()),
    }
}

/// The Python exception for an error in the options of `TokenBlocks`.
pub fn tokens_error(e: &TokensError) -> PyErr {
    match e {
        TokensError::BlockSize { .. } | TokensError::LoraPathAlone | TokensError::MmOrder { .. } => {
            Exc::ConfigError.err(e.to_string())
        }
    }
}

/// The Python exception for an error of the decoder; what is said in the message also stands in attributes.
pub fn decode_error(py: Python<'_>, e: &DecodeError) -> PyErr {
    let err = Exc::DecodeError.err(e.to_string());
    let value = err.value(py);
    let set = match e {
        DecodeError::NotABatch { offset, .. } => value.setattr("offset", offset),
        DecodeError::Event { index, reason, field, offset, .. } => value
            .setattr("event", index)
            .and_then(|()| value.setattr("field", field))
            .and_then(|()| value.setattr("reason", reason))
            .and_then(|()| value.setattr("offset", offset)),
        DecodeError::Columns(e) => return events_error(e),
    };
    set.err().unwrap_or(err)
}

/// The Python exception for an error of the encoder.
pub fn encode_error(py: Python<'_>, e: &EncodeError) -> PyErr {
    let err = Exc::EncodeError.err(e.to_string());
    let value = err.value(py);
    let set = value.setattr("event", e.index).and_then(|()| value.setattr("field", e.field));
    set.err().unwrap_or(err)
}

/// The Python exception for an error of the block pool.
pub fn pool_error(e: &PoolError) -> PyErr {
    match e {
        PoolError::Config(_) => Exc::ConfigError.err(e.to_string()),
        PoolError::NoFreeBlocks { .. } => Exc::NoFreeBlocksError.err(e.to_string()),
        PoolError::BlockRange { .. }
        | PoolError::NotInUse { .. }
        | PoolError::NullBlock { .. }
        | PoolError::Twice { .. }
        | PoolError::AlreadyCached { .. }
        | PoolError::Group { .. }
        | PoolError::Range { .. }
        | PoolError::TooFewBlocks { .. }
        | PoolError::TooFewHashes { .. }
        | PoolError::TooFewTokens { .. }
        | PoolError::HashForm(_)
        | PoolError::Boundary { .. }
        | PoolError::BlockSize { .. }
        | PoolError::EventsOff => Exc::BlockError.err(e.to_string()),
    }
}

/// The Python exception for an error of the aggregator.
pub fn aggregate_error(e: &AggregateError) -> PyErr {
    match e {
        AggregateError::Workers { .. } | AggregateError::Rule(_) | AggregateError::StillVotes { .. } => {
            Exc::AggregatorError.err(e.to_string())
        }
        AggregateError::Worker { .. } => Exc::WorkerIndexError.err(e.to_string()),
        AggregateError::Untagged { .. } => Exc::AggregatorTypeError.err(e.to_string()),
    }
}
