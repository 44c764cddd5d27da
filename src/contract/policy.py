"""What is said to a policy server: tokens in, tokens and log-probabilities out, and new weights.

Bodies are MessagePack (`application/msgpack`); see `inference.server` for the routes. No torch.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of running requests in a pause: they stop where they are and go on after it, they are finished
first, or they are ended with what they have (finish reason `abort`)."""

FinishReason = Literal["stop", "length", "abort"]

GENERATE_ROUTE = "/generate"
VERSION_ROUTE = "/version"
PAUSE_ROUTE = "/pause"
RESUME_ROUTE = "/resume"
UPDATE_ROUTE = "/update_weights"
HEALTH_ROUTE = "/health"
CONTENT_TYPE = "application/msgpack"

OTHER_RUN = 412
"""HTTP status of a draw that names a run, when the weights are of another one."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token. From 1e-6, if it is not 0.
        top_p, top_k: draw from the most likely tokens only; 1.0 and 0 draw from all.
        max_tokens: most tokens drawn; the context of the model may end the sequence earlier (`length`).
        min_tokens: end tokens and stop texts do not end the sequence before so many.
        stop_ids: tokens that end the sequence; the one that did is its last token.
        stop: texts that end the sequence; the token that completed one is its last token.
        seed: of this sequence alone; the tokens do not depend on what else runs. None draws anew each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop_ids: list[int] = msgspec.field(default_factory=list)
    stop: list[str] = msgspec.field(default_factory=list)
    seed: int | None = None


_SEEDS = range(-(2**63), 2**64)
MIN_TEMPERATURE = 1e-6
"""The least that is not 0: logits over less are not finite."""
"""Logits that are divided by less may not be finite any more."""


class InvalidSampling(ValueError):
    """A value of a `Sampling` that is out of its range.

    Attributes:
        field: its name.
    """

    def __init__(self, field: str, value: object, valid: str) -> None:
        super().__init__(f"{field} = {value!r} is not valid; it must be {valid}")
        self.field = field


def check_sampling(sampling: Sampling) -> None:
    """What any engine asks of a request.

    Raises:
        InvalidSampling: a value is out of its range.
    """
    temperature = sampling.temperature
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise InvalidSampling("temperature", temperature, f"0, or a number from {MIN_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidSampling("top_p", sampling.top_p, "more than 0 and at most 1")
    if sampling.top_k < 0:
        raise InvalidSampling("top_k", sampling.top_k, "0 (all tokens) or more")
    if sampling.max_tokens < 1:
        raise InvalidSampling("max_tokens", sampling.max_tokens, "1 or more")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidSampling(
            "min_tokens", sampling.min_tokens, f"between 0 and max_tokens = {sampling.max_tokens}"
        )
    if sampling.seed is not None and sampling.seed not in _SEEDS:
        raise InvalidSampling("seed", sampling.seed, "a number of 64 bits")
    if "" in sampling.stop:
        raise InvalidSampling("stop", sampling.stop, "texts that are not empty")


class GenerateRequest(msgspec.Struct, frozen=True):
    """One sequence to draw.

    Attributes:
        request_id: unique among running requests; a request is ended by closing its connection.
        prompt: token ids.
        run_id: run whose weights must draw every token; with any other the request is refused or ended
            (status `OTHER_RUN`). Empty draws with whatever is there.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    run_id: str = ""


class GenerateResponse(msgspec.Struct, frozen=True):
    """One drawn sequence; the three lists have one entry per token.

    Attributes:
        logprobs: natural logarithm of the probability with which each token was drawn: that of the
            distribution after temperature, top-k and top-p.
        versions: policy version that drew each token.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


class PauseRequest(msgspec.Struct, frozen=True):
    """Stop drawing tokens until `RESUME_ROUTE`."""

    mode: PauseMode = "keep"


class TensorInfo(msgspec.Struct, frozen=True):
    """One weight under its Hugging Face name; `dtype` is torch's name of it, e.g. `float32`."""

    name: str
    dtype: str
    shape: list[int]


class Origin(msgspec.Struct, frozen=True):
    """Whose weights these are; both empty is nobody's: the model as loaded.

    Attributes:
        run_id: of the run folder.
        trainer: id that a trainer takes anew at every start. On the rollout channel it goes by the same one,
            so the orchestrator knows which weights are those of the trainer that it works for.
    """

    run_id: str
    trainer: str


NOBODY = Origin("", "")


class FolderUpdate(msgspec.Struct, frozen=True, tag="folder"):
    """Weights of `version` lie as safetensors in `folder`."""

    version: int
    folder: str
    origin: Origin


class BroadcastUpdate(msgspec.Struct, frozen=True, tag="broadcast"):
    """Weights of `version` will be broadcast.

    Attributes:
        tensors: in the order in which they come.
        backend: gloo or nccl; auto lets the sender decide when it knows the devices of all receivers.
        host, port: where the sender's store listens.
        number: of this broadcast among those of the trainer.
        rank, world_size: of the receiver in the group; the sender is rank 0.
        bucket_bytes: tensors are packed into buckets of at most so many bytes (a larger one is alone).
        timeout_seconds: longest wait for a bucket.
    """

    version: int
    tensors: list[TensorInfo]
    backend: Literal["auto", "gloo", "nccl"]
    host: str
    port: int
    origin: Origin
    number: int
    rank: int
    world_size: int
    bucket_bytes: int
    timeout_seconds: float


WeightUpdate = FolderUpdate | BroadcastUpdate


class VersionInfo(msgspec.Struct, frozen=True):
    """The policy version that draws tokens now, and whose it is.

    Attributes:
        max_len: longest sequence that can be drawn, prompt included, in tokens; None does not tell.
    """

    version: int
    origin: Origin
    max_len: int | None = None


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request was refused; comes with a status of 400 or more."""

    error: str


def encode(message: msgspec.Struct) -> bytes:
    """As MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(content: bytes, kind: type[T]) -> T:
    """Raises `msgspec.DecodeError` (`msgspec.ValidationError` among them) if `content` is none."""
    return msgspec.msgpack.decode(content, type=kind)
