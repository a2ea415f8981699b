"""Options of the benchmarks of veRL's engines, on any strategy."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dualkv.models import CONFIGS


class Engine(StrEnum):
    VERL = "verl"
    DUALKV = "dualkv"


class Algorithm(StrEnum):
    GRPO = "grpo"
    DAPO = "dapo"


Engines = Annotated[Engine, typer.Option(help="veRL's own, or packed groups.")]
Model = Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}; random weights.")]
Layers = Annotated[int | None, typer.Option(help="Of the model; all of them by default.")]
Groups = Annotated[int, typer.Option(help="Prompts in an update of each data-parallel rank.")]
Responses = Annotated[int, typer.Option("--responses", "-n", help="Responses of each prompt.")]
PromptLen = Annotated[int, typer.Option("--prompt-len", "-p", help="Tokens of each prompt.")]
ResponseLen = Annotated[int, typer.Option("--response-len", "-r", help="Tokens of each response.")]
MicroBatch = Annotated[int | None, typer.Option(help="Rollouts a micro-batch.")]
MaxTokens = Annotated[int | None, typer.Option(help="Or tokens, packed ones with packed groups.")]
Algorithms = Annotated[Algorithm, typer.Option(help="Whose loss.")]
Updates = Annotated[int, typer.Option(help="To measure; a fresh worker makes a small one before.")]
Untimed = Annotated[int, typer.Option(help="Whole updates before them, where the first one of a row compiles.")]
LearningRate = Annotated[float, typer.Option(help="Of AdamW, constant.")]
Rows = Annotated[
    Path | None, typer.Option(help="A JSON list of options, each laid over those given here; run one by one.")
]
