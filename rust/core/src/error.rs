//! Errors, one enum per layer. Each says what was wrong, where, and what was seen.

use thiserror::Error;

/// What can be wrong with events that are put into an `EventList`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EventsError {
    /// A field holds something that no engine can mean.
    #[error("event {index}: {field}: {seen}")]
    Field {
        /// Position of the event in what was given.
        index: usize,
        /// The field, by vLLM's name.
        field: &'static str,
        /// What was wrong and what was seen.
        seen: String,
    },
    /// The columns are addressed by 32 bits.
    #[error("too many {what} for one EventList: {seen} (at most {limit}); take events more often")]
    TooLarge {
        /// `hash bytes`, `token ids` or `bytes of rare fields`.
        what: &'static str,
        /// The size that was asked for.
        seen: usize,
        /// The largest size.
        limit: usize,
    },
    /// Bytes that are not a pickled `EventList`, or are damaged.
    #[error("not a valid pickled EventList: {0}")]
    Corrupt(String),
    /// Bytes of an `EventList` of another version of this package.
    #[error(
        "this EventList was pickled in format version {seen}, this build reads version {known}; \
         run the same kvevents release in every process"
    )]
    Version {
        /// The version in the bytes.
        seen: u16,
        /// The version of this build.
        known: u16,
    },
}

/// What can be wrong with the options of `TokenBlocks`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokensError {
    /// A block holds at least one token.
    #[error("block_size: 1 to 16777216 tokens were expected, saw {seen}")]
    BlockSize {
        /// What was given.
        seen: usize,
    },
    /// A path says nothing without its adapter.
    #[error("lora_path was given without lora_name; give both, as the engine has them")]
    LoraPathAlone,
    /// Features come in the order of the prompt.
    #[error("mm[{index}]: offset {offset} comes after offset {before}; sort the features by offset")]
    MmOrder {
        /// Position of the feature.
        index: usize,
        /// Its offset.
        offset: u32,
        /// The offset of the feature before it.
        before: u32,
    },
}

/// What can be wrong with a batch that is put into a replay log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReplayLogError {
    /// Numbers grow, or readers could not tell a repetition from a loss.
    #[error("sequence {seq} is not above the newest in the log, {newest}")]
    NotNewer {
        /// The number that was given.
        seq: u64,
        /// The newest number in the log.
        newest: u64,
    },
    /// All ones ends a replay on the wire, so no batch can have it.
    #[error("sequence 2^64-1 is the end marker of a replay; a batch cannot have it")]
    Reserved,
}

/// Why a payload, or (strictly) an event in it, could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The payload is no batch of events at all.
    #[error("not a batch of KV events: {what} at byte {offset}, saw {seen}")]
    NotABatch {
        /// What was expected.
        what: &'static str,
        /// Where, in bytes from the start of the payload.
        offset: usize,
        /// What stood there.
        seen: String,
    },
    /// Strict decoding, and an event could not be read.
    #[error("event {index}: {field}: {what} at byte {offset}, saw {seen} ({reason})")]
    Event {
        /// Position of the event in the batch.
        index: usize,
        /// The word that lenient decoding counts it under.
        reason: &'static str,
        /// The field, by the name on the wire.
        field: String,
        /// What was expected.
        what: String,
        /// Where, in bytes from the start of the payload.
        offset: usize,
        /// What stood there.
        seen: String,
    },
    /// More than one `EventList` can hold.
    #[error(transparent)]
    Columns(#[from] EventsError),
}

/// A field of an event that the dialect has no place for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "event {index}: {field}: {reason} in dialect {dialect}; pass lossy=True to leave it out, or write another dialect"
)]
pub struct EncodeError {
    /// Position of the event in the batch.
    pub index: usize,
    /// The field, by vLLM's name.
    pub field: &'static str,
    /// Why it cannot be written.
    pub reason: &'static str,
    /// The dialect's name.
    pub dialect: &'static str,
}

/// What a caller of the block pool can get wrong. Nothing was changed when one of these comes back.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PoolError {
    /// A setting that cannot work.
    #[error("{0}")]
    Config(String),
    /// No such block.
    #[error("blocks[{index}]: block {block} of a pool of {num_blocks} (0 to {})", num_blocks - 1)]
    BlockRange {
        /// Position in what was given.
        index: usize,
        /// The id that was given.
        block: u32,
        /// Blocks of the pool.
        num_blocks: usize,
    },
    /// A block that nobody uses (any more).
    #[error(
        "blocks[{index}]: block {block} has no user: it was freed already, or named more often than it \
         has users"
    )]
    NotInUse {
        /// Position in what was given.
        index: usize,
        /// The block.
        block: u32,
    },
    /// The null block where a real one must stand.
    #[error("blocks[{index}]: block 0 is the null block; it has no content and no users")]
    NullBlock {
        /// Position in what was given.
        index: usize,
    },
    /// One block twice where each stands for another part of a sequence.
    #[error("blocks[{index}]: block {block} stands twice in one call")]
    Twice {
        /// Position of the second.
        index: usize,
        /// The block.
        block: u32,
    },
    /// A block that holds something else.
    #[error(
        "blocks[{index}]: block {block} has a hash of {tokens} tokens already; only a boundary inside a \
         block is replaced by a longer one (evict_blocks makes it free for another hash)"
    )]
    AlreadyCached {
        /// Position in what was given.
        index: usize,
        /// The block.
        block: u32,
        /// Tokens of the prefix that the block's hash names.
        tokens: usize,
    },
    /// More blocks than are free.
    #[error("{asked} blocks were asked for, {free} are free; free blocks first or preempt a request")]
    NoFreeBlocks {
        /// Number that was asked for.
        asked: usize,
        /// Number that is free.
        free: usize,
    },
    /// No such group.
    #[error("group {group} of a pool with {groups} group(s)")]
    Group {
        /// The group that was named.
        group: usize,
        /// Groups of the pool.
        groups: usize,
    },
    /// More blocks cached than are full.
    #[error("num_cached_blocks {cached} is more than num_full_blocks {full}")]
    Range {
        /// `num_cached_blocks`
        cached: usize,
        /// `num_full_blocks`
        full: usize,
    },
    /// A list of blocks that ends before `num_full_blocks`.
    #[error("{needed} blocks are full, the list of blocks has {given}")]
    TooFewBlocks {
        /// Length that was given.
        given: usize,
        /// Length that is needed.
        needed: usize,
    },
    /// A request with fewer hashes than blocks.
    #[error("{needed} block hashes are needed, the request has {given}")]
    TooFewHashes {
        /// Number of hashes that there are.
        given: usize,
        /// Number that is needed.
        needed: usize,
    },
    /// A request with fewer tokens than its blocks hold.
    #[error("{needed} token ids are needed, the request has {given}")]
    TooFewTokens {
        /// Number of tokens that there are.
        given: usize,
        /// Number that is needed.
        needed: usize,
    },
    /// A request that was cut into blocks of another size.
    #[error("the request was cut into blocks of {seen} tokens, the pool makes hashes over {expected}")]
    BlockSize {
        /// The request's.
        seen: usize,
        /// The pool's.
        expected: usize,
    },
    /// Hashes of another form than the pool's.
    #[error("block hashes: {0}")]
    HashForm(String),
    /// A boundary that no hash names.
    #[error("num_tokens {num_tokens}: a positive multiple of the block size {step} was expected")]
    Boundary {
        /// What was given.
        num_tokens: usize,
        /// Tokens over which one hash is made.
        step: usize,
    },
    /// Something that only events make possible.
    #[error("tokens are kept only with enable_kv_cache_events=True and enable_caching=True")]
    EventsOff,
}

/// What an aggregator refuses; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AggregateError {
    /// A number of workers that cannot be served.
    #[error("{seen} workers: 1 to {limit} can be aggregated")]
    Workers {
        /// The number asked for.
        seen: u32,
        /// The largest.
        limit: u32,
    },
    /// A rule that can never hold, or always does.
    #[error("rule: {0}")]
    Rule(String),
    /// A worker that does not exist.
    #[error(
        "worker {seen} does not exist: there are {workers}, numbered from 0; resize() first if one joined"
    )]
    Worker {
        /// The number given.
        seen: i64,
        /// Number of workers.
        workers: u32,
    },
    /// An event that does not say which worker it came from.
    #[error(
        "event {index} does not name its worker; give the worker, or tag events with with_origin(worker=...)"
    )]
    Untagged {
        /// Position of the event.
        index: usize,
    },
    /// A worker beyond the new number still holds blocks.
    #[error(
        "worker {worker} still holds {blocks} blocks, so {workers} workers are too few; \
         call forget_worker({worker}) first"
    )]
    StillVotes {
        /// The worker.
        worker: u32,
        /// Blocks that it holds.
        blocks: u64,
        /// The number of workers asked for.
        workers: u32,
    },
}

/// What can be wrong with the index.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IndexError {
    /// Bytes that are not a dump of an index, or are damaged.
    #[error("not a valid dump of an index: {0}")]
    Corrupt(String),
}

/// What a connector can get wrong when it records. Nothing was changed when one of these comes back.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecordError {
    /// A ticket that no open store has.
    #[error("ticket {ticket}: no open store has it; it completed or failed before, or was never begun")]
    Ticket {
        /// The ticket.
        ticket: u64,
    },
    /// More blocks than the store has.
    #[error("stored: block {index} of a store of {blocks} blocks")]
    Blocks {
        /// The position that was given.
        index: usize,
        /// Blocks of the store.
        blocks: usize,
    },
    /// Positions that do not ascend.
    #[error("stored[{index}]: positions ascend, saw {position} after {before}")]
    Order {
        /// Place in the list of positions.
        index: usize,
        /// The position before.
        before: u32,
        /// The position that was given.
        position: u32,
    },
    /// A medium that no reader knows.
    #[error("medium: a tier's name in upper case was expected (GPU, CPU, STORAGE or your own), saw {seen:?}")]
    Medium {
        /// The text that was given.
        seen: String,
    },
    /// Stores are begun and never ended.
    #[error("{open} stores are open; every ticket of begin_store() must be completed or failed")]
    TooMany {
        /// Stores that are open.
        open: usize,
    },
    /// The columns are full.
    #[error(transparent)]
    Columns(#[from] EventsError),
}
