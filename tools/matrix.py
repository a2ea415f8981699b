"""`python -m tools.matrix`: every exact model type times every way in which its packed calls can run.

A type of `tools.zoo` is built small, with random weights. Each of its sequences runs alone; then the packed tree of all
of them runs in each of WAYS. Logits and gradients are compared. A cell is exact, refused (ValueError or TypeError, with
its sentence) or wrong. The exit code is 1 if a cell is wrong. The record, `--json docs/results/matrix.json`, makes a
table of docs/trust.md (`python -m tools.tables`). A run that was cut goes on with the same command: types that the file
has of the same commit are not run again. Types that are named are run again and replace those in the file, whatever its
commit; the record then has the commit of each.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
import typer
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import dualkv
from dualkv import PackedSequences
from dualkv.context_parallel import ContextShard
from dualkv.integrations import transformers as integration
from dualkv.integrations.transformers import enable, layers, recompute_layers, selfcheck
from dualkv.sequence_parallel import Shard
from tools import filed, zoo
from tools.bench.record import OptionalJsonPath, Record
from tools.zoo import EXACT, REFUSED, WRONG, Computed, Result

BUDGET = 6  # rows of a part of a walk: shorter than most segments, so that trunks are cut
RANKS = 2
SECONDS = 1800.0  # of one type, on a machine that has other work too
RANK_SECONDS = 600  # that a rank waits for the other
LENGTHS = [11, 6, 9, 13, 2, 7, 3, 7, 2, 4, 10, 6, 1]
PARENTS = [-1, 0, 0, 0, -1, 4, 4, 6, 6, -1, 9, 10, 9]


class Case(NamedTuple):
    """A model class with a small configuration, its sequences, packed as trees, and the weight [T] of each packed row
    in the loss, 0 where a row predicts nothing."""

    cls: type[PreTrainedModel]
    config: PreTrainedConfig
    batch: PackedSequences
    weight: torch.Tensor

    def model(self) -> Any:
        """The small model, the same at each call, with dropout and noise of training switched off."""
        model = zoo.small(self.cls, self.config)
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and draws(name):
                    setattr(module, name, 0.0)
        return model

    def loss(self, logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return zoo.loss(logits, weight)

    def computed(self, model: nn.Module, logits: torch.Tensor, loss: torch.Tensor) -> Computed:
        """Split logits [T, V] of the packed rows into sequences, and compute the gradients of the loss."""
        paths = selfcheck.sequence_rows(self.batch.layout)
        return [logits[path].detach() for path in paths], zoo.gradients(model, loss)

    def alone(self, model: Any) -> Computed:
        """Logits of each sequence run by itself; the gradients of a loss in which each packed row counts once."""
        return zoo.replicated(model, self.batch.layout, (self.batch.input_ids, self.weight))

    def packed(self, model: Any) -> Computed:
        logits = model(input_ids=self.batch.input_ids, dualkv=self.batch.layout).logits[0]
        return self.computed(model, logits, self.loss(logits, self.weight))


def draws(name: str) -> bool:
    """Whether an attribute of a module is a probability or a size of noise in training."""
    return name == "p" or any(part in name for part in ("dropout", "jitter", "layerdrop", "drop_path"))


def case(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Case:
    """The sequences of LENGTHS and PARENTS with random tokens."""
    layout = dualkv.Layout.from_segments([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], PARENTS)
    ids, weight = zoo.inputs(zoo.small(cls, config), layout)
    batch = dualkv.pack_sequences([ids[0, path] for path in selfcheck.sequence_rows(layout)])
    predicts = torch.zeros(batch.layout.num_tokens, dtype=torch.bool)
    predicts[batch.predict_rows] = True
    return Case(cls, config, batch, weight[: batch.layout.num_tokens].where(predicts, 0.0))


# ---------------------------------------------------------------- the ways
Way = Callable[[Case], Computed]


def plain(case: Case) -> Computed:
    return case.packed(enable(case.model(), check=False))


def walk(case: Case) -> Computed:
    """Parts of BUDGET rows."""
    model = enable(case.model(), check=False)
    logits: dict[int, torch.Tensor] = {}

    def forward(input_ids: torch.Tensor, branch: Any) -> torch.Tensor:
        made: torch.Tensor = model(input_ids=input_ids, dualkv=branch).logits
        logits.update(zip(branch.part.rows.tolist(), made[0].detach(), strict=True))
        return made

    def loss(made: torch.Tensor, part: Any) -> torch.Tensor:
        return case.loss(made[0], case.weight[torch.from_numpy(part.rows)])

    model.zero_grad(set_to_none=True)
    dualkv.walk(case.batch, BUDGET, forward, loss)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    rows = torch.stack([logits[row] for row in range(case.batch.layout.num_tokens)])
    return [rows[path] for path in selfcheck.sequence_rows(case.batch.layout)], found


def head(case: Case) -> Computed:
    """The decoder, and logits of what `head` says of the model."""
    model = enable(case.model(), check=False)
    base = model.base_model if model.base_model is not model else layers.decoders(model)[0]
    hidden = base(input_ids=case.batch.input_ids, dualkv=case.batch.layout).last_hidden_state
    logits = integration.head(model).logits(hidden)[0]
    return case.computed(model, logits, case.loss(logits, case.weight))


def checkpointed(keep: str) -> Way:
    def run(case: Case) -> Computed:
        return case.packed(recompute_layers(enable(case.model(), check=False).train(), keep))

    return run


def shared(kind: type[Shard]) -> Way:
    """Rows over RANKS ranks of gloo, each in a process of its own."""

    def run(case: Case) -> Computed:
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            receive, send = context.Pipe(duplex=False)
            ranks = [context.Process(target=_rank, args=(rank, folder, kind, case, send)) for rank in range(RANKS)]
            for rank in ranks:
                rank.start()
            send.close()
            try:
                found = receive.recv()
            finally:
                for rank in ranks:
                    rank.join(RANK_SECONDS)
                    rank.kill()
        if isinstance(found, Exception):
            raise found
        logits, gradients = found
        return [torch.from_numpy(x) for x in logits], {name: torch.from_numpy(x) for name, x in gradients.items()}

    return run


def _rank(rank: int, folder: str, kind: type[Shard], case: Case, send: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=RANK_SECONDS)
        )
        shard = kind(case.batch.layout, dist.group.WORLD)
        model = enable(case.model(), check=False)
        logits = model(input_ids=shard.split(case.batch.input_ids, 1), dualkv=shard).logits
        gradients = zoo.gradients(model, case.loss(logits[0], shard.split(case.weight)))
        for name, parameter in model.named_parameters():
            gradient = gradients.setdefault(name, torch.zeros_like(parameter))
            dist.all_reduce(gradient)
        whole = shard.gather(logits.detach(), 1)[0]
        paths = selfcheck.sequence_rows(case.batch.layout)
        found: Any = [whole[path].numpy() for path in paths], {name: x.numpy() for name, x in gradients.items()}
    except (ValueError, TypeError) as error:
        found = type(error)(str(error))
    except Exception as error:
        found = RuntimeError(f"{type(error).__name__}: {error}")
    if rank == 0:
        send.send(found)
    dist.destroy_process_group()


@torch.no_grad()
def with_lora(model: Any) -> Any:
    """Put random adapters at all linear layers of the decoders.

    Some are left out since PEFT cannot wrap them: Llama 4's routers, which return two tensors, and some of Mamba.
    """
    refused: tuple[str, ...] = ("router",)
    if any(name.endswith("conv1d") for name, _ in model.named_modules()):
        refused += ("out_proj", "conv1d")
    inside = {module for decoder in layers.decoders(model) for module in decoder.modules()}
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module in inside and not name.endswith(refused)
    ]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    draw = torch.Generator().manual_seed(zoo.SEED)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)  # a sixth of the weights
    return model


def lora(case: Case) -> Computed:
    return case.packed(enable(with_lora(case.model()), check=False))


# Two ranks first: they are forks, and autograd's threads do not survive a fork.
WAYS: dict[str, Way] = {
    "ulysses": shared(Shard),
    "context": shared(ContextShard),
    "plain": plain,
    "walk": walk,
    "head": head,
    "checkpointing": checkpointed("nothing"),
    "products": checkpointed("products"),
    "lora": lora,
}
WRAPPED = {"lora": with_lora}  # ways whose sequences alone run through a wrapped model too


# ---------------------------------------------------------------- one type
def examine(kind: str) -> Result:
    """The cells of one type, by way; the worse of its models where both auto classes build it."""
    found: dict[str, Result] = {}
    for auto, mapping in zoo.MAPPINGS.items():
        config = zoo.configuration(kind)
        if type(config) in mapping:
            with torch.device("meta"):
                whole = getattr(transformers, auto).from_config(config, attn_implementation="eager")
            if next(layers.objections(whole), None) is None:
                for way, cell in _examine_model(case(type(whole), whole.config)).items():
                    found[way] = max(cell, found.get(way, cell), key=lambda one: zoo.OUTCOMES.index(one["outcome"]))
    return found


def _examine_model(case: Case) -> dict[str, Result]:
    got: dict[str, Computed | Exception] = {}
    for name, way in WAYS.items():
        try:
            got[name] = way(case)
        except Exception as error:
            got[name] = error
    expected = functools.cache(lambda name: case.alone(WRAPPED.get(name, lambda model: model)(case.model())))
    return {name: _cell(one, expected(name if name in WRAPPED else "")) for name, one in got.items()}


def _cell(got: Computed | Exception, expected: Computed) -> Result:
    if isinstance(got, ValueError | TypeError):
        return {"outcome": REFUSED, "reason": " ".join(str(got).split())}
    if isinstance(got, Exception):
        return {"outcome": WRONG, "reason": f"{type(got).__name__}: {got}"}
    error = zoo.difference(got, expected)
    return {"outcome": EXACT if error <= zoo.BOUND else WRONG, "error": error}


# ---------------------------------------------------------------- all types
def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="Model types; all exact ones if none is named.")] = None,
    draw: Annotated[int | None, typer.Option(min=1, help="So many random types in place of all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random types.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    json_to: OptionalJsonPath = None,
) -> None:
    """Compare packed calls with sequences alone, for every exact model type and way. Exit code 1 if a cell is wrong."""
    warnings.simplefilter("ignore")
    chosen = kinds or sorted(zoo.exact_before())
    if draw is not None:  # of those that ran in every way when all did
        known = filed.read(zoo.RECORDS[0].with_name("matrix.json"))["types"]
        chosen = [kind for kind in chosen if known.get(kind, {}).keys() >= WAYS.keys()]
        chosen = sorted(random.Random(seed).sample(chosen, min(draw, len(chosen))))
    start, record = time.monotonic(), Record(json_to, gpu=False)
    found = _before(json_to, record.about, named=bool(kinds))
    results, spent, later = dict(found.get("types", {})), float(found.get("seconds", 0.0)), dict(found.get("later", {}))
    at = {name: record.about.get(name) for name in ("commit", "date")}
    record.about = {name: found.get(name, value) for name, value in record.about.items()}
    for kind, cells in zoo.run([kind for kind in chosen if kinds or kind not in results], workers, SECONDS, examine):
        results[kind] = {"all": cells} if "outcome" in cells else cells
        if at["commit"] != record.about.get("commit"):
            later[kind] = at
        bad = {way: cell for way, cell in results[kind].items() if cell["outcome"] not in (EXACT, REFUSED)}
        worst = max((cell.get("error", 0.0) for cell in results[kind].values()), default=0.0)
        refused = [way for way, cell in results[kind].items() if cell["outcome"] == REFUSED]
        print(kind, f"{worst:.1e}", f"refused: {', '.join(refused) or 'none'}", *bad.items(), sep=" | ", flush=True)
        record.write(
            {
                "transformers": transformers.__version__,
                "workers": found.get("workers", workers),
                "seconds": spent + time.monotonic() - start,
                "types": dict(sorted(results.items())),
                **({"later": later} if later else {}),
            }
        )
    outcomes = Counter(cell["outcome"] for cells in results.values() for cell in cells.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()), f"seed {seed}" if draw else "")
    if outcomes.keys() - {EXACT, REFUSED}:
        raise typer.Exit(1)


def _before(path: Path | None, about: dict[str, Any], named: bool) -> dict[str, Any]:
    """Return the record in a file, which a run goes on with; an empty one if it is of another transformers or, unless
    types are named, of another commit."""
    if path is None or not path.exists():
        return {}
    found = filed.read(path)
    same = named or all(found.get(name) == about.get(name) for name in ("commit", "changed_files"))
    return found if same and found.get("transformers") == transformers.__version__ else {}


if __name__ == "__main__":
    typer.run(main)
