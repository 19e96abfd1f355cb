"""Keys, models and files that are not there or are not what they should be."""

from __future__ import annotations

from tests.config.wrong import GOOD, Wrong, wrong_set

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
        fix="data has source, tokenizer, end_token, packing, token_dir, padding. Remove it",
    ),
    wrong_set(
        "unknown_hyper_parameter",
        "model.hiden_size=64",
        value="model.hiden_size:",
        rule="llama has no such hyper-parameter",
        fix="Did you mean model.hidden_size?",
    ),
    wrong_set(
        "set_unknown_path",
        "mesh.dp_shards=2",
        value="'mesh.dp_shards=2'",
        rule="there is no such key",
        fix="Did you mean mesh.dp_shard?",
    ),
    wrong_set(
        "set_without_value",
        "mesh.pp",
        value="'mesh.pp'",
        rule="not of the form key.path=value",
        fix="Write for example mesh.pp=2",
    ),
    wrong_set(
        "set_too_deep",
        "mesh.pp.x=1",
        value="'mesh.pp.x=1'",
        rule="paths have two parts",
        fix="Did you mean mesh.pp?",
    ),
    wrong_set(
        "set_below_a_value",
        "device.name=cpu",
        value="'device.name=cpu'",
        rule="device has no keys below it",
        fix="Write device=value",
    ),
    wrong_set(
        "unknown_model",
        "model.name=lama",
        value="model.name='lama'",
        rule="is not a model",
        fix="Did you mean llama?",
    ),
    wrong_set(
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
    wrong_set(
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
