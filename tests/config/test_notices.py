"""Settings that run in another way than their name promises: told, and right."""

from __future__ import annotations

import pytest

from paralign.config.notices import notices
from paralign.config.presets import PRESETS
from paralign.train.build import build_tensor
from tests.parity import check_result, make_config, measure_all


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_as_they_are_called(name):
    assert list(notices(PRESETS[name]())) == []


def test_mc2_is_chunks_and_told():
    chunks, fused = (make_config(mesh={"tp": 2}, tensor={"overlap": o}) for o in ("chunks", "mc2"))
    assert build_tensor(fused) == build_tensor(chunks)
    assert list(notices(chunks)) == []
    [told] = notices(fused)
    assert "tensor.overlap=mc2 runs as chunks: no fused kernel" in told
    assert "Write overlap: chunks" in told


@pytest.mark.ranks
def test_mc2_is_the_run_of_one_device_and_that_of_chunks_to_the_last_bit():
    pipeline = {"schedule": "1F1B", "num_microbatches": 2}
    results = measure_all(
        [
            make_config(mesh={"tp": 2}, pipeline=pipeline, tensor={"overlap": overlap})
            for overlap in ("chunks", "mc2", "none")
        ]
    )
    for result in results:
        check_result(result)
    chunks, fused, plain = results
    assert fused == chunks  # each error, to the last bit
    assert plain.errors != chunks.errors  # chunks are added in another order
