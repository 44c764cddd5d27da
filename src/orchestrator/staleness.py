"""How far sampling may run ahead of training, and how old a token may be. Pure functions of numbers.

Version v of the policy is that after v updates. Batch n (n = 1, 2, ...) turns version n - 1 into n, so the
age of a token of batch n is `n - 1` minus the version that sampled it.
"""

from __future__ import annotations


def age_in_batch(step: int, version: int) -> int:
    """Updates between the weights that sampled a token and those that batch `step` is trained from."""
    return step - 1 - version


def last_step_allowed(version: int, max_lead: int, max_age: int, max_steps: int) -> int:
    """The last batch that may be sampled while the policy server serves `version`.

    Args:
        max_lead: batches ahead of the trainer.
        max_age: greatest age of a token. What is sampled further ahead than this would be too old from the
            start, so it bounds the lead too.
        max_steps: the last batch of the run.
    """
    return min(version + 1 + min(max_lead, max_age), max_steps)


def is_too_old(step: int, oldest_version: int | None, max_age: int) -> bool:
    """Whether a group cannot join batch `step`, nor any later one.

    Args:
        oldest_version: of its tokens; None has none yet, and is never too old.
    """
    return oldest_version is not None and age_in_batch(step, oldest_version) > max_age
