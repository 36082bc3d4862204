"""What tests of this package, and of programs that use it, need."""

from __future__ import annotations

from kvevents.testing.aggregate import NaiveAggregator
from kvevents.testing.captures import Capture, Reproduction, read_capture, replay_requests, reproduce_capture
from kvevents.testing.index import NaivePrefixIndex
from kvevents.testing.resident import NaiveResidentSet
from kvevents.testing.vectors import (
    FrameReport,
    VectorReport,
    check_frames,
    check_vectors,
    event_from_json,
    is_vector_file,
    read_json_lines,
)

__all__ = [
    "Capture",
    "FrameReport",
    "NaiveAggregator",
    "NaivePrefixIndex",
    "NaiveResidentSet",
    "Reproduction",
    "VectorReport",
    "check_frames",
    "check_vectors",
    "event_from_json",
    "is_vector_file",
    "read_capture",
    "read_json_lines",
    "replay_requests",
    "reproduce_capture",
]
