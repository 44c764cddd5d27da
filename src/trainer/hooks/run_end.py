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

    Also of a run whose steps were all done when it began: an attempt that died between its last save and the
    end leaves that to the next one. So does one that is asked to end or to pause meanwhile: everything is
    saved, and the loop ends by what was decided here.
    """

    def __init__(self, source: StreamSource, process: Process, requests: Requests) -> None:
        self._source = source
        self._process = process
        self._requests = requests

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`.

        Raises:
            ChannelError: the message does not come in time, or is not the one that is due.
        """
        while (end := self._source.next_end()) is PENDING:
            if self._requests.decide(self._process, state.step).ending:
                if self._process.is_main:
                    logger.warning("step %d: the last evaluation is not waited for", state.step)
                return {}
        return end.metrics
