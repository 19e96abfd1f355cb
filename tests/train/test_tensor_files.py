from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paralign.errors import ConfigError
from paralign.train.tensor_files import new_folder, write_durably, write_tensors


def test_files_are_numbered_and_hold_what_was_written(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.arange(10 * n, dtype=torch.float32) for n in range(1, 5)}
    placed = write_tensors(tmp_path, tensors.items(), file_bytes=100)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [placed[name] for name in tensors] == [names[0], names[0], names[1], names[2]]
    for name, file in placed.items():
        with safe_open(str(tmp_path / file), framework="pt") as found:
            assert found.metadata() == {"format": "pt"}
            assert torch.equal(found.get_tensor(name), tensors[name])


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def tensors():
        yield "a", torch.ones(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), new_folder(tmp_path / "new") as folder:
        write_tensors(folder, tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_gets_its_name_at_the_end(tmp_path: Path) -> None:
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "old").write_text("left by a killed run")
    with new_folder(tmp_path / "new") as folder:
        write_durably(folder / "a", "text")
        assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]
    with pytest.raises(ConfigError, match="exists already"), new_folder(tmp_path / "new"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), new_folder(tmp_path / "file" / "x"):
        pass
