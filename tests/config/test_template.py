from __future__ import annotations

import re

import pytest

from paralign.config.load import load_config
from paralign.config.parse import SECTIONS
from paralign.config.presets import PRESETS
from paralign.config.run import ModelSection, RunConfig
from paralign.config.template import render


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_reads_back_equal(name, tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text(render(PRESETS[name](), title="t"))
    assert load_config(path) == PRESETS[name]()


def test_floats_are_written_so_that_they_read_back(tmp_path):
    run = PRESETS["hsdp"]().model_copy(
        update={"optimizer": RunConfig().optimizer.model_copy(update={"lr": 1e-07, "eps": 1e-16})}
    )
    path = tmp_path / "RUN.yaml"
    path.write_text(render(run, title="t"))
    assert load_config(path).optimizer == run.optimizer


def test_every_key_is_there_with_a_comment():
    line = re.compile(r"^( *)(?:# )?(\w+):.*?(?:  # (\S.*))?$", re.M)
    comments: dict[str, str] = {}
    section = ""
    for indent, key, comment in line.findall(render(RunConfig(), title="t")):
        section = section if indent else key
        comments[f"{section}.{key}" if indent else key] = comment
    for section, kind in SECTIONS.items():
        assert section in comments
        for key, field in kind.model_fields.items():
            assert comments.get(f"{section}.{key}"), f"{section}.{key} is not explained"
            assert field.description
    assert comments["device"]


def test_each_section_starts_with_its_meaning():
    text = render(RunConfig(), title="t")
    for section, kind in SECTIONS.items():
        assert f"# {(kind.__doc__ or '').splitlines()[0]}\n{section}:\n" in text


def test_own_model_and_its_arguments_are_kept():
    own = ModelSection.model_validate({"build": "a.b:c", "blueprint": "a.b:d", "width": 3})
    text = render(RunConfig(model=own), title="t")
    assert re.search(r"^  build: a\.b:c ", text, re.M)
    assert re.search(r"^  width: 3 ", text, re.M)
    assert re.search(r"^  # name: llama ", text, re.M)


def test_lines_are_short_and_ascii():
    for make in PRESETS.values():
        text = render(make(), title="t")
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 100
