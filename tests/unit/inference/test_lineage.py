"""What numbers of weights stand for, and which updates may come."""

from __future__ import annotations

import pytest

from contract.policy import NOBODY, FolderUpdate, Origin, VersionInfo
from inference.lineage import Lineage
from inference.refusal import Refused

FIRST, AGAIN, OTHER = Origin("a", "t1"), Origin("a", "t2"), Origin("b", "t3")


def _admit(lineage: Lineage, version: int, origin: Origin, present: int) -> int:
    """Admit and load."""
    number = lineage.admit(FolderUpdate(version, "", origin), present)
    lineage.settle(number)
    return number


def test_numbers_rise_whatever_the_versions_do_and_each_stays_one_version_of_one_trainer() -> None:
    lineage, number, expected = Lineage(0), 0, {0: VersionInfo(0, NOBODY)}
    sent = [(FIRST, v) for v in (0, 1, 1, 3)] + [(OTHER, v) for v in (0, 1)] + [(AGAIN, v) for v in (2, 7)]
    for origin, version in sent:
        earlier, number = number, _admit(lineage, version, origin, number)
        repeated = expected[earlier] == VersionInfo(version, origin)
        assert number == earlier if repeated else number > earlier
        expected[number] = VersionInfo(version, origin)
    assert {number: lineage.info(number) for number in expected} == expected
    assert list(lineage.versions(sorted(expected), "")) == [0, 0, 1, 3, 0, 1, 2, 7]


def test_tokens_of_two_runs_are_not_taken_for_those_of_one() -> None:
    lineage = Lineage(0)
    of_first = _admit(lineage, 4, FIRST, 0)
    of_other = _admit(lineage, 4, OTHER, of_first)
    of_again = _admit(lineage, 2, AGAIN, of_other)
    assert lineage.versions([of_first, of_again], "a") == (4, 2)
    with pytest.raises(Refused, match="the weights are those of run b, not of run a") as refused:
        lineage.versions([of_first, of_other], "a")
    assert refused.value.status == 412
    with pytest.raises(Refused, match="those of no run, not of run a"):
        lineage.versions([0], "a")


@pytest.mark.parametrize(
    ("run_id", "origin", "version", "told"),
    [
        ("", AGAIN, 4, "version 4 is older than version 5, which draws now and is of the same trainer"),
        ("", FIRST, 9, "a trainer of run a, which run a has replaced here"),
        ("", NOBODY, 9, "a trainer of no run, which run a has replaced here"),
        ("a", OTHER, 9, r"version 9 is of run b, and this server belongs to run a \(its setting run_id\)"),
        ("a", NOBODY, 9, "version 9 is of no run, and this server belongs to run a"),
    ],
)
def test_what_is_refused_says_why_and_changes_nothing(
    run_id: str, origin: Origin, version: int, told: str
) -> None:
    lineage = Lineage(-1, run_id)
    number = _admit(lineage, 5, AGAIN, _admit(lineage, 0, FIRST, -1))
    with pytest.raises(Refused, match=told) as refused:
        lineage.admit(FolderUpdate(version, "", origin), number)
    assert refused.value.status == 409
    assert lineage.info(number) == VersionInfo(5, AGAIN)
    assert lineage.info(_admit(lineage, 6, AGAIN, number)) == VersionInfo(6, AGAIN)


def test_weights_that_did_not_come_leave_no_trace() -> None:
    lineage = Lineage(0)
    number = _admit(lineage, 5, FIRST, 0)
    for _ in range(2):
        lineage.admit(FolderUpdate(0, "", OTHER), number)
        lineage.settle(number)
        lineage.admit(FolderUpdate(6, "", FIRST), number)
        lineage.settle(number)
    assert lineage.info(number) == VersionInfo(5, FIRST)
    assert lineage.info(_admit(lineage, 0, OTHER, number)) == VersionInfo(0, OTHER)
