"""Which devices and how many CPU threads each part of an RL run gets on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from contract.errors import ConfigError
from launcher.rl_config import RLConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts run.

    Attributes:
        num_ranks: processes of the trainer.
        trainer_gpus, server_gpu: as `CUDA_VISIBLE_DEVICES` names them; none is the CPU.
        trainer_threads: CPU threads of each of its processes.
        shares_cores: whether trainer and server compute on the same CPU.
        notes: what the user should be told.
    """

    num_ranks: int
    trainer_gpus: list[str]
    server_gpu: str | None
    trainer_threads: int
    server_threads: int
    shares_cores: bool
    notes: list[str] = field(default_factory=list)

    def trainer_environment(self) -> dict[str, str]:
        """Variables of the trainer's processes."""
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self.trainer_gpus),
            "OMP_NUM_THREADS": str(self.trainer_threads),
            **self._waiting(),
        }

    def server_environment(self) -> dict[str, str]:
        """Variables of the policy server."""
        return {
            "CUDA_VISIBLE_DEVICES": self.server_gpu or "",
            "OMP_NUM_THREADS": str(self.server_threads),
            **self._waiting(),
        }

    def _waiting(self) -> dict[str, str]:
        # Threads of the one that waits would otherwise spin on the cores that the other computes on.
        return {"OMP_WAIT_POLICY": "PASSIVE"} if self.shares_cores else {}


def place(config: RLConfig, gpus: list[str], cores: int) -> Placement:
    """Place the parts: the policy server on the last GPU and the trainer on the others, unless set otherwise.

    Args:
        gpus: those of this machine, as `CUDA_VISIBLE_DEVICES` names them.
        cores: CPU cores of this machine.

    Raises:
        ConfigError: a device that is set is not there.
    """
    notes: list[str] = []
    server_gpu = _server_gpu(config, gpus)
    trainer_gpus = [] if config.deployment.device == "cpu" else gpus
    if trainer_gpus and server_gpu is not None:
        rest = [gpu for gpu in trainer_gpus if gpu != server_gpu]
        if not rest:
            notes.append(
                "one GPU: trainer and policy server share its memory and its time; with less than both need, "
                "lower inference.engine.max_batch"
            )
        trainer_gpus = rest or trainer_gpus
    num_ranks = config.deployment.num_processes or max(1, len(trainer_gpus))
    if trainer_gpus and num_ranks > len(trainer_gpus):
        taken = " (the policy server has one: inference.device)" if server_gpu is not None else ""
        raise ConfigError(
            f"deployment.num_processes = {num_ranks}, but the trainer has {len(trainer_gpus)} GPUs{taken}; "
            f"lower it, or remove it to take all"
        )
    server_on_cpu = not config.servers and server_gpu is None
    shares_cores = server_on_cpu and not trainer_gpus
    server_threads, trainer_threads = cores, cores
    # With a lead both compute at the same time; without, they take turns.
    if shares_cores and config.rollout.lead > 0:
        server_threads = max(1, (cores + 1) // 2)
        trainer_threads = max(1, cores - server_threads)
    return Placement(
        num_ranks=num_ranks,
        trainer_gpus=trainer_gpus[:num_ranks] if trainer_gpus else [],
        server_gpu=server_gpu,
        trainer_threads=config.deployment.num_threads or max(1, trainer_threads // num_ranks),
        server_threads=config.inference.num_threads or server_threads,
        shares_cores=shares_cores,
        notes=notes,
    )


def _server_gpu(config: RLConfig, gpus: list[str]) -> str | None:
    device = config.inference.device
    if config.servers or device == "cpu":
        return None
    _, _, index = device.partition(":")
    if device.startswith("cuda") and (not gpus or (index and int(index) >= len(gpus))):
        found = f"{len(gpus)} GPUs" if gpus else "no GPU"
        raise ConfigError(
            f"inference.device = {device!r}, but this machine shows {found}; set 'auto' or 'cpu'"
        )
    if not gpus:
        return None
    return gpus[int(index)] if index else gpus[-1]
