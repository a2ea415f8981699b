"""The settings of `dualkv demo`. The options of the command line are made of their defaults, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")

# What `dualkv demo` takes on a GPU for options that are not given: enough to compute, in a dtype that kernels take. The
# defaults for CPUs would show there how long launches take, and fp32, which has no kernel.
ON_CUDA: dict[str, Any] = {
    "model": "qwen3-0.6b",
    "steps": 1,
    "prompt_len": 4096,
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
}


@dataclass(frozen=True)
class DemoSettings:
    """The settings of `dualkv demo`; its options have the same names, and on a GPU other defaults (:data:`ON_CUDA`).

    Attributes:
        groups, prompt_len, responses, response_len: of drawn rollouts: prompts, tokens of each, responses a prompt,
            tokens of a response.
        turns: of drawn rollouts; with more than one, turns of `response_len` tokens with as many of an environment in
            between, which do not count; rollouts branch at every turn.
        batch_invariant: log-probs of the packed ways have equal bits in all micro-batches; their old log-probs come
            from the smallest ones, and the first update says its ratio to them.

    Raises:
        ValueError: a dtype or device that is not there.
    """

    model: str = "tiny"
    rollouts: str | None = None
    tokenizer: str | None = None
    steps: int = 3
    groups: int = 2
    prompt_len: int = 1024
    responses: int = 8
    response_len: int = 64
    turns: int = 1
    budget: int | None = None
    dtype: str = "float32"
    device: str | None = None
    seed: int = 0
    batch_invariant: bool = False
    gradient_checkpointing: bool = False

    @classmethod
    def given(cls, device: str | None = None, **options: Any) -> DemoSettings:
        """Make settings from options, where None means not given, with the defaults of the device."""
        settings = {name: value for name, value in options.items() if value is not None}
        on_cuda = cls(device=device).where.startswith("cuda")
        return cls(device=device, **(ON_CUDA | settings if on_cuda else settings))

    def __post_init__(self) -> None:
        import torch

        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        kind = (self.device or "cpu").partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}, expected cpu or cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r} and PyTorch sees no CUDA device: see `dualkv doctor`")

    @property
    def where(self) -> str:
        """The device."""
        import torch

        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")
