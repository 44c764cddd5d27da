"""Reading a configuration: precedence, flags, types, and what an error says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from contract.errors import ConfigError
from contract.settings import Settings
from contract.settings.base import PathSetting
from contract.settings.dump import to_toml
from contract.settings.load import Loaded, load_file, load_settings, with_values


class Fast(Settings):
    """Quick."""

    kind: Literal["fast"] = "fast"
    rate: float = Field(default=1.0, gt=0, description="Rate.")
    boost: int = Field(default=2, description="Boost.")


class Slow(Settings):
    """Careful."""

    kind: Literal["slow"] = "slow"
    rate: float = Field(default=0.5, gt=0, description="Rate.")
    care: Literal["little", "much"] = Field(default="much", description="Care.")


class Store(Settings):
    """Storage."""

    interval: int | None = Field(default=None, description="Interval.")
    keep_last: int = Field(default=3, ge=1, description="Kept.")


class Model(Settings):
    """Model."""

    name: str = Field(min_length=1, description="Name.")
    sizes: list[int] = Field(default=[1], description="Sizes.")
    extra: dict[str, int] = Field(default={}, description="Extra.")


class Config(Settings):
    """Everything."""

    model: Model = Field(description="The model.")
    pace: Annotated[Fast | Slow, Field(discriminator="kind")] = Field(default=Fast(), description="Pace.")
    store: Store | None = Field(default=Store(keep_last=7), description="Store.")
    extra_store: Store | None = Field(default=None, description="Another.")
    max_steps: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Steps.")
    shift: float = Field(default=0.0, description="Shift.")
    clean: bool = Field(default=False, description="Clean.")
    live: bool | None = Field(default=None, description="Live.")
    folder: PathSetting = Field(default=Path("out"), description="Folder.")
    tags: list[str] = Field(default=[], description="Tags.")
    stores: list[Store] = Field(default=[], description="Stores.")


Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


def read(*argv: object) -> Loaded[Config]:
    return load_settings(Config, [str(word) for word in argv], prog="prog", description="")


def read_named(*argv: object) -> Config:
    """Read with the one required key given."""
    return read("--model.name", "m", *argv).settings


def error(*argv: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_later_files_win_key_by_key_and_flags_win_over_files(write: Write) -> None:
    a = write(
        "a.toml", 'max_steps = 1\nshift = 1.5\n[model]\nname = "a"\nsizes = [1, 2]\n[model.extra]\nx = 1\n'
    )
    b = write("b.toml", 'max_steps = 2\n[model]\nname = "b"\n[model.extra]\ny = 2\n')
    settings = read("--model.name=c", "@", a, f"@{b}").settings
    assert (settings.model.name, settings.max_steps, settings.shift) == ("c", 2, 1.5)
    assert settings.model.sizes == [1, 2]
    assert settings.model.extra == {"x": 1, "y": 2}
    assert read("@", b, "@", a).settings.max_steps == 1


@pytest.mark.parametrize("flag", ["--store.keep-last", "--store.keep_last"])
def test_kebab_case_and_snake_case_name_the_same_key(flag: str) -> None:
    settings = read_named(flag, "5")
    assert settings.store is not None and settings.store.keep_last == 5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--clean"], True),
        (["--clean", "true"], True),
        (["--clean=false"], False),
        (["--no-clean"], False),
        (["--clean", "false"], False),
        (["--clean", "--shift", "1"], True),
    ],
)
def test_a_bool_flag_takes_every_usual_form(words: list[str], expected: bool) -> None:
    assert read_named(*words).clean is expected


def test_none_unsets_an_optional_key_on_the_command_line_and_in_a_file(write: Write) -> None:
    path = write("a.toml", 'max_steps = 4\nlive = true\nstore = "None"\n')
    settings = read_named("@", path, "--max-steps", "None", "--live", "None")
    assert settings.max_steps is None and settings.live is None and settings.store is None


def test_negative_numbers_are_values() -> None:
    assert read_named("--shift", "-1e-3").shift == -1e-3
    assert read_named("--model.sizes", "-1", "-2").model.sizes == [-1, -2]


def test_lists_are_words_repeated_flags_or_json(write: Write) -> None:
    path = write("a.toml", 'tags = ["z"]\n')
    assert read_named("@", path, "--tags", "a", "b", "--tags", "c").tags == ["a", "b", "c"]
    assert read_named("--tags", '["a", "b c"]', "--clean").tags == ["a", "b c"]
    assert read_named("@", path, "--tags", "[]").tags == []
    assert read_named("--tags", "[draft]").tags == ["[draft]"]


def test_json_sets_dicts_and_whole_sections_over_a_file(write: Write) -> None:
    path = write("a.toml", '[model]\nname = "a"\nsizes = [3]\n')
    settings = read(
        "@", path, "--model", '{"name": "b", "extra": {"k": 1}}', "--model.extra", '{"l": 2}'
    ).settings
    assert settings.model == Model(name="b", sizes=[3], extra={"k": 1, "l": 2})


def test_a_bare_flag_switches_an_optional_section_on_and_keeps_what_a_file_set(write: Write) -> None:
    path = write("a.toml", "[store]\ninterval = 20\n")
    assert read_named("--extra-store").extra_store == Store()
    assert read_named("@", path, "--store").store == Store(interval=20, keep_last=7)
    off = write("off.toml", 'store = "None"\n')
    assert read_named("@", off, "--store").store == Store(keep_last=7)


def test_no_section_switches_it_off_also_over_a_file(write: Write) -> None:
    path = write("a.toml", "[store]\ninterval = 20\n")
    assert read_named("@", path, "--no-store").store is None
    assert "both off" in error("--model.name", "m", "--no-store", "--store.interval", "3")
    assert "both off" in error("--model.name", "m", "--store.interval", "3", "--no-store")


def test_a_part_of_a_section_keeps_the_other_defaults_of_the_field() -> None:
    assert read_named("--store.interval", "2").store == Store(interval=2, keep_last=7)


def test_switching_a_variant_drops_the_old_ones_keys_from_files_and_says_so(write: Write) -> None:
    path = write("a.toml", "[pace]\nrate = 3.0\nboost = 9\n")
    loaded = read("--model.name", "m", "@", path, "--pace.kind", "slow")
    assert loaded.settings.pace == Slow(rate=3.0)
    assert len(loaded.notices) == 1
    assert (
        "pace.boost = 9" in loaded.notices[0]
        and "line 3" in loaded.notices[0]
        and "'slow'" in loaded.notices[0]
    )


def test_a_key_of_another_variant_given_with_the_switch_is_an_error() -> None:
    message = error("--model.name", "m", "--pace.kind", "slow", "--pace.boost", "3")
    assert "pace.boost (command line): not a key of pace.kind = 'slow'; it belongs to 'fast'" in message


def test_unknown_keys_name_path_file_line_and_nearest_key(write: Write) -> None:
    path = write("a.toml", 'max_step = 3\n[model]\nname = "a"\n[pace]\nbost = 3\n')
    message = error("@", path, "--store.kep-last", "3", "--interval", "4")
    assert f"max_step ({path}, line 1): unknown key; did you mean max_steps?" in message
    assert f"pace.bost ({path}, line 5): unknown key; did you mean pace.boost?" in message
    assert "unknown flag `--store.kep-last`; did you mean --store.keep-last?" in message
    assert "--extra-store.interval or --store.interval" in message
    assert message.startswith("4 problems")


def test_a_hidden_unknown_key_of_an_earlier_file_is_found(write: Write) -> None:
    path = write("a.toml", "[store]\nintervall = 3\n")
    assert "store.intervall" in error("--model.name", "m", "@", path, "--no-store")


def test_files_are_not_coerced_and_flags_are_read_by_declared_type(write: Write) -> None:
    path = write("a.toml", 'max_steps = "3"\nshift = true\nclean = 1\n[model]\nname = 5\n')
    message = error("@", path)
    assert (
        f"max_steps ({path}, line 1): found '3', valid is integer >= 1, or None; write it without quotes"
        in message
    )
    assert "shift" in message and "clean" in message and "model.name" in message
    assert "max_steps (command line): found '3.5', valid is integer" in error(
        "--model.name", "m", "--max-steps", "3.5"
    )
    assert "found 0, valid is integer >= 1" in error("--model.name", "m", "--max-steps", "0")
    assert read_named("--tags", "3").tags == ["3"]
    assert read_named("--shift", "3").shift == 3.0


def test_a_choice_names_the_valid_values_and_the_nearest() -> None:
    message = error("--model.name", "m", "--pace.kind", "slow", "--pace", '{"care": "mutch"}')
    assert "pace.care (command line): found 'mutch', valid is little | much; did you mean much?" in message
    assert "valid is fast | slow" in error("--model.name", "m", "--pace.kind", "sloow")


def test_an_unknown_variant_in_a_file_names_the_valid_ones(write: Write) -> None:
    path = write("a.toml", '[pace]\nkind = "slov"\ncare = "much"\n')
    message = error("--model.name", "m", "@", path)
    assert "pace.kind" in message and "fast | slow; did you mean 'slow'?" in message


def test_a_section_as_a_scalar_and_a_scalar_as_a_section_are_typed_errors(write: Write) -> None:
    path = write("a.toml", 'model = "m"\n[max_steps]\na = 1\n')
    message = error("@", path, "--model.name", "x")
    assert f"model ({path}, line 1): is a section, but was given as 'm'; write [model]" in message
    assert f"max_steps ({path}, line 2): is a value, not a section" in message
    assert "model.name" not in message


def test_a_missing_required_key_says_what_it_means_and_how_to_set_it() -> None:
    message = error("--max-steps", "3")
    assert "model.name: not set" in message and "--model.name" in message and "Name." in message


def test_missing_and_broken_files_are_named(write: Write, tmp_path: Path) -> None:
    broken = write("b.toml", "[model]\nname = \n")
    message = error("@", tmp_path / "none.toml", "@", broken, "@", tmp_path)
    assert "there is no such file" in message and "none.toml" in message
    assert f"({broken}, line 2)" in message and "not valid TOML" in message
    assert "is a folder" in message
    assert "not set" not in message  # what the unread files would have set is no problem of its own


def test_a_scalar_flag_given_twice_takes_the_last_value_with_a_notice() -> None:
    loaded = read("--model.name", "m", "--max-steps", "3", "--max_steps=5")
    assert loaded.settings.max_steps == 5
    assert loaded.notices == ["--max-steps is given more than once (3, then 5); the last one counts"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stray"], "unexpected argument 'stray'"),
        (["@"], "not followed by a file"),
        (["--max-steps"], "needs a value"),
        (["--model"], "a section that is always on"),
        (["--no-max-steps"], "`--max-steps None`"),
        (["--model.extra", "x"], "not JSON"),
        (["--no-clean=true"], "takes no value"),
    ],
)
def test_malformed_command_lines_say_what_to_write(words: list[str], expected: str) -> None:
    assert expected in error("--model.name", "m", *words)


def test_switches_are_reported_and_help_and_version_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("--model.name", "m", "--dry-run").dry_run is True
    assert read("--model.name", "m").dry_run is False
    for word in ("--help", "-h", "--version"):
        with pytest.raises(SystemExit) as caught:
            read(word)
        assert caught.value.code == 0
        assert "prog" in capsys.readouterr().out


def test_sources_say_where_each_key_was_set(write: Write) -> None:
    path = write("a.toml", "shift = 1\nmax_steps = 2\n")
    sources = read("--model.name", "m", "@", path, "--max-steps", "3").sources
    assert sources["shift"] == f"{path}, line 1"
    assert sources["max_steps"] == "command line"
    off = read("--model.name", "m", "@", write("b.toml", "[store]\ninterval = 2\n"), "--no-store").sources
    assert off["store"] == "command line" and "store.interval" not in off


def test_no_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_STEPS", "max_steps", "SHIFT", "MODEL", "MODEL__NAME"):
        monkeypatch.setenv(name, "9")
    settings = read_named()
    assert settings.max_steps is None and settings.shift == 0.0 and settings.model.name == "m"


def test_a_resolved_configuration_reads_back_equal(write: Write) -> None:
    settings = read_named(
        "--pace.kind", "slow", "--no-store", "--tags", 'a"b', "é", "--model.extra", '{"k": 3}'
    )
    path = write("resolved.toml", to_toml(settings, header="two\nlines"))
    assert load_file(Config, path) == settings


def test_a_list_of_tables_is_toml_tables_or_json_words_and_its_errors_name_the_item(write: Write) -> None:
    path = write("a.toml", '[[stores]]\ninterval = "None"\n[[stores]]\nkeep_last = 1\n')
    expected = [Store(interval=None), Store(interval=None, keep_last=1)]
    assert read_named("@", path).stores == expected
    assert read_named("--stores", "{}", '{"keep_last": 1}').stores == expected
    assert load_file(Config, write("b.toml", to_toml(read_named("@", path)))).stores == expected
    bad = write("c.toml", '[[stores]]\n[[stores]]\nkeep = 1\nkeep_last = "1"\n')
    message = error("--model.name", "m", "@", bad)
    assert "item 1: unknown key 'keep'" in message and "item 1: keep_last: found '1'" in message


def test_changed_values_are_checked_again_and_the_origin_is_named() -> None:
    settings = read_named()
    assert with_values(settings, {"store.keep_last": 2}, origin="test", prog="prog").store == Store(
        keep_last=2
    )
    with pytest.raises(ConfigError, match=r"store.keep_last \(one per GPU\): found 0"):
        with_values(settings, {"store.keep_last": 0}, origin="one per GPU", prog="prog")
