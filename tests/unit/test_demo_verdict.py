"""What a demo run must have shown before its verdict is `identical`."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvevents.demo.options import DemoOptions, LinkRates, WorkerOptions
from kvevents.demo.truth import TruthReader, TruthWriter, add_digests
from kvevents.demo.verdict import ConnectorReport, EngineReport, ReaderReport, judge
from kvevents.errors import ConfigError

LINK = {"dropped": 3, "duplicated": 3, "delayed": 3, "reordered": 3, "reconnects": 1}
ENGINE = EngineReport(
    batches=100,
    finished=1000,
    hit_rate=0.25,
    blocks_stored=4000,
    blocks_removed=3000,
    seconds=2.0,
    publish_p50_us=1.0,
    publish_p99_us=9.0,
)
READER = ReaderReport(
    applied=100,
    identical=100,
    explained=0,
    repaired=3,
    gaps=(),
    resets=0,
    first_difference=None,
    held_at_difference=frozenset(),
    left_out=None,
)
DIFFERENCE = {"seq": 17, "missing": [], "extra": ["ab"]}


def judged(*, requests=1000, rates=None, link=LINK, difference=None, **reader):
    options = DemoOptions(requests=requests, link=rates or LinkRates())
    seen = msgspec.structs.replace(READER, **reader)
    return judge(options, ENGINE, batches_sent=100, link=link, reader=seen, first_difference=difference)


def test_identical_when_everything_was_applied_and_every_fault_happened():
    result = judged()
    assert (result.verdict, result.identical, result.sequences, result.reasons) == ("identical", 100, 100, ())


def test_a_snapshot_explains_what_it_stands_for():
    assert judged(applied=90, identical=90, explained=10).verdict == "identical"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"identical": 99, "difference": DIFFERENCE}, "sequence 17"),
        ({"applied": 99, "identical": 99}, "1 sequence(s) were neither"),
        ({"identical": 99}, "1 sequence(s) could not be compared"),
        ({"gaps": ("sequences 3 to 4 are lost: too old",)}, "3 to 4"),
        ({"link": {**LINK, "delayed": 0}}, "never happened: delayed"),
    ],
)
def test_anything_less_is_different_and_says_why(change, says):
    result = judged(**change)
    assert result.verdict == "different"
    assert any(says in reason for reason in result.reasons)


def test_faults_need_not_happen_in_short_runs_or_at_rate_zero():
    nothing = dict.fromkeys(LINK, 0)
    assert judged(requests=999, link=nothing).verdict == "identical"
    assert (
        judged(rates=LinkRates(drop=0, duplicate=0, delay=0, reorder=0, cut_every=0), link=nothing).verdict
        == "identical"
    )


def test_json_has_exactly_the_documented_keys():
    assert list(json.loads(judged(difference=DIFFERENCE).to_json())) == [
        "verdict",
        "sequences",
        "identical",
        "first_difference",
        "requests",
        "hit_rate",
        "blocks_stored",
        "blocks_removed",
        "batches_sent",
        "link",
        "repaired",
        "publish_p50_us",
        "publish_p99_us",
        "blocks_per_s",
    ]


def test_json_tells_of_workers_where_there_are_any():
    work = ConnectorReport(
        pickle_bytes_per_step=1234.56, late_stores=5, failed_stores=2, evicted=9, restarts=1, reannounced=7
    )
    result = judge(
        DemoOptions(requests=1000, behind=WorkerOptions(workers=3, connectors=2)),
        msgspec.structs.replace(ENGINE, connectors=work),
        batches_sent=100,
        link=LINK,
        reader=READER,
        first_difference=None,
    )
    fields = json.loads(result.to_json())
    assert (fields["verdict"], fields["workers"], fields["connectors"]) == ("identical", 3, 2)
    assert fields["connector_work"] == {**msgspec.structs.asdict(work), "pickle_bytes_per_step": 1234.6}


def test_a_run_in_which_no_worker_restarted_and_nothing_was_announced_again_has_shown_less_than_it_should():
    work = ConnectorReport(
        pickle_bytes_per_step=1.0, late_stores=5, failed_stores=2, evicted=9, restarts=0, reannounced=0
    )
    result = judge(
        DemoOptions(requests=1000, behind=WorkerOptions()),
        msgspec.structs.replace(ENGINE, connectors=work),
        batches_sent=100,
        link=LINK,
        reader=READER,
        first_difference=None,
    )
    assert (result.verdict, result.reasons) == (
        "different",
        ("faults that never happened: restarts, reannounced",),
    )


@pytest.mark.parametrize("rule", ["", "none", "0", "5", "-1", "1.5"])
def test_a_rule_that_no_number_of_workers_can_meet_is_refused(rule):
    with pytest.raises(ConfigError, match="all, any, or a number from 1 to 4"):
        WorkerOptions(workers=4, rule=rule)


def test_digests_of_sets_without_a_common_key_add():
    assert add_digests(b"\xff" * 16, b"\0" * 15 + b"\x02") == b"\0" * 15 + b"\x01"


def test_the_side_file_is_read_as_it_grows(tmp_path):
    path = tmp_path / "truth"
    with TruthWriter(path) as write, TruthReader(path) as read:
        assert read.digest(0) is None
        write.write(0, b"\x01" * 16, 3)
        write.write(1, b"\x02" * 16, 5)
        assert read.digest(1) == b"\x02" * 16
        assert read.digest(0) == b"\x01" * 16
        assert [read.step(seq) for seq in range(3)] == [3, 5, None]
        assert read.digest(2) is None
        write.write(2, b"\x03" * 16, 6)
        assert read.digest(2) == b"\x03" * 16
        assert read.digest(-1) is None


def test_half_a_line_of_the_side_file_is_no_digest_yet(tmp_path):
    path = tmp_path / "truth"
    path.write_bytes(b"0 " + b"ab" * 7)
    with TruthReader(path) as read:
        assert read.digest(0) is None
        with path.open("ab") as more:
            more.write(b"ab" * 9 + b" 1\n")
        assert read.digest(0) == b"\xab" * 16
