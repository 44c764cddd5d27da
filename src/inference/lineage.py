"""Whose weights draw: what the numbers of an engine's weights stand for, and which new ones may come.

A trainer counts versions on from the step that it begins with, so the version of a server goes back when a
trainer is started again, or another run takes the server. The number of an engine's weights never does: here
each number is known as a version of one trainer, and tokens from both sides of such a change are told apart,
whatever was being drawn meanwhile.

Invariants: numbers rise; a number belongs to one trainer; a trainer that was replaced does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contract.policy import NOBODY, OTHER_RUN, Origin, VersionInfo, WeightUpdate
from inference.refusal import Refused


@dataclass(frozen=True, slots=True)
class _Reign:
    """The weights of one trainer: those from number `first` on, each `offset` more than its version."""

    first: int
    offset: int
    origin: Origin


class Lineage:
    """The trainers of a server, one after the other."""

    def __init__(self, number: int, run_id: str = "") -> None:
        """
        Args:
            number: of the model as loaded, which is its version, too.
            run_id: the only run that the server takes weights of; empty takes them of any.
        """
        self._run_id = run_id
        self._reigns = [_Reign(number, 0, NOBODY)]

    def info(self, number: int) -> VersionInfo:
        """What the weights `number` are."""
        reign = self._reign(number)
        return VersionInfo(number - reign.offset, reign.origin)

    def versions(self, numbers: Sequence[int], run_id: str) -> tuple[int, ...]:
        """The versions of tokens that were drawn with the weights `numbers`.

        Raises:
            Refused: a token is not of the run `run_id` (empty is any).
        """
        found = []
        for number in numbers:
            reign = self._reign(number)
            if run_id and reign.origin.run_id != run_id:
                raise Refused(
                    OTHER_RUN, f"the weights are those of {_whose(reign.origin)}, not of run {run_id}"
                )
            found.append(number - reign.offset)
        return tuple(found)

    def admit(self, update: WeightUpdate, present: int) -> int:
        """The number that the weights of `update` get: a trainer goes on from its latest version, or loads it
        again; a new one begins with any.

        Args:
            present: number of the weights that draw now.

        Raises:
            Refused: the update is of a run that has no business here, of a trainer that was replaced, or
                older than the present version (409).
        """
        origin, reign = update.origin, self._reign(present)
        if self._run_id and origin.run_id != self._run_id:
            raise Refused(
                409,
                f"version {update.version} is of {_whose(origin)}, and this server belongs to run "
                f"{self._run_id} (its setting run_id), of which alone it takes weights; start a server for "
                f"the other run, or name that one in `servers`",
            )
        if origin == reign.origin:
            if update.version + reign.offset < present:
                raise Refused(
                    409,
                    f"version {update.version} is older than version {present - reign.offset}, which draws "
                    f"now and is of the same trainer; start the trainer again to go back",
                )
            return update.version + reign.offset
        if any(one.origin == origin for one in self._reigns):
            raise Refused(
                409,
                f"version {update.version} is of a trainer of {_whose(origin)}, which {_whose(reign.origin)} "
                f"has replaced here; one run at a time uses a server: give each its own, and go on with "
                f"--resume",
            )
        self._reigns.append(_Reign(present + 1, present + 1 - update.version, origin))
        return present + 1

    def settle(self, number: int) -> None:
        """The weights `number` draw: what was admitted beyond them has not come."""
        while self._reigns[-1].first > number:
            del self._reigns[-1]

    def _reign(self, number: int) -> _Reign:
        return next(reign for reign in reversed(self._reigns) if reign.first <= number)


def _whose(origin: Origin) -> str:
    return f"run {origin.run_id}" if origin.run_id else "no run"
