from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paralign.align.agreement import begin_folder, check_disk, exchange, say_bytes
from paralign.errors import TraceError
from paralign.testing import run_on_ranks


def test_bytes_in_words() -> None:
    assert [say_bytes(n) for n in (7, 2048, 3 << 20, 5 << 30, 7 << 40)] == [
        "7 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "7.0 TiB",
    ]


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=100, used=50, free=50)
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: usage)
    assert check_disk(tmp_path, 50, 1) == 50
    with pytest.raises(TraceError, match=r"needs 51 B on .*, but only 50 B are free"):
        check_disk(tmp_path, 51, 1)


def agree(folder: str) -> Any:
    rank = dist.get_rank()
    number = begin_folder(Path(folder), rank, 2)
    need = check_disk(Path(folder), 10 + rank, 2)
    return number, need, exchange(2, {"rank": rank})


@pytest.mark.ranks
def test_ranks_of_one_machine_agree(tmp_path: Path) -> None:
    (tmp_path / "rank00007.json").write_text("{}")
    first, second = run_on_ranks(agree, 2, str(tmp_path))
    assert first == second
    assert first[1:] == (21, [{"rank": 0}, {"rank": 1}])
    assert len(first[0]) == 16
    assert list(tmp_path.iterdir()) == []
