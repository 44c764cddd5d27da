"""How an episode fails: it then has no reward, is left out of the loss and the baseline, and is counted."""

from __future__ import annotations


class EpisodeFailed(Exception):
    """One episode cannot be finished; the run goes on.

    Attributes:
        kind: why, as counted in metrics: `environment` (its code raised), `timeout`, `worker` (its process
            died), `server` (no usable answer of the policy), `prompt too long`, `empty` (the policy
            drew nothing).
        message: what happened, in words.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[type[EpisodeFailed], tuple[str, str]]:
        # The constructor's arguments are not the exception's: pickle would call it with one too few.
        return type(self), (self.kind, self.message)
