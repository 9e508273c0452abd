"""`quire doctor` finds this machine fit, and says what is wrong where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from quire.cli import doctor
from quire.cli.doctor import FAIL, OK, WARN, Finding
from quire.cli.main import main


def test_a_fit_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [finding["name"] for finding in report["findings"]]
    for name in ("python", "quire", "torch build", "instructions", "device", "threads", "memory", "bundled model"):
        assert name in names


def test_a_missing_essential_fails_and_stops_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  python" in shown
    assert "install Python 99.0 or newer" in shown
    assert "torch" not in shown


@pytest.mark.parametrize(
    ("version", "requirement", "is_right"),
    [
        ("2.13.0+cpu", "torch>=2.11", True),
        ("2.11.0a0+git1", "torch>=2.11", True),
        ("2.9.1", "torch>=2.11", False),
        ("1.9", "llguidance<2,>=1.9", True),
        ("2.0.0", "llguidance<2,>=1.9", False),
        ("0.14.0", "h11>=0.14", True),
        ("1.0", "other", True),
    ],
)
def test_a_version_is_compared_with_the_requirement(version: str, requirement: str, is_right: bool) -> None:
    assert doctor.meets(version, requirement) is is_right


def test_a_package_of_an_old_version_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["h11>=99", "rich>=1", 'lmdb>=3; extra == "disk"'])
    _, old, new = doctor.check_packages()
    assert (old.name, old.status, old.advice) == ("h11", FAIL, "install h11>=99")
    assert (new.name, new.status) == ("rich", OK)


def test_a_look_that_breaks_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def check_torch() -> Iterator[Finding]:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor, "check_torch", check_torch)
    assert main(["doctor", "--json"]) == 1
    last = json.loads(capsys.readouterr().out)["findings"][-1]
    assert (last["name"], last["status"]) == ("torch", FAIL)
    assert "libgomp" in last["detail"]
    assert last["advice"]


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "files", lambda _: tmp_path)
    (finding,) = doctor.check_bundled_model()
    assert finding.status == FAIL
    assert "model.safetensors" in finding.detail


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = {finding.name: finding.status for finding in doctor.check_machine()}
    assert statuses["threads"] == OK
    monkeypatch.setattr(doctor, "COMFORTABLE_BYTES", 1 << 60)
    statuses = {finding.name: finding.status for finding in doctor.check_machine()}
    assert statuses["memory"] == WARN
