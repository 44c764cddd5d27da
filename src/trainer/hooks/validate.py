"""Held-out loss, every few steps and at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping

from contract.batch import MicroBatch
from trainer.engine import Engine
from trainer.hooks.base import BaseHook
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.source.base import ValidationSource
from trainer.state import TrainState

logger = logging.getLogger(__name__)


class ValidateHook(BaseHook):
    """Reports `validation/loss`: the mean over all trainable tokens of the validation rows."""

    def __init__(
        self,
        source: ValidationSource,
        engine: Engine,
        process: Process,
        requests: Requests,
        *,
        interval: int,
        at_start: bool,
    ) -> None:
        self._source = source
        self._engine = engine
        self._process = process
        self._requests = requests
        self._interval = interval
        self._at_start = at_start
        self._last_step = -1

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return self._validate(state) if self._at_start else {}

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return self._validate(state) if state.step % self._interval == 0 else {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return self._validate(state) if state.step != self._last_step else {}

    def _validate(self, state: TrainState) -> Mapping[str, float]:
        self._last_step = state.step
        sums = self._engine.evaluate(self._until_stopped())
        component = self._engine.components[0]
        names = ["loss", f"{component}_tokens"]
        loss_sum, num_tokens = self._process.all_sum([sums.get(name, 0.0) for name in names])
        if self._requests.agree(self._process):
            # A part of the rows is not the validation loss; a signal must not wait for the rest.
            return {}
        loss = loss_sum / num_tokens if num_tokens else math.nan
        logger.info("step %d: validation loss %.4f over %d tokens", state.step, loss, int(num_tokens))
        return {"validation/loss": loss, "validation/tokens": num_tokens}

    def _until_stopped(self) -> Iterator[MicroBatch]:
        for micro_batch in self._source.micro_batches():
            if self._requests.agree(self._process):
                return
            yield micro_batch
