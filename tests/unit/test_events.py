"""`EventList`, the Structs and the hooks: behaviour that users see."""

from __future__ import annotations

import copy
import pickle
import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import pytest

import kvevents
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVEventBatch, Skipped, errors


def stored(**fields) -> BlockStored:
    values = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [10, 11, 12, 13],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**{**values, **fields})


ALL_FIELDS = stored(
    block_hashes=[b"a" * 32, b"b" * 32],
    parent_block_hash=b"p" * 32,
    lora_id=3,
    lora_name="adapter",
    extra_keys=[("salt",), None],
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=128,
    locality="local",
    ownership="shared",
    session_id="s-1",
    lookahead_token_ids=[[1], None],
    cache_salt="tenant",
    metadata={"step": 7, "tags": ["x", None, 1.5, b"raw"]},
    other_fields={"future": {"deep": [1, 2]}},
)
SOME = [stored(), ALL_FIELDS, BlockRemoved(block_hashes=[2], medium="GPU"), AllBlocksCleared()]


# ---------------------------------------------------------------- a sequence


def test_an_event_list_is_a_sequence_of_events() -> None:
    events = EventList(SOME)
    assert isinstance(events, Sequence)
    assert len(events) == 4
    assert list(events) == SOME
    assert [events[i] for i in range(4)] == SOME
    assert events[-1] == SOME[-1]
    assert list(reversed(events)) == SOME[::-1]
    assert SOME[2] in events
    assert stored(block_size=4) not in events
    assert "no event" not in events
    assert events.index(SOME[2]) == 2
    assert events.index(SOME[2], -2) == 2
    assert events.count(SOME[0]) == 1
    assert events.count(3) == 0
    with pytest.raises(ValueError, match="not in the list"):
        events.index(SOME[0], 1)
    assert EventList() == []
    assert not EventList()


@pytest.mark.parametrize("key", [4, -5, 10**30])
def test_an_index_outside_is_an_index_error(key: int) -> None:
    with pytest.raises(IndexError):
        EventList(SOME)[key]


@pytest.mark.parametrize("key", ["a", 1.0, None])
def test_an_index_of_another_type_is_a_type_error(key: object) -> None:
    with pytest.raises(TypeError):
        EventList(SOME)[key]


@pytest.mark.parametrize(
    "s",
    [
        slice(None),
        slice(1, 3),
        slice(3, 1),
        slice(-3, None),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(9, 99),
    ],
)
def test_slices_are_those_of_a_list(s: slice) -> None:
    part = EventList(SOME)[s]
    assert isinstance(part, EventList)
    assert part == SOME[s]
    assert pickle.loads(pickle.dumps(part)) == SOME[s]


def test_concatenation_with_lists_from_both_sides() -> None:
    events = EventList(SOME)
    assert events + events == SOME + SOME
    assert events + SOME == SOME + SOME
    assert [SOME[3], *SOME] == [SOME[3]] + events
    assert (SOME[3],) + events == [SOME[3], *SOME]
    with pytest.raises(TypeError):
        events + 3
    with pytest.raises(errors.EventTypeError, match="event 1"):
        events + [SOME[0], 3]


def test_equality_looks_at_every_field() -> None:
    base = EventList([ALL_FIELDS])
    for name in ALL_FIELDS.__struct_fields__:
        if name in {"block_hashes", "token_ids"}:
            continue
        other = copy.copy(ALL_FIELDS)
        value = getattr(ALL_FIELDS, name)
        new = {int: 77, str: "other", bytes: b"q" * 32, list: [None, ("z",)], dict: {"other": 1}}[type(value)]
        setattr(other, name, new)
        assert EventList([other]) != base, name
        assert base != [other], name
    assert base == (ALL_FIELDS,)
    assert base != "text"
    assert base != [3]
    assert base != [ALL_FIELDS, ALL_FIELDS]


def test_metadata_is_equal_in_any_order_of_its_keys() -> None:
    a, b = stored(metadata={"x": 1, "y": [2]}), stored(metadata={"y": [2], "x": 1})
    assert a == b
    assert EventList([a]) == EventList([b])
    assert EventList([a]) != EventList([stored(metadata={"x": 1, "y": [3]})])


def test_an_event_list_cannot_be_a_key() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(EventList())


def test_events_can_be_hashed_and_metadata_does_not_count() -> None:
    assert len({hash(e) for e in (ALL_FIELDS, copy.deepcopy(ALL_FIELDS))}) == 1
    assert hash(stored(metadata={"a": 1})) == hash(stored())
    assert stored(metadata={"a": 1}) != stored()
    there_and_back = msgspec.msgpack.decode(msgspec.msgpack.encode(ALL_FIELDS), type=BlockStored)
    assert hash(there_and_back) == hash(ALL_FIELDS)


def test_repr_is_for_people() -> None:
    text = repr(EventList([*SOME, *SOME]))
    assert text.startswith(
        "EventList(8: stored 2 blocks from 0x1 after root GPU; stored 2 blocks from 61616161.. after 70"
    )
    assert text.endswith("... 3 more)")
    assert repr(EventList()) == "EventList(0)"
    assert len(repr(EventList([stored()] * 10_000))) < 400


# ---------------------------------------------------------------- what goes in comes out


@pytest.mark.parametrize(
    "event",
    [
        stored(block_hashes=[-1, -(2**63)], parent_block_hash=-5),
        stored(block_hashes=[2**64 - 1, 2**63], parent_block_hash=2**64 - 1),
        stored(block_hashes=[-1, 2**64 - 1]),
        stored(block_hashes=[b"", b"x" * 64], parent_block_hash=b"y"),
        stored(block_hashes=[5, b"five"]),
        stored(token_ids=[[1, 2], [3, 4], "text", 2**63], block_size=2),
        stored(token_ids=[-1, 0, 2**32, 2**64 - 1]),
    ],
    ids=["signed", "unsigned", "both signs", "bytes", "mixed", "wide tokens", "large tokens"],
)
def test_every_legal_hash_and_token_survives(event: BlockStored) -> None:
    for events in (EventList([event]), pickle.loads(pickle.dumps(EventList([event])))):
        assert list(events) == [event]
        assert events.irregular == 0


@pytest.mark.parametrize(
    "event",
    [
        stored(block_hashes=[]),
        stored(token_ids=[], block_size=0),
        stored(token_ids=[1]),
        stored(block_hashes=[1]),
        stored(extra_keys=[None]),
        stored(lookahead_token_ids=[1, 2, 3]),
        BlockRemoved(block_hashes=[], medium=None),
    ],
    ids=[
        "no hashes",
        "hash only",
        "few tokens",
        "few hashes",
        "few extra keys",
        "long lookahead",
        "empty removal",
    ],
)
def test_irregular_events_of_others_are_kept_word_for_word_and_counted(event: object) -> None:
    events = EventList([stored(), event])
    assert list(events) == [stored(), event]
    assert events.irregular == 1
    assert events.is_irregular(1)
    assert not events.is_irregular(0)
    assert pickle.loads(pickle.dumps(events))[1:].irregular == 1
    with pytest.raises(IndexError):
        events.is_irregular(2)


def test_token_ids_come_from_any_integer_buffer() -> None:
    for code in "bBhHiIlLqQ":
        assert EventList([stored(token_ids=array(code, [10, 11, 12, 13]))]) == [stored()]
    assert EventList([stored(token_ids=(10, 11, 12, 13))]) == [stored()]
    assert EventList([stored(token_ids=iter([10, 11, 12, 13]))]) == [stored()]
    assert EventList([stored(token_ids=memoryview(array("i", [10, 0, 11, 0, 12, 0, 13]))[::2])]) == [stored()]


def test_an_engines_own_structs_are_read_by_their_names() -> None:
    """Older engines lack newer fields; the class is told by its name."""
    old = type("BlockStored", (SimpleNamespace,), {})
    event = old(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=[10, 11, 12, 13], block_size=2, lora_id=None
    )
    assert EventList([event]) == [stored(medium=None)]


def test_any_iterable_will_do() -> None:
    assert EventList(e for e in SOME) == SOME
    assert EventList(EventList(SOME)) == SOME


# ---------------------------------------------------------------- what is refused, and how


@pytest.mark.parametrize(
    ("event", "error", "says"),
    [
        (stored(block_hashes=[1.5]), errors.EventError, r"event 1: block_hashes\[0\].*float 1\.5"),
        (stored(block_hashes=[2**64]), errors.EventError, r"block_hashes\[0\].*18446744073709551616"),
        (stored(block_hashes=[-(2**63) - 1]), errors.EventError, r"block_hashes\[0\]"),
        (stored(block_hashes=[b"x" * 65]), errors.EventError, "at most 64 bytes, saw 65"),
        (stored(block_hashes=b"digest"), errors.EventTypeError, "a list of hashes was expected, saw bytes"),
        (stored(block_hashes=bytearray(b"digest")), errors.EventTypeError, "a list of hashes.*bytearray"),
        (stored(block_hashes=7), errors.EventTypeError, "a list of hashes was expected, saw int 7"),
        (stored(block_hashes=None), errors.EventTypeError, "block_hashes.*None"),
        (stored(parent_block_hash="root"), errors.EventError, "parent_block_hash.*str 'root'"),
        (stored(token_ids=[1, 2, 2**64, 4]), errors.EventError, r"token_ids\[2\].*18446744073709551616"),
        (stored(token_ids=[1, 2.0]), errors.EventError, r"token_ids\[1\].*float 2\.0"),
        (stored(token_ids=[1, None]), errors.EventError, r"token_ids\[1\].*None"),
        (stored(token_ids="text"), errors.EventTypeError, "token_ids: a list was expected"),
        (stored(token_ids=7), errors.EventTypeError, "token_ids"),
        (stored(token_ids=array("d", [1.0])), errors.EventTypeError, "token_ids"),
        (stored(block_size=0), errors.EventError, "block_size: 0 with 4 token ids"),
        (stored(block_size=-1), errors.EventError, "block_size.*-1"),
        (stored(block_size=2**40), errors.EventError, "block_size"),
        (stored(block_size="16"), errors.EventTypeError, "block_size.*str '16'"),
        (stored(lora_id=2**70), errors.EventTypeError, "lora_id"),
        (stored(medium="\ud800"), errors.EventError, "medium: text in UTF-8"),
        (stored(token_ids=[1, "\ud800"]), errors.EventError, "token_ids: cannot be encoded"),
        (stored(medium=3), errors.EventTypeError, "medium: a str or None was expected, saw int 3"),
        (stored(extra_keys="no list"), errors.EventTypeError, "extra_keys"),
        (stored(metadata=[1]), errors.EventTypeError, "metadata: a dict or None"),
        (stored(metadata={"a": object()}), errors.EventError, "metadata: cannot be encoded"),
        (BlockRemoved(block_hashes=[None], medium="GPU"), errors.EventError, r"block_hashes\[0\]"),
        (
            None,
            errors.EventTypeError,
            "BlockStored, BlockRemoved or AllBlocksCleared was expected, saw NoneType",
        ),
        ({"type": "BlockStored"}, errors.EventTypeError, "event 1.*dict"),
    ],
)
def test_a_bad_event_is_refused_by_index_field_and_value(event: object, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        EventList([stored(), event])
    assert "event 1" in str(caught.value)
    assert isinstance(caught.value, errors.KVEventsError)


def test_values_nested_too_deep_are_refused() -> None:
    deep: list = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(errors.EventError, match="nested deeper than 32"):
        EventList([stored(metadata={"deep": deep})])


def test_an_error_while_iterating_is_passed_on() -> None:
    def broken():
        yield SOME[0]
        raise KeyError("from the user's generator")

    with pytest.raises(KeyError, match="user's generator"):
        EventList(broken())
    with pytest.raises(TypeError):
        EventList(3)


def test_a_property_that_raises_is_passed_on() -> None:
    class BlockStored:
        @property
        def metadata(self):
            raise RuntimeError("from the engine")

    with pytest.raises(RuntimeError, match="from the engine"):
        EventList([BlockStored()])


# ---------------------------------------------------------------- other processes


def test_everything_that_a_user_holds_can_be_pickled_and_copied() -> None:
    """Worker output crosses processes by pickle; classes without support fail only in multi-process tests."""
    things = [
        *SOME,
        EventList(SOME),
        EventList(SOME)[1:3],
        EventList(SOME).with_origin(source="cpu", worker=3),
        KVEventBatch(ts=1.5, events=EventList(SOME), data_parallel_rank=2),
        KVEventBatch(ts=1, events=SOME),
        Skipped(3, "unknown_tag", "saw BlockMoved"),
    ]
    for thing in things:
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(thing, protocol)) == thing
        assert copy.copy(thing) == thing
        assert copy.deepcopy(thing) == thing


def test_every_error_can_be_pickled() -> None:
    for name in errors.__all__:
        error = pickle.loads(pickle.dumps(getattr(errors, name)("what was wrong")))
        assert str(error) == "what was wrong"
        assert isinstance(error, errors.KVEventsError)


def test_origin_travels_and_does_not_count_for_equality() -> None:
    events = EventList(SOME)
    tagged = events.with_origin(source="cpu", worker=3)
    assert tagged == events
    assert events.origin(0) == (None, None)
    assert pickle.loads(pickle.dumps(tagged)).origin(3) == ("cpu", 3)
    joined = events + tagged
    assert [joined.origin(i) for i in (0, 4)] == [(None, None), ("cpu", 3)]
    with pytest.raises(IndexError):
        tagged.origin(4)


def test_metadata_survives_every_way() -> None:
    event = stored(metadata={"request": "r-1", "n": [1, None]})
    batch = KVEventBatch(ts=0.5, events=EventList([event]))
    encoded = msgspec.msgpack.encode(batch, enc_hook=kvevents.enc_hook)
    back = msgspec.msgpack.decode(encoded, type=KVEventBatch, dec_hook=kvevents.dec_hook)
    for events in (
        EventList([event]) + [stored()],
        EventList([event, stored()])[:1],
        pickle.loads(pickle.dumps(batch)).events,
        back.events,
    ):
        assert events[0].metadata == event.metadata


class TestDamage:
    """Bytes that did not come from `to_bytes` unharmed are a `PickleError`, never a panic or another list."""

    data = EventList(SOME).to_bytes()

    def test_every_cut(self) -> None:
        for n in range(len(self.data)):
            with pytest.raises(errors.PickleError):
                EventList.from_bytes(self.data[:n])

    def test_every_byte_changed(self) -> None:
        for i in range(len(self.data)):
            changed = bytearray(self.data)
            changed[i] ^= 1 << (i % 8)
            with pytest.raises(errors.PickleError):
                EventList.from_bytes(bytes(changed))

    def test_random_damage(self) -> None:
        rng = random.Random(1)
        for _ in range(500):
            changed = bytearray(self.data)
            for _ in range(rng.randrange(1, 8)):
                at = rng.randrange(len(changed))
                changed[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(1, 5))
            if bytes(changed) != self.data:
                with pytest.raises(errors.PickleError):
                    EventList.from_bytes(bytes(changed))

    def test_another_version_says_what_to_do(self) -> None:
        newer = self.data[:4] + b"\x63\x00" + self.data[6:]
        with pytest.raises(
            errors.PickleError, match="format version 99, this build reads version 1.*same kvevents"
        ):
            EventList.from_bytes(newer)

    @pytest.mark.parametrize("junk", [b"", b"KVEL", b"\x80\x05K\x01.", bytes(1000)])
    def test_something_else(self, junk: bytes) -> None:
        with pytest.raises(errors.PickleError):
            EventList.from_bytes(junk)

    def test_not_bytes(self) -> None:
        with pytest.raises(TypeError):
            EventList.from_bytes("text")


# ---------------------------------------------------------------- inside somebody else's Structs


class EngineOutput(msgspec.Struct, array_like=True):
    step: int
    batch: KVEventBatch | None
    events: EventList


def test_a_batch_travels_inside_another_struct() -> None:
    output = EngineOutput(
        3, KVEventBatch(ts=1.25, events=EventList(SOME), data_parallel_rank=1), EventList(SOME[:2])
    )
    encoded = msgspec.msgpack.Encoder(enc_hook=kvevents.enc_hook).encode(output)
    back = msgspec.msgpack.Decoder(EngineOutput, dec_hook=kvevents.dec_hook).decode(encoded)
    assert back == output
    assert isinstance(back.batch.events, EventList)


def test_the_hook_also_reads_a_list_of_events() -> None:
    encoded = msgspec.msgpack.encode([1.5, SOME, 0])
    batch = msgspec.msgpack.decode(encoded, type=KVEventBatch, dec_hook=kvevents.dec_hook)
    assert batch.events == SOME
    assert batch.data_parallel_rank == 0


def test_the_hooks_leave_other_types_to_msgspec() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        msgspec.msgpack.encode(object(), enc_hook=kvevents.enc_hook)
    with pytest.raises(NotImplementedError, match="complex"):
        kvevents.dec_hook(complex, 1)


# ---------------------------------------------------------------- what it tells about itself


def test_blocks_and_bytes_are_counted() -> None:
    events = EventList([stored(), BlockRemoved(block_hashes=[1, 2, 3], medium=None), AllBlocksCleared()])
    assert events.num_blocks == (2, 3)
    assert 0 < events.nbytes < 2_000
    assert not events.overflowed


def incomplete() -> EventList:
    """Two events of a batch of which one could not be read, after a queue that overflowed."""
    raw = msgspec.msgpack.encode([0.5, [["BlockRemoved", [1]], ["AllBlocksCleared"], "no event"]])
    queue = kvevents.EventQueue(max_queued_events=1)
    queue.push_cleared()
    queue.push_cleared()
    return queue.take() + kvevents.decode(raw).events


@pytest.mark.parametrize(
    "way",
    [
        lambda e: e[:2],
        lambda e: e[::2],
        lambda e: e[::-1],
        lambda e: e.with_origin(worker=1),
        lambda e: e.with_origin(worker=1).with_origin(),
        lambda e: e.by_worker()[0][1],
        lambda e: EventList.from_bytes(e.to_bytes()),
        lambda e: e + [],
        lambda e: [] + e,
        lambda e: e[:1] + e[1:],
    ],
)
def test_what_is_missing_from_a_list_is_said_by_every_list_made_of_it(way) -> None:
    made = way(incomplete())
    assert made.overflowed
    assert [s.reason for s in made.skipped] == ["not_an_event"]


def test_events_of_interleaved_workers_keep_the_word_about_what_is_missing() -> None:
    events = incomplete()
    a, b = events.with_origin(worker=0), EventList(SOME).with_origin(worker=1)
    for _, part in (a[:1] + b[:1] + a[1:]).by_worker():
        assert part.overflowed
        assert part.skipped


def test_arguments_beyond_the_obvious_are_keyword_only() -> None:
    """A positional argument must not land in another parameter."""
    events = EventList(SOME)
    with pytest.raises(TypeError):
        events.with_origin("cpu", 3)
    with pytest.raises(TypeError):
        EventList(events=SOME)
    for worker in (-1, 2**32, 1.5, "3"):
        with pytest.raises((OverflowError, TypeError)):
            events.with_origin(worker=worker)
    largest = events.with_origin(worker=2**32 - 1)
    assert pickle.loads(pickle.dumps(largest)).origin(0) == (None, 2**32 - 1)


@pytest.mark.parametrize("form", [msgspec.msgpack, msgspec.json])
def test_a_batch_travels_inside_anybodys_struct_in_any_format(form):
    class Output(msgspec.Struct):
        batch: KVEventBatch

    batch = KVEventBatch(1.5, EventList([BlockRemoved([1, -1, b"x" * 32], "GPU")]), 3)
    data = form.encode(Output(batch), enc_hook=kvevents.enc_hook)
    assert form.decode(data, type=Output, dec_hook=kvevents.dec_hook).batch == batch
    assert (
        form.decode(form.encode({"batch": [1, []]}), type=Output, dec_hook=kvevents.dec_hook).batch.events
        == []
    )


def test_text_that_is_no_list_of_events_is_refused():
    with pytest.raises(errors.PickleError, match="EventList"):
        kvevents.dec_hook(EventList, "no base64!")
