"""Where a model comes from: Hub id, folder, GGUF file or a file inside a Python package; ends in one local
folder.

Whatever the origin, `ModelSource.folder` is a Hugging Face folder (config, tokenizer, safetensors in any
number of shards). GGUF files are dequantised once to float32 into a cache folder keyed by the file's content.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contract.errors import ModelError
from contract.gguf import dequantize
from contract.sections import ModelFilesConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.py", "*.tiktoken"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as files on this machine.

    Attributes:
        name: as the user wrote it.
        folder: Hugging Face folder.
    """

    name: str
    folder: Path


def resolve_model(config: ModelFilesConfig) -> ModelSource:
    """Find the model's files, fetching or converting them if needed. Safe to call from several processes at
    once.

    Raises:
        ModelError: there is no such file, folder, package or Hub repository, or it holds no usable weights.
    """
    path = find_local(config)
    if path is None:
        return ModelSource(config.name, _fetch_from_hub(config))
    return ModelSource(config.name, dequantize(path) if path.suffix == ".gguf" else path)


def find_local(config: ModelFilesConfig) -> Path | None:
    """The model as a folder or GGUF file on this machine; None if it is one of the Hub. Fetches and converts
    nothing.

    Raises:
        ModelError: it has to be on this machine, and is not, or is no model.
    """
    name = config.name
    if name.startswith("package:"):
        path = _package_file(name)
    else:
        path = Path(name).expanduser()
        looks_local = name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1
        if not path.exists():
            if looks_local:
                raise ModelError(f"model.name = {name!r}: no such file or folder on this machine")
            return None
    if config.revision is not None:
        raise ModelError(
            f"model.revision = {config.revision!r} names a version on the Hub, but model.name = {name!r} is "
            f"found on this machine; remove model.revision"
        )
    if path.suffix != ".gguf" and not (path / "config.json").is_file():
        raise ModelError(
            f"model.name = {name!r}: {path} holds no config.json; name a Hugging Face folder or .gguf file"
        )
    return path


def load_model_config(config: ModelFilesConfig, source: ModelSource) -> PretrainedConfig:
    """The architecture's configuration.

    Raises:
        ModelError: transformers does not know the architecture, or needs `model.trust_remote_code`.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.name = {config.name!r}: its configuration cannot be read: {error}"
        ) from error


def load_tokenizer(config: ModelFilesConfig, source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template that `model.chat_template` sets.

    Raises:
        ModelError: there is no usable tokenizer.
    """
    from transformers import AutoTokenizer

    origin: str | Path = config.tokenizer or source.folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the tokenizer of {str(origin)!r} cannot be loaded: {error}; set model.tokenizer"
        ) from error
    # The name and not the place of its files: renderers are chosen by it.
    tokenizer.name_or_path = config.tokenizer or config.name
    if config.chat_template is not None:
        template = Path(config.chat_template)
        is_file = "{" not in config.chat_template
        if is_file and not template.is_file():
            raise ModelError(
                f"model.chat_template = {config.chat_template!r}: no such file, and not a Jinja template"
            )
        tokenizer.chat_template = template.read_text() if is_file else config.chat_template
    return tokenizer


def _package_file(name: str) -> Path:
    package, separator, file = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if not separator or spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.name = {name!r}: Python package {package!r} is not installed (or the name is not "
            f"package:NAME/FILE); "
            "install it, e.g. `uv sync --group quickstart` for the quickstart model"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.exists():
        raise ModelError(f"model.name = {name!r}: package {package!r} holds no file {file!r}")
    return path


def _fetch_from_hub(config: ModelFilesConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(config.name, revision=config.revision, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.name = {config.name!r} is no local file or folder, and cannot be fetched from the Hub: "
            f"{type(error).__name__}: {error}"
        ) from error
    if config.needs_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.name = {config.name!r}: the repository holds no .safetensors weights")
    return folder
