"""From a finished episode to what the trainer trains.

Tokens that the policy sampled have `rl` weight 1; all others have weight 0, whatever brought them in.
"""

from __future__ import annotations

import numpy as np

from contract.batch import Sample
from orchestrator.episode import Episode, SampledTokens


def to_samples(episode: Episode, advantage: float, temperature: float, sample_id: int) -> list[Sample]:
    """The samples of `episode`, which share `sample_id`.

    Entry t of a stream belongs to predicting token t; see `contract.rollout`.

    Args:
        advantage: of every sampled token.
        temperature: that the episode was sampled with; above 0.

    Raises:
        ValueError: temperature is 0: such an episode was not drawn from the policy's distribution.
    """
    if not temperature > 0:
        raise ValueError(f"an episode drawn at temperature {temperature:g} cannot be trained; it must be > 0")
    return [_to_sample(sampled, advantage, temperature, sample_id) for sampled in episode.samples]


def _to_sample(sampled: SampledTokens, advantage: float, temperature: float, sample_id: int) -> Sample:
    weights = np.asarray(sampled.is_sampled, dtype=np.float32)
    streams = {
        "logprobs": np.asarray(sampled.logprobs, dtype=np.float32),
        "advantages": weights * np.float32(advantage),
        # Also where nothing was sampled: logits are divided by it.
        "temperatures": np.full(len(weights), temperature, dtype=np.float32),
    }
    return Sample(np.asarray(sampled.tokens, dtype=np.int64), {"rl": weights}, sample_id, streams)
