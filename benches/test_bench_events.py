"""Events in columns beside a list of Structs: what crosses a process border, compares and concatenates."""

from __future__ import annotations

import pickle

import msgspec

from benches import workloads
from benches.harness import Work, as_tests, compare
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVCacheEvent

STRUCTS = "list of msgspec Structs"
decoder = msgspec.msgpack.Decoder(list[BlockStored | BlockRemoved | AllBlocksCleared])


def shapes(events: int, per_event: int) -> tuple[EventList, list[KVCacheEvent]]:
    """The same events in columns and as Structs."""
    structs: list[KVCacheEvent] = list(workloads.stored_events(events, per_event))
    return EventList(structs), structs


def pickled(events: int, per_event: int) -> Work:
    """A pickle round trip."""
    columns, structs = shapes(events, per_event)

    def ours() -> object:
        return pickle.loads(pickle.dumps(columns, pickle.HIGHEST_PROTOCOL))

    def theirs() -> object:
        return pickle.loads(pickle.dumps(structs, pickle.HIGHEST_PROTOCOL))

    def check() -> None:
        assert list(ours()) == structs == theirs()

    return Work(ours, theirs, events, check)


@compare("pickle round trip, 256 events of 1 hash", per="event", against=STRUCTS)
def pickle_small() -> Work:
    """Many small events."""
    return pickled(256, 1)


@compare("pickle round trip, 64 events of 16 hashes", per="event", against=STRUCTS)
def pickle_large() -> Work:
    """Fewer, larger events."""
    return pickled(64, 16)


@compare("compare 256 events of 1 hash", per="event", against=STRUCTS)
def equality() -> Work:
    """Equal, so that everything is looked at."""
    (a, structs), (b, others) = shapes(256, 1), shapes(256, 1)

    def check() -> None:
        assert a == b
        assert structs == others
        assert a != b[:-1]

    return Work(lambda: a == b, lambda: structs == others, 256, check)


@compare("build from Structs, 256 events of 1 hash", per="event", against="msgspec encode of the Structs")
def build() -> Work:
    """What an engine pays that makes its own Structs, beside what their bytes cost."""
    columns, structs = shapes(256, 1)
    encode = msgspec.msgpack.Encoder().encode

    def check() -> None:
        assert EventList(structs) == columns
        assert decoder.decode(encode(structs)) == structs

    return Work(lambda: EventList(structs), lambda: encode(structs), 256, check)


test_rows = as_tests(__name__)
