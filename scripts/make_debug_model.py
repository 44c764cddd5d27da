"""Make configs/debug/model: a tiny byte-level chat model that half knows the task of configs/debug/rl.toml.

    uv run python -m scripts.make_debug_model [--steps 1500] [--out configs/debug/model]

It is trained to answer `sort-letters` with the letters of the question in any order, and more often than by
chance in the right one. So every group of episodes has rewards to compare, and RL has something to find.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from orchestrator.environment.builtin.sort_letters import SortLetters
from tests.support.tiny_model import write_tiny_model

SORTED_SHARE = 0.15
"""Examples with the right answer; the others have the letters in an order drawn at random."""

_BATCH = 64
_LR = 3e-3
_REPORTED_TASKS = 256


def _prompt(
    tokenizer: PreTrainedTokenizerBase, environment: SortLetters, task: Mapping[str, Any]
) -> list[int]:
    text = tokenizer.apply_chat_template(environment.start(task), add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)


def _example(
    tokenizer: PreTrainedTokenizerBase, environment: SortLetters, index: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Token ids, and labels that are -100 up to the answer."""
    task = environment.task(index)
    letters = list(task["letters"])
    rng.shuffle(letters)
    if rng.random() < SORTED_SHARE:
        letters.sort()
    prompt_ids = _prompt(tokenizer, environment, task)
    answer_ids = tokenizer.encode(f"{''.join(letters)}<|im_end|>", add_special_tokens=False)
    return [*prompt_ids, *answer_ids], [-100] * len(prompt_ids) + answer_ids


def _train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, environment: SortLetters, steps: int
) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LR, total_steps=steps)
    for step in range(steps):
        rows = [_example(tokenizer, environment, step * _BATCH + row, rng) for row in range(_BATCH)]
        # All questions have the same length, and so have all answers.
        tokens, labels = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def _mean_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, environment: SortLetters) -> str:
    generate: Any = model.generate  # declared as a module's attribute
    total = exact = 0.0
    for index in range(_REPORTED_TASKS):
        task = environment.task(index)
        ids = torch.tensor([_prompt(tokenizer, environment, task)])
        drawn = generate(ids, do_sample=True, max_new_tokens=8, top_k=0)[0, ids.shape[1] :]
        answer = tokenizer.decode(drawn, skip_special_tokens=True)
        reward = environment.reward(task, [{"role": "assistant", "content": answer}], {})
        total, exact = total + reward["reward"], exact + reward["exact"]
    return f"mean reward {total / _REPORTED_TASKS:.3f}, exact {exact / _REPORTED_TASKS:.3f}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("configs/debug/model"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    settings = {"min_length": 3, "max_length": 3, "alphabet": "abcdefgh"}
    write_tiny_model(arguments.out, hidden=64)
    model = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.out)
    _train(model, tokenizer, SortLetters(**settings), arguments.steps)
    print(_mean_reward(model, tokenizer, SortLetters(split="test", **settings)))
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
