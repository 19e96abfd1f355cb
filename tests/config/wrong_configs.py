"""Configs that each break one thing, and what the message must say about it."""

from __future__ import annotations

from dataclasses import dataclass

GOOD = """\
model: {name: llama, preset: tiny}
mesh: {pp: 2, dp_shard: 2, cp: 2}
pipeline: {schedule: GPipe, num_microbatches: 4}
batch: {global_batch: 8, seq_len: 64}
"""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One mistake, made by ``--set`` on a good config or by a text of its own."""

    id: str
    sets: tuple[str, ...] = ()
    text: str = GOOD
    value: str
    rule: str
    fix: str
    options: tuple[str, ...] = ()


def _set(id: str, *sets: str, value: str, rule: str, fix: str) -> Wrong:
    return Wrong(id=id, sets=sets, value=value, rule=rule, fix=fix)


SIZES = [
    _set(
        "heads_against_cp",
        "model.num_heads=3",
        "model.num_kv_heads=3",
        "model.hidden_size=96",
        value="num_heads=3",
        rule="does not split evenly over ulysses_degree=2 on axis 'cp' (2 ranks, remainder 1)",
        fix="Use ulysses_degree in {1}",
    ),
    _set(
        "kv_heads_against_heads",
        "model.num_kv_heads=3",
        value="num_kv_heads=3",
        rule="num_heads=4 must be a multiple of",
        fix="Use num_heads=6",
    ),
    _set(
        "heads_against_hidden",
        "model.hidden_size=66",
        value="hidden_size=66",
        rule="must be a multiple of num_heads=4 (remainder 2)",
        fix="Use hidden_size=68",
    ),
    _set(
        "sequence_against_cp",
        "batch.seq_len=63",
        value="seq_len=63",
        rule="does not split evenly over axis 'cp' (2 ranks, remainder 1)",
        fix="Use seq_len=62 or 64",
    ),
    _set(
        "sequence_against_load_balance",
        "batch.seq_len=62",
        "context={load_balance: true, ulysses_degree: 1}",
        value="seq_len=62",
        rule="2 * 2 chunks",
        fix="Use seq_len=60 or 64",
    ),
    _set(
        "load_balance_of_nothing",
        "context.load_balance=true",
        value="load_balance=True",
        rule="every rank already computes the whole sequence for its own heads",
        fix="use ulysses_degree=1",
    ),
    _set(
        "ulysses_degree_does_not_divide",
        "context.ulysses_degree=3",
        value="ulysses_degree=3",
        rule="must divide axis 'cp' (2 ranks)",
        fix="Use ulysses_degree in {1, 2}",
    ),
    _set(
        "batch_does_not_divide",
        "batch.global_batch=12",
        value="batch.global_batch=12",
        rule="does not divide into dp_replicate * dp_shard * num_microbatches = 1 * 2 * 4 = 8",
        fix="Use global_batch=8 or 16",
    ),
    _set(
        "fewer_layers_than_stages",
        "model.num_layers=1",
        value="num_layers=1",
        rule="every stage needs a layer",
        fix="Use at least 2 layers",
    ),
    _set(
        "layers_per_stage_sum",
        "pipeline.layers_per_stage=[3, 2]",
        value="layers_per_stage=[3, 2]",
        rule="sums to 5, and the model has 4 layers",
        fix="sum to 4",
    ),
    _set(
        "layers_per_stage_count",
        "pipeline.layers_per_stage=[2, 1, 1]",
        value="layers_per_stage=[2, 1, 1]",
        rule="has 3 entries for 2 stages",
        fix="List 2 numbers",
    ),
    _set(
        "vocabulary_below_bytes",
        "model.vocab_size=100",
        value="model.vocab_size=100",
        rule="smaller than the 256 tokens of data.tokenizer=bytes",
        fix="Use vocab_size=256 or more",
    ),
    Wrong(
        id="world",
        options=("--world", "6"),
        value="world size 6",
        rule="pp=2 * dp_replicate=1 * dp_shard=2 * cp=2 * tp=1 = 8",
        fix="Start 8 ranks or change the degrees",
    ),
]

PLANS = [
    _set(
        "unknown_schedule",
        "pipeline.schedule=1FB1",
        value="pipeline.schedule='1FB1'",
        rule="is not a schedule",
        fix="Did you mean 1F1B?",
    ),
    _set(
        "too_few_microbatches",
        "pipeline={schedule: 1f1b, num_microbatches: 1}",
        value="num_microbatches=1",
        rule="too few for 1F1B over axis 'pp' (2 ranks): it needs at least pp = 2",
        fix="Use num_microbatches=2",
    ),
    _set(
        "too_few_microbatches_for_dualpipe",
        "pipeline={schedule: DualPipeV, num_microbatches: 2}",
        value="num_microbatches=2",
        rule="at least 2 * pp = 4",
        fix="Use num_microbatches=4",
    ),
    _set(
        "microbatch_rounds",
        "pipeline={schedule: Interleaved1F1B, num_microbatches: 5}",
        "batch.global_batch=10",
        value="num_microbatches=5",
        rule="does not divide into 2 equal rounds",
        fix="Use num_microbatches=4 or 6",
    ),
    _set(
        "stages_of_a_single_stage_schedule",
        "pipeline.stages_per_rank=2",
        value="stages_per_rank=2",
        rule="GPipe, which runs one stage a rank",
        fix="Use stages_per_rank=1",
    ),
    _set(
        "zero_bubble_reshard",
        "pipeline={schedule: ZBVZeroBubble, num_microbatches: 4}",
        "fsdp.reshard_after_forward=true",
        value="reshard_after_forward=true",
        rule="the hooks that would gather them again never fire",
        fix="Use reshard_after_forward=false",
    ),
    _set(
        "zero_bubble_precision",
        "pipeline={schedule: ZBVZeroBubble, num_microbatches: 4}",
        "precision.compute=bfloat16",
        value="compute=bfloat16",
        rule="below reduce=float32",
        fix="Use num_microbatches=1",
    ),
    _set(
        "tensor_parallel",
        "mesh.tp=2",
        value="mesh.tp=2",
        rule="not in this version of paralign",
        fix="Use tp: 1",
    ),
    _set(
        "expert_parallel",
        "mesh.ep=2",
        value="mesh.ep=2",
        rule="not in this version of paralign",
        fix="Use ep: 1",
    ),
    Wrong(
        id="program",
        text=GOOD + 'program: "my_pkg.parallel:build"\n',
        value="program='my_pkg.parallel:build'",
        rule="not in this version of paralign",
        fix="Remove `program`",
    ),
    Wrong(
        id="train",
        text=GOOD + "train: {steps: 100}\n",
        value="train={'steps': 100}",
        rule="not in this version of paralign",
        fix="Remove `train`",
    ),
    _set(
        "unit_named_twice",
        "fsdp.wrap=[[layers.0], [layers.0]]",
        value="'layers.0'",
        rule="a module belongs to one unit",
        fix="Name it once",
    ),
    _set(
        "empty_unit",
        "fsdp.wrap=[[]]",
        value="fsdp.wrap=[[]]",
        rule="a unit without modules",
        fix="wrap: root",
    ),
]

KEYS = [
    Wrong(
        id="unknown_key",
        text=GOOD.replace("num_microbatches", "num_microbatch"),
        value="pipeline.num_microbatch:",
        rule="there is no such key",
        fix="Did you mean pipeline.num_microbatches?",
    ),
    Wrong(
        id="unknown_section",
        text=GOOD.replace("pipeline:", "pipelines:"),
        value="pipelines:",
        rule="there is no such key",
        fix="Did you mean pipeline?",
    ),
    Wrong(
        id="key_of_another_section",
        text=GOOD + "fsdp: {ulysses_degree: 1}\n",
        value="fsdp.ulysses_degree:",
        rule="there is no such key",
        fix="Did you mean context.ulysses_degree?",
    ),
    Wrong(
        id="key_like_no_other",
        text=GOOD + "data: {zzz: 1}\n",
        value="data.zzz:",
        rule="there is no such key",
        fix="data has source, tokenizer, padding. Remove it",
    ),
    _set(
        "unknown_hyper_parameter",
        "model.hiden_size=64",
        value="model.hiden_size:",
        rule="llama has no such hyper-parameter",
        fix="Did you mean model.hidden_size?",
    ),
    _set(
        "set_unknown_path",
        "mesh.dp_shards=2",
        value="'mesh.dp_shards=2'",
        rule="there is no such key",
        fix="Did you mean mesh.dp_shard?",
    ),
    _set(
        "set_without_value",
        "mesh.pp",
        value="'mesh.pp'",
        rule="not of the form key.path=value",
        fix="Write for example mesh.pp=2",
    ),
    _set(
        "set_too_deep",
        "mesh.pp.x=1",
        value="'mesh.pp.x=1'",
        rule="paths have two parts",
        fix="Did you mean mesh.pp?",
    ),
    _set(
        "set_below_a_value",
        "device.name=cpu",
        value="'device.name=cpu'",
        rule="device has no keys below it",
        fix="Write device=value",
    ),
    _set(
        "unknown_model",
        "model.name=lama",
        value="model.name='lama'",
        rule="is not a model",
        fix="Did you mean llama?",
    ),
    _set(
        "unknown_preset",
        "model.preset=tinny",
        value="model.preset='tinny'",
        rule="is not a preset of llama",
        fix="Did you mean tiny?",
    ),
    Wrong(
        id="no_model",
        text="mesh: {pp: 1}\n",
        value="model.name",
        rule="is missing",
        fix="Write `model: {name: llama}`",
    ),
    _set(
        "two_models",
        'model.build="a:b"',
        value="name/preset",
        rule="and build/blueprint (your own)",
        fix="Keep one of the two",
    ),
    Wrong(
        id="own_model_without_blueprint",
        text='model: {build: "my_pkg.model:build"}\n',
        value="model.blueprint",
        rule="your own model needs both",
        fix='Write `blueprint: "my_pkg.model:blueprint"`',
    ),
    Wrong(
        id="own_model_without_colon",
        text='model: {build: my_pkg.model, blueprint: "json:dumps"}\n',
        value="model.build='my_pkg.model'",
        rule="joined by a colon",
        fix='Write `build: "my_pkg.model:build"`',
    ),
    Wrong(
        id="own_model_nowhere",
        text='model: {build: "no_such_pkg:build", blueprint: "json:dumps"}\n',
        value="model.build='no_such_pkg:build'",
        rule="there is no module no_such_pkg",
        fix="Start paralign in the folder that holds no_such_pkg",
    ),
]

VALUES = [
    _set(
        "text_for_number",
        "mesh.pp=two",
        value="mesh.pp='two' (text)",
        rule="must be a whole number of at least 1",
        fix="Write `pp: 2`",
    ),
    _set(
        "boolean_for_number",
        "mesh.pp=true",
        value="mesh.pp=true (a boolean)",
        rule="must be a whole number of at least 1",
        fix="Write `pp: 2`",
    ),
    _set(
        "number_for_boolean",
        "context.load_balance=1",
        value="context.load_balance=1",
        rule="must be true or false",
        fix="Write `load_balance: false`",
    ),
    _set(
        "fraction_for_count",
        "batch.seq_len=64.0",
        value="batch.seq_len=64.0",
        rule="must be a whole number",
        fix="Write `seq_len: 64`",
    ),
    _set(
        "negative_degree",
        "mesh.cp=-2",
        value="mesh.cp=-2",
        rule="must be a whole number of at least 1",
        fix="Write `cp: 2`",
    ),
    _set(
        "zero_batch",
        "batch.global_batch=0",
        value="batch.global_batch=0",
        rule="must be a whole number of at least 1",
        fix="Write `global_batch: 8`",
    ),
    _set(
        "null_for_count",
        "mesh.dp_shard=null",
        value="mesh.dp_shard=null",
        rule="must be a whole number of at least 1",
        fix="Write `dp_shard: 2`",
    ),
    _set(
        "list_for_section",
        "mesh=[2, 2]",
        value="mesh=[2, 2] (a list)",
        rule="must be a section",
        fix="such as `mesh: {pp: 2}`",
    ),
    _set(
        "hyper_parameter_type",
        "model.num_layers=four",
        value="model.num_layers='four' (text)",
        rule="must be a whole number",
        fix="Write `num_layers: 4`",
    ),
    _set(
        "hyper_parameter_range",
        "model.num_layers=0",
        value="num_layers=0",
        rule="must be a whole number of at least 1",
        fix="at least 1",
    ),
    _set(
        "learning_rate_nan",
        "optimizer.lr=.nan",
        value="optimizer.lr=nan",
        rule="must be a number above 0",
        fix="Write `lr: 3.0e-4`",
    ),
    _set(
        "learning_rate_infinite",
        "optimizer.lr=.inf",
        value="optimizer.lr=inf",
        rule="must be a number above 0",
        fix="Write `lr: 3.0e-4`",
    ),
    _set(
        "learning_rate_negative",
        "optimizer.lr=-1e-3",
        value="optimizer.lr=-0.001",
        rule="must be a number above 0",
        fix="Write `lr: 3.0e-4`",
    ),
    _set(
        "betas_out_of_range",
        "optimizer.betas=[0.9, 1.0]",
        value="optimizer.betas=[0.9, 1.0]",
        rule="two numbers of at least 0 and below 1",
        fix="Write `betas: [0.9, 0.95]`",
    ),
    _set(
        "unknown_optimizer",
        "optimizer.name=adam",
        value="optimizer.name='adam'",
        rule="must be one of adamw, sgd",
        fix="Did you mean adamw?",
    ),
    _set(
        "momentum_of_adamw",
        "optimizer.momentum=0.9",
        value="optimizer.momentum=0.9",
        rule="has no effect on adamw",
        fix="Remove momentum, or use name: sgd",
    ),
    _set(
        "betas_of_sgd",
        "optimizer={name: sgd, betas: [0.8, 0.9]}",
        value="optimizer.betas=[0.8, 0.9]",
        rule="has no effect on sgd",
        fix="Remove betas, or use name: adamw",
    ),
    _set(
        "precision_name",
        "precision.compute=fp32",
        value="precision.compute='fp32'",
        rule="must be one of float64, float32, bfloat16",
        fix="Did you mean float32?",
    ),
    _set(
        "align_dtype",
        "align.dtype=bf16",
        value="align.dtype='bf16'",
        rule="must be one of float64, float32, bfloat16, or null",
        fix="Did you mean bfloat16?",
    ),
    _set(
        "align_steps",
        "align.steps=0",
        value="align.steps=0",
        rule="must be a whole number of at least 1",
        fix="Write `steps: 1`",
    ),
    _set(
        "align_seed",
        "align.seed=-1",
        value="align.seed=-1",
        rule="must be a whole number of at least 0",
        fix="Write `seed: 0`",
    ),
    _set(
        "align_jitter",
        "align.jitter=-0.1",
        value="align.jitter=-0.1",
        rule="must be a number of at least 0",
        fix="Write `jitter: 0.02`",
    ),
    _set(
        "device",
        "device=gpu",
        value="device='gpu'",
        rule="must be one of cpu, cuda, npu, xpu",
        fix="Did you mean",
    ),
    _set(
        "device_index",
        "device=cuda:0",
        value="device='cuda:0'",
        rule="no index: each rank picks its own",
        fix="Did you mean cuda?",
    ),
    _set(
        "wrap",
        "fsdp.wrap=block",
        value="fsdp.wrap='block'",
        rule="must be root, blocks, first_block, or a list of lists",
        fix="Did you mean blocks?",
    ),
    _set(
        "padding",
        "data.padding=1.0",
        value="data.padding=1.0",
        rule="must be a number of at least 0 and below 1",
        fix="Write `padding: 0.25`",
    ),
    _set(
        "unknown_data",
        "data.source=/no/such/text",
        value="data.source='/no/such/text'",
        rule="there is no such file or folder",
        fix="Give the path of a text file or folder, or stdlib",
    ),
]

FILES = [
    Wrong(
        id="empty_file",
        text="",
        value="RUN.yaml",
        rule="the file is empty",
        fix="`paralign init` writes a RUN.yaml",
    ),
    Wrong(
        id="only_comments",
        text="# nothing\n",
        value="RUN.yaml",
        rule="the file is empty",
        fix="`paralign init` writes a RUN.yaml",
    ),
    Wrong(
        id="a_list",
        text="- pp: 2\n",
        value="holds a list",
        rule="must hold sections",
        fix="such as `mesh: {pp: 2}`",
    ),
    Wrong(
        id="yaml_syntax",
        text="model: {name: llama\nmesh: {pp: 2}\n",
        value="RUN.yaml, line 2, column 5",
        rule="not valid YAML",
        fix="Check brackets, colons, quotes and indentation",
    ),
    Wrong(
        id="yaml_tag",
        text="model: !!python/object/apply:os.system [ls]\n",
        value="RUN.yaml, line 1",
        rule="could not determine a constructor",
        fix="Check brackets",
    ),
    Wrong(
        id="key_twice",
        text=GOOD + "mesh: {pp: 4}\n",
        value="line 5: mesh",
        rule="already given on line 2",
        fix="Keep one of the two",
    ),
    Wrong(
        id="key_twice_in_a_section",
        text="mesh:\n  pp: 2\n  pp: 4\n",
        value="line 3: pp",
        rule="already given on line 2",
        fix="Keep one of the two",
    ),
    Wrong(
        id="key_no_text",
        text=GOOD + "1: 2\n",
        value="line 5: the key 1",
        rule="is not text",
        fix="Put it in quotes",
    ),
]

WRONG = [*SIZES, *PLANS, *KEYS, *VALUES, *FILES]
