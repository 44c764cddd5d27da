"""The orchestrator's last message: what it found in its last evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trainer.hooks.base import BaseHook
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.source.base import PENDING
from trainer.source.stream import StreamSource
from trainer.state import TrainState

logger = logging.getLogger(__name__)


class RunEndHook(BaseHook):
    """After the last step waits until the orchestrator ends the run, and reports the metrics of that.

    A run that was complete already has no orchestrator that would end it.
    """

    def __init__(self, source: StreamSource, process: Process, requests: Requests) -> None:
        self._source = source
        self._process = process
        self._requests = requests
        self._has_trained = False

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        self._has_trained = True
        return {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`.

        Raises:
            ChannelError: the message does not come in time, or is not the one that is due.
        """
        if not self._has_trained and self._source.end is None:
            return {}
        while (end := self._source.next_end()) is PENDING:
            if self._requests.agree(self._process):
                if self._process.is_main:
                    logger.warning("step %d: the last evaluation is not waited for", state.step)
                return {}
        return end.metrics
