"""OpenAI's routes, asked by OpenAI's own client over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from contract.policy import GenerateRequest, PauseRequest
from tests.support.fake_engine import FakeEngine, Script, echo
from tests.unit.inference.serving import END_ID, MODEL, Client, serve, until

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def _run(
    tokenizer: Any,
    check: Callable[[Client, openai.AsyncOpenAI, FakeEngine], Awaitable[None]],
    script: Script = echo,
    **settings: Any,
) -> None:
    async def run() -> None:
        engine = FakeEngine(tokenizer, script, max_len=64)
        async with serve(engine, **settings) as client, client.openai() as api:
            await check(client, api, engine)

    asyncio.run(run())


def _says(tokenizer: Any, text: str, *, ends: bool = True) -> Script:
    tokens = tokenizer(text)["input_ids"] + [END_ID] * ends
    return lambda request: tokens


def test_the_model_is_listed_and_found_by_its_name(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        assert [model.id async for model in await api.models.list()] == [MODEL]
        assert (await api.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            await api.models.retrieve("other")

    _run(tokenizer, check)


def test_a_chat_is_the_text_of_what_was_drawn_after_the_template(tokenizer: Any) -> None:
    prompts: list[list[int]] = []
    tokens = tokenizer("héy 漢")["input_ids"]

    def script(request: GenerateRequest) -> list[int]:
        prompts.append(request.prompt)
        return [*tokens, END_ID]

    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        messages: Any = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        answer = await api.chat.completions.create(model=MODEL, messages=messages)
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and choice.message.content == "héy 漢"
        assert choice.finish_reason == "stop" and choice.logprobs is None
        text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        assert prompts == [tokenizer(text)["input_ids"]]
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens == len(prompts[0])
        assert usage.completion_tokens == len(tokens) + 1
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    _run(tokenizer, check, script)


def test_a_streamed_chat_says_the_same_as_a_whole_one(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        settings: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "n": 2,
            "stop": [" END"],
            "logprobs": True,
            "seed": 3,
        }
        whole = await api.chat.completions.create(**settings)
        stream: Any = await api.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        texts, logprobs, reasons, roles = ["", ""], [[], []], ["", ""], ["", ""]
        usage = None
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role or ""
                reasons[choice.index] += choice.finish_reason or ""
                logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        assert texts == [choice.message.content for choice in whole.choices] == ["héy 👩‍🚀"] * 2
        assert reasons == ["stop"] * 2 and roles == ["assistant"] * 2
        assert logprobs == [choice.logprobs.content for choice in whole.choices if choice.logprobs]
        assert usage == whole.usage

    _run(tokenizer, check, _says(tokenizer, "héy 👩‍🚀 END no more", ends=False))


def test_completions_take_texts_and_ids_and_give_each_its_choices(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        for prompt in ("ab", ["ab", "c"], tokenizer("ab")["input_ids"], [[70, 71], [72]]):
            answer: Any = await api.completions.create(
                model=MODEL, prompt=prompt, n=2, max_tokens=4, extra_body={"return_token_ids": True}
            )
            one = isinstance(prompt, str) or isinstance(prompt[0], int)
            texts = [prompt] if one else prompt
            ids = [tokenizer(text)["input_ids"] if isinstance(text, str) else text for text in texts]
            assert [choice.index for choice in answer.choices] == list(range(2 * len(ids)))
            for choice in answer.choices:
                mine = ids[choice.index // 2]
                assert choice.prompt_token_ids == mine
                assert choice.token_ids == (mine * 4)[:4]
                assert choice.text == tokenizer.decode(choice.token_ids) and choice.finish_reason == "length"
            assert answer.usage.prompt_tokens == sum(len(item) for item in ids)
        default = await api.completions.create(model=MODEL, prompt="ab")
        assert default.usage is not None and default.usage.completion_tokens == 16

    _run(tokenizer, check)


def test_logprobs_are_those_of_the_drawn_tokens(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        answer = await api.completions.create(model=MODEL, prompt="aé", max_tokens=3, logprobs=0)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs == [-0.125, -0.25, -0.375]
        assert logprobs.tokens == ["a", "\ufffd", "\ufffd"] and logprobs.text_offset == [0, 1, 1]
        chat = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], max_completion_tokens=6, logprobs=True
        )
        content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert content is not None and content[1].token == "u" and content[1].bytes == [ord("u")]
        assert [item.logprob for item in content] == [-(place + 1) / 8 for place in range(6)]

    _run(tokenizer, check)


def test_settings_reach_the_engine_and_each_choice_has_its_own_seed(tokenizer: Any) -> None:
    seen: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[int]:
        seen.append(request)
        return [70]

    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        messages: Any = [{"role": "user", "content": "a"}]
        extra = {"top_k": 5, "min_tokens": 2, "stop_token_ids": [9]}
        for _ in range(2):
            await api.chat.completions.create(
                model=MODEL,
                messages=messages,
                n=3,
                temperature=0.5,
                top_p=0.9,
                max_tokens=3,
                seed=11,
                stop="x",
                user="me",
                frequency_penalty=0,
                extra_body=extra,
            )
        first, second = ([item.sampling for item in part] for part in (seen[:3], seen[3:]))
        assert first == second and first[0].seed == 11 and len({item.seed for item in first}) == 3
        sampling = first[0]
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
        assert (sampling.max_tokens, sampling.min_tokens) == (3, 2)
        assert sampling.stop == ["x"] and sampling.stop_ids == [END_ID, 9]
        seen.clear()
        await api.chat.completions.create(model=MODEL, messages=messages)
        assert seen[0].sampling.seed is None and len({item.request_id for item in seen}) == 1
        assert seen[0].sampling.max_tokens == 64 - len(seen[0].prompt)

    _run(tokenizer, check, script)


def test_errors_have_the_form_that_the_client_knows(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        messages: Any = [{"role": "user", "content": "a" * 100}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="does not fit") as caught:
                await api.chat.completions.create(model=MODEL, messages=messages, stream=stream)
            assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as missing:
            await api.completions.create(model="other", prompt="a")
        assert missing.value.code == "model_not_found" and missing.value.param == "model"
        response = await client.http.post("/v1/completions", content=b"no json")
        assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"]
        assert (await client.http.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"

    _run(tokenizer, check)


def test_a_wrong_key_is_an_authentication_error(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            await api.models.list()
        assert caught.value.code == "invalid_api_key"
        async with client.openai("secret") as right:
            assert [model.id async for model in await right.models.list()] == [MODEL]

    _run(tokenizer, check, api_key="secret")


def test_a_client_that_leaves_a_stream_ends_all_its_choices(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        stream: Any = await api.completions.create(model=MODEL, prompt="ab", n=3, max_tokens=50, stream=True)
        async for _ in stream:
            engine.step.clear()
            break
        assert engine.stats().num_running == 3
        await stream.close()
        await until(lambda: engine.stats().num_running == 0, "the choices to end in the engine")
        waiting = client.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "ab"}, timeout=httpx.Timeout(5, read=0.1)
        )
        with pytest.raises(httpx.ReadTimeout):
            await waiting
        await until(lambda: engine.stats().num_running == 0, "the request to end in the engine")

    _run(tokenizer, check)


def test_an_engine_that_fails_in_a_stream_is_an_error_and_not_the_end_of_the_text(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        stream: Any = await api.completions.create(model=MODEL, prompt="ab", max_tokens=50, stream=True)
        with pytest.raises(openai.APIError, match="out of memory"):
            async for _ in stream:
                engine.step.clear()
                engine.failure = RuntimeError("out of memory")
        with pytest.raises(openai.InternalServerError):
            await api.completions.create(model=MODEL, prompt="ab", stream=True)

    _run(tokenizer, check)


def test_a_request_that_a_pause_aborts_says_so(tokenizer: Any) -> None:
    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        engine.step.clear()
        waiting = asyncio.create_task(api.completions.create(model=MODEL, prompt="ab", max_tokens=50))
        await until(lambda: engine.stats().num_running == 1, "the request to run")
        await client.post("/pause", PauseRequest("abort"))
        assert (await waiting).choices[0].finish_reason == "abort"

    _run(tokenizer, check)


def test_tools_and_calls_reach_the_chat_template(tokenizer: Any) -> None:
    prompts: list[str] = []

    def script(request: GenerateRequest) -> list[int]:
        prompts.append(tokenizer.decode(request.prompt))
        return [END_ID]

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    template = (
        "{{ tools | map(attribute='function') | map(attribute='name') | join }}|"
        "{{ messages[1].tool_calls[0].function.arguments.a + 1 }}|{{ messages[2].content }}|{{ flavour }}"
    )

    async def check(client: Client, api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        original, tokenizer.chat_template = tokenizer.chat_template, template
        try:
            extra = {"chat_template_kwargs": {"flavour": "sour"}}
            await api.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, extra_body=extra)
            with pytest.raises(openai.BadRequestError, match="does not take these messages"):
                await api.chat.completions.create(model=MODEL, messages=messages[:1], tools=TOOLS)
            tokenizer.chat_template = None
            with pytest.raises(openai.BadRequestError, match=r"set model\.chat_template"):
                await api.chat.completions.create(model=MODEL, messages=messages)
        finally:
            tokenizer.chat_template = original

    _run(tokenizer, check, script)
    assert prompts == ["add|2|2|sour"]
