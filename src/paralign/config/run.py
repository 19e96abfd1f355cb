"""What a RUN.yaml may say: one frozen section a topic, each key with its type, default and meaning.

Only types and ranges live here. What joins two keys is in :mod:`paralign.config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from paralign.config.keys import (
    Count,
    Dtype,
    Natural,
    NonNegative,
    Part,
    Section,
    Share,
    count,
    dtype,
    key,
    part,
    tuples,
)
from paralign.config.training import (
    MetricsSection,
    OptimizerSection,
    ProfileSection,
    ScheduleSection,
    TrainSection,
    ValidationSection,
)
from paralign.mesh import Degrees
from paralign.parallel.stages import SCHEDULES


def _schedule_name(name: str) -> str:
    """Spell a known schedule as torch does; an unknown one is left for the rules to name."""
    kind = SCHEDULES.get(name.lower())
    return kind.name if kind else name


class ModelSection(Section):
    """Which model to run: one of paralign's by name, or your own by import path."""

    # Every other key is a hyper-parameter of the model, checked against the model's own names.
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    name: str | None = key(
        None, "a model that ships with paralign", expects="the name of a model", example="llama"
    )
    preset: str | None = key(
        None, "its starting sizes", expects="the name of a preset", example="tiny"
    )
    build: str | None = key(
        None,
        "your own model: a function that returns the module",
        expects="text like pkg.module:function",
        example='"my_pkg.model:build"',
    )
    blueprint: str | None = key(
        None,
        "how it is cut: a Blueprint class, or a function of the module that returns one",
        expects="text like pkg.module:name",
        example='"my_pkg.model:cut"',
    )
    start_from: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "its weights at the start: a checkpoint, a seed checkpoint, a published model, a trace, or "
        "a .safetensors file",
        expects="the path of a folder or file, or null",
        example="seed/step-00000000",
    )

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The keys that are handed to the model."""
        return dict(self.model_extra or {})


class MeshSection(Section):
    """How many ranks each mesh axis has; 1 means the axis is off."""

    pp: Count = count(1, "pipeline stages run side by side")
    dp_replicate: Count = count(1, "copies of the model, each with its own rows (HSDP)")
    dp_shard: Count = count(
        1,
        "ranks that share one copy of the parameters (FSDP); auto: all that torchrun has beside "
        "the other axes",
    )
    cp: Count = count(1, "ranks that share one sequence (context parallel)")
    tp: Count = count(1, "ranks that share every layer (tensor parallel)")
    ep: Count = count(1, "ranks that share the experts (part of dp_shard * cp * tp)")

    @property
    def degrees(self) -> Degrees:
        """The same numbers as the value that ``build_mesh`` takes."""
        return Degrees(**{name: getattr(self, name) for name in type(self).model_fields})


class PipelineSection(Section):
    """How the layers are split into stages and in which order micro-batches run."""

    schedule: Annotated[str, AfterValidator(_schedule_name)] = key(
        "1F1B",
        "GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV",
        expects="the name of a schedule",
        example="1F1B",
    )
    num_microbatches: Count = count(4, "pieces a rank's rows are cut into, one after another")
    stages_per_rank: Count | None = key(
        None,
        "null: 1, or 2 where the schedule has virtual stages",
        expects="a whole number of at least 1, or null",
        example="2",
    )
    layers_per_stage: Annotated[tuple[Count, ...], BeforeValidator(tuples)] | None = key(
        None,
        "null: as even as it can be; or one number a stage, such as [3, 2, 2, 1]",
        expects="a list of whole numbers of at least 1, or null",
        example="[3, 2, 2, 1]",
    )


class FsdpSection(Section):
    """How parameters are grouped into units that are gathered and reduced together."""

    wrap: Annotated[
        Literal["root", "blocks", "first_block"] | tuple[tuple[str, ...], ...],
        BeforeValidator(tuples),
    ] = key(
        "blocks",
        "root, blocks, first_block, or lists of module names; the root is always wrapped",
        expects="root, blocks, first_block, or a list of lists of module names",
        example="blocks",
        words="root, blocks, first_block",
    )
    reshard_after_forward: bool | Literal["default"] = key(
        "default",
        "true: free gathered parameters after the forward; default: as torch chooses",
        expects="true, false or default",
        example="default",
        words="default",
    )

    @property
    def reshard(self) -> bool | None:
        """The choice as torch takes it: None lets torch choose."""
        choice = self.reshard_after_forward
        return choice if isinstance(choice, bool) else None


class ContextSection(Section):
    """How attention works on a sequence that is split over cp."""

    ulysses_degree: Count | None = key(
        None,
        "null: all of cp swaps sequence for heads; 1: gather K and V; between: both",
        expects="a whole number of at least 1, or null",
        example="2",
    )
    load_balance: bool = key(
        False,
        "give each rank a piece from the head and one from the tail of the sequence",
        expects="true or false",
        example="false",
    )


class TensorSection(Section):
    """How layers are spread over tp."""

    sequence_parallel: bool = key(
        True,
        "between blocks, cut the sequence over tp, so that norms are not repeated on every rank",
        expects="true or false",
        example="true",
    )
    overlap: Literal["none", "chunks", "mc2"] = key(
        "none",
        "chunks: multiply one chunk of tokens while another one is sent; needs sequence_parallel; "
        "mc2: the same, and a notice that no fused kernel is used",
        expects="none, chunks or mc2",
        example="chunks",
        words="none, chunks, mc2",
    )

    @property
    def overlaps(self) -> bool:
        """Whether multiplications and sends take turns in chunks, whatever that was called."""
        return self.overlap != "none"


class RecomputeSection(Section):
    """What is computed again in the backward pass, instead of kept from the forward."""

    parts: Annotated[
        Literal["none", "block"] | tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(tuples),
    ] = key(
        "none",
        "none; block: whole layers; or names of modules and methods inside a layer, * for any text",
        expects="none, block, or a list of names",
        example='["*_norm", attention.project]',
        words="none, block",
    )


class CompileSection(Section):
    """Whether `torch.compile` compiles each block."""

    backend: Literal["none", "inductor", "aot_eager", "eager"] = key(
        "none",
        "none; inductor: torch's compiler; aot_eager, eager: graphs that run as they are, to look "
        "for trouble",
        expects="one of none, inductor, aot_eager, eager",
        example="inductor",
        words="none, inductor, aot_eager, eager",
    )


class BatchSection(Section):
    """How many tokens one optimizer step sees, over all ranks and micro-batches."""

    global_batch: Count = count(8, "rows", example="8")
    seq_len: Count = count(64, "tokens a row", example="64")


class LossSection(Section):
    """How the loss of a micro-batch is computed."""

    chunks: Count = count(
        1,
        "pieces of the sequence that logits and loss are computed in, so that the logits of all "
        "tokens never exist",
        example="4",
    )


class DataSection(Section):
    """Where the tokens come from. A document is a file of the source."""

    source: Annotated[str, Field(min_length=1)] = key(
        "stdlib",
        "stdlib (the .py files of this Python), or the path of a text file or folder",
        expects="stdlib, or the path of a text file or folder",
        example="stdlib",
    )
    tokenizer: Annotated[str, Field(min_length=1)] = key(
        "bytes",
        "bytes: one token a byte, 256 in all; or the path of a tokenizers JSON file",
        expects="bytes, or the path of a JSON file of the tokenizers library",
        example="bytes",
        words="bytes",
    )
    end_token: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "a token of that JSON file to put behind every document; null: none",
        expects="a token of data.tokenizer, or null",
        example='"</s>"',
    )
    packing: Literal["none", "packed", "isolated"] = key(
        "none",
        "none: each document begins a row; packed: documents one after another; isolated: and "
        "attention stays inside of each",
        expects="one of none, packed, isolated",
        example="packed",
        words="none, packed, isolated",
    )
    token_dir: Annotated[str, Field(min_length=1)] = key(
        "runs/tokens",
        "folder of token files, made once from source; all ranks must see it. Bytes without "
        "packing need none",
        expects="the path of a folder",
        example="runs/tokens",
    )
    padding: Share = key(
        0.0,
        "largest share of a row that is a masked tail; uneven from row to row",
        expects="a number of at least 0 and below 1",
        example="0.25",
    )


class PrecisionSection(Section):
    """Which dtype each part of the training step works in."""

    compute: Dtype = dtype("float32", "forward and backward")
    reduce: Dtype = dtype("float32", "sums of gradients over micro-batches and ranks")
    softmax: Part = part("attention scores, their softmax and the weighted sum")
    logits: Part = part("the product with the head's weight")
    residual: Part = part("the stream that layers add to, and norms of it")


class AlignSection(Section):
    """How the parallel run is compared with the run on one device."""

    dtype: Dtype | None = key(
        None,
        "null: float64 where the device has it, else float32 against a float64 truth on the CPU",
        expects="one of float64, float32, bfloat16, or null",
        example="float64",
        words="float64, float32, bfloat16",
    )
    steps: Count = count(1, "optimizer steps to compare", example="1")
    seed: Natural = key(
        0, "of weights and data", expects="a whole number of at least 0", example="0"
    )
    jitter: NonNegative = key(
        0.02,
        "noise on parameters that start constant (norms, biases), so that no fault in them hides "
        "behind zeros; 0: off",
        expects="a number of at least 0",
        example="0.02",
    )
    record: Literal["gradients", "activations"] = key(
        "gradients",
        "gradients: inputs, loss, gradients and weights; activations: also what modules return and "
        "its gradients, to find the module where two runs part",
        expects="gradients or activations",
        example="gradients",
        words="gradients, activations",
    )


class RunConfig(Section):
    """A whole run, resolved: what :func:`paralign.config.load_config` returns."""

    model: ModelSection = ModelSection()
    mesh: MeshSection = MeshSection()
    pipeline: PipelineSection = PipelineSection()
    fsdp: FsdpSection = FsdpSection()
    context: ContextSection = ContextSection()
    tensor: TensorSection = TensorSection()
    recompute: RecomputeSection = RecomputeSection()
    compile: CompileSection = CompileSection()
    batch: BatchSection = BatchSection()
    loss: LossSection = LossSection()
    data: DataSection = DataSection()
    precision: PrecisionSection = PrecisionSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    validation: ValidationSection = ValidationSection()
    metrics: MetricsSection = MetricsSection()
    profile: ProfileSection = ProfileSection()
    align: AlignSection = AlignSection()
    program: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "your own parallel code to judge: build(model, mesh, config) -> step(batch) -> loss",
        expects="text like pkg.module:function, or null",
        example='"my_pkg.parallel:build"',
    )
    device: Literal["cpu", "cuda", "npu", "xpu"] = key(
        "cpu",
        "cpu, cuda, npu or xpu",
        expects="one of cpu, cuda, npu, xpu (no index: each rank picks its own)",
        example="cuda",
    )

    def for_training(self) -> RunConfig:
        """Return the run with the seed of ``train`` and no noise on what starts constant."""
        align = self.align.model_copy(update={"seed": self.train.seed, "jitter": 0.0})
        return self.model_copy(update={"align": align})
