"""`python -m tests.unit.inference.programs BEHAVIOUR CONFIG ATTEMPT_DIR`: a policy server without a model."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contract.policy import WeightUpdate
from inference.cli import Served, run_part
from inference.config import InferenceConfig
from tests.support.fake_engine import FakeEngine

_NO_TOKENIZER: Any = None


@contextmanager
def _open_nothing(update: WeightUpdate) -> Iterator[Iterator[Any]]:
    yield iter(())


class _Failing(FakeEngine):
    """Fails when it is asked to pause, in its thread so to say: nobody who asks is told."""

    async def pause(self, mode: Any) -> None:
        self.failure = RuntimeError("out of memory")


class _NeverClosing(FakeEngine):
    """Neither ends nor lets a thread of its own end."""

    async def close(self) -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        await asyncio.sleep(600)


def main(behaviour: str, config: Path, attempt_dir: Path) -> int:
    """Serve; the file `loading` appears when the model would be loaded."""

    def load(_: InferenceConfig) -> Served:
        (attempt_dir / "loading").touch()
        if behaviour == "slow-start":
            time.sleep(600)
        kinds = {"failing": _Failing, "never-closing": _NeverClosing}
        engine = kinds.get(behaviour, FakeEngine)(_NO_TOKENIZER, max_len=10**9)
        return Served(engine, _open_nothing, frozenset(), lambda: (attempt_dir / "closed").touch())

    return run_part(config, attempt_dir, load=load, end_seconds=2.0 if behaviour == "never-closing" else 60.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
