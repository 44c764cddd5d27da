"""Text of a sequence while it is drawn, against the text of the whole sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inference.openai_api.text import TextStream
from tests.unit.inference.serving import END_ID

ALPHABET = "ab é ß 漢字 👩‍🚀 𝄞\n\t"


def _pieces(stream: TextStream, tokens: list[int], reason: Any, size: int = 1) -> list[str]:
    pieces: list[str] = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        pieces.append(stream.push(part, reason if start + size >= len(tokens) else None))
    return pieces


@pytest.mark.parametrize("size", [1, 2, 7])
def test_pieces_hold_whole_characters_and_make_up_the_text(tokenizer: Any, size: int) -> None:
    draw = random.Random(size)
    for _ in range(20):
        text = "".join(draw.choices(ALPHABET, k=30))
        tokens = tokenizer(text)["input_ids"]
        assert len(tokens) > len(text)  # characters do spread over tokens
        pieces = _pieces(TextStream(tokenizer, [1, 5], [], [END_ID]), tokens, "length", size)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_come_as_the_tokenizer_decodes_them(tokenizer: Any) -> None:
    draw = random.Random(0)
    for _ in range(20):
        tokens = [draw.randrange(3, 259) for _ in range(12)]
        pieces = _pieces(TextStream(tokenizer, [], [], []), tokens, "length")
        assert "".join(pieces) == tokenizer.decode(tokens)


def test_endless_garbage_does_not_stay_open(tokenizer: Any) -> None:
    continuation = tokenizer("é")["input_ids"][1]
    stream = TextStream(tokenizer, [], [], [])
    assert "".join(stream.push([continuation], None) for _ in range(40)) != ""


def test_an_end_token_has_no_text_and_a_special_one_inside_neither(tokenizer: Any) -> None:
    tokens = tokenizer("ab")["input_ids"]
    stream = TextStream(tokenizer, [], [], [tokens[1], END_ID])
    assert "".join(_pieces(stream, [*tokens[:1], 1, tokens[1]], "stop")) == "a"
    stream = TextStream(tokenizer, [], [], [END_ID])
    assert "".join(_pieces(stream, [*tokens, END_ID], "stop")) == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("yes END", [" END"], "yes"),
        ("yes EN", [" END"], "yes EN"),
        ("aXaXb", ["aXb"], "aX"),
        ("one\n\n", ["\n\n"], "one"),
        ("é漢", ["漢"], "é"),
        ("abc", ["bc", "c"], "a"),
    ],
)
def test_nothing_of_a_stop_text_is_given(tokenizer: Any, text: str, stop: list[str], expected: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    reason = "length" if text == expected else "stop"
    stream = TextStream(tokenizer, [], stop, [END_ID])
    assert "".join(_pieces(stream, tokens, reason)) == expected


def test_text_that_cannot_begin_a_stop_text_is_given_at_once(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [], ["END"], [])
    tokens = tokenizer("xENyE")["input_ids"]
    assert _pieces(stream, tokens, "length") == ["x", "", "", "ENy", "E"]


@pytest.mark.parametrize("size", [1, 5])
def test_a_stop_text_before_min_tokens_is_text(tokenizer: Any, size: int) -> None:
    stream = TextStream(tokenizer, [], ["a"], [])
    assert "".join(_pieces(stream, tokenizer("abcba")["input_ids"], "stop", size)) == "abcb"


def test_each_token_knows_where_its_text_begins(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [], [], [])
    _pieces(stream, tokenizer("aéb")["input_ids"], "length")
    assert stream.offsets == [0, 1, 1, 2]
