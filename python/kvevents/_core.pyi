"""The seam on one page: everything that Rust gives to Python.

Only handles, buffers and scalars cross when it is hot. Python containers appear in a signature only where
`tests/test_seam.py` lists the function with a reason, or its name starts with `to_`. Each part of the
package stands under its own header, in the order in which the crates depend on one another.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Self, SupportsIndex, final, overload

from typing_extensions import Buffer

from kvevents.events import KVCacheEvent, Skipped

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
    def from_bytes(data: bytes) -> EventList:
        """Reads `to_bytes`; `PickleError` for damaged bytes or those of another format version."""

    @property
    def irregular(self) -> int:
        """How many events are irregular: kept word for word, but readers use only their hashes."""

    def is_irregular(self, index: int) -> bool:
        """Whether this event is irregular; `IndexError` outside the list."""

    @property
    def overflowed(self) -> bool:
        """Whether the queue that made this list lost events before it: what is resident must be told anew."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns take."""

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
