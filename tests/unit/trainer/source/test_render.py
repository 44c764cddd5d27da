"""Tokens and the mask of tokens that carry loss.

The reference is written out by hand: a list of pieces of text, each with or without loss. With the tiny
    tokenizer a
token is a byte or a special token, so pieces encode on their own as they do inside the whole.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from contract.errors import DataError
from tests.unit.trainer.source.chats import assistant, chat, system, tool, user
from trainer.source.conversation import RowError, parse_conversation
from trainer.source.render import ConversationRenderer, Rendered

Pieces = list[tuple[str, bool]]

TRIMMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is dropped from all but the last turn, which gets an empty block if it has none.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role != 'assistant' %}{{ m.content }}{% elif not loop.last %}{{ text }}"
    "{% elif '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0].rstrip('\n') + '\n</think>\n\n' + text }}"
    "{% else %}{{ '<think>\n\n</think>\n\n' + text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a reasoning block that the history does not show.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MERGED_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if messages[0].role == 'system' and loop.last %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
TOOLS = (
    "{% if tools is not none %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{% if m.content %}\n{% endif %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}HEAD\n{{ m.content }}<|im_end|>TAIL{% endfor %}"
TAIL_DEPENDS = TURNS.replace("TAIL", "{{ m.content | length }}").replace("HEAD", "")
SAID_TWICE = TURNS.replace("TAIL", "{{ m.content }}").replace("HEAD", "")
HEAD_DEPENDS = TURNS.replace("HEAD", " {{ m.content | length }}").replace("TAIL", "")


def encode(tokenizer: PreTrainedTokenizerBase, pieces: Pieces) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    mask: list[bool] = []
    for text, has_loss in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [has_loss] * len(ids)
    return tokens, mask


def render(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], *, last_only: bool = False
) -> Rendered | RowError:
    return ConversationRenderer(tokenizer, last_only=last_only).render([parse_conversation(row)])[0]


def check(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], pieces: Pieces, *, last_only: bool = False
) -> None:
    rendered = render(tokenizer, row, last_only=last_only)
    assert isinstance(rendered, Rendered), rendered
    tokens, mask = encode(tokenizer, pieces)
    assert rendered.tokens.tolist() == tokens
    assert rendered.trainable.tolist() == mask


def test_the_quickstart_model_renders_to_these_ids_and_this_mask(
    quickstart_tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = chat(system("Be brief."), user("Say cat"), assistant("Cat!"), user("Say  dog"), assistant("Dog 🐶"))
    rendered = render(quickstart_tokenizer, row)
    assert isinstance(rendered, Rendered)
    by_hand = [
        (1, 0), (9690, 0), (198, 0), (6077, 0), (5453, 0), (30, 0), (2, 0), (198, 0),  # system, Be brief.
        (1, 0), (4093, 0), (198, 0), (36218, 0), (2644, 0), (2, 0), (198, 0),  # user, Say cat
        (1, 0), (520, 0), (9531, 0), (198, 0),  # ass-istant
        (27772, 1), (17, 1), (2, 1), (198, 0),  # Cat!, end of turn; the line break has no loss
        (1, 0), (4093, 0), (198, 0), (36218, 0), (216, 0), (2767, 0), (2, 0), (198, 0),  # two blanks
        (1, 0), (520, 0), (9531, 0), (198, 0),  # ass-istant
        (44378, 1), (15107, 1), (234, 1), (131, 1), (2, 1), (198, 0),  # Dog and three tokens of bytes
    ]  # fmt: skip
    assert rendered.tokens.tolist() == [token for token, _ in by_hand]
    assert rendered.trainable.tolist() == [bool(loss) for _, loss in by_hand]


def test_the_quickstart_models_default_system_prompt_carries_no_loss(
    quickstart_tokenizer: PreTrainedTokenizerBase,
) -> None:
    for messages in ([user("Hi"), assistant("Yo")], [assistant("Yo"), user("Hi")]):
        rendered = render(quickstart_tokenizer, chat(*messages))
        assert isinstance(rendered, Rendered)
        text = quickstart_tokenizer.decode(rendered.tokens)
        assert str(text).startswith("<|im_start|>system\nYou are a helpful AI assistant")
        assert quickstart_tokenizer.decode(rendered.tokens[rendered.trainable]) == "Yo<|im_end|>"


def test_every_assistant_turn_and_its_end_token_carry_loss_and_nothing_else(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = chat(system("s"), user("u"), assistant("a1"), user("v"), assistant("a2"))
    first: Pieces = [
        ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n", False)
    ]
    second: Pieces = [("\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n", False)]
    last: Pieces = [("a2<|im_end|>", True), ("\n", False)]
    check(tokenizer, row, [*first, ("a1<|im_end|>", True), *second, *last])
    check(tokenizer, row, [*first, ("a1<|im_end|>", False), *second, *last], last_only=True)


def test_text_that_equals_answers_or_template_parts_does_not_move_the_mask(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    trap = "yes<|im_end|>\n<|im_start|>assistant\nyes"
    check(
        tokenizer,
        chat(user("yes"), assistant(trap), user(trap), assistant("yes")),
        [
            ("<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n", False),
            (f"{trap}<|im_end|>", True),
            (f"\n<|im_start|>user\n{trap}<|im_end|>\n<|im_start|>assistant\n", False),
            ("yes<|im_end|>", True),
            ("\n", False),
        ],
    )


def test_the_private_marker_in_a_row_does_not_move_the_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    marker = "\ue000turn\ue001"
    pieces: Pieces = [
        (f"<|im_start|>user\n{marker}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{marker}{marker}<|im_end|>", True),
        ("\n", False),
    ]
    check(tokenizer, chat(user(marker), assistant(marker * 2)), pieces)


def test_two_user_turns_and_a_user_turn_at_the_end_are_rendered(tokenizer: PreTrainedTokenizerBase) -> None:
    check(
        tokenizer,
        chat(user("a"), user("b"), assistant("c"), user("d")),
        [
            ("<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False),
            ("c<|im_end|>", True),
            ("\n<|im_start|>user\nd<|im_end|>\n", False),
        ],
    )


def test_a_template_that_trims_text_is_followed(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TRIMMED
    check(
        tokenizer,
        chat(user(" u "), assistant("\n a \n"), user("v"), assistant("b")),
        [
            ("<|im_start|>user\nu<|im_end|><|im_start|>assistant\n", False),
            ("a<|im_end|>", True),
            ("<|im_start|>user\nv<|im_end|><|im_start|>assistant\n", False),
            ("b<|im_end|>", True),
        ],
    )


def test_reasoning_that_the_template_drops_or_adds_is_followed(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = REASONING
    thought = "<think>\nhm\n</think>\n\n"
    head = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    for last, rendered_last in ((f"{thought}b", f"{thought}b"), ("b", "<think>\n\n</think>\n\nb")):
        check(
            tokenizer,
            chat(user("u"), assistant(f"{thought}a"), user("u"), assistant(last)),
            [
                (head, False),
                ("a<|im_end|>", True),
                (f"\n{head}", False),
                (f"{rendered_last}<|im_end|>", True),
                ("\n", False),
            ],
        )


def test_what_only_the_generation_prompt_supplies_does_not_stop_the_proof(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = OPENED
    head = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    check(tokenizer, chat(user("u"), assistant("a")), [(head, False), ("a<|im_end|>", True), ("\n", False)])


def test_a_template_without_generation_prompt_or_roles_of_its_own_is_followed(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = MERGED_SYSTEM
    check(
        tokenizer,
        chat(system("s"), user("u"), assistant("a"), user("v"), assistant("b")),
        [
            ("[INST] u [/INST] ", False),
            ("a<|im_end|>", True),
            ("[INST] v [/INST] ", False),
            ("b<|im_end|>", True),
        ],
    )


def test_without_an_end_token_only_the_text_carries_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = PLAIN_TEXT
    row = chat(user("u"), assistant("a"), user("v"), assistant("b"))
    pieces: Pieces = [
        ("user: u\nassistant:", False),
        (" a", True),
        ("\nuser: v\nassistant:", False),
        (" b", True),
    ]
    check(tokenizer, row, [*pieces, ("\n", False)])


def test_tools_reach_the_template_and_tool_calls_carry_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TOOLS
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [user("u"), assistant("", tool_calls=[call]), tool("3"), assistant("is 3")]
    expected: Pieces = [
        ("<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n", False),
        ('<call>add {"a": 1}</call><|im_end|>', True),
        ("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False),
        ("is 3<|im_end|>", True),
        ("\n", False),
    ]
    check(tokenizer, chat(*messages), expected)
    check(tokenizer, chat(*messages, tools=[]), [("<|im_start|>tools\n[]<|im_end|>\n", False), *expected])
    check(
        tokenizer,
        chat(*messages, tools='[{"f": 1}]'),
        [('<|im_start|>tools\n[{"f": 1}]<|im_end|>\n', False), *expected],
    )


@pytest.mark.parametrize("template", [TAIL_DEPENDS, SAID_TWICE, HEAD_DEPENDS])
def test_a_turn_that_cannot_be_told_apart_is_an_error_never_a_guess(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    tokenizer.chat_template = template
    result = render(tokenizer, chat(user("u"), assistant("a"), user("v")))
    assert isinstance(result, RowError)
    assert result.reason == "assistant tokens cannot be told apart"
    assert "messages[1]" in result.detail


def test_a_row_that_the_template_refuses_is_an_error_of_that_row_alone(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + PLAIN_TEXT
    )
    rows = [chat(assistant("a")), chat(user("u"), assistant("a"))]
    renderer = ConversationRenderer(tokenizer, last_only=False)
    refused, rendered = renderer.render([parse_conversation(row) for row in rows])
    assert isinstance(refused, RowError) and "user first" in refused.detail
    assert isinstance(rendered, Rendered)


def test_tokens_equal_what_the_tokenizer_itself_makes_of_the_conversation(
    quickstart_tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [
        chat(user("  a\n\n"), assistant(" b  c\n")),
        chat(user("x" * 300), assistant("é\u00a0<|im_end|> y")),
    ]
    renderer = ConversationRenderer(quickstart_tokenizer, last_only=False)
    for row, rendered in zip(rows, renderer.render([parse_conversation(row) for row in rows]), strict=True):
        assert isinstance(rendered, Rendered)
        assert rendered.tokens.tolist() == quickstart_tokenizer.apply_chat_template(
            row["messages"], return_dict=False
        )


def test_spans_without_leading_white_space_are_completed(tokenizer: PreTrainedTokenizerBase) -> None:
    from tokenizers import processors

    tokenizer.chat_template = MERGED_SYSTEM  # what precedes an answer ends with a space
    row = chat(user("u"), assistant(" a \n b "))
    expected = render(tokenizer, row)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # pyright: ignore
    trimmed = render(tokenizer, row)
    assert isinstance(expected, Rendered) and isinstance(trimmed, Rendered)
    assert trimmed.trainable.tolist() == expected.trainable.tolist()


def test_a_family_renderer_that_agrees_gives_the_mask_and_equals_the_proof_by_template(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    words = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens(words)
    tokenizer.chat_template = REASONING
    row = chat(user("u"), assistant("a"), user("v"), assistant("<think>\nhm\n</think>\n\nb"))
    by_template = render(tokenizer, row)
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    renderer = ConversationRenderer(tokenizer, last_only=False)
    assert renderer.method == "chat template, checked with Qwen3Renderer"
    by_family = renderer.render([parse_conversation(row)])[0]
    assert isinstance(by_template, Rendered) and isinstance(by_family, Rendered)
    assert by_family.trainable.tolist() == by_template.trainable.tolist()
    assert by_family.trainable.any()


def test_a_family_renderer_that_differs_from_the_tokenizers_template_is_not_used(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.add_tokens(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    )
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    head = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    check(tokenizer, chat(user("u"), assistant("a")), [(head, False), ("a<|im_end|>", True), ("\n", False)])


def test_a_tokenizer_without_chat_template_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"set model\.chat_template"):
        ConversationRenderer(tokenizer, last_only=False)


def test_the_digest_follows_template_vocabulary_and_choice_of_turns(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    digests = [ConversationRenderer(tokenizer, last_only=last).digest() for last in (False, False, True)]
    assert digests[0] == digests[1] != digests[2]
    tokenizer.add_tokens(["word"])
    digests.append(ConversationRenderer(tokenizer, last_only=False).digest())
    tokenizer.chat_template = PLAIN_TEXT
    digests.append(ConversationRenderer(tokenizer, last_only=False).digest())
    assert len(set(digests)) == 4


def test_half_a_surrogate_pair_is_an_error_of_its_row(tokenizer: PreTrainedTokenizerBase) -> None:
    result = render(tokenizer, chat(user("\ud800"), assistant("a")))
    assert isinstance(result, RowError) and result.reason == "not Unicode text"


def test_a_turn_that_the_template_leaves_out_is_never_trained_as_an_empty_answer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    silent = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    result = render(tokenizer, chat(user("u"), silent))
    assert isinstance(result, RowError) and "leaves out all of it" in result.detail
