"""The archives that users install from."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked where nothing else is."""
    if importlib.util.find_spec("maturin") is None or shutil.which("cargo") is None:
        pytest.skip("maturin and cargo are needed to make the source archive")
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "maturin", "sdist", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=100)
    (archive,) = out.glob("kvevents-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    (folder,) = (p for p in out.iterdir() if p.is_dir())
    return folder


def test_the_source_archive_holds_all_that_a_build_needs(unpacked: Path) -> None:
    """`make sdist` also builds a wheel from it, offline."""
    for name in (
        "Cargo.lock",
        "Cargo.toml",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "python/kvevents/py.typed",
    ):
        assert (unpacked / name).is_file(), name
    crates = ("core", "py")
    sources = {p.relative_to(ROOT) for c in crates for p in (ROOT / "rust" / c / "src").rglob("*.rs")}
    assert sources
    assert sources <= {p.relative_to(unpacked) for p in unpacked.rglob("*.rs")}
    assert not (unpacked / "tests").exists()
    assert not (unpacked / "docs").exists()


def test_cargo_accepts_the_workspace_of_the_source_archive_offline(unpacked: Path) -> None:
    """Every manifest, and every target that it names, is there; the lock file fits."""
    done = subprocess.run(
        ["cargo", "metadata", "--offline", "--locked", "--format-version", "1", "--no-deps"],
        cwd=unpacked,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {p["name"] for p in json.loads(done.stdout)["packages"]} == {"kvevents-core", "kvevents-py"}
    targets = [t for p in json.loads(done.stdout)["packages"] for t in p["targets"]]
    assert all(Path(t["src_path"]).is_file() for t in targets)


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    wheels = list((ROOT / "dist").glob("kvevents-*.whl"))
    if len(wheels) != 1:
        pytest.skip("no wheel in dist/: make wheel")
    (wheel,) = wheels
    assert "-cp311-abi3-" in wheel.name, "one wheel for all versions of Python from 3.11"
    assert wheel.stat().st_size < 1_500_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        scripts = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    assert [n for n in names if n.endswith((".so", ".pyd"))] in (
        ["kvevents/_core.abi3.so"],
        ["kvevents/_core.pyd"],
    )
    assert {"kvevents/py.typed", "kvevents/_core.pyi", "kvevents/__init__.py"} <= set(names)
    assert not [n for n in names if not n.startswith(("kvevents/", "kvevents-"))]
    assert "kvevents=kvevents.cli:main" in scripts.replace(" ", "")
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata
