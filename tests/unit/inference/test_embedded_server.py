"""The server over the embedded engine and a tiny model: both kinds of routes, and weights from a folder."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.config import EmbeddedEngineConfig, InferenceConfig
from inference.engine.build import build_engine
from inference.receive.build import WeightReceiver
from tests.support.tiny_model import write_tiny_model
from tests.unit.inference.serving import END_ID, MODEL, Client, error_of, folder_update, request, serve, until

PROMPT = [1, 70, 71, 2, 1]
SAMPLING: dict[str, Any] = {"max_tokens": 12, "seed": 5}


def _engine(folder: Path) -> Any:
    return build_engine(
        InferenceConfig(
            model={"name": str(folder)},  # pyright: ignore[reportArgumentType]
            engine=EmbeddedEngineConfig(max_batch=4),
            device="cpu",
            num_threads=1,
            max_len=400,
        )
    )


def _greedy(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """What the model of `folder` finds most likely, without a cache, and with which log-probability."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logits_V = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits_V.argmax()))
            logprobs.append(float(logits_V.log_softmax(-1).max()))
    return tokens[len(prompt) :], logprobs


def test_new_weights_from_a_folder_draw_and_broken_ones_do_not(tmp_path: Path) -> None:
    old = write_tiny_model(tmp_path / "old", tie=False, seed=0)
    new = write_tiny_model(tmp_path / "new", tie=False, seed=1)
    broken = shutil.copytree(new, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])

    async def check_draws(client: Client, folder: Path, version: int) -> None:
        answer = await client.generate("a", PROMPT, max_tokens=8, temperature=0.0)
        tokens, logprobs = _greedy(folder, PROMPT, 8)
        assert answer.tokens == tokens and answer.versions == [version] * 8
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-5)

    async def check() -> None:
        engine = _engine(old)
        open_update = WeightReceiver(engine.device).open_update
        async with serve(engine, open_update=open_update) as client:
            await check_draws(client, old, 0)
            for folder in (broken, tmp_path / "missing"):
                refused = await client.post("/update_weights", folder_update(1, str(folder)))
                assert refused.status_code == 422 and str(folder) in error_of(refused)
                await check_draws(client, old, 0)
            polling = asyncio.create_task(client.http.get("/version?at_least=1&timeout_seconds=20"))
            accepted = await client.post("/update_weights", folder_update(1, str(new)))
            assert accepted.status_code == 200, accepted.content
            assert (await polling).content == accepted.content
            assert _greedy(new, PROMPT, 8)[0] != _greedy(old, PROMPT, 8)[0]
            await check_draws(client, new, 1)

    asyncio.run(check())


def test_both_kinds_of_routes_draw_the_same_and_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")

    async def check() -> None:
        engine = _engine(folder)
        async with serve(engine) as client, client.openai() as api:
            plain = await client.generate("a", PROMPT, stop_ids=[END_ID], **SAMPLING)
            answer: Any = await api.completions.create(
                model=MODEL, prompt=PROMPT, n=2, logprobs=0, extra_body={"return_token_ids": True}, **SAMPLING
            )
            assert answer.choices[0].token_ids == plain.tokens != answer.choices[1].token_ids
            assert answer.choices[0].logprobs.token_logprobs == plain.logprobs
            messages: Any = [{"role": "user", "content": "é"}]
            whole = await api.chat.completions.create(model=MODEL, messages=messages, **SAMPLING)
            stream: Any = await api.chat.completions.create(
                model=MODEL, messages=messages, stream=True, **SAMPLING
            )
            pieces = [event.choices[0].delta.content or "" async for event in stream]
            assert "".join(pieces) == whole.choices[0].message.content != ""
            leaving = [
                asyncio.create_task(
                    client.post("/generate", request(f"leaves-{index}", PROMPT, max_tokens=390))
                )
                for index in range(6)
            ]
            await until(lambda: engine.stats().num_waiting == 2, "more requests than places")
            for task in leaving:
                task.cancel()
            await until(
                lambda: engine.stats().num_running + engine.stats().num_waiting == 0, "the places to be free"
            )
            assert engine.stats().num_drawn_tokens < 6 * 390

    asyncio.run(check())
