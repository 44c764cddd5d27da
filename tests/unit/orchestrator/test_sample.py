"""What the trainer gets of an episode."""

from __future__ import annotations

import numpy as np
import pytest

from contract.batch import build_micro_batch
from contract.rollout import COMPONENTS, STREAMS, from_wire, to_wire
from orchestrator.episode import Episode, SampledTokens
from orchestrator.sample import to_samples


def episode() -> Episode:
    """Two samples: prompt 5 6, sampled 7, given 8, sampled 9 10; and prompt 5, sampled 6."""
    first = SampledTokens(
        [5, 6, 7, 8, 9, 10],
        [False, False, True, False, True, True],
        [0.0, 0.0, -0.5, 0.0, -0.25, -2.0],
        [-1, -1, 3, -1, 4, 4],
    )
    second = SampledTokens([5, 6], [False, True], [0.0, -1.5], [-1, 5])
    return Episode([first, second], [], {"reward": 1.0}, 3, "stop")


def test_sampled_tokens_alone_have_weight_and_advantage() -> None:
    first, second = to_samples(episode(), advantage=-1.5, temperature=0.5, sample_id=7)
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert {name: stream.tolist() for name, stream in first.weights.items()} == {"rl": [0, 0, 1, 0, 1, 1]}
    assert {name: stream.tolist() for name, stream in first.streams.items()} == {
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25, -2.0],
        "advantages": [0.0, 0.0, -1.5, 0.0, -1.5, -1.5],
        "temperatures": [0.5] * 6,
    }
    assert second.weights["rl"].tolist() == [0, 1]
    assert first.sample_id == second.sample_id == 7


def test_samples_travel_and_pack_with_each_value_beside_the_token_that_it_belongs_to() -> None:
    samples = to_samples(episode(), advantage=2.0, temperature=0.5, sample_id=7)
    for sample in samples:
        assert set(sample.weights) <= set(COMPONENTS) and set(sample.streams) <= set(STREAMS)
        assert sample.tokens.dtype == np.int64
        assert {stream.dtype for stream in [*sample.weights.values(), *sample.streams.values()]} == {
            np.dtype(np.float32)
        }
    row = build_micro_batch([[from_wire(to_wire(sample)) for sample in samples]])
    trained = np.flatnonzero(row.weights["rl"])
    assert row.targets[trained].tolist() == [7, 9, 10, 6]
    assert row.streams["logprobs"][trained].tolist() == [-0.5, -0.25, -2.0, -1.5]
    assert row.streams["advantages"][trained].tolist() == [2.0] * 4
    assert row.streams["temperatures"][trained].tolist() == [0.5] * 4


def test_an_episode_drawn_at_temperature_0_is_not_made_into_samples() -> None:
    with pytest.raises(ValueError, match="temperature 0 cannot be trained"):
        to_samples(episode(), advantage=1.0, temperature=0.0, sample_id=0)
