"""Addresses: parsing, ranks, overlap, bind or connect."""

from __future__ import annotations

import socket

import pytest

from kvevents.errors import ConfigError, EndpointInUseError
from kvevents.publish.endpoints import binds, check_ipc_path, check_ranges, numeric, offset, parse, ranks


@pytest.mark.parametrize(
    ("text", "rank_2"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://0.0.0.0:5557", "tcp://0.0.0.0:5559"),
        ("tcp://engine-7.example:5557", "tcp://engine-7.example:5559"),
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("tcp://:::5557", "tcp://[::]:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("tcp://[fe80::1%25lo]:5557", "tcp://[fe80::1%lo]:5559"),
        ("tcp://*:0", "tcp://*:0"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0"),
        ("inproc://kv", "inproc://kv_dp2"),
        ("ipc://kv.sock", "ipc://kv.sock_dp2"),
        ("ipc://tcp-events.sock", "ipc://tcp-events.sock_dp2"),
        ("ipc:///run/inproc/kv", "ipc:///run/inproc/kv_dp2"),
    ],
)
def test_a_rank_gets_its_own_address(text, rank_2):
    assert str(offset(parse(text), 2)) == rank_2
    assert offset(parse(text), 0) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp",
        "tcp://",
        "tcp://*:",
        "tcp://host",
        "tcp://:5557",
        "tcp://*:70000",
        "tcp://*:-1",
        "tcp://*:55x",
        "tcp://[::1]",
        "tcp://[::1:5557",
        "tcp://[zz::1]:5557",
        "tcp://1.2.3:5557",
        "tcp://a b:5557",
        "TCP://*:5557",
        "udp://*:5557",
        "ipc://",
        "inproc://",
    ],
)
def test_a_bad_address_is_one_kind_of_error(text):
    with pytest.raises(ConfigError, match="endpoint"):
        parse(text)


def test_an_upper_case_scheme_gets_a_hint():
    with pytest.raises(ConfigError, match="did you mean 'tcp'"):
        parse("TCP://*:5557")


def test_a_port_above_the_last_is_refused():
    assert str(offset(parse("tcp://*:65530"), 5)) == "tcp://*:65535"
    with pytest.raises(ConfigError, match="65536"):
        offset(parse("tcp://*:65530"), 6)


def test_an_ipc_path_over_the_systems_limit_is_refused():
    fits = "ipc:///" + "a" * 106
    assert str(offset(parse(fits), 0)) == fits
    with pytest.raises(ConfigError, match="111 bytes"):
        offset(parse(fits), 1)
    with pytest.raises(ConfigError, match="107"):
        offset(parse("ipc:///" + "a" * 120), 0)


@pytest.mark.parametrize(
    ("live", "replay", "size"),
    [
        ("tcp://*:5557", "tcp://*:5558", 2),
        ("tcp://*:5558", "tcp://*:5557", 2),
        ("tcp://*:5557", "tcp://*:5557", 1),
        ("tcp://*:5557", "tcp://127.0.0.1:5557", 1),
        ("tcp://[::]:5557", "tcp://[::1]:5560", 4),
        ("ipc://kv", "ipc://kv", 1),
        ("ipc://kv", "ipc://kv_dp1", 2),
        ("inproc://kv", "inproc://kv", 3),
    ],
)
def test_overlapping_live_and_replay_ranges_are_refused(live, replay, size):
    with pytest.raises(ConfigError, match=r"overlap.*live is .* to .*replay is"):
        check_ranges(parse(live), parse(replay), size)


@pytest.mark.parametrize(
    ("live", "replay", "size"),
    [
        ("tcp://*:5557", "tcp://*:5558", 1),
        ("tcp://*:5557", "tcp://*:5561", 4),
        ("tcp://*:0", "tcp://*:0", 4),
        ("tcp://10.0.0.1:5557", "tcp://127.0.0.1:5557", 4),
        ("ipc://5557", "tcp://*:5557", 2),
        ("ipc://kv", "ipc://kv_dp1", 1),
    ],
)
def test_ranges_apart_are_fine(live, replay, size):
    check_ranges(parse(live), parse(replay), size)


@pytest.mark.parametrize(
    "text",
    [
        "tcp://*:1",
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "tcp://127.0.0.1:1",
        "tcp://127.9.9.9:1",
        "tcp://localhost:1",
        "tcp://[::1]:1",
        "ipc://x",
        "inproc://x",
    ],
)
def test_wildcard_loopback_ipc_and_inproc_bind(text):
    assert binds(parse(text))


@pytest.mark.parametrize(
    "text", ["tcp://198.51.100.7:1", "tcp://[2001:db8::1]:1", "tcp://[fe80::abcd:1%25lo]:1"]
)
def test_addresses_of_other_machines_connect(text):
    assert not binds(parse(text))


def test_own_interfaces_and_addresses_bind():
    assert binds(parse(f"tcp://{socket.if_nameindex()[0][1]}:1"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        assert binds(parse(f"tcp://{probe.getsockname()[0]}:1"))


def test_a_host_name_is_bound_by_its_number():
    assert str(numeric(parse("tcp://localhost:7"))) in {"tcp://127.0.0.1:7", "tcp://[::1]:7"}
    assert str(numeric(parse("tcp://*:7"))) == "tcp://*:7"


def test_ranks():
    assert ranks(0, 1) == 1
    assert ranks(3, 1) == 4, "only the rank was said"
    assert ranks(1, 4) == 4
    for rank, size in [(4, 4), (-1, 1), (True, 1), ("0", 1)]:
        with pytest.raises(ConfigError, match="data_parallel_rank"):
            ranks(rank, size)


def test_an_ipc_path_is_never_taken_from_a_file_or_a_live_socket(tmp_path):
    path = tmp_path / "kv"
    endpoint = parse(f"ipc://{path}")
    check_ipc_path(endpoint, 0)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        check_ipc_path(endpoint, 0)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(EndpointInUseError, match="rank 0"):
            check_ipc_path(endpoint, 0)
    check_ipc_path(endpoint, 0)
    with pytest.raises(ConfigError, match="no directory"):
        check_ipc_path(parse(f"ipc://{tmp_path}/missing/kv"), 0)
