"""`dualkv precompile`: which kernels a model needs, and the command from end to end."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from codegen import KernelError, select, store
from codegen.spec import backward_specs, forward_spec, table
from dualkv import packed_rows
from dualkv.cli import precompile
from dualkv.cli.precompile import Heads, heads_of, requested, shape
from dualkv.models import CONFIGS
from tests.codegen import stand_in

POST = backward_specs("bf16", 64).postprocess


@pytest.fixture
def run(run):
    """Runs `dualkv precompile ...`."""
    return functools.partial(run, "precompile")


# ---------------------------------------------------------------- models
def test_models_by_name():
    assert heads_of("qwen3-8b") == Heads(32, 8, 128)
    assert heads_of("Qwen/Qwen3-30B-A3B") == Heads(32, 4, 128)
    assert heads_of("openai/gpt-oss-20b") == Heads(64, 8, 64, ("window", "sinks"))
    assert heads_of("gemma-3-12b") == Heads(16, 8, 256, ("window",))
    for name in CONFIGS:
        assert requested([name]), name


GEMMA4_FULL = Heads(8, 4, 512)
CONFIGURED = [
    ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 96}, Heads(12, 4, 96)),
    ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}, Heads(14, 2, 64)),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": None, "hidden_size": 512}, Heads(8, 8, 64)),
    ("mistral", {"head_dim": 64, "sliding_window": None}, Heads(32, 8, 64)),
    ("mistral", {}, Heads(32, 8, 128, ("window",))),
    ("gpt_oss", {}, Heads(64, 8, 64, ("window", "sinks"))),
    ("granite_swa", {}, Heads(20, 4, 128, ("window", "sinks"))),
    ("gemma2", {}, Heads(8, 4, 256, ("window", "softcap"))),
    ("gemma3_text", {}, Heads(8, 4, 256, ("window",))),
    ("gemma4_text", {}, Heads(8, 4, 256, ("window",), None, (GEMMA4_FULL,))),
    ("olmo3", {}, Heads(32, 32, 128, ("window",))),
    ("llama4_text", {}, Heads(40, 8, 128, ("window",))),
    # Hybrids need the kernels of their layers with attention.
    ("qwen3_next", {}, Heads(16, 2, 256)),
    ("olmo_hybrid", {}, Heads(30, 30, 128)),
    ("nemotron_h", {}, Heads(32, 8, 128)),
    ("granitemoehybrid", {}, Heads(32, 32, 128)),
    ("minimax", {}, Heads(32, 8, 128)),
    # Values of another head dim.
    ("deepseek_v3", {}, Heads(128, 128, 192, (), 128)),
    ("minicpm3", {}, Heads(40, 40, 96, (), 64)),
    ("glm4_moe_lite", {}, Heads(20, 20, 256)),
]


@pytest.mark.parametrize(("kind", "settings", "expected"), CONFIGURED)
def test_heads_of_configs_that_transformers_writes(tmp_path, kind, settings, expected):
    pytest.importorskip("transformers").AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    assert heads_of(str(tmp_path)) == heads_of(str(tmp_path / "config.json")) == expected


def test_layer_types_of_older_files(tmp_path):
    path = tmp_path / "c.json"
    fields = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    path.write_text(json.dumps(fields | {"layer_types": ["mamba", "attention"]}))
    assert heads_of(str(path)) == Heads(8, 2, 64)
    path.write_text(json.dumps(fields | {"layer_types": ["full_attention", "sparse_attention"]}))
    with pytest.raises(ValueError, match=r"asks for layers of sparse_attention \(layer_types\), which"):
        heads_of(str(path))


def test_layers_of_two_head_dims(tmp_path):
    """Gemma 4 has layers with a window, and layers of full attention."""
    pytest.importorskip("transformers").AutoConfig.for_model("gemma4_text").save_pretrained(tmp_path)
    found = requested([str(tmp_path)])
    assert {forward_spec("bf16", 512, 2), *backward_specs("bf16", 512).present} <= set(found)
    assert forward_spec("bf16", 256, 2, True, ("window",)) in found
    path = tmp_path / "c.json"
    published = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512}
    path.write_text(json.dumps(published))
    assert heads_of(str(path)) == Heads(8, 4, 256, (), None, (GEMMA4_FULL,))
    path.write_text(json.dumps({"num_attention_heads": 8, "head_dim": 256, "global_head_dim": 520}))
    with pytest.raises(ValueError, match=r"asks for layers of head dim 520, which dualkv does not compute"):
        heads_of(str(path))


def test_values_of_another_head_dim(tmp_path):
    """Some have kernels of their own; others are padded, and need the kernels of the larger head dim."""
    config = {"num_attention_heads": 8, "head_dim": 192, "v_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = requested([str(tmp_path)])
    assert found == requested(head_dims=[(192, 128)], gqa=[1])
    assert found[0] == forward_spec("bf16", 192, 1, head_dim_v=128)
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 96, "v_head_dim": 64}))
    assert requested([str(tmp_path)]) == requested(head_dims=[96], gqa=[1])
    assert requested(head_dims=[(96, 200)], gqa=[4]) == requested(head_dims=[256], gqa=[4])


ZOO = json.loads((Path(__file__).parents[2] / "docs" / "results" / "zoo.json").read_text())["types"]["rows"]
SAMPLE = (
    "gpt_oss",
    "hy_v4",
    "mimo_v2_flash",
    "dots3_note_text",
    "gemma2",
    "gemma4_text",
    "gpt_bigcode",
    "llama4_text",
    "zamba2",
)


def calls(monkeypatch, kind):
    """The configuration of a small model of the type, and the kernels' shapes that its packed calls ask for."""
    zoo = pytest.importorskip("tools.zoo", reason="without transformers")
    found, config = set(), zoo.configuration(kind)
    real = packed_rows.attention

    def noted(q, k, v, layout, **settings):
        given = settings | {"window": settings.get("window") or settings.get("chunk")}
        own = tuple(name for name in select.NAMES if given.get(name) is not None)
        of_values = None if v.shape[2] == k.shape[2] else v.shape[2]
        found.add(precompile.Shape(q.shape[2], q.shape[1] // k.shape[1], own, of_values))
        return real(q, k, v, layout, **settings)

    monkeypatch.setattr(packed_rows, "attention", noted)
    auto = next(auto for auto, mapping in zoo.MAPPINGS.items() if type(config) in mapping)
    with torch.device("meta"):
        whole = getattr(zoo.transformers, auto).from_config(config, attn_implementation="eager")
    model = zoo.small(type(whole), whole.config)
    zoo.enable(model, check=False)
    zoo.packed(model, zoo.LAYOUTS[0])
    return model.config, found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.slow)
        for kind, (outcome, *_) in ZOO.items()
        if outcome == "exact"
    ],
)
def test_kernels_of_a_configuration_are_those_that_packed_calls_ask_for(monkeypatch, tmp_path, kind):
    config, asked = calls(monkeypatch, kind)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    found = heads_of(str(tmp_path))
    shapes = {shape(heads) for heads in (found, *found.others)}
    shapes |= {precompile._without_window(one) for one in shapes}
    assert asked <= shapes


def test_a_configuration_of_dbrx(tmp_path):
    """The names of its own config.json are read; transformers' default of KV heads is 1."""
    config = {"model_type": "dbrx", "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}
    for attention, kv_heads in (({"kv_n_heads": 8}, 8), ({}, 1)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"attn_config": attention}))
        assert heads_of(str(tmp_path)) == Heads(48, kv_heads, 128)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "is no configuration of a model"),
        ({"text_config": [1]}, r"has text_config=\[1\], expected an object"),
        ({"layer_types": 5}, "has layer_types=5, expected a list of strings"),
        ({"layer_types": [5, "full_attention"]}, "has layer_types=.*, expected a list of strings"),
        ({"model_type": "dbrx", "attn_config": [1]}, r"has attn_config=\[1\], expected an object"),
        ({}, "has num_attention_heads=None, expected an integer of 1 or more"),
        ({"num_attention_heads": 8}, "has head_dim=None"),
        ({"num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": 3}, "8 query heads for 3 KV heads"),
        ({"num_attention_heads": "8", "head_dim": 64}, "has num_attention_heads='8'"),
        (
            {"num_attention_heads": 8, "head_dim": 64, "per_layer_config": {"5": {"num_key_value_heads": 3}}},
            "c.json, layer 5, has 8 query heads for 3 KV heads",
        ),
        ({"num_attention_heads": 8, "head_dim": 64, "v_head_dim": "32"}, "has v_head_dim='32'"),
        ({"num_attention_heads": 8, "head_dim": 64, "kv_lora_rank": 32}, "has head_dim=None"),
    ],
)
def test_configs_that_say_no_shape(tmp_path, config, says):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        heads_of(str(path))


def test_configs_of_vision_models_have_a_text_part(tmp_path):
    path = tmp_path / "c.json"
    text = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "use_sliding_window": False}
    path.write_text(json.dumps({"text_config": text | {"sliding_window": 4096}, "vision_config": {}}))
    assert heads_of(str(path)) == Heads(8, 2, 64)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("qwen9-1b", "model 'qwen9-1b' is neither the path of a config.json nor one of "),
        ("/absent/config.json", "model '/absent/config.json' is neither the path of a config.json"),
    ],
)
def test_models_that_there_are_no_kernels_for(model, says):
    with pytest.raises(ValueError, match=says):
        heads_of(model)


def test_tensor_parallel_ranks_share_the_heads():
    big = Heads(64, 4, 128)
    assert [shape(big, tp).heads_per_kv for tp in (1, 2, 4, 8, 16)] == [16, 16, 16, 8, 4]
    found = requested(["qwen3-30b-a3b"], [1, 8], directions=["forward"])
    assert {spec.packed_heads for spec in found} == {8, 4}
    with pytest.raises(ValueError, match="tp is 3, expected a divisor of the model's 64 query heads"):
        shape(big, 3)
    with pytest.raises(ValueError, match="tp is 6, expected a divisor or a multiple of the model's 4 KV heads"):
        shape(Heads(12, 4, 128), 6)
    with pytest.raises(ValueError, match="tp is 0"):
        shape(big, 0)


def of_both_kinds(head_dim, deterministic=False, features=()):
    """The kernels of backwards whose rows see many keys, then of those whose rows see few."""
    kinds = (
        backward_specs("bf16", head_dim, deterministic, features=features, few_keys=few_keys)
        for few_keys in (False, True)
    )
    return list(dict.fromkeys(spec for specs in kinds for spec in specs.present))


def test_requests():
    many, few = (backward_specs("bf16", 128, few_keys=few_keys) for few_keys in (False, True))
    forwards = [forward_spec("bf16", 128, 4, few_keys=few_keys) for few_keys in (False, True)]
    assert requested(["qwen3-8b", "llama-3-8b"]) == [
        *forwards, *many.present, few.main, few.partial_sum
    ], "for layouts whose rows see many keys, and for those whose rows see few"  # fmt: skip
    assert requested(head_dims=[64], directions=["backward"]) == of_both_kinds(64)
    assert requested(head_dims=[192], directions=["backward"]) == backward_specs("bf16", 192).present
    assert requested(head_dims=[64, 96], gqa=[1, 2], directions=["forward"], dtypes=["fp16"]) == [
        *(forward_spec("fp16", 64, h) for h in (1, 2)),
        *(forward_spec("fp16", 96, h, few_keys=few_keys) for h in (1, 2) for few_keys in (False, True)),
    ]
    assert requested(head_dims=[64], gqa=[5], directions=["forward"]) == [
        forward_spec("bf16", 64, h) for h in (5, 4, 1)
    ], "two launches may take the heads of a KV head"
    assert requested(head_dims=[64], gqa=[2], directions=["forward"], trees=True) == [
        forward_spec("bf16", 64, 2, trees) for trees in (False, True)
    ]
    window, sinks = ("window", "sinks"), ("sinks",)
    assert requested(["gpt-oss-20b"], deterministic=True) == list(
        dict.fromkeys(
            [
                forward_spec("bf16", 64, 8, features=("sinks",)),
                *(x for fixed in (False, True) for x in of_both_kinds(64, fixed, sinks)),
                forward_spec("bf16", 64, 8, trees=True, features=("window", "sinks")),
                *(x for fixed in (False, True) for x in of_both_kinds(64, fixed, window)),
            ]
        )
    ), "without the window too, for full layers and for paths that the window does not cut"
    assert requested(head_dims=[64], gqa=[8], directions=["forward"], features=window) == [
        forward_spec("bf16", 64, 8, trees=True, features=("window", "sinks"))
    ]
    with pytest.raises(ValueError, match=r"head_dims is \[64\] and gqa is \[\], expected both or neither"):
        requested(head_dims=[64])


# ---------------------------------------------------------------- the command
def test_the_command_compiles_once_and_checks(run, tmp_path, monkeypatch):
    """Real compiles of one small kernel: larger kernels of its selection are left out."""
    monkeypatch.setattr(precompile, "select", lambda *given: [s for s in select.select(*given) if s == POST])
    out, words = tmp_path / "kernels", ("--head-dims", "64", "--directions", "backward")
    code, said, err = run(
        "--out", str(out), *words, "-j", "2", "--emit", "cubin,ptx,sass", "--json", str(tmp_path / "r")
    )
    assert code == 0, err
    assert "bwd_postprocess bf16 D=64 dqkv" in said
    assert "1 kernel in" in said
    assert "1 compiled in" in said
    assert f"DUALKV_KERNEL_DIR={out} DUALKV_JIT=0" in " ".join(said.split()), "wrapped or not"
    assert json.loads((tmp_path / "r").read_text())["compiled"] == 1
    assert sorted(p.suffix for p in (out / "code").iterdir()) == [".cubin", ".ptx", ".sass"]
    assert list(json.loads((out / "manifest.json").read_text())["kernels"]) == [p.name for p in out.glob("dualkv_*")]

    code, said, _ = run("--out", str(out), *words, "-j", "2", "--json", "-")
    assert (code, json.loads(said)["compiled"]) == (0, 0)
    old = shutil.copytree(next(out.glob("dualkv_*")), out / "dualkv_bwd-old")
    stand_in.changed(old / "kernel.json", sources="others")
    assert "1 of other versions lie there too and are not used, remove them" in run("--out", str(out), *words)[1]
    code, said, err = run("--check", str(out), *words)
    assert code == 0, said
    assert said.startswith("1 kernel: hashes and records agree, all load here")

    monkeypatch.undo()
    code, said, _ = run("--check", str(out), "--models", "qwen3-8b")
    assert code == 1
    assert f"no usable kernel {forward_spec('bf16', 128, 4)}" in said
    assert "8 problems in a folder of 1 kernel" in said
    shutil.rmtree(old)
    stand_in.flipped(next(out.glob("dualkv_*")) / "kernel.so", 100)
    code, said, _ = run("--check", str(out))
    assert code == 1
    assert "is corrupt (kernel.so does not have the recorded hash)" in said


@pytest.mark.parametrize(
    "spec",
    [
        *[s for s in table() if s.head_dim == 96 and s.dtype == "fp16"][::4],
        forward_spec("fp16", 96, 7, trees=True),
        forward_spec("fp16", 96, 7, features=("sinks", "softcap")),
        forward_spec("fp16", 96, 7, True, features=("window",)),
        *backward_specs("fp16", 96, features=("window", "sinks", "softcap", "dlse")).present,
    ],
    ids=str,
)
def test_the_command_that_the_store_names_makes_the_kernel(run, compiles, monkeypatch, tmp_path, spec):
    """DUALKV_JIT=0 without a kernel: the words of its error, run, and the kernel is there."""
    monkeypatch.setattr(precompile.precompiled, "write_manifest", lambda *_: {})  # stand-ins have no registers
    monkeypatch.setattr(precompile, "rows", lambda result: [])
    monkeypatch.setenv("DUALKV_JIT", "0")
    with pytest.raises(KernelError) as caught:
        store.entry(spec)
    command = str(caught.value).split("`")[1]
    words = [str(tmp_path / "made") if word == "DIR" else word for word in shlex.split(command)]
    assert words[:2] == ["dualkv", "precompile"]
    code, _, err = run(*words[2:], "-j", "4")
    assert code == 0, err
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "made"))
    assert store.where(spec) == "kernel_dir"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "expected --out DIR (compile into it) or --check DIR (look at it), one of them"),
        (["--out", "a", "--check", "b"], "expected --out DIR"),
        (["--out", "a"], "nothing to compile: expected --models, --head-dims with --gqa, or --all"),
        (["--out", "a", "--head-dims", "64", "--gqa", "8", "--features", "sink"], "features is sink, expected some of"),
        (["--out", "a", "--models", "qwen3-8b", "--tp", "two"], "--tp is 'two', expected integers by commas"),
        (["--out", "a", "--models", "qwen3-8b", "--dtypes", "fp8"], "dtypes is fp8, expected some of bf16,fp16"),
        (["--out", "a", "--models", "qwen3-8b", "--emit", "elf"], "code is written out as cubin, ptx, sass, got 'elf'"),
        (["--out", "a", "--head-dims", "60", "--gqa", "1"], "head_dim is 60, expected a multiple of 8"),
        (["--out", "a", "--models", "qwen3-8b", "-j", "0"], "-j"),
        (["--check", "/absent", "--emit", "ptx"], "--emit writes what --out compiles, expected no --check beside it"),
        (["--check", "/absent"], "--check is '/absent', expected a folder that `dualkv precompile --out` made"),
        (["--out", "/proc/kernels", "--head-dims", "64", "--gqa", "1"], "kernels cannot be written to /proc/kernels"),
    ],
)
def test_failures_are_one_sentence(run, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert code != 0
    assert out.strip() == ""
    assert err.startswith("dualkv: ")
    assert says in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "something was begun"


def test_a_machine_that_cannot_compile_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, _, err = run("--out", str(tmp_path / "a"), "--head-dims", "64", "--gqa", "1")
    assert code == 1
    assert "must be compiled and no C compiler is on PATH (gcc, cc or clang)," in err


# ---------------------------------------------------------------- the wheel
def test_a_wheel_of_what_was_asked(run, compiles, monkeypatch, tmp_path):
    monkeypatch.setattr(precompile.precompiled, "write_manifest", lambda *_: {})  # stand-ins have no registers
    monkeypatch.setattr(precompile, "rows", lambda result: [])
    folder, dist = tmp_path / "k", tmp_path / "dist"
    asked = ["--head-dims", "64", "--gqa", "1", "--directions", "forward"]
    store.add(forward_spec("fp16", 96, 7), folder)  # lies there, was not asked for
    code, out, err = run("--out", str(folder), "--wheel", str(dist), "--json", str(tmp_path / "j"), *asked)
    assert code == 0, err
    (wheel,) = dist.iterdir()
    assert f"To use them: pip install {wheel} (0.0 MiB), or DUALKV_KERNEL_DIR=" in " ".join(out.split())
    assert json.loads((tmp_path / "j").read_text())["wheel"] == [str(wheel), wheel.stat().st_size]
    (entry,) = {name.split("/")[1] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert entry.startswith(forward_spec("bf16", 64, 1).symbol)


def test_all_is_the_table(run, monkeypatch, tmp_path):
    asked = []

    def none(specs, *_):
        asked.extend(specs)
        raise KernelError("seen")

    monkeypatch.setattr(precompile, "precompile", none)
    assert run("--all", "--out", str(tmp_path))[0] == 1
    assert asked == table()
    for words, says in (
        (["--all", "--out", "k", "--head-dims", "64", "--gqa", "1"], "--all is every kernel, expected no --models"),
        (["--check", "k", "--wheel", "d"], "--wheel packs what --out compiles, expected no --check beside it"),
    ):
        code, _, err = run(*words)
        assert code == 1
        assert says in err


def test_rows_of_the_table_are_different():
    """Some kernels differ in their tiles alone; their rows say how."""
    record = dict.fromkeys(("registers", "spill_stores", "spill_loads", "shared_memory", "threads", "ctas_per_sm"), 0)
    made = [precompile.Made("", "", False, record | {"spec": spec.to_dict()}) for spec in table()]
    names = [row[0] for row in precompile.rows(precompile.Result("", made, [], None, [], 0.0))]
    assert len(set(names)) == len(names)
    assert any("=" in name.partition(" D=")[2] for name in names)
