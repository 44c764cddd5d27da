"""What checkpoints cost: real runs of a configuration, one per mode, and the disk's own rate, in one go.

For every mode of `model.offload` the configuration is trained twice, as the command `sft` would: with
synchronous and with asynchronous saves (with `none` there are only synchronous ones). Before and after each
run the bytes of one checkpoint are written to the same disk by a plain loop with fsync. The figures are
medians over the saves, from the metrics of the runs:

    sync      seconds that a step waits for a synchronous save
    blocked   seconds that a step waits for an asynchronous save to begin
    write     seconds of the background write, to the commit; MB/s is its rate, plain MB/s that of the loop
    hold      seconds that the next step waited for state that was not written yet
    slower    seconds that the next step took longer than steps without a write: the hold, and what the write
              takes from the step's cores
    memory    host memory at its highest beyond that of the synchronous run; sampled from outside

Nothing else should run on the machine meanwhile.

    uv run python scripts/bench_checkpoint.py
    uv run python scripts/bench_checkpoint.py --modes full -- --ckpt.writer-threads 4

What follows `--` goes to `sft` as it is. Runs, checkpoints and logs lie in a temporary folder under --dir
and are deleted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from contract.attempt import read_pid
from contract.layout import RunFolder
from telemetry.metrics import read_metrics

_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Seconds are medians over its saves; None where the run has no such thing."""

    mode: str
    is_async: bool
    blocked_seconds: float
    write_seconds: float
    num_bytes: float
    step_seconds: float
    slower_seconds: float | None
    hold_seconds: float | None
    highest_bytes: float
    plain_rates: tuple[float, float]
    """MB/s of the plain loop before and after."""

    @property
    def rate(self) -> float:
        """MB/s of the write."""
        return self.num_bytes / self.write_seconds / 1e6


class MemorySampler:
    """Samples the resident memory of rank 0, with times."""

    def __init__(self, attempt_dir: Path) -> None:
        self._attempt_dir = attempt_dir
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def highest(self, start: float, stop: float) -> int:
        """Most memory between two times, in bytes."""
        return max((size for at, size in self.samples if start <= at <= stop), default=0)

    def _run(self) -> None:
        process: psutil.Process | None = None
        while not self._ended.wait(0.02):
            try:
                pid = read_pid(self._attempt_dir, 0)
                if process is None and pid is not None:
                    process = psutil.Process(pid)
                if process is not None:
                    self.samples.append((time.time(), process.memory_info().rss))
            except psutil.Error:
                return


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.dry_run:
        command = [*_sft(arguments.config, arguments.sft), "--dry-run"]
        return subprocess.run(command, check=False).returncode
    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-checkpoint-") as folder:
        for mode in arguments.modes:
            for is_async in (False,) if mode == "none" else (False, True):
                name = f"{mode}, {'asynchronous' if is_async else 'synchronous'}"
                print(f"{name} ...", flush=True)
                results.append(measure(arguments, Path(folder), mode, is_async))
    show(results, arguments)
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what follows `--` is `.sft`."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [config] [-- FLAGS OF SFT]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", default="configs/bench/smollm2-135m.toml", help="an SFT run")
    parser.add_argument("--modes", nargs="+", default=["none", "optimizer", "full"], help="of model.offload")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure (default: here)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--dry-run", action="store_true", help="only check the configuration")
    arguments = parser.parse_args(list(argv)[:cut])
    arguments.sft = list(argv)[cut + 1 :]
    return arguments


def measure(arguments: argparse.Namespace, place: Path, mode: str, is_async: bool) -> Result:
    """Run one mode; the folder of the run is gone afterwards."""
    name = f"{mode}-{'asynchronous' if is_async else 'synchronous'}"
    flags = ["--output-dir", str(place), "--run-name", name, "--model.offload", mode]
    flags.append("--ckpt.async-save" if is_async else "--no-ckpt.async-save")
    folder = RunFolder(place / name)
    attempt = folder.logs / "attempt_1"
    log = place / "output.log"
    size_path = place / "size.json"
    before = plain_rate(place, _known_size(size_path))
    with MemorySampler(attempt) as memory, log.open("wb") as output:
        command = [*_sft(arguments.config, arguments.sft), *flags]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise SystemExit(f"the run ended with exit code {code}")
    records = read_metrics(folder.metrics)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    num_bytes = _values(records, "checkpoint/bytes")[0]
    size_path.write_text(json.dumps(num_bytes))
    after = plain_rate(place, num_bytes)
    highest = memory.highest(lines[0]["time"], math.inf)
    shutil.rmtree(folder.root)
    return evaluate(mode, is_async, records, float(highest), (before or after, after))


def evaluate(
    mode: str,
    is_async: bool,
    records: list[dict[str, Any]],
    highest_bytes: float,
    plain_rates: tuple[float, float],
) -> Result:
    """The figures of one run from its metrics. The first two steps warm up; the last save is awaited."""
    by_step = {record["step"]: record for record in records}
    last = max(by_step)
    saved = [step for step, record in by_step.items() if "time/save_ckpt" in record and step != last]
    behind = [step + 1 for step in saved if step + 1 in by_step]
    steps = {step: record["step_seconds"] for step, record in by_step.items() if "step_seconds" in record}
    quiet = [seconds for step, seconds in steps.items() if step > 2 and step not in behind]
    written = [
        record["checkpoint/write_seconds"] for record in records if "checkpoint/write_seconds" in record
    ]
    if len(saved) < 2 or len(quiet) < 2:
        raise SystemExit(
            f"{len(saved)} saves and {len(quiet)} steps without one are too few to measure; raise "
            f"max_steps, or lower "
            f"ckpt.interval"
        )
    step_seconds = statistics.median(quiet)
    return Result(
        mode=mode,
        is_async=is_async,
        blocked_seconds=statistics.median(by_step[step]["time/save_ckpt"] for step in saved),
        write_seconds=statistics.median(written),
        num_bytes=_values(records, "checkpoint/bytes")[0],
        step_seconds=step_seconds,
        slower_seconds=statistics.median(steps[step] - step_seconds for step in behind) if is_async else None,
        hold_seconds=statistics.median(_values(records, "checkpoint/hold_seconds")) if is_async else None,
        highest_bytes=highest_bytes,
        plain_rates=plain_rates,
    )


def plain_rate(place: Path, num_bytes: float | None) -> float:
    """MB/s of one sequential write of `num_bytes` with fsync; 0 if the size is not known yet."""
    if not num_bytes:
        return 0.0
    block = os.urandom(_BLOCK_BYTES)
    path = place / "plain"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = int(num_bytes)
        while left > 0:
            left -= file.write(block[: min(left, _BLOCK_BYTES)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return num_bytes / seconds / 1e6


def show(results: Sequence[Result], arguments: argparse.Namespace) -> None:
    """Print the table, and write it as JSON where asked for."""
    table = Table(title=f"Checkpoints of {arguments.config}")
    columns = [
        "offload",
        "step s",
        "sync s",
        "blocked s",
        "write s",
        "MB/s",
        "plain MB/s",
        "hold s",
        "slower s",
    ]
    for column in [*columns, "memory GB"]:
        table.add_column(column, justify="left" if column == "offload" else "right")
    ratios: list[dict[str, float | str]] = []
    for mode in arguments.modes:
        of_mode = {result.is_async: result for result in results if result.mode == mode}
        sync, behind = of_mode[False], of_mode.get(True)
        shown = behind or sync
        plain = statistics.mean(rate for result in of_mode.values() for rate in result.plain_rates)
        row = [mode, f"{shown.step_seconds:.2f}", f"{sync.blocked_seconds:.2f}"]
        row += [_number(behind.blocked_seconds) if behind else "", f"{shown.write_seconds:.2f}"]
        row += [f"{shown.rate:.0f}", f"{plain:.0f}"]
        row += [_number(behind.hold_seconds), _number(behind.slower_seconds)] if behind else ["", ""]
        row.append(f"{(behind.highest_bytes - sync.highest_bytes) / 1e9:.2f}" if behind else "")
        table.add_row(*row)
        if behind is not None:
            ratios.append(_ratios(mode, sync, behind, plain))
        ratios.append({"mode": f"{mode} (synchronous)", "write / plain rate": sync.rate / plain})
    console = Console(width=120)
    console.print(table)
    for ratio in ratios:
        parts = [f"{key} {value:.3f}" for key, value in ratio.items() if isinstance(value, float)]
        console.print(f"{ratio['mode']}: {', '.join(parts)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(ratios, indent=1))


def _ratios(mode: str, sync: Result, behind: Result, plain: float) -> dict[str, float | str]:
    # A checkpoint of AdamW in float32 is weights and two moments of the same size.
    weight_bytes = behind.num_bytes / 3
    assert behind.hold_seconds is not None and behind.slower_seconds is not None
    return {
        "mode": mode,
        "blocked / synchronous save": behind.blocked_seconds / sync.blocked_seconds,
        "hold / write": behind.hold_seconds / behind.write_seconds,
        "slower / write": behind.slower_seconds / behind.write_seconds,
        "memory / weights": (behind.highest_bytes - sync.highest_bytes) / weight_bytes,
        "write / plain rate": behind.rate / plain,
    }


def _sft(config: str, more: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "launcher.sft", "@", config, *more]


def _known_size(path: Path) -> float | None:
    return json.loads(path.read_text()) if path.exists() else None


def _values(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if key in record]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
