"""The recorded runs of `dualkv bench` (tools/bench/attention): what of them needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch
import typer

from tools.bench import attention


def test_an_ampere_card_is_stood_in_for(monkeypatch):
    import torch._inductor.config as config
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic as Heuristic

    monkeypatch.setattr(config, "force_disable_caches", False)
    monkeypatch.setenv("DISABLE_MMA_V3", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name in ("get_flex_attn_fwd_configs", "get_flex_attn_bwd_configs"):
        monkeypatch.setattr(Heuristic, name, getattr(Heuristic, name))
    tiles, hopper = Heuristic(), Heuristic().get_flex_attn_bwd_configs(128, torch.bfloat16)
    attention.as_ampere()
    assert (os.environ["DISABLE_MMA_V3"], config.force_disable_caches) == ("1", True)
    assert tiles.get_flex_attn_bwd_configs(128, torch.bfloat16) != hopper
    assert tiles.get_flex_attn_fwd_configs(64, torch.bfloat16) == [tiles.a100_default_flex_config[torch.bfloat16, 64]]
    assert torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("names", [["nothing"], ["forward", attention.AMPERE]])
def test_other_names_are_refused(names):
    with pytest.raises(typer.BadParameter, match=names[-1]):
        attention.main(names)
