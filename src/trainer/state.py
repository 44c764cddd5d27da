"""Counters of a run. The step is the number of completed updates, and the version of the policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class TrainState:
    """What `resume` carries on and `skip_progress` resets. Owned by the loop; everybody else reads.

    Attributes:
        step: completed updates, skipped ones included (a skipped update still consumes its batch).
        num_tokens: tokens seen, over all ranks, prompts included, padding excluded.
        num_samples: samples seen, over all ranks.
        num_skipped: updates skipped because loss or gradient was not finite.
        schedule_step: updates that changed weights, i.e. steps of the schedule (`skip_scheduler` resets it
            alone).
    """

    step: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    schedule_step: int = 0

    def advance(self, *, num_tokens: int, num_samples: int, skipped: bool) -> None:
        """Count one update."""
        self.step += 1
        self.num_tokens += num_tokens
        self.num_samples += num_samples
        self.num_skipped += skipped
        self.schedule_step += not skipped

    def state_dict(self) -> dict[str, int]:
        """All counters, as JSON values."""
        return asdict(self)
