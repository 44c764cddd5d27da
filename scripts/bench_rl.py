"""What an RL run costs: a whole run, and the orchestrator alone against a scripted policy server.

`run` trains a configuration as the command `rl` would, and reads its metrics; figures are of the steps after
the first two:

    step        seconds per update
    trained     tokens per second that the trainer computes, prompts included
    sampled     tokens per second that the policy server draws for training
    waiting     share of the time for which the trainer waits for a batch
    publish     seconds per update until the policy server has the new weights

`orchestrator` starts the orchestrator with one worker process and a policy server that answers by script at
once; a reader takes the place of the trainer. Orchestrator and reader are measured apart:

    episodes/s  episodes shipped per second, and per second of the orchestrator's own CPU time: what it does
                with one core for itself
    memory      of the orchestrator after a tenth of the episodes and at the end, in MiB

Nothing else should run on the machine meanwhile.

    uv run python scripts/bench_rl.py run @ configs/debug/rl.toml
    uv run python scripts/bench_rl.py orchestrator --episodes 100000

What follows `run` goes to `rl` as it is. Everything lies in a temporary folder and is deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from contract.channel.filesystem import FilesystemReceiver
from contract.layout import RunFolder
from contract.policy import CONTENT_TYPE, UPDATE_ROUTE, FolderUpdate, GenerateRequest, Origin, encode
from contract.rollout import RolloutBatch, decode_message
from contract.sections import ModelFilesConfig, SamplingConfig
from contract.settings.dump import to_toml
from orchestrator.config import OrchestratorConfig, RolloutConfig, SourceConfig
from telemetry.metrics import read_metrics

_ROOT = Path(__file__).parents[1]
_WARM_UP_STEPS = 2
_SECONDS = 120.0
_ORIGIN = Origin("bench", "trainer")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "orchestrator", "serve"], help="`serve` is used by itself")
    parser.add_argument("--episodes", type=int, default=100_000, help="of the orchestrator alone")
    parser.add_argument("--group-size", type=int, default=8)
    arguments, rest = parser.parse_known_args()
    if arguments.what == "serve":
        asyncio.run(_serve())
        return 0
    if arguments.what == "orchestrator":
        with tempfile.TemporaryDirectory(prefix="bench_rl_") as folder:
            _measure_orchestrator(Path(folder), arguments.episodes, arguments.group_size)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench_rl_") as folder:
        return _measure_run(Path(folder), rest)


def _measure_run(folder: Path, words: Sequence[str]) -> int:
    place = ["--output-dir", str(folder), "--run-name", "bench", "--no-export"]
    code = subprocess.run([sys.executable, "-m", "launcher.rl", *words, *place], check=False).returncode
    if code:
        return code
    records = [
        record for record in read_metrics(RunFolder(folder / "bench").metrics) if "step_seconds" in record
    ]
    steps = records[_WARM_UP_STEPS:] or records
    seconds = [float(record["step_seconds"]) for record in steps]
    table = Table(title=f"{len(steps)} updates; medians")
    for name in ("step [s]", "trained [tokens/s]", "sampled [tokens/s]", "waiting", "publish [s]"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{statistics.median(seconds):.2f}",
        f"{sum(float(record['step_tokens']) for record in steps) / sum(seconds):.0f}",
        f"{sum(float(record['tokens/sampled']) for record in steps) / sum(seconds):.0f}",
        f"{sum(float(record['time/data']) for record in steps) / sum(seconds):.0%}",
        f"{statistics.median(float(record['time/publish']) for record in steps):.3f}",
    )
    Console().print(table)
    return 0


async def _serve() -> None:
    """A policy server whose answers depend on the seed, so that groups differ in reward."""
    sys.path.insert(0, str(_ROOT))
    from tests.support.policy_server import PolicyServer, Reply

    letters, end = _vocabulary()

    def answer(request: GenerateRequest) -> Reply:
        seed = request.sampling.seed or 0
        return Reply([*(letters[(seed >> shift) % len(letters)] for shift in (0, 8, 16)), end])

    async with PolicyServer(answer, origin=_ORIGIN, keep=1) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def _vocabulary() -> tuple[list[int], int]:
    """Ids of the letters a to h, and of the end of a turn, in the debug model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_ROOT / "configs" / "debug" / "model")
    return tokenizer.convert_tokens_to_ids(list("abcdefgh")), tokenizer.eos_token_id


def _measure_orchestrator(root: Path, num_episodes: int, group_size: int) -> None:
    groups = 16
    steps = max(10, num_episodes // (group_size * groups))
    folder = RunFolder(root / "run")
    attempt = folder.logs / "attempt_1"
    attempt.mkdir(parents=True)
    folder.run_id.write_text(f"{_ORIGIN.run_id}\n")
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        path = root / "orchestrator.toml"
        path.write_text(to_toml(_configuration(root, url, steps, group_size, groups)))
        command = [sys.executable, "-m", "orchestrator", str(path), str(attempt)]
        with (attempt / "orchestrator.log").open("wb") as log:
            orchestrator = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                _read_all(folder, url, steps, psutil.Process(orchestrator.pid))
            except BaseException:
                print((attempt / "orchestrator.log").read_text())
                raise
            finally:
                orchestrator.kill()
                orchestrator.wait()
    finally:
        server.kill()
        server.wait()


def _configuration(root: Path, url: str, steps: int, group_size: int, groups: int) -> OrchestratorConfig:
    settings = {"min_length": 3, "max_length": 3, "alphabet": "abcdefgh"}
    return OrchestratorConfig(
        sources=[SourceConfig(environment="sort-letters", settings=settings)],
        sampling=SamplingConfig(max_tokens=8),
        rollout=RolloutConfig(group_size=group_size, groups_per_batch=groups, max_lead=2),
        output_dir=root,
        run_name="run",
        max_steps=steps,
        seq_len=128,
        model=ModelFilesConfig(name=str(_ROOT / "configs" / "debug" / "model")),
        servers=[url],
    )


def _read_all(folder: RunFolder, url: str, steps: int, process: psutil.Process) -> None:
    """Take every batch as a trainer would that needs no time, and print what the orchestrator did."""
    import httpx

    receiver = FilesystemReceiver(folder.channel, _ORIGIN.trainer)
    num_episodes, early = 0, 0.0
    start, cpu_start = 0.0, 0.0
    with httpx.Client(headers={"Content-Type": CONTENT_TYPE}) as client:
        for step in range(1, steps + 1):
            frame = receiver.receive(step, _SECONDS)
            assert frame is not None, f"no batch {step} within {_SECONDS:g} s"
            batch = decode_message(frame)
            assert isinstance(batch, RolloutBatch)
            receiver.acknowledge(step)
            update = encode(FolderUpdate(step, str(folder.root), _ORIGIN))
            client.post(f"{url}{UPDATE_ROUTE}", content=update).raise_for_status()
            if step == 1:  # start-up is over
                start, cpu_start = time.perf_counter(), sum(process.cpu_times()[:2])
                continue
            num_episodes += batch.num_episodes
            if step <= max(2, steps // 10):
                early = process.memory_info().rss / 2**20
    seconds, cpu = time.perf_counter() - start, sum(process.cpu_times()[:2]) - cpu_start
    table = Table(title=f"{num_episodes:,} episodes, one worker process")
    for name in ("episodes/s", "episodes per CPU second", "memory early [MiB]", "memory at the end [MiB]"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{num_episodes / seconds:,.0f}",
        f"{num_episodes / cpu:,.0f}",
        f"{early:.1f}",
        f"{process.memory_info().rss / 2**20:.1f}",
    )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
