from __future__ import annotations

from paralign.parallel.context_cores import CoreWatch
from paralign.parallel.stage import boundary_tensors, meta_copy
from tests.models.helpers import tiny


def test_every_call_is_noted_until_the_watch_ends():
    model, config, blueprint = tiny("pangu_moe", num_layers=2)
    skeleton = meta_copy(model)
    watch = CoreWatch(skeleton.get_submodule("layers").children(), blueprint)
    boundary_tensors(skeleton, blueprint, splits=[range(2)], rows=3, local_seq=8)
    watch.remove()
    boundary_tensors(skeleton, blueprint, splits=[range(2)], rows=3, local_seq=8)
    assert len(watch.calls) == 2
    core = watch.calls[0]
    heads, tokens = config.num_heads, 3 * 8
    assert (core.num_heads, core.num_kv_heads) == (heads, heads)
    assert (core.score_width, core.value_width) == (config.qk_head_dim, config.v_head_dim)
    assert core.query_bytes == tokens * heads * config.qk_head_dim * 8
    assert core.kv_bytes == core.query_bytes + core.output_bytes
    assert core.output_bytes == tokens * heads * config.v_head_dim * 8
