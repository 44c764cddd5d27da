"""Every setting that is refused, with the words that say why."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import SFTConfig

CHAT: dict[str, Any] = {"type": "chat", "path": "rows.jsonl"}
FAKE: dict[str, Any] = {"type": "fake"}


def build(**changes: Any) -> SFTConfig:
    """A configuration that is right, with `changes`."""
    base: dict[str, Any] = {"model": {"name": "org/model"}, "data": CHAT, "max_steps": 10}
    return SFTConfig.model_validate({**base, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": None}, "nothing ends this run: set max_steps or max_epochs"),
        ({"max_epochs": 2}, "max_steps = 10 and max_epochs = 2 both end the run"),
        (
            {"schedule": {"type": "cosine", "warmup_steps": 11}},
            "schedule.warmup_steps = 11 and schedule.decay_steps = 0 do not fit into max_steps = 10",
        ),
        (
            {"schedule": {"type": "linear", "warmup_steps": 6, "decay_steps": 5}},
            "schedule.warmup_steps = 6 and schedule.decay_steps = 5 do not fit into max_steps = 10",
        ),
        (
            {"deployment": {"num_processes": 4, "dp_replicate": 3}},
            "deployment.dp_replicate = 3 does not divide deployment.num_processes = 4",
        ),
        (
            {"deployment": {"num_processes": 3}},
            "data.batch_size = 8 cannot be dealt evenly to deployment.num_processes = 3; choose a multiple",
        ),
        ({"resume": {}, "clean": True}, "clean deletes the run that resume would go on from"),
        (
            {"model": {"name": "some/model", "offload": "full"}, "optimizer": {"type": "muon"}},
            "model.offload = 'full' updates weights on the host, piece by piece, but optimizer.type = 'muon'",
        ),
        (
            {"data": FAKE, "validation": {"path": "rows.jsonl"}},
            "validation reads conversations, but data.type is 'fake'",
        ),
        (
            {"data": {**CHAT, "batch_size": 2, "micro_batch_size": 3}},
            "data.micro_batch_size = 3 is larger than data.batch_size = 2",
        ),
        (
            {"ckpt": {"keep_interval": 100}},
            "ckpt.keep_interval = 100 exempts steps from pruning, but nothing is pruned without ckpt",
        ),
        (
            {"ckpt": {"url": "ftp://host/runs"}},
            "ckpt.url: 'ftp://host/runs' names no object store; valid are URLs that begin with one of s3://",
        ),
        (
            {"resume": {"dir": "s3:///step_4"}},
            "resume.dir: 's3:///step_4' names no bucket",
        ),
        (
            {"resume": {"step": 4, "dir": "other/step_4"}},
            "resume.step = 4 and resume.dir = 'other/step_4' both name a checkpoint",
        ),
        (
            {"model": {"name": "package:pkg/file.gguf", "revision": "main"}},
            "model.revision names a version on the Hub, but model.name is a package file",
        ),
        (
            {"optimizer": {"type": "adamw", "betas": [0.9, 1.0]}},
            r"optimizer.betas = \[0.9, 1.0\]: both must lie in \[0, 1\)",
        ),
        (
            {"optimizer": {"type": "muon", "betas": [-0.1, 0.5]}},
            r"optimizer.betas = \[-0.1, 0.5\]: both must lie in \[0, 1\)",
        ),
        ({"optimizer": {"type": "sgd", "nesterov": True}}, "optimizer.nesterov needs optimizer.momentum > 0"),
        (
            {"data": {**FAKE, "seq_len": 16, "document_len": 17}},
            "data.document_len = 17 is longer than data.seq_len = 16",
        ),
        (
            {"data": {**CHAT, "split": "test"}},
            "`split` is for Hub data sets, but `path` = 'rows.jsonl' is local",
        ),
        ({"data": {**CHAT, "path": "./rows", "subset": "en"}}, "`subset` is for Hub data sets"),
        ({"validation": {"path": "~/rows.parquet", "revision": "x"}}, "`revision` is for Hub data sets"),
    ],
)
def test_a_contradiction_is_refused_with_what_was_set(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        ({"max_step": 3}, ("max_step",), "Extra inputs are not permitted"),
        ({"optimizer": {"type": "adamw", "l_r": 1.0}}, ("optimizer", "adamw", "l_r"), "Extra inputs"),
        ({"optimizer": {"type": "adam"}}, ("optimizer",), "does not match any of the expected tags"),
        ({"optimizer": {"type": "adamw", "lr": float("nan")}}, ("optimizer", "adamw", "lr"), "finite number"),
        (
            {"optimizer": {"type": "adamw", "lr": -1.0}},
            ("optimizer", "adamw", "lr"),
            "greater than or equal to 0",
        ),
        ({"optimizer": {"type": "adamw", "eps": 0.0}}, ("optimizer", "adamw", "eps"), "greater than 0"),
        (
            {"optimizer": {"type": "adamw", "betas": [0.9]}},
            ("optimizer", "adamw", "betas"),
            "at least 2 items",
        ),
        (
            {"optimizer": {"type": "adamw", "max_grad_norm": 0.0}},
            ("optimizer", "adamw", "max_grad_norm"),
            "0",
        ),
        ({"optimizer": {"type": "sgd", "momentum": 1.0}}, ("optimizer", "sgd", "momentum"), "less than 1"),
        ({"schedule": {"type": "linear", "min_lr_ratio": 1.5}}, ("schedule", "linear", "min_lr_ratio"), "1"),
        ({"schedule": {"type": "linear", "decay_steps": 0}}, ("schedule", "linear", "decay_steps"), "1"),
        ({"max_steps": "10"}, ("max_steps",), "valid integer"),
        ({"max_steps": 0}, ("max_steps",), "greater than or equal to 1"),
        ({"seed": -1}, ("seed",), "greater than or equal to 0"),
        ({"run_name": "../other"}, ("run_name",), "match pattern"),
        ({"data": {**CHAT, "seq_len": 4}}, ("data", "chat", "seq_len"), "greater than or equal to 8"),
        ({"data": {**CHAT, "path": ""}}, ("data", "chat", "path"), "at least 1 character"),
        ({"model": {"name": "a", "attention": "flash"}}, ("model", "attention"), "'varlen', 'sdpa'"),
        ({"model": {"name": ""}}, ("model", "name"), "at least 1 character"),
        ({"export": {"dtype": "float8"}}, ("export", "dtype"), "match pattern"),
        ({"export": {"max_shard_size": "5 GB"}}, ("export", "max_shard_size"), "match pattern"),
        ({"sample": {"prompts": []}}, ("sample", "prompts"), "at least 1 item"),
        ({"log": {"peak_tflops": 0.0}}, ("log", "peak_tflops"), "greater than 0"),
        (
            {"deployment": {"collective_timeout_seconds": 0.0}},
            ("deployment", "collective_timeout_seconds"),
            "0",
        ),
    ],
)
def test_a_value_out_of_its_range_is_refused_where_it_stands(
    changes: dict[str, Any], place: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        build(**changes)
    assert [error["loc"] for error in raised.value.errors()] == [place]
    assert message in raised.value.errors()[0]["msg"]


def test_what_is_allowed_stays_allowed() -> None:
    config = build(
        optimizer={"type": "sgd", "momentum": 0.5, "nesterov": True},
        schedule={"type": "linear", "warmup_steps": 5, "decay_steps": 5},
        deployment={"num_processes": 4, "dp_replicate": 2},
        ckpt={"keep_last": 1, "keep_interval": 5},
        resume={"step": 3},
        data={**CHAT, "batch_size": 4, "micro_batch_size": 4},
        validation={"path": "org/data", "split": "test", "subset": "en", "revision": "v1"},
    )
    assert config.resume is not None and config.resume.step == 3
    assert (
        build(max_steps=None, max_epochs=1, schedule={"type": "cosine", "warmup_steps": 10**6}).max_epochs
        == 1
    )
    assert build(ckpt=None, export=None).ckpt is None


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        build().seed = 3  # pyright: ignore[reportAttributeAccessIssue]
