"""Find the kernels that models need, by name or config.json, and compile them into a folder, on a machine without a
GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from codegen import precompiled, store
from codegen.select import DIRECTIONS, NAMES, Shape, select
from codegen.spec import DTYPES, FORWARDS, GRADIENTS, KernelSpec
from codegen.tiles import HEAD_DIMS
from dualkv import __version__
from dualkv.models import CONFIGS, WITH_WINDOWS_IN_FULL_LAYERS, read_config
from dualkv.progress import Track, untracked


class Heads(NamedTuple):
    """Attention of some of a model's layers: query heads, KV heads, head dim, features (codegen.select.NAMES), the head
    dim of values (None: the same), and the attention of layers with other heads."""

    heads: int
    kv_heads: int
    head_dim: int
    features: tuple[str, ...] = ()
    head_dim_v: int | None = None
    others: tuple[Heads, ...] = ()


# Recurrent layers of hybrid models and layers of one block need no kernel of dualkv. "attention" and "mamba" are names
# in older files.
LAYER_TYPES = (
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention", "hybrid"),
    *("linear_attention", "mamba", "conv", "mlp", "moe", "minimax_m3_sparse"),
)
OF_HEADS = {"num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "n_head"}
OF_LATENT_HEADS = {"qk_nope_head_dim", "qk_rope_head_dim"}
# Model types; no field of a config.json says so.
WITH_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "hy_v4")
WITH_SINKS_IN_WINDOWS = ("mimo_v2_flash",)  # whose window layers have twice the KV heads, too


# ---------------------------------------------------------------- models
def heads_of(model: str) -> Heads:
    """Read the heads of a model from its name in :data:`dualkv.models.CONFIGS` (an organisation and capitals are
    allowed), or from the path of a config.json or its folder.

    Raises:
        ValueError: no such model, or one whose attention dualkv does not compute.
    """
    config = read_config(model)
    if config is None:
        config = CONFIGS.get(model.split("/")[-1].lower())
    if config is None:
        raise ValueError(f"model {model!r} is neither the path of a config.json nor one of {', '.join(CONFIGS)}")
    return heads_of_config(config, model)


def heads_of_config(config: Any, where: str) -> Heads:
    """Read the heads from a Hugging Face configuration, or from the text part of one.

    Raises:
        ValueError: it says no heads, or asks for attention that dualkv does not compute.
    """
    if not isinstance(config, dict):
        raise ValueError(f"{where} is no configuration of a model, expected an object with num_attention_heads")
    config = config.get("text_config") or config
    if not isinstance(config, dict):
        raise ValueError(f"{where} has text_config={config!r}, expected an object")
    types = config.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"{where} has layer_types={types!r}, expected a list of strings")
    if feature := _not_computed(config):
        raise ValueError(f"{where} asks for {feature}, which dualkv does not compute")
    shape, features, others = _heads(config, where), _features(config), list[Heads]()
    if (of_all := config.get("global_head_dim")) is not None:  # Gemma 4's layers of full attention
        others.append(Heads(shape.heads, config.get("num_global_key_value_heads") or shape.kv_heads, of_all))
    if config.get("model_type") in WITH_SINKS_IN_WINDOWS:
        others.append(shape._replace(kv_heads=2 * shape.kv_heads, features=("window", "sinks")))
        features = ()
    kinds = dict(enumerate(types))
    for layer, fields in _of_single_layers(config).items():  # as transformers writes them
        if (OF_HEADS | OF_LATENT_HEADS) & set(fields):
            own = _heads(config | {"head_dim": shape.head_dim} | fields, f"{where}, layer {layer},")
            others.append(own._replace(features=() if kinds.get(layer) == "full_attention" else features))
    return shape._replace(features=features, others=tuple(dict.fromkeys(others)))


def _heads(config: dict[str, Any], where: str) -> Heads:
    """Read the heads of a model's layers, or of one layer with fields of its own, without features."""
    if config.get("model_type") == "dbrx":  # which has names of its own
        names, attention = {"num_attention_heads": "n_heads", "hidden_size": "d_model"}, config.get("attn_config") or {}
        if not isinstance(attention, dict):
            raise ValueError(f"{where} has attn_config={attention!r}, expected an object")
        config = config | {name: config.get(own) for name, own in names.items()}
        config["num_key_value_heads"] = attention.get("kv_n_heads", 1)
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)
    head_dim, head_dim_v = config.get("head_dim"), config.get("v_head_dim")
    width = config.get("hidden_size", config.get("n_embd"))
    if config.get("kv_lora_rank") is not None:  # latent attention: every query head has keys and values of its own
        parts: list[Any] = [config.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        head_dim, kv_heads = sum(parts) if all(type(part) is int for part in parts) else None, heads
    elif config.get("attention_head_dim") is not None:  # Zamba 2, whose kv_channels are something else
        head_dim = config["attention_head_dim"]
    elif config.get("kv_channels") is not None:  # JetMoe: each expert of queries has as many heads as there are of keys
        heads, head_dim = kv_heads, config["kv_channels"]
    elif head_dim is None and isinstance(heads, int) and heads > 0 and isinstance(width, int):
        head_dim = width // heads
    found: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    _check_heads(found | ({} if head_dim_v is None else {"v_head_dim": head_dim_v}), where)
    of_values = None if head_dim_v == head_dim else head_dim_v
    return Heads(found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"], (), of_values)


def _features(config: dict[str, Any]) -> tuple[str, ...]:
    """List the features that some layers of a configuration have, in the order of codegen.select.NAMES."""
    kinds = config.get("layer_types")
    sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    of_one_kind = sliding or config.get("attention_chunk_size") is not None
    if config.get("model_type") in WITH_WINDOWS_IN_FULL_LAYERS:
        kinds = None
    found = {
        "window": not {"sliding_attention", "chunked_attention"}.isdisjoint(kinds) if kinds else of_one_kind,
        "sinks": config.get("model_type") in WITH_SINKS,
        "softcap": config.get("attn_logit_softcapping") is not None,
    }
    return tuple(name for name in NAMES if found.get(name))


def _of_single_layers(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The fields that single layers have for themselves, by the layer's number (the keys are such as "05")."""
    own = config.get("per_layer_config")
    own = own.items() if isinstance(own, dict) else ()
    return {int(n): fields for n, fields in own if n.isdigit() and isinstance(fields, dict)}


def _check_heads(found: dict[str, Any], where: str) -> None:
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{where} has {name}={value!r}, expected an integer of 1 or more")
    heads, kv_heads = found["num_attention_heads"], found["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(f"{where} has {heads} query heads for {kv_heads} KV heads, expected a multiple")


def _not_computed(config: dict[str, Any]) -> str | None:
    """Name the attention of a configuration that is not supported, in words; None if all is supported."""
    of_layers = (fields.get("head_dim") or 0 for fields in _of_single_layers(config).values())
    widest = max(config.get("global_head_dim") or 0, *of_layers, 0)
    if widest > HEAD_DIMS[-1]:
        return f"layers of head dim {widest}"
    other = sorted(set(config.get("layer_types") or []) - set(LAYER_TYPES))
    if other:
        return f"layers of {' and '.join(other)} (layer_types)"
    return None


def shape(heads: Heads, tensor_parallel: int = 1) -> Shape:
    """The shape of one rank's kernels; KV heads fewer than ranks are copied, as Megatron and vLLM do.

    Raises:
        ValueError: heads that these ranks cannot share out.
    """
    if tensor_parallel < 1 or heads.heads % tensor_parallel:
        raise ValueError(f"tp is {tensor_parallel}, expected a divisor of the model's {heads.heads} query heads")
    if heads.kv_heads % tensor_parallel and tensor_parallel % heads.kv_heads:
        raise ValueError(
            f"tp is {tensor_parallel}, expected a divisor or a multiple of the model's {heads.kv_heads} KV heads"
        )
    kv_heads = max(1, heads.kv_heads // tensor_parallel)
    return Shape(heads.head_dim, heads.heads // tensor_parallel // kv_heads, heads.features, heads.head_dim_v)


def _without_window(shape: Shape) -> Shape:
    return shape._replace(features=tuple(name for name in shape.features if name != "window"))


def requested(
    models: Iterable[str] = (),
    tensor_parallel: Iterable[int] = (1,),
    head_dims: Iterable[int | tuple[int, int]] = (),
    gqa: Iterable[int] = (),
    dtypes: Iterable[str] = DTYPES[:1],
    directions: Iterable[str] = DIRECTIONS,
    gradients: Iterable[str] = GRADIENTS[:1],
    deterministic: bool = False,
    trees: bool = False,
    features: tuple[str, ...] = (),
) -> list[KernelSpec]:
    """The kernels of models, on so many tensor-parallel ranks each, and of every head dim with every GQA ratio.

    Models with windows get kernels without them too, for layers of full attention and for shorter paths than a window.

    Args:
        head_dims: a pair is the head dim of queries and keys, and the one of values.
        gqa: may be left out where only the backward is asked for, whose kernels serve every ratio.
        features: of the layers of `head_dims`.

    See :func:`heads_of` for models and :func:`codegen.select.select` for the rest, also for the errors.
    """
    directions, head_dims, gqa = list(directions), list(head_dims), list(gqa)
    if head_dims and not gqa and directions == ["backward"]:
        gqa = [1]
    if bool(head_dims) != bool(gqa):
        raise ValueError(f"head_dims is {head_dims} and gqa is {gqa}, expected both or neither")
    every = (heads for found in map(heads_of, models) for heads in (found, *found.others))
    shapes = [shape(heads, ranks) for heads in every for ranks in tensor_parallel]
    shapes = [of for given in shapes for of in dict.fromkeys((_without_window(given), given))]
    pairs = [(of, None) if isinstance(of, int) else of for of in head_dims]
    shapes += [Shape(head_dim, ratio, features, of_values) for head_dim, of_values in pairs for ratio in gqa]
    return select(shapes, dtypes, directions, gradients, deterministic, trees)


# ---------------------------------------------------------------- compile
@dataclass(frozen=True)
class Made:
    """A kernel in the folder: `found` there, or compiled now; the record's fields are those of its kernel.json."""

    kernel: str
    entry: str
    found: bool
    record: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The result of a precompile; `as_dict` is for JSON.

    Attributes:
        code: files written for reading.
        wheel: the file, and its size in bytes.
        unusable: entries of other versions that lie in the folder too.
    """

    folder: str
    kernels: list[Made]
    code: list[str]
    wheel: tuple[str, int] | None
    unusable: list[str]
    seconds: float

    @property
    def compiled(self) -> int:
        return sum(not made.found for made in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"compiled": self.compiled}


def precompile(
    specs: list[KernelSpec],
    folder: Path,
    jobs: int,
    code: Iterable[str] = (),
    wheel: Path | None = None,
    track: Track = untracked,
) -> Result:
    """Compile what `folder` lacks of `specs`, `jobs` at a time, and write its manifest.json.

    Args:
        code: of codegen.precompiled.CODE, written to `folder/code` for reading.
        wheel: a folder to write a wheel of these kernels to.

    Raises:
        ValueError: fewer jobs than 1.
        KernelError: this machine cannot compile, a compile failed, the folder cannot be written.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, expected 1 or more")
    code = list(code)
    for kind in code:
        if kind not in precompiled.CODE:
            raise ValueError(f"code is written out as {', '.join(precompiled.CODE)}, got {kind!r}")
    begin = time.monotonic()
    there = {spec for spec in specs if store.has(spec, folder)}
    made, written, entries = [], [], []
    for spec, entry in track(store.fill(specs, folder, jobs), "compiling", len(specs)):
        entries.append(entry)
        made.append(Made(str(spec), entry.name, spec in there, precompiled.record_of(entry)))
        written += [str(path) for path in precompiled.emit(entry, spec, code, folder / precompiled.CODE_FOLDER)]
    precompiled.write_manifest(folder, __version__)
    packed = None if wheel is None else precompiled.write_wheel(entries, wheel, __version__)
    of_wheel = None if packed is None else (str(packed), packed.stat().st_size)
    return Result(str(folder), made, written, of_wheel, list(precompiled.unusable(folder)), time.monotonic() - begin)


def check(folder: Path, specs: list[KernelSpec]) -> precompiled.Checked:
    """See :func:`codegen.precompiled.check`; ValueError without such a folder."""
    if not folder.is_dir():
        raise ValueError(f"--check is {str(folder)!r}, expected a folder that `dualkv precompile --out` made")
    return precompiled.check(folder, specs)


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------- in words
COLUMNS = ("kernel", "regs", "spills", "smem KiB", "threads", "CTA/SM", "")


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    """One a kernel, under COLUMNS. Kernels that differ in their tiles alone have what differs."""
    named = [_named(made.record["spec"]) for made in result.kernels]
    for made, name in zip(result.kernels, named, strict=True):
        record, tile = made.record, made.record["spec"]["tile"]
        same = [m.record["spec"]["tile"] for m, other in zip(result.kernels, named, strict=True) if other == name]
        differs = [f" {key}={value}" for key, value in tile.items() if any(x.get(key) != value for x in same)]
        yield (
            name + "".join(differs),
            str(record["registers"]),
            str(record["spill_stores"] + record["spill_loads"]),
            f"{record['shared_memory'] / 1024:.1f}",
            str(record["threads"]),
            str(record["ctas_per_sm"]),
            "found" if made.found else "compiled",
        )


def _named(spec: dict[str, Any]) -> str:
    """The operation, dtype, head dims and what a kernel serves."""
    if spec["operation"] in FORWARDS:
        serves = f"GQA {spec['packed_heads']}"
    else:
        serves = f"d{spec['gradients']}" + (" deterministic" if spec["tile"].get("deterministic") else "")
    dims = "/".join(str(spec[name]) for name in ("head_dim", "head_dim_v") if name in spec)
    return f"{spec['operation']} {spec['dtype']} D={dims} {serves}" + f" {spec['features']}" * bool(spec["features"])


def summary(result: Result) -> str:
    """Say what was compiled and how the folder is used."""
    code = f"; {len(result.code)} files in {Path(result.folder) / precompiled.CODE_FOLDER}" if result.code else ""
    others = len(result.unusable)
    old = f"; {others} of other versions lie there too and are not used, remove them" if others else ""
    kernels = f"{_counted(len(result.kernels), 'kernel')} in {result.folder}"
    use = f"DUALKV_KERNEL_DIR={Path(result.folder).absolute()} DUALKV_JIT=0"
    if result.wheel is not None:
        path, size = result.wheel
        use = f"pip install {path} ({size / 2**20:.1f} MiB), or {use}"
    return f"{kernels}, {result.compiled} compiled in {result.seconds:.1f} s{code}{old}. To use them: {use}"


def described(checked: precompiled.Checked) -> Iterator[str]:
    """A check's result, line by line."""
    yield from checked.problems
    kernels = _counted(checked.kernels, "kernel")
    if checked.problems:
        problems = _counted(len(checked.problems), "problem")
        yield f"{problems} in a folder of {kernels}: `dualkv precompile --out` on it makes what it lacks or has wrong"
        return
    yield f"{kernels}: hashes and records agree, all load here; " + (
        f"not read back from a GPU: {checked.not_read_back}"
        if checked.not_read_back
        else "the GPU says the same of registers, stack, threads and occupancy"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
