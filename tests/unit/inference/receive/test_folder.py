from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contract.errors import PublishError
from contract.policy import NOBODY, FolderUpdate
from inference.receive.build import open_update
from inference.receive.folder import read_folder

A = torch.arange(6.0).view(2, 3)
B = torch.tensor([1, 2, 3])


def write(folder: Path) -> Path:
    """Two files and their index."""
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_update_by_folder_hands_out_every_tensor_once(tmp_path: Path) -> None:
    with open_update(FolderUpdate(3, str(write(tmp_path)), NOBODY)) as tensors:
        found = list(tensors)
    assert [name for name, _ in found] == ["a", "b"]
    assert torch.equal(found[0][1], A) and torch.equal(found[1][1], B)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PublishError, match=r"model-00002-of-00002\.safetensors is missing"):
        list(read_folder(tmp_path))
    with pytest.raises(PublishError, match=r"model\.safetensors is missing; this machine must see"):
        list(read_folder(tmp_path / "elsewhere"))


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(PublishError, match=r"model-00001-of-00002\.safetensors cannot be read"):
        list(read_folder(tmp_path))


def test_a_file_that_is_not_what_the_index_says_is_refused(tmp_path: Path) -> None:
    save_file({"c": B}, write(tmp_path) / "model-00002-of-00002.safetensors")
    with pytest.raises(PublishError, match=r"does not hold what .* says: b is in one of them only"):
        list(read_folder(tmp_path))


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    for content in ("{", "{}", '{"weight_map": 3}'):
        (write(tmp_path) / "model.safetensors.index.json").write_text(content)
        with pytest.raises(PublishError, match=r"index\.json is damaged"):
            list(read_folder(tmp_path))
