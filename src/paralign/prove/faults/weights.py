"""Runs that do not start from the weights of the reference."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import alike_layers, layer_number, local, swap_


@fault(needs={"pp"}, component="weights", axes={"pp"}, cause="wrong_layer")
def layers_loaded_by_the_wrong_offset(run: FaultRun) -> None:
    """The later stages load their layers one further on, as rank // dp_size offsets do."""
    if run.coordinate["pp"] == 0:
        return
    # Layers that this rank has are turned round by one: the names stay, the contents move on.
    layers = alike_layers(run)
    rotated = dict(zip(layers, [*layers[1:], *layers[:1]], strict=True))
    before = {name: local(p).clone() for name, p in run.parameters.items()}
    for name, parameter in run.parameters.items():
        number = layer_number(name)
        if number in rotated:
            source = name.replace(f".{number}.", f".{rotated[number]}.", 1)
            local(parameter).copy_(before[source])


@fault(component="weights", cause="wrong_layer", any_program=True)
def two_layers_exchanged(run: FaultRun) -> None:
    """Two neighbouring layers are loaded into each other's place."""
    first, second = (alike_layers(run) * 2)[:2]
    for name, parameter in run.parameters.items():
        if layer_number(name) == first:
            other = name.replace(f".{first}.", f".{second}.", 1)
            swap_(local(parameter), local(run.parameters[other]))


@fault(needs={"pp"}, component="weights", axes={"pp"}, cause="rng")
def later_stages_draw_other_weights(run: FaultRun) -> None:
    """Each pipeline stage seeds its generator with its own rank."""
    if run.coordinate["pp"] == 0:
        return
    for number, parameter in enumerate(run.parameters.values()):
        piece = local(parameter)
        generator = torch.Generator().manual_seed(1000 * run.coordinate["pp"] + number)
        drawn = torch.randn(piece.shape, generator=generator, dtype=piece.dtype)
        piece.copy_(drawn * piece.std(unbiased=False) + piece.mean() if piece.numel() else drawn)


@fault(needs={"dp_replicate"}, component="weights", axes={"dp_replicate"}, cause="rng")
def replicas_draw_other_weights(run: FaultRun) -> None:
    """Each replica draws its own weights and nothing broadcasts the first one's."""
    if run.coordinate["dp_replicate"] == 0:
        return
    generator = torch.Generator().manual_seed(run.coordinate["dp_replicate"])
    for parameter in run.parameters.values():
        piece = local(parameter)
        piece.copy_(piece[torch.randperm(len(piece), generator=generator)] * 1.01)


@fault(needs={"dp_shard"}, component="weights", axes={"dp_shard"}, cause="permuted_shards")
def shards_of_matrices_in_another_order(run: FaultRun) -> None:
    """A checkpoint's shards are loaded by the neighbouring dp_shard rank."""
    group, size = run.mesh["dp_shard"].get_group(), run.mesh["dp_shard"].size()
    for name in sorted(run.parameters):
        parameter = run.parameters[name]
        piece = local(parameter)
        shapes: list[tuple[int, ...]] = [()] * size
        dist.all_gather_object(shapes, tuple(piece.shape), group=group)
        if parameter.dim() < 2 or len(set(shapes)) > 1:
            continue  # uneven shards cannot be taken for each other
        pieces = [torch.empty_like(piece) for _ in range(size)]
        dist.all_gather(pieces, piece.contiguous(), group=group)
        piece.copy_(pieces[(run.coordinate["dp_shard"] + 1) % size])


@fault(component="weights", cause="single_rank", any_program=True)
def one_rank_loads_a_stale_checkpoint(run: FaultRun) -> None:
    """The last rank starts from weights that are a little older than the others'."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    for parameter in run.parameters.values():
        local(parameter).mul_(0.99)
