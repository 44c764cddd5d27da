"""Which sequence is in which slot, and one token for each of them at a time.

Owns the slots, the queue of those that wait, and the version of the weights. Synchronous, and used by one
thread; when to step and who learns of the tokens is the worker's concern.

What a sequence draws does not depend on the others: its prompt is computed alone, or copied from a slot that
computed the same prompt with the same weights; each token among a number of rows that `SlotModel` found to
give the same bits; and its random numbers are its own.

A slot keeps its prompt's keys after its sequence has ended, until another takes it: that, and the logits
after the prompt, is all there is of shared prefixes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from contract.errors import PolicyServerError
from inference.engine.model import SlotModel
from inference.engine.sampler import draw, uniforms
from inference.engine.sequence import Sequence


class Scheduler:
    """Continuous batching over the slots of one model.

    Attributes:
        version: of the weights.
        num_prompt_tokens, num_drawn_tokens, num_prefills, num_updates: see `base.EngineStats`.
    """

    def __init__(self, model: SlotModel, max_len: int, version: int = 0) -> None:
        self._model = model
        self._max_len = max_len
        num_slots = model.num_slots
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence | None] = [None] * num_slots
        # Prompt whose keys lie at the start of each slot, and when the slot was last given to a sequence.
        self._prompts: list[tuple[int, ...] | None] = [None] * num_slots
        self._last_used = [0] * num_slots
        self._clock = 0
        self._tokens = [0] * num_slots
        self._temperatures = [1.0] * num_slots
        shape = (num_slots, model.vocab_size)
        self._first_logits = torch.zeros(shape, device=model.device)
        self._logits = torch.zeros(shape, device=model.device)
        self._changed: dict[Sequence, None] = {}
        self.version = version
        self.num_prompt_tokens = 0
        self.num_drawn_tokens = 0
        self.num_prefills = 0
        self.num_updates = 0

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return sum(sequence is not None for sequence in self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot yet."""
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Let it wait for a slot; first come, first served."""
        self._waiting.append(sequence)

    @torch.inference_mode()
    def step(self, admit: bool) -> None:
        """Draw one token for every running sequence, and the first one for those that get a slot now.

        Args:
            admit: whether those that wait may get one.
        """
        self.drop_cancelled()
        if self.num_running:
            self._decode()
        while admit and self._waiting and self.num_running < self._model.num_slots:
            self._admit(self._waiting.popleft())
        if self.num_running:
            self._draw()

    def drop_cancelled(self) -> None:
        """Forget the sequences whose caller has left."""
        for sequence in self._running:
            if sequence is not None and sequence.is_cancelled:
                self._release(sequence)
                self._changed.pop(sequence, None)
        if any(sequence.is_cancelled for sequence in self._waiting):
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.is_cancelled)

    def abort(self, waiting: bool = False) -> None:
        """End the running sequences with what they have, and, if asked, those that wait."""
        ended = [sequence for sequence in self._running if sequence is not None]
        for sequence in ended:
            self._release(sequence)
        if waiting:
            ended += self._waiting
            self._waiting.clear()
        for sequence in ended:
            sequence.finish_reason = "abort"
            self._changed[sequence] = None

    def update(self, copy_weights: Callable[[Any], None], version: int) -> None:
        """Replace the weights by `copy_weights(lm)`, and forget all prompts computed with the old ones.
        Running sequences go on with the keys they have.
        """
        copy_weights(self._model.lm)
        self._prompts = [None] * self._model.num_slots
        self.version = version
        self.num_updates += 1

    def take_changed(self, only_ended: bool) -> list[Sequence]:
        """Sequences that drew or ended since they were last taken."""
        taken = [
            sequence
            for sequence in self._changed
            if not only_ended or sequence.finish_reason is not None or sequence.error is not None
        ]
        for sequence in taken:
            del self._changed[sequence]
        return taken

    def _decode(self) -> None:
        self._compact()
        num_rows = self._num_rows()
        positions, longest = [], 0
        for slot in range(num_rows):
            sequence, prompt = self._running[slot], self._prompts[slot]
            if sequence is not None:
                positions.append(sequence.num_tokens - 1)
                longest = max(longest, sequence.num_tokens)
            else:
                # Computed for nothing, and written where it harms nothing: behind a prompt that may be
                # shared later.
                positions.append(len(prompt) if prompt is not None else 0)
        device = self._model.device
        self._logits[:num_rows] = self._model.decode(
            torch.tensor(self._tokens[:num_rows], device=device),
            torch.tensor(positions, device=device),
            longest,
        )

    def _compact(self) -> None:
        """Move sequences to lower slots where fewer rows then do."""
        limit = self._rows_for(self.num_running)
        for sequence in self._running[limit:]:
            if sequence is None or sequence.slot is None:
                continue
            source, target = sequence.slot, self._choose(sequence, limit)
            self._model.cache.copy(source, target, sequence.num_tokens - 1)
            self._first_logits[target] = self._first_logits[source]
            self._prompts[target] = self._prompts[source]
            self._running[source] = None
            self._place(sequence, target, self._tokens[source])

    def _admit(self, sequence: Sequence) -> None:
        if sequence.is_cancelled:
            return
        prompt = sequence.request.prompt
        donor = self._find(sequence.key)
        if donor is not None:
            # One object for all of a group: comparing it with itself is quick.
            sequence.key = self._prompts[donor] or sequence.key
        slot = self._choose(sequence, self._rows_for(self.num_running + 1))
        if donor is None:
            self._first_logits[slot] = self._model.prefill(prompt, slot)
            self.num_prefills += 1
        elif donor != slot:
            self._model.cache.copy(donor, slot, len(prompt))
            self._first_logits[slot] = self._first_logits[donor]
        self._prompts[slot] = sequence.key
        self._logits[slot] = self._first_logits[slot]
        self._place(sequence, slot, 0)
        self.num_prompt_tokens += len(prompt)

    def _place(self, sequence: Sequence, slot: int, token: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock
        self._running[slot] = sequence
        self._tokens[slot] = token
        self._temperatures[slot] = sequence.request.sampling.temperature
        sequence.slot = slot

    def _find(self, key: tuple[int, ...]) -> int | None:
        """A slot that holds this prompt."""
        return next((slot for slot, prompt in enumerate(self._prompts) if prompt == key), None)

    def _choose(self, sequence: Sequence, limit: int) -> int:
        """A free slot below `limit`: one that holds the prompt already, or the least loss to others."""
        free = [slot for slot in range(limit) if self._running[slot] is None]

        def loss(slot: int) -> tuple[bool, bool, int]:
            prompt = self._prompts[slot]
            is_last = prompt is not None and self._prompts.count(prompt) == 1
            return prompt != sequence.key, is_last, self._last_used[slot]

        return min(free, key=loss)

    def _rows_for(self, num_sequences: int) -> int:
        return next(count for count in self._model.row_counts if count >= num_sequences)

    def _num_rows(self) -> int:
        """Rows of a step that reach the highest running sequence."""
        highest = max(slot for slot, sequence in enumerate(self._running) if sequence is not None)
        return self._rows_for(highest + 1)

    def _draw(self) -> None:
        num_rows = self._num_rows()
        rows = self._running[:num_rows]
        top_k: dict[int, int] = {}
        top_p: dict[int, float] = {}
        for slot, sequence in enumerate(rows):
            if sequence is None:
                continue
            sampling = sequence.request.sampling
            if sampling.temperature > 0 and 0 < sampling.top_k < self._model.vocab_size:
                top_k[slot] = sampling.top_k
            if sampling.temperature > 0 and sampling.top_p < 1.0:
                top_p[slot] = sampling.top_p
            if sequence.may_not_stop and sampling.stop_ids:
                self._logits[slot, list(sampling.stop_ids)] = float("-inf")
        temperatures = self._temperatures[:num_rows]
        device = self._model.device
        numbers = uniforms(
            [sequence.stream if sequence is not None else 0 for sequence in rows],
            [sequence.num_drawn if sequence is not None else 0 for sequence in rows],
        )
        tokens_B, logprobs_B = draw(
            self._logits[:num_rows],
            torch.from_numpy(numbers).to(device),
            torch.tensor(temperatures, device=device),
            top_k,
            top_p,
            greedy=0.0 in temperatures,
        )
        tokens, logprobs = tokens_B.tolist(), logprobs_B.tolist()
        for slot, sequence in enumerate(rows):
            if sequence is not None:
                self._push(sequence, slot, tokens[slot], logprobs[slot])

    def _push(self, sequence: Sequence, slot: int, token: int, logprob: float) -> None:
        self._changed[sequence] = None
        if not math.isfinite(logprob):
            # Or the next sequence of this slot would read it.
            self._model.cache.clean()
            sequence.error = PolicyServerError(
                f"request {sequence.request.request_id}: the logits of version {self.version} are not finite "
                f"after {sequence.num_tokens} tokens; load other weights"
            )
            self._release(sequence)
            return
        self._tokens[slot] = token
        self.num_drawn_tokens += 1
        sequence.push(token, logprob, self.version, self._max_len)
        if sequence.finish_reason is not None:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._running[sequence.slot] = None
            self._temperatures[sequence.slot] = 1.0
            self._tokens[sequence.slot] = 0
            sequence.slot = None
