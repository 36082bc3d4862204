"""The seam on one page: everything that Rust gives to Python.

Only handles, buffers and scalars cross when it is hot. Python containers appear in a signature only where
`tests/test_seam.py` lists the function with a reason, or its name starts with `to_`. Each part of the
package stands under its own header, in the order in which the crates depend on one another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self, SupportsIndex, TypeAlias, final, overload

from typing_extensions import Buffer, disjoint_base

from kvevents.events import KVCacheEvent, Skipped
from kvevents.index import Match
from kvevents.pool import KVCacheGroup

# ---------------------------------------------------------------- build

__version__: Final[str]
BUILD_PROFILE: Final[str]
"""`release`, or `debug` for an extension that is several times slower than it should be."""

# ---------------------------------------------------------------- events

@final
class EventList(Sequence[KVCacheEvent]):
    """Events in columns: the handle that pool, aggregator, codec, publisher, reader and index pass around.

    A `collections.abc.Sequence` of `BlockStored`, `BlockRemoved` and `AllBlocksCleared`; the objects are made
    when somebody iterates or indexes, each time anew. Immutable, so it may be shared between threads; a slice
    (step 1) and a copy share the columns. Equal to an `EventList` or a list of equal events, metadata included;
    not hashable. Pickles as one `bytes`, readable by any build with the same format version.
    """

    def __new__(cls, events: Iterable[KVCacheEvent] | None = None, /) -> Self:
        """From any iterable of events: ours, or Structs of an engine with the same class and field names.

        `EventTypeError` for what is no event or a field of the wrong type, `EventError` for a value that no
        engine can mean; both name event, field and value. Irregular events of others (fewer hashes than
        tokens, no tokens, ...) are kept word for word and flagged.
        """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: SupportsIndex, /) -> KVCacheEvent: ...
    @overload
    def __getitem__(self, key: slice[Any, Any, Any], /) -> EventList: ...
    def __iter__(self) -> Iterator[KVCacheEvent]: ...
    def __add__(self, other: EventList | Sequence[KVCacheEvent], /) -> EventList: ...
    def __radd__(self, other: EventList | Sequence[KVCacheEvent], /) -> EventList: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: object, /) -> Self: ...
    def __reduce__(self) -> tuple[object, tuple[bytes]]: ...
    def index(self, value: object, start: int = 0, stop: int | None = None, /) -> int:
        """Position of the first event that equals `value`; `ValueError` where there is none."""

    def count(self, value: object, /) -> int:
        """How many events equal `value`."""

    def to_bytes(self) -> bytes:
        """The columns as one `bytes`, with a format version and a checksum; the inverse of `from_bytes`."""

    @staticmethod
    def from_bytes(data: bytes | Buffer) -> EventList:
        """Reads `to_bytes`, from any contiguous buffer; `PickleError` for damaged bytes or those of another format version."""

    @property
    def irregular(self) -> int:
        """How many events are irregular: kept word for word, but readers use only their hashes."""

    def same_blocks(self, other: EventList) -> bool:
        """Whether both store the same blocks, with the same fields, in the same order, however they are cut into
        events. Looked at for regular stores without values that are kept as bytes; `False` for all others.
        """

    def to_originals(self, columns: EventList, events: list[object]) -> list[object]:
        """These events, each as the object among `events`, whose columns are `columns`, that says the same; as
        one of ours where none does.
        """

    def by_worker(self) -> list[tuple[int | None, EventList]]:
        """The events of each worker by their origin, in their order; `None` for events that do not say."""

    def by_source(self) -> list[tuple[str | None, EventList]]:
        """The events of each source by their origin, in their order; `None` for events that do not say."""

    def with_source(self, source: str | None, *, nest: bool = False) -> EventList:
        """The same events, said to come from `source`; workers stay. `nest` keeps an old source as `source/old`."""

    def is_irregular(self, index: int) -> bool:
        """Whether this event is irregular; `IndexError` outside the list."""

    @property
    def overflowed(self) -> bool:
        """Whether the queue that made this list lost events before it: what is resident must be told anew."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns take."""

    def split_at_clears(self) -> list[EventList]:
        """The parts before, between and after the clears; one part more than there are clears."""

    @property
    def stored_media(self) -> list[str]:
        """The media of its stores, each once; those without one are left out."""

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Hashes in stores, hashes in removals."""

    def origin(self, index: int) -> tuple[str | None, int | None]:
        """`(source, worker)` that the event came from, each `None` where it was not said."""

    def with_origin(self, *, source: str | None = None, worker: int | None = None) -> EventList:
        """The same events, all tagged with where they come from."""

    @property
    def skipped(self) -> list[Skipped]:
        """What the decoder left out of the batch, in order; empty for events from elsewhere."""

# ---------------------------------------------------------------- codec

def decode_batch(payload: bytes, strict: bool = False) -> tuple[float | int, int | None, EventList]:
    """`(ts, rank, events)` of one payload; `DecodeError`. Large ones without the interpreter lock."""

def encode_batch(
    events: EventList | Sequence[KVCacheEvent],
    ts: float,
    rank: int | None,
    dialect: str,
    *,
    lossy: bool = False,
    metadata: bool = False,
    detach: bool | None = None,
) -> bytes:
    """One payload. `detach`: whether the interpreter lock is released (`None`: only for large ones)."""

def encode_batch_reporting(
    events: EventList | Sequence[KVCacheEvent],
    ts: float,
    rank: int | None,
    dialect: str,
    *,
    lossy: bool = False,
    metadata: bool = False,
    detach: bool | None = None,
) -> tuple[bytes, list[tuple[int, str, str]]]:
    """One payload of every event that can be written, and `(index, field, reason)` of the others."""

def dialects() -> list[str]:
    """The names that `encode_batch` knows, newest first."""

# ---------------------------------------------------------------- tokens

class _Buffer:
    """Base of the handles that are buffers: one dimension, read only."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BlockHashes(_Buffer, Sequence[bytes | int]):
    """Hashes of blocks, all of one form: a `Sequence` of `bytes` or of `int`, and a buffer.

    The buffer has format `B` and all bytes one after the other, or format `Q` and one integer a block. Immutable:
    a request that grows gives out a new handle, which shares memory with the last one until it does. Equal to
    a handle, list or tuple of the same hashes; not hashable. Pickles as one `bytes`.
    """

    def __new__(cls, hashes: Sequence[bytes] | Sequence[int] | Buffer, *, width: int = 32) -> Self:
        """From a list or other sequence of hashes, all integers of 64 bits or all bytes of one length up to 64, or
        from a contiguous buffer: of 64-bit integers (`Q`, `q`), of shape `(n, width)` and format `B`, or flat with
        `width` bytes a hash.

        `EventError` or `EventTypeError` names the first hash that is neither; `TypeError` for another buffer.
        """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: SupportsIndex, /) -> bytes | int: ...
    @overload
    def __getitem__(self, key: slice[Any, Any, Any], /) -> BlockHashes: ...
    def __iter__(self) -> Iterator[bytes | int]: ...
    def __contains__(self, value: object, /) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[object, tuple[bytes, int]]: ...
    def index(self, value: object, start: int = 0, stop: int | None = None, /) -> int:
        """Position of the first block with this hash; `ValueError` where there is none."""

    def count(self, value: object, /) -> int:
        """How many blocks have this hash."""

    @staticmethod
    def from_bytes(data: bytes, width: int) -> BlockHashes:
        """From the hashes one after the other, `width` bytes each; width 0: integers of 8 bytes, little endian."""

@final
class TokenBlocks:
    """One request's tokens cut into blocks with chained hashes: the request handle.

    Follows vLLM 0.32's `hash_block_tokens` for `sha256` and `sha256_cbor`, its extra keys included: LoRA in every
    block, multimodal features in the blocks that they overlap, salt in the first; `xxh3_64` is this package's own
    (`docs/hashes.md`). Safe to use from several threads; a copy shares hashes until one of the two grows.
    """

    def __new__(
        cls,
        block_size: int,
        *,
        algorithm: str = "sha256_cbor",
        lora_name: str | None = None,
        lora_path: str | None = None,
        lora_id: int | None = None,
        cache_salt: str | None = None,
        mm: Sequence[tuple[str, int, int]] | None = None,
        seed: str | None = None,
    ) -> Self:
        """An empty request with blocks of `block_size` tokens.

        `lora_path` is part of the hash as the engine knows it; `lora_id` is part of events only. `mm` holds
        `(identifier, offset, length)` in tokens of the request, sorted by offset. An empty salt is none. `seed` is
        the engine's `PYTHONHASHSEED` (`None`: not set). `ConfigError` says which option cannot be meant.
        """

    def extend(self, token_ids: Sequence[int] | Buffer) -> None:
        """Append token ids, in pieces of any size: a list, tuple or other iterable of integers, or a buffer of any
        integer format and stride.

        `TokenError` (out of 0 to 2^32-1) or `TokenTypeError` (no integer) names the position; nothing is appended.
        Never releases the interpreter lock.
        """

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    @property
    def algorithm(self) -> str:
        """Name of the hash function."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far, an unfinished block's included."""

    @property
    def num_blocks(self) -> int:
        """Full blocks: the number of hashes."""

    @property
    def block_hashes(self) -> BlockHashes:
        """Hashes of the full blocks at this moment: 32 bytes each, or integers for `xxh3_64`."""

    @property
    def none_hash(self) -> bytes | int:
        """What stands for the parent in the hash of the first block (events say `None` there)."""

    @property
    def lora_name(self) -> str | None:
        """As given."""

    @property
    def lora_path(self) -> str | None:
        """As given."""

    @property
    def lora_id(self) -> int | None:
        """As given."""

    @property
    def cache_salt(self) -> str | None:
        """As given; `None` for an empty one."""

    @property
    def mm(self) -> tuple[tuple[str, int, int], ...]:
        """`(identifier, offset, length)` of each feature."""

    @property
    def seed(self) -> str | None:
        """As given."""

    def to_token_ids(self) -> list[int]:
        """A copy of all token ids as a list."""

    def to_extra_keys(self) -> list[tuple[object, ...] | None]:
        """The extra keys of every full block as events carry them: LoRA name, `(identifier, offset in the block)`
        of each feature, salt; `None` where there are none.
        """

    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: object, /) -> Self: ...
    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, Any]]: ...
    def __getstate__(self) -> bytes: ...
    def __setstate__(self, state: bytes, /) -> None: ...

# ---------------------------------------------------------------- publish

@final
class ReplayLog:
    """The payloads of the last batches by sequence number, bounded by their count and by their bytes.

    Numbers grow and may have holes. Costs at most 24 bytes a batch beyond the payloads (from some thousand
    batches on). Safe from several threads: the sender appends while the replay server reads.
    """

    def __new__(cls, max_batches: int, max_bytes: int) -> Self:
        """With 0 for either nothing is kept."""

    def append(self, seq: int, payload: bytes) -> bool:
        """Add a batch; the oldest go until both bounds hold. `False` if the payload alone is over the bound.

        `SequenceError` for a number that is not above the newest, or is 2^64-1.
        """

    def append_encoded(
        self,
        seq: int,
        events: EventList | Sequence[KVCacheEvent],
        ts: float,
        rank: int | None,
        dialect: str,
        *,
        lossy: bool = False,
        mirror: Mirror | None = None,
    ) -> tuple[bytes, list[tuple[int, str, str]]]:
        """`encode_batch_reporting`, `append` and `mirror.record` in one, all without the interpreter lock.

        The mirror takes what could be encoded. Raises before anything was added.
        """

    def get(self, seq: int) -> bytes | None:
        """The payload of one batch; `None` if it is not here (any more)."""

    def read(self, start: int, last: int, max_batches: int, max_bytes: int) -> list[tuple[bytes, bytes]]:
        """Batches from `start` to `last`, oldest first, as `(8 bytes of the number, big endian; payload)`.

        Stops at the limits, but gives at least one batch where there is one. Go on from the last number + 1.
        """

    def __len__(self) -> int: ...
    @property
    def oldest(self) -> int | None:
        """Number of the oldest batch that is here."""

    @property
    def newest(self) -> int | None:
        """Number of the newest batch that was added, kept or not."""

    @property
    def evicted(self) -> int:
        """Batches that were let go, or were too large to be kept."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads that are here."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory in all."""

@final
class Mirror:
    """What a publisher's stream says is resident: kept batch by batch, with its digest, and all that a snapshot needs.

    Costs about 45 ns a block of 16 tokens, and 160 bytes (95 without tokens, with hashes of 32 bytes). Safe from
    several threads: the sender records while the replay server walks; nobody holds the lock for longer than a
    chunk of the walk or a batch takes. Keys and digest are those of `ResidentSet`.
    """

    def __new__(cls, first: int = 0, *, keep_tokens: bool = True) -> Self:
        """Empty, for a stream that starts at number `first`."""

    def record(self, seq: int, events: EventList | Sequence[KVCacheEvent]) -> None:
        """Apply batch `seq`. `EventError` or `EventTypeError` before anything changed."""

    def record_payload(self, seq: int, payload: bytes) -> bool:
        """Apply batch `seq` from its payload, without the interpreter lock.

        `False`, and the mirror is no longer `known`, if any of it cannot be read.
        """

    def advance(self, seq: int) -> None:
        """Number `seq` holds nothing."""

    def lose(self) -> None:
        """Events are missing: nothing can be said from now on, until a clear is recorded."""

    def digest(self, seq: int | None = None) -> tuple[int, bytes] | None:
        """The digest (16 bytes) behind batch `seq`, or the newest, and the number after it.

        `None` for a number that is not among the last 4,096, and while the mirror is not `known`.
        """

    def begin_snapshot(self, piece_bytes: int) -> tuple[int, bytes, int] | None:
        """Begin a snapshot of the set as it is: `(resume_seq, digest, blocks)`; `None` while it is not `known`.

        One that was being made is given up. `resume_seq` is the first number that it does not contain.
        """

    def next_piece(
        self, ts: float, rank: int | None, dialect: str, max_blocks: int
    ) -> tuple[bytes | None, bool]:
        """Walk over up to about `max_blocks` blocks: a payload, if a piece is full, and whether there is more.

        Stores, parents first, each piece one batch of at most about `piece_bytes`. The mirror may change
        meanwhile; the snapshot stays what it was at its beginning. `(None, False)` if none was begun.
        """

    def abort_snapshot(self) -> None:
        """Give up the snapshot that is being made."""

    def __len__(self) -> int:
        """Number of resident keys."""

    @property
    def resume_seq(self) -> int:
        """The first number that is not in it."""

    @property
    def known(self) -> bool:
        """Whether it holds all of the stream."""

    @property
    def longest_wait_ns(self) -> int:
        """The longest time for which a batch waited for its turn."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without a snapshot that is being made."""

# ---------------------------------------------------------------- resident

@final
class ResidentSet:
    """The resident keys of one source; `kvevents.ResidentSet` keeps one of these for each source.

    A key is a hash with `medium, group_idx, locality, ownership`; integers are one key by their 64 bits.
    Storing twice changes nothing. Safe from several threads; a large `apply` gives the interpreter lock away.
    """

    def __new__(cls) -> Self:
        """An empty set."""

    def apply(self, events: EventList) -> bool:
        """Apply events in order; `True` if there was a clear among them."""

    def clear(self) -> None:
        """Empty the set; counters stay."""

    def digest(self) -> bytes:
        """16 bytes, big endian: the sum modulo 2^128 of the keys' XXH3-128."""

    def __len__(self) -> int: ...
    def contains(
        self,
        block_hash: int | bytes,
        medium: str | None,
        group_idx: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
    ) -> bool:
        """Whether exactly this key is resident."""

    def __contains__(self, block_hash: int | bytes, /) -> bool:
        """Whether the hash is resident in any tier or group; `EventTypeError` for what is no hash."""

    def difference(self, other: ResidentSet) -> EventList:
        """The keys that `other` has not, as removals: one event a scope, hashes sorted and unsigned."""

    def copy(self) -> ResidentSet:
        """An independent copy, counters included."""

    def __copy__(self) -> ResidentSet: ...
    def __deepcopy__(self, memo: object, /) -> ResidentSet: ...
    def __eq__(self, other: object, /) -> bool:
        """Whether both hold the same keys; counters do not matter."""

    @property
    def duplicate_stores(self) -> int:
        """Stores of keys that were resident already."""

    @property
    def unknown_removals(self) -> int:
        """Removals of keys that were not resident."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tables take."""

# ---------------------------------------------------------------- pool

@final
class BlockIds(_Buffer, Sequence[int]):
    """Ids of blocks: a `Sequence` of integers, and a read-only buffer of signed 32-bit integers.

    Equal to a list or tuple of the same ids; `+` joins it with any sequence of ids; a slice is a `BlockIds`.
    """

    def __new__(cls, ids: Sequence[int] | Buffer | None = None, /) -> Self:
        """From a list, tuple or integer buffer of ids; `BlockError` or `BlockTypeError` names a bad one."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, key: slice[Any, Any, Any], /) -> BlockIds: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, value: object, /) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __add__(self, other: Sequence[int] | Buffer, /) -> BlockIds: ...
    def __radd__(self, other: Sequence[int] | Buffer, /) -> BlockIds: ...
    def index(self, value: int, start: int = 0, stop: int | None = None, /) -> int:
        """Position of the first block with this id; `ValueError` where there is none."""

    def count(self, value: int, /) -> int:
        """How often an id stands here."""

    def to_list(self) -> list[int]:
        """The ids as a list."""

@final
class PoolStats:
    """Counters of a `BlockPool` at one moment."""

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""

    @property
    def free_blocks(self) -> int:
        """Blocks in the free queue, cached ones included."""

    @property
    def resident_hashes(self) -> int:
        """Different keys (hash and group) that are resident."""

    @property
    def copies(self) -> int:
        """Pairs of block and key: more than `resident_hashes` where several blocks hold one hash."""

    @property
    def allocated_blocks(self) -> int:
        """Blocks given out since the pool was made."""

    @property
    def evicted_blocks(self) -> int:
        """Blocks that lost their hashes by allocation, `evict_blocks`, promotion or replacement."""

    @property
    def stored_hashes(self) -> int:
        """Keys that became resident."""

    @property
    def removed_hashes(self) -> int:
        """Keys that stopped being resident; those of resets are not counted."""

    @property
    def resets(self) -> int:
        """Successful `reset_prefix_cache` calls."""

    @property
    def queued_events(self) -> int:
        """Events that wait for `take_events`."""

    @property
    def resyncs(self) -> int:
        """How often a full event queue was replaced by a resync mark."""

    @property
    def dropped_events(self) -> int:
        """Events that were dropped by that (and announced anew)."""

    def __eq__(self, other: object, /) -> bool: ...

@disjoint_base
class BlockPool:
    """Blocks of a KV cache, their hashes, and the events that say what is resident. Behaves as vLLM's block pool.

    A block is its id. Block 0 is the null block: it stands for a hole and is skipped by `touch`, `free_blocks` and
    `cache_full_blocks`. Free blocks form a queue in eviction order: a freed block without a hash goes to its head,
    a cached one to its tail; allocation takes from the head and evicts. Several blocks may hold one hash, and a hit
    takes the first that was stored; one block may own several hashes, which all leave with it.

    Wherever a method takes `request`, that is a `TokenBlocks` (nothing is copied through Python), or `None` with
    `block_hashes=` (a `BlockHashes`, list or buffer of the whole request), `token_ids=` (the same; only while
    events are on), `lora_name=`, `lora_id=` and `extra_keys=` (one entry a block of the group, `None` or a tuple)
    in its place. `block_hashes` has one hash per `block_size` tokens of the pool; a group with larger blocks uses
    the last hash inside a block.

    Every mistake of a caller is a `BlockError` (`NoFreeBlocksError`, or `BlockTypeError` for a wrong type), raised
    before anything changed. Safe to use from several threads, each call is atomic; the interpreter lock is never
    released. May be subclassed; hashed by identity.
    """

    NULL_BLOCK: Final[int]
    """0"""

    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = True,
        medium: str = "GPU",
        report: str = "residency",
        report_hits: bool = False,
        hash_form: str = "bytes",
        groups: Sequence[KVCacheGroup] | None = None,
        max_queued_events: int = ...,  # 100_000
    ) -> Self:
        """A pool of `num_blocks` blocks, the null block included; a hash stands for `block_size` tokens.

        - `report="residency"`: a store when the first copy of a hash appears, a removal when the last goes, each
          exactly once; removals of one call are one event; reads never emit. `report="every_copy"`: vLLM 0.32's
          stream, event for event.
        - `report_hits=True`: `emit_cached_block_events` announces reused blocks, as vLLM's full report does.
        - `hash_form="int"`: events carry the low 64 bits of a digest (vLLM's rule), the pool's key stays whole.
        - `groups`: the KV cache groups of a hybrid model, whose block sizes are multiples of `block_size`.
        - `max_queued_events`: beyond it the queue is replaced by a resync mark: nothing is built until
          `take_events`, which then gives a clear and stores of everything that is resident.

        `ConfigError` says which setting cannot work. Without caching or events nothing is kept for them.
        """

    def get_new_blocks(self, num_blocks: int) -> BlockIds:
        """Take blocks from the head of the free queue, evicting what they held. `NoFreeBlocksError`."""

    def get_cached_block(
        self, block_hash: bytes | int, kv_cache_group_ids: Sequence[int] | None = None
    ) -> BlockIds | None:
        """The block with this hash in each group (default: group 0), or `None` where a group has none. A read."""

    def find_longest_cache_hit(
        self,
        request: TokenBlocks | BlockHashes | Sequence[bytes | int] | Buffer,
        max_blocks: int | None = None,
        group: int = ...,  # 0
    ) -> BlockIds:
        """Blocks of the longest prefix that is cached, at most `max_blocks`. A read.

        An engine that has to compute the last token passes `(num_tokens - 1) // block_size`. For a sliding-window
        group: the longest prefix whose last window is cached, block 0 standing for what lies before the window.
        """

    def cache_full_blocks(
        self,
        request: TokenBlocks | None,
        blocks: Sequence[int] | Buffer,
        num_cached_blocks: int,
        num_full_blocks: int,
        *,
        group: int = ...,  # 0
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer | None = None,
        token_ids: Sequence[int] | Buffer | None = None,
        lora_name: str | None = None,
        lora_id: int | None = None,
        extra_keys: Sequence[tuple[object, ...] | None] | None = None,
        session_id: str | None = None,
    ) -> None:
        """Give blocks `num_cached_blocks` to `num_full_blocks` of a request their hashes.

        `blocks` are all blocks of the request. Block 0 is skipped. A block that owns the hash of a boundary inside
        it is promoted; one that has this hash already stays as it is; one with another hash is an error.
        """

    def cache_partial_block(
        self,
        request: TokenBlocks | None,
        block: int,
        num_tokens: int,
        *,
        group: int = ...,  # 0
        replace_existing_hashes: bool = False,
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer | None = None,
        token_ids: Sequence[int] | Buffer | None = None,
        lora_name: str | None = None,
        lora_id: int | None = None,
        extra_keys: Sequence[tuple[object, ...] | None] | None = None,
        session_id: str | None = None,
    ) -> bytes | int | None:
        """Make a block reachable by the hash of the first `num_tokens` tokens, which end inside it.

        Returns that hash if the block owns it now. In residency a boundary that the block's hash covers already is
        refused (`None`), and the event spans from the last resident ancestor; `every_copy` follows vLLM. In place of
        a request, `extra_keys` holds one entry: that of the span.
        """

    def move_block_hashes(self, src_block: int, dst_block: int) -> None:
        """Move all hashes of `src_block` to `dst_block`, which is in use and has none. No event."""

    def touch(self, blocks: Sequence[int] | Buffer) -> None:
        """Add a user to each block; free ones leave the free queue."""

    def free_blocks(self, blocks: Sequence[int] | Buffer) -> None:
        """Take a user from each block, in the given order (engines free the last block of a sequence first)."""

    def evict_blocks(self, block_ids: Iterable[int] | Buffer) -> None:
        """Remove the hashes of these blocks, in the given order. The blocks stay in use or free as they are."""

    def unpin_blocks(
        self, blocks: Sequence[int] | Buffer, on_reuse: Callable[[int], object] | None = None
    ) -> None:
        """Free blocks that stay readable until they are given out: they go to the tail of the free queue.

        `on_reuse(block)` is called after `get_new_blocks` gave a block out, or a reset; what it raises goes to
        `sys.unraisablehook`: the caller gets its blocks whatever a watcher does.
        """

    def emit_cached_block_events(
        self,
        request: TokenBlocks | None,
        num_cached_blocks: int,
        *,
        group: int = ...,  # 0
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer | None = None,
        token_ids: Sequence[int] | Buffer | None = None,
        lora_name: str | None = None,
        lora_id: int | None = None,
        extra_keys: Sequence[tuple[object, ...] | None] | None = None,
        session_id: str | None = None,
    ) -> None:
        """Announce the first blocks of a request again: they were hit. Does nothing without `report_hits=True`.

        In residency only what is resident is announced, with `metadata` `{"already_resident": True}`.
        """

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes; `False`, and nothing happens, while blocks are in use."""

    def get_num_free_blocks(self) -> int:
        """Blocks that `get_new_blocks` can give out, cached ones included."""

    def get_usage(self) -> float:
        """Share of blocks in use, 0.0 to 1.0; the null block does not count."""

    def take_events(self) -> EventList:
        """All events since the last call. O(1), except after the queue was replaced by a resync mark."""

    def digest(self) -> bytes:
        """Digest (16 bytes) of the resident set, computed from the pool's own table, not from events. O(blocks)."""

    def snapshot(self) -> EventList:
        """Stores of everything that is resident, a parent before its children where it is resident. O(blocks).

        `BlockError` without events or caching: then nothing is kept to announce.
        """

    def stats(self) -> PoolStats:
        """Counters at this moment."""

    def free_order(self) -> BlockIds:
        """The free blocks in the order in which they will be given out. O(blocks)."""

    def ref_count(self, block: int) -> int:
        """Number of users of a block."""

    def is_block_writable(self, block: int) -> bool:
        """Whether its only user may write into a block: it has no hash and is not the null block."""

    def block_hash(self, block: int) -> bytes | int | None:
        """The hash by which a block is known (its first, if it owns several)."""

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""

    @property
    def block_size(self) -> int:
        """Tokens over which one hash is made."""

    @property
    def medium(self) -> str:
        """Tier, as in events."""

    @property
    def report(self) -> str:
        """`residency` or `every_copy`."""

    @property
    def enable_caching(self) -> bool:
        """As given."""

    @property
    def enable_kv_cache_events(self) -> bool:
        """As given."""

@disjoint_base
class EventQueue:
    """A bounded queue of events, for engines that have their own block pool. Safe from several threads.

    A store whose parent is the last hash of the event before it, with equal attributes, continues that event;
    removals of one scope are joined. When `max_queued_events` pushes were not taken, what is queued is dropped and
    counted, and `take().overflowed` tells the owner to announce anew (a clear, then stores of what is resident).
    """

    def __new__(cls, *, max_queued_events: int = 100_000) -> Self:
        """An empty queue. `ConfigError` for a bound below 1."""

    def push_stored(
        self,
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer,
        parent_block_hash: bytes | int | None,
        token_ids: Sequence[int] | Buffer,
        block_size: int,
        *,
        lora_id: int | None = None,
        medium: str | None = ...,  # GPU
        lora_name: str | None = None,
        extra_keys: Sequence[tuple[object, ...] | None] | None = None,
        group_idx: int | None = None,
        kv_cache_spec_kind: str | None = None,
        kv_cache_spec_sliding_window: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Blocks became resident. `EventError` where the numbers of hashes, tokens and keys do not fit together."""

    def push_removed(
        self,
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer,
        *,
        medium: str | None = ...,  # GPU
        group_idx: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Blocks are no longer resident. `metadata` may say why."""

    def push_cleared(self, *, metadata: Mapping[str, object] | None = None) -> None:
        """Nothing is resident any more, in any tier of this rank."""

    def append(self, event: KVCacheEvent) -> None:
        """Queue one event object, as it is. `EventError` or `EventTypeError` says what is wrong with it."""

    def extend(self, events: EventList | Iterable[KVCacheEvent]) -> None:
        """Queue events, all or none of them."""

    def take(self) -> EventList:
        """Everything since the last call. O(1)."""

    def __len__(self) -> int:
        """Events that wait, joined ones counted once."""

    @property
    def overflows(self) -> int:
        """How often the bound was reached."""

    @property
    def dropped_events(self) -> int:
        """Pushes that were dropped by that."""

    @property
    def max_queued_events(self) -> int:
        """The bound, in pushes."""

# ---------------------------------------------------------------- pool of an engine

@final
class EngineBlock:
    """One block of an `EnginePool`: the one object that an engine's code holds for it. Identity is equality.

    `ref_cnt` may be written while the block stays in use. Anything else that is written, and the neighbours in
    the free queue, belong to the engine's own code: the pool is handed over to it first (`EnginePool`).
    """

    @property
    def block_id(self) -> int:
        """Its number."""

    @property
    def is_null(self) -> bool:
        """Whether it is block 0, which stands for a hole."""

    @property
    def pool(self) -> EnginePool | None:
        """The pool, while there is one."""

    ref_cnt: int
    """Number of users."""
    _block_hash: bytes | None
    _block_hash_num_tokens: int | None
    prev_free_block: object
    next_free_block: object

    @property
    def block_hash(self) -> bytes | None:
        """Its own hash and the group in four bytes, big endian."""

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Tokens from the beginning of the sequence to the end of what the hash names."""

    def set_block_hash(self, block_hash: bytes, num_tokens: int | None = None) -> None:
        """The engine's own."""

    def reset_hash(self) -> None:
        """The engine's own."""

@disjoint_base
class EnginePool:
    """The base of a class that stands in for an engine's own `BlockPool` (vLLM 0.32's, with its names and order
    of parameters), called with the engine's own request and with the blocks that it gave out.

    A request is read in place: `block_hashes` (a list, one hash per `block_size` tokens of the pool),
    `all_token_ids`, `lora_request`, `session_id`, and whether it has multimodal features, prompt embeddings or a
    salt; only then `extra_keys(request, first_token, block_size, holes)` is asked for what events say of them.
    Tokens and the rest only while events are on.

    What the native pool cannot do changes nothing: the subclass's `_hand_over(why)` is called, which makes this
    object one of the engine's own code with the same contents (`_adopt` gives the blocks their successors), and
    the same call is made again. So a subclass has `_hand_over`, and `_free_mixed(blocks, why)`,
    `_get_new_blocks_hooked`, `_touch_hooked` and `_evict_blocks_hooked` for what `_set_hooked` asks for.

    Not thread-safe beyond single calls; the interpreter lock is never released.
    """

    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        medium: str,
        report: str,
        narrow: bool,
        block_class: type,
        event_classes: tuple[type, type, type],
        extra_keys: object,
    ) -> Self:
        """A pool of free blocks; `event_classes` make stores, removals and clears. `ConfigError`."""

    def get_new_blocks(self, num_blocks: int) -> list[EngineBlock]:
        """Take blocks from the head of the free queue. `ValueError` in the engine's words."""

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
    ) -> list[EngineBlock] | None:
        """The block with this hash in each group, or `None`."""

    def cache_full_blocks(
        self,
        request: object,
        blocks: list[EngineBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Give full blocks their hashes; the null block and masked ones are holes."""

    def cache_partial_block(
        self,
        request: object,
        block: EngineBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bytes | None:
        """Make a block reachable by a boundary inside it; the key of that, or `None` for the null block."""

    def emit_cached_block_events(
        self, request: object, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        """Announce blocks that were hit."""

    def move_block_hashes(self, src_block: EngineBlock, dst_block: EngineBlock) -> None:
        """All hashes of one block go to another, without an event."""

    def touch(self, blocks: Sequence[EngineBlock]) -> None:
        """One more user each; out of the free queue."""

    def free_blocks(self, ordered_blocks: Sequence[EngineBlock]) -> None:
        """One user less each, in this order; any iterable. Blocks of other pools go to those."""

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """Take all hashes from these blocks; any iterable of ids."""

    def is_block_writable(self, block: EngineBlock) -> bool:
        """Whether its only user may write into it."""

    def get_num_free_blocks(self) -> int:
        """Blocks that can be given out."""

    def get_usage(self) -> float:
        """The share in use."""

    def _insert_block_hash(
        self, block_hash_with_group_id: bytes, block: EngineBlock, num_tokens: int | None
    ) -> None: ...
    def _maybe_evict_cached_block(self, block: EngineBlock) -> bool: ...
    def _bind(self, owner: object) -> None:
        """A weak reference to this object, for its blocks."""

    def _set_hooked(self, on: bool) -> None:
        """Whether somebody wants to know of single blocks."""

    def _set_shared_queue(self, on: bool) -> None:
        """Whether events go into `self.kv_event_queue` at the end of each call."""

    def _set_group(self, group: int, kind: str, sliding_window: int | None) -> None:
        """What stores of a group say about it."""

    def _take_blocks(self, num_blocks: int) -> list[EngineBlock]: ...
    def _touch(self, blocks: Sequence[EngineBlock]) -> None: ...
    def _unpin(self, blocks: Sequence[EngineBlock], on_reuse: object) -> None: ...
    def _reset(self) -> bool: ...
    def _take_columns(self) -> EventList:
        """Events since the last call, as columns."""

    def to_events(self) -> list[object]:
        """The same as the engine's Structs."""

    def to_blocks(self) -> list[EngineBlock]:
        """All blocks."""

    def to_free_blocks(self, at_most: int) -> list[EngineBlock]:
        """The blocks that are given out next, in order."""

    def _next_free(self, after: EngineBlock | None) -> EngineBlock | None: ...
    def _num_keys(self) -> int: ...
    def to_keys(self) -> list[bytes]:
        """Every hash that is held, with its group."""

    def to_keys_of(self, block: int) -> list[tuple[bytes, int | None]]:
        """Hashes of a block and the tokens that each covers, its own first."""

    def to_copies(self, key: object) -> list[EngineBlock]:
        """The blocks that hold a hash, the one that a hit takes first."""

    def _adopt(self, own: list[object]) -> None:
        """From here on each block stands for one of these."""

# ---------------------------------------------------------------- record

@final
class KVEventRecorder:
    """What a connector's worker half records: events, and stores that finish later. Safe from several threads.

    A store is announced when it is done. Its fields are captured at `begin_store`, since the request may be gone
    later. Bounded as `EventQueue` is. Errors come before anything changed.
    """

    def __new__(cls, *, max_queued_events: int = 100_000, max_open_stores: int = 100_000) -> Self:
        """Nothing recorded yet. `ConfigError` for a bound below 1."""

    def begin_store(
        self,
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer,
        parent_block_hash: bytes | int | None,
        token_ids: Sequence[int] | Buffer,
        block_size: int,
        *,
        start: int = 0,
        end: int | None = None,
        lora_id: int | None = None,
        medium: str | None = ...,  # CPU
        lora_name: str | None = None,
        extra_keys: Sequence[tuple[object, ...] | None] | None = None,
        group_idx: int | None = None,
        kv_cache_spec_kind: str | None = None,
        kv_cache_spec_sliding_window: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> int:
        """A store of blocks `start` to `end` of these (whole) lists begins; returns its ticket.

        `parent_block_hash` is the parent of the lists' first block. `medium` is a tier's name in upper case; another
        spelling of a known one, or a device, is mapped with a `UserWarning`. `EventError` where the numbers of hashes,
        tokens and keys do not fit together, `EventTypeError` for a medium that is no string, `RecordError` for one
        that names no tier and where too many stores are open.
        """

    def complete(self, ticket: int, stored: int | Sequence[int] | None = None) -> None:
        """The store is done: all of it, its first `stored` blocks, or those at these ascending positions.

        `RecordError` for a ticket that is not open, and for blocks that the store has not.
        """

    def fail(self, ticket: int) -> None:
        """The store failed: nothing is announced. `RecordError` for a ticket that is not open."""

    def removed(
        self,
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer,
        *,
        medium: str | None = ...,  # CPU
        group_idx: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Blocks are no longer held. Record it before the store that they make room for."""

    def cleared(self, *, metadata: Mapping[str, object] | None = None) -> None:
        """Nothing is held any more; takes this worker's votes for this connector, and no other's."""

    def append(self, event: KVCacheEvent) -> None:
        """Record one event object, as it is. `EventError` or `EventTypeError` says what is wrong with it."""

    def extend(self, events: EventList | Iterable[KVCacheEvent]) -> None:
        """Record events, all or none of them."""

    def take(self) -> EventList:
        """Everything since the last call. O(1)."""

    def __len__(self) -> int:
        """Events that wait, joined ones counted once."""

    @property
    def open_stores(self) -> int:
        """Stores that began and neither completed nor failed."""

    @property
    def dropped_events(self) -> int:
        """Events that were dropped since nobody took them."""

# ---------------------------------------------------------------- index

@disjoint_base
class PrefixIndex:
    """Who holds the longest prefix. What users construct is `kvevents.PrefixIndex`, which explains the options."""

    def __new__(
        cls,
        *,
        seed: int | None = None,
        orphan_blocks: int = 65_536,
        expected_blocks: int = 65_536,
        digests: bool = True,
        expires_s: float = 600.0,
        clock: Callable[[], float] | None = None,
        data: bytes | None = None,
    ) -> Self:
        """An empty index, or the one whose dump `data` is. `ConfigError`, `PickleError`."""

    def add_source(
        self,
        source: str,
        rank: int = 0,
        *,
        emits_removals: bool = True,
        store_only: Sequence[str] = ...,
        first_seq: int = 0,
    ) -> None:
        """Make a source known; the blocks of one that never announces removals expire.

        `store_only`: only those in the tiers of these media do.

        A source that is not added is made at its first event, taken to announce removals and to count from 0. One
        that was dropped is ignored until it is added again.
        """

    def apply(self, source: str, rank: int, seq: int | None, payload: bytes) -> int:
        """Apply one message's payload, without a Python object per block; its number of events.

        A `seq` that does not follow the last one (0 at first) marks the source as not complete; it is applied all
        the same, so leave duplicates out (a `Subscriber` does). A large payload lets other threads run.
        `DecodeError` for what is no batch: the source is then not complete.
        """

    def apply_events(
        self,
        source: str,
        rank: int,
        events: EventList | Iterable[KVCacheEvent],
        *,
        seq: int | None = None,
        checked: bool = True,
    ) -> None:
        """Apply events that are decoded already; `checked=False`: the caller has seen to it that none is missing."""

    def apply_snapshot(
        self,
        source: str,
        rank: int,
        events: EventList | Iterable[KVCacheEvent],
        *,
        resume_seq: int | None = None,
    ) -> bool:
        """Replace what is known of a source, all at once, by what is exact at `resume_seq` (the first not contained).

        `False`, and nothing happens, where that is older than what was applied.
        """

    def find(
        self,
        token_ids: Sequence[int] | Buffer | None = None,
        *,
        block_hashes: BlockHashes | Sequence[bytes | int] | Buffer | None = None,
        source: str | None = None,
        rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        mm: Sequence[tuple[str, int, int]] | None = None,
    ) -> Matches:
        """Who holds a prefix of `token_ids`: longest first, ties in the order in which sources came.

        LoRA name, salt and multimodal features `(identifier, offset, length)` are part of what is asked. Or, from
        `block_hashes`, how much of that chain of its own hashes `source` holds: one match, or none.
        """

    def find_many(
        self,
        prompts: Iterable[Sequence[int] | Buffer],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Matches]:
        """The answers for many prompts in one call, which lets other threads run."""

    def expect(
        self,
        source: str,
        rank: int,
        token_ids: Sequence[int] | Buffer,
        ttl_s: float,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        mm: Sequence[tuple[str, int, int]] | None = None,
    ) -> int:
        """A prompt was sent there: expect its blocks for `ttl_s` seconds. The number of blocks.

        They count in `Match.expected` only, until the real event replaces them. 0 for a source that never told its
        block size.
        """

    def digest(self, source: str, rank: int = 0, *, owner: bool = False) -> bytes | None:
        """Digest of what a source holds, as its publisher computes it; `None` where it is not valid.

        It is not after a gap, a bad event, an orphan given up, an expiry or `clear_tier`, until a clear or a
        snapshot.
        """

    def mark_incomplete(self, source: str, rank: int | None = None, *, last_seq: int | None = None) -> bool:
        """Something of a source is missing (up to `last_seq`); whether the source is known. All ranks for `None`."""

    def reset(self, source: str, rank: int | None = None) -> None:
        """Forget what a source holds and its numbering, as after its restart. All ranks for `None`."""

    def drop(self, source: str, rank: int | None = None, *, owner: bool = False) -> bool:
        """Forget a source, or the `owner` of a shared tier; whether it was known. All ranks for `None`.

        Its events that arrive later are ignored until it is added again. What it told of shared tiers stays: that
        belongs to their owner.
        """

    def clear_tier(self, source: str, tier: str, rank: int = 0, *, owner: bool = False) -> int:
        """Forget what a source holds in one tier (`GPU`, `CPU`, ...); the number of blocks. `ConfigError`."""

    def expire(self) -> int:
        """Free the memory of expired blocks; their number. Answers leave them out in any case."""

    def to_tiers(self) -> list[str]:
        """Names of the tiers."""

    def to_stats(self) -> list[dict[str, Any]]:
        """State and counters of every source."""

    def confirm(self, source: str, rank: int | None = None) -> None:
        """The publisher of a source that was loaded lives the same life still, and nothing since is missing unsaid.

        Until then what a dump says is neither `complete` nor has a digest. All ranks for `None`.
        """

    def to_dump(self, note: bytes | None = None) -> bytes:
        """The index as bytes, with a note of the caller's. Sources may go on changing meanwhile."""

    @property
    def note(self) -> bytes:
        """The note of the dump that was loaded; empty where there was none."""

@final
class Matches:
    """An answer: who holds how much, longest first. Immutable; `Match` objects are made when somebody looks."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: SupportsIndex, /) -> Match: ...
    def __iter__(self) -> Iterator[Match]: ...
    def to_list(self) -> list[Match]:
        """All of them."""

    def to_dict(self) -> dict[tuple[str, int], int]:
        """Usable tokens of engines by `(source, rank)`; owners of shared tiers are left out."""

# ---------------------------------------------------------------- aggregate

_Rule: TypeAlias = str | int | tuple[tuple[tuple[int, ...], int], ...]

@final
class Aggregator:
    """What enough workers hold, block by block, over steps; `kvevents.Aggregator` wraps it and logs notices.

    Workers are `0 .. num_workers - 1` (at most 1,024). A worker that says nothing changes nothing; one that
    stores a block twice counts once. Safe from several threads; never gives the interpreter lock away.
    """

    def __new__(
        cls,
        num_workers: int,
        *,
        rule: _Rule | None = None,
        group_rules: tuple[tuple[int | None, _Rule], ...] | None = None,
        max_waiting: int = 1048576,
        max_age: int = 10000,
        warn_after: int = 100,
        keep_content: bool = False,
        forget: bool = False,
    ) -> Self:
        """`rule` is `"all"` (default), `"any"`, a number of workers or a `Quorum`; `group_rules` are
        `(group_idx, rule)` pairs for groups with another rule. At most `max_waiting` blocks wait for more
        workers, each at most `max_age` steps; then the oldest lose their votes, which is counted. After
        `warn_after` steps that bring stores and no agreement there is a notice. `keep_content` keeps the
        fields of resident blocks. `forget` forgets a block with its votes as soon as it is announced, so that
        it goes out each time that it is agreed on. `AggregatorError` and `AggregatorTypeError` for what cannot work.
        """

    def add(self, worker: int, events: EventList) -> None:
        """Applies what a worker reports; its clear takes all its votes. `WorkerIndexError` if there is none."""

    def add_all(self, reports: list[tuple[int, EventList]]) -> None:
        """The same for reports of several workers; those that say the same vote together."""

    def add_tagged(self, events: EventList) -> None:
        """Applies events that each name their worker; `AggregatorTypeError` if one does not."""

    def step(self, reports: list[EventList | None]) -> EventList:
        """One step: the reports by worker (`None` for silence), then `drain`. Faster than one `add` after another."""

    def drain(self) -> EventList:
        """Ends a step: removals, then stores, parents first, of what changed. Never a clear."""

    def snapshot(self) -> EventList:
        """Everything that is announced, as stores with parents first; hashes only without `keep_content`."""

    def forget_worker(self, worker: int) -> None:
        """The worker left or restarted: its votes are gone; the next `drain` says what went with them."""

    def resize(
        self,
        num_workers: int,
        *,
        rule: _Rule | None = None,
        group_rules: tuple[tuple[int | None, _Rule], ...] | None = None,
    ) -> None:
        """Another number of workers; rules that are not given stay. `AggregatorError` where a worker that
        would be cut off still holds blocks.
        """

    def held(self, worker: int) -> int:
        """Number of blocks that a worker holds."""

    def holders(
        self,
        block_hash: int | bytes,
        medium: str | None,
        *,
        group_idx: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
    ) -> tuple[int, ...]:
        """The workers that hold a block."""

    def __len__(self) -> int: ...
    @property
    def num_workers(self) -> int:
        """Number of workers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""

    @property
    def has_notices(self) -> bool:
        """Whether `take_notices` has something."""

    def take_notices(self) -> list[tuple[str, int, object]]:
        """What was not told yet: `(field, worker, hash)` of the first disagreement,
        `("nothing_agrees", steps, blocks that wait)`.
        """

    def to_stats(self) -> dict[str, int | tuple[int, ...]]:
        """See `kvevents.AggregatorStats`; looks at every block."""
