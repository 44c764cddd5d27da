"""Where a model's files come from, and what is said if there are none. The Hub is never asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelError
from contract.model_files import load_model_config, load_tokenizer, resolve_model
from trainer.config.model import ModelConfig


def resolve(name: str, **settings: Any) -> Path:
    return resolve_model(ModelConfig(name=name, **settings)).folder


def test_a_folder_is_taken_as_it_is(tiny_llama: Path) -> None:
    source = resolve_model(ModelConfig(name=str(tiny_llama)))
    assert (source.name, source.folder) == (str(tiny_llama), tiny_llama)


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "missing.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match=rf"model.name = '{name}': no such file or folder on this machine"):
        resolve(name)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json; name a Hugging Face folder or .gguf file"):
        resolve(str(tmp_path))


def test_a_version_of_something_local_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"model.revision = 'main' names a version on the Hub"):
        resolve(str(tiny_llama), revision="main")


def test_a_file_of_a_package_is_found_and_its_absence_is_said(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tinypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model").symlink_to(tiny_llama)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert resolve("package:tinypackage/model").samefile(tiny_llama)
    with pytest.raises(ModelError, match="package 'tinypackage' holds no file 'other'"):
        resolve("package:tinypackage/other")
    for name in ("package:notinstalled/x", "package:tinypackage", "package:../x"):
        with pytest.raises(ModelError, match="is not installed"):
            resolve(name)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-like-it"}')
    config = ModelConfig(name=str(tmp_path))
    with pytest.raises(ModelError, match=r"its configuration cannot be read: .*nothing-like-it"):
        load_model_config(config, resolve_model(config))


def test_the_chat_template_is_that_of_the_setting_a_file_or_the_tokenizer(
    tiny_llama: Path, tmp_path: Path
) -> None:
    def template(**settings: Any) -> Any:
        config = ModelConfig(name=str(tiny_llama), **settings)
        return load_tokenizer(config, resolve_model(config)).chat_template

    assert "<|im_start|>" in template()
    assert template(chat_template="{{ messages }}") == "{{ messages }}"
    (tmp_path / "own.jinja").write_text("{{ x }}")
    assert template(chat_template=str(tmp_path / "own.jinja")) == "{{ x }}"
    with pytest.raises(ModelError, match="no such file, and not a Jinja template"):
        template(chat_template="missing.jinja")


def test_a_tokenizer_that_cannot_be_loaded_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    config = ModelConfig(name=str(tiny_llama), tokenizer=str(tmp_path))
    with pytest.raises(
        ModelError, match=r"(?s)the tokenizer of '.*' cannot be loaded: .*; set model.tokenizer"
    ):
        load_tokenizer(config, resolve_model(config))
