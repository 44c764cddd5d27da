"""Write the quickstart's chat data: word and letter games over sentences from works in the public domain.

Reads `sentences.txt` and writes `train.jsonl` and `validation.jsonl` beside it; the same input gives the same
bytes. A sentence is cut at its commas into phrases; all phrases of a sentence go to one of the two files, so
that validation shows whether the games were learned rather than the sentences.

    uv run python scripts/make_quickstart_data.py
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "configs" / "quickstart" / "data"
SYSTEM = "You play word games."
MIN_WORDS, MAX_WORDS = 3, 8
VALIDATION_EVERY = 8
"""One sentence in so many is held out."""

GAMES: dict[str, Callable[[list[str]], str]] = {
    "Shout": lambda words: " ".join(words).upper() + "!",
    "Backwards": lambda words: " ".join(reversed(words)),
    "Initials": lambda words: " ".join(word[0].upper() for word in words),
    "Dashes": lambda words: " - ".join(words),
}

Chat = dict[str, list[dict[str, str]]]


def read_sentences(path: Path) -> list[str]:
    """All lines but blank ones and comments."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def cut_phrases(sentence: str) -> list[list[str]]:
    """The words of each phrase of a sentence, in lower case; too short and too long phrases are left out."""
    phrases = [re.findall(r"[a-z]+", part.replace("'", "")) for part in sentence.lower().split(",")]
    return [words for words in phrases if MIN_WORDS <= len(words) <= MAX_WORDS]


def build_chat(words: list[str], games: list[str]) -> Chat:
    """One conversation: the first game names the phrase, each later one is played on the same phrase."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, game in enumerate(games):
        request = f"{game}: {' '.join(words)}" if turn == 0 else f"{game}, same words."
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": GAMES[game](words)})
    return {"messages": messages}


def build_chats(phrases: list[list[str]]) -> list[Chat]:
    """For each phrase two conversations of one game and one of two; every game is played equally often."""
    names = list(GAMES)
    chats = []
    for index, words in enumerate(phrases):
        turn = names[index % len(names) :] + names[: index % len(names)]
        first, second, third, fourth = turn if index // len(names) % 2 else turn[::-1]
        chats += [build_chat(words, games) for games in ([first], [second], [third, fourth])]
    return chats


def split(sentences: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Phrases for training and for validation; none is in both, or twice in one."""
    held_out = sentences[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    kept = [sentence for sentence in sentences if sentence not in set(held_out)]
    train = list(dict.fromkeys(tuple(words) for sentence in kept for words in cut_phrases(sentence)))
    validation = dict.fromkeys(tuple(words) for sentence in held_out for words in cut_phrases(sentence))
    return [list(words) for words in train], [list(words) for words in validation if words not in set(train)]


def main() -> None:
    """Write both files and say how many conversations they hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write to (default: %(default)s)")
    out: Path = parser.parse_args().out
    for name, phrases in zip(
        ("train", "validation"), split(read_sentences(DATA / "sentences.txt")), strict=True
    ):
        chats = build_chats(phrases)
        lines = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{out / name}.jsonl: {len(chats)} conversations over {len(phrases)} phrases")


if __name__ == "__main__":
    main()
