"""The parts of a checkpoint that belong to nobody else: model, progress, schedule, data position, tracker;
and the state of another process, which comes with the batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from contract.errors import CheckpointError
from trainer.model.causal_lm import CausalLM
from trainer.parallel.layout import LogicalTensor
from trainer.source.base import Source
from trainer.state import TrainState

_SCHEDULE_FIELDS = ("schedule_step",)


class ValuesPart:
    """A part without tensors."""

    def tensors(self) -> dict[str, LogicalTensor]:
        """See `Part`."""
        return {}

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """See `Part`."""
        return {}


class WeightCopies(Protocol):
    """Who may keep the weights in float32 apart from the model (an optimizer); see
    `optimizer.base.Optimizer`.
    """

    def weights(self) -> dict[str, LogicalTensor]:
        """By logical name; empty where the model's own parameters are the weights."""
        ...

    def weights_loaded(self) -> None:
        """The weights were filled: bring copies up to date."""
        ...


class ModelPart:
    """Weights under their Hugging Face names and in float32, whatever the model looks like at run time."""

    def __init__(self, model: CausalLM, copies: WeightCopies) -> None:
        self._model = model
        self._copies = copies

    def tensors(self) -> dict[str, LogicalTensor]:
        """See `Part`."""
        return {**self._model.logical_state(), **self._copies.weights()}

    def values(self) -> dict[str, Any]:
        """See `Part`."""
        return {}

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """See `Part`; a checkpoint of another model is refused."""
        tensors = self.tensors()
        missing, unknown = sorted(set(tensors) - set(names)), sorted(set(names) - set(tensors))
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint is of another model: {len(missing)} weights are missing from it"
                f"{f' (e.g. {missing[0]})' if missing else ''}, {len(unknown)} are not of this model"
                f"{f' (e.g. {unknown[0]})' if unknown else ''}; set model.name to the model it was trained "
                f"from"
            )
        return tensors

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Part`."""
        self._copies.weights_loaded()


class StatePart(ValuesPart):
    """Some fields of `TrainState`."""

    def __init__(self, state: TrainState, fields: Collection[str]) -> None:
        self._state = state
        self._fields = fields

    @classmethod
    def progress(cls, state: TrainState) -> StatePart:
        """Every counter but those of the schedule."""
        return cls(state, [field for field in state.state_dict() if field not in _SCHEDULE_FIELDS])

    @classmethod
    def schedule(cls, state: TrainState) -> StatePart:
        """The counter that the learning rate follows."""
        return cls(state, _SCHEDULE_FIELDS)

    def values(self) -> dict[str, Any]:
        """See `Part`."""
        return {field: getattr(self._state, field) for field in self._fields}

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Part`."""
        for field in self._fields:
            setattr(self._state, field, values[field])


class DataPart(ValuesPart):
    """The position of the source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def values(self) -> dict[str, Any]:
        """See `Part`."""
        return self._source.state_dict()

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Part`."""
        self._source.load_state_dict(values)


class Snapshots(Protocol):
    """Who keeps the state of another process (a source of rollouts); see `source.stream.StreamSource`."""

    snapshot: bytes


class SnapshotCompanion:
    """The state of another process that came with the last batch. Implements `checkpoint.base.Companion`."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def content(self) -> bytes:
        """See `Companion`."""
        return self._snapshots.snapshot

    def loaded(self, content: bytes) -> None:
        """See `Companion`."""
        self._snapshots.snapshot = content


class TrackerPart(ValuesPart):
    """Ids under which outside trackers know this run, so that a resumed run goes on under the same."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}

    def values(self) -> dict[str, Any]:
        """See `Part`."""
        return dict(self.ids)

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Part`."""
        self.ids = dict(values)
