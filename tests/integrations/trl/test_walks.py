"""Trainings of TRL's whose micro-batches are walked in parts, against TRL's padded batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import dualkv
from dualkv import walks
from dualkv.data import memory
from dualkv.integrations.transformers import selfcheck
from dualkv.integrations.trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer, common
from tests.integrations.tiny import assert_close
from tests.integrations.trl.runs import having, make_trainer, train
from tests.integrations.trl.test_answers import assert_same, dpo
from tests.integrations.trl.test_trainer import (
    CONFIGS,
    ENTROPIES,
    EXPERTS,
    FEATURES,
    IMAGES,
    SEQUENCES,
    TRAINERS,
    assert_equal_trainings,
    assert_equal_values,
    batch_of_turns,
    both,
    of_turns,
    padded_batch,
)
from tests.integrations.trl.test_unpaired import DATA, LABELLED
from tests.integrations.trl.test_unpaired import make as of_answers

ROW = dualkv.RowCosts(kept=1000, path=100, graph=9000, recomputed=4000)
MEMORY = dualkv.Memory(200_000, ROW)
COPIES = dualkv.Memory(200_000, ROW._replace(kept=10**6))  # no trunk can keep its keys


BOTH = {"F", "FT", "G", "GT"}  # trunks and parts, without a graph and with one


RUNS: dict[str, dict[str, Any]] = {
    "a reference model, two iterations, sequences": SEQUENCES,
    "entropies": ENTROPIES,
    "images of tools": {"of": "screens", **IMAGES},
    "RLOO, a mixture of experts": {"of": "rloo", **EXPERTS, "learning_rate": 0.01, "router_aux_loss_coef": 0.0},
}


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Note the kinds of passes that run: F without a graph, G with one, T of trunks."""
    found: set[str] = set()
    backward = walks.Pass.backward

    def noted(self: walks.Pass, loss: Any = None) -> None:
        if not selfcheck._ALONE._is_owned():  # walks of a small model, which are checked first
            found.add(self.kind + "T" * self.part.is_trunk)
        backward(self, loss)

    monkeypatch.setattr(walks.Pass, "backward", noted)
    return found


def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which a few rows are left, on which the head takes nothing, and passes cost what their rows do."""
    for name in ("PASS_BACKWARD", "LEAST_PASS"):
        monkeypatch.setattr(memory, name, 0)
    measured = common.Walks._costs
    monkeypatch.setattr(common.Walks, "_bytes", lambda self: 300_000)
    monkeypatch.setattr(common.Walks, "_costs", lambda *args: measured(*args)._replace(head=0.0, saved=None))


@pytest.mark.parametrize(("name", "walk"), [*zip(RUNS, (16, True, True, MEMORY), strict=True)])
def test_a_walked_training_is_the_padded_one(
    folder: Path, name: str, walk: Any, kinds: set[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    small_memory(monkeypatch)
    settings = dict(RUNS[name])
    of = settings.pop("of", "grpo")
    ours, padded, _ = TRAINERS[of]
    ours, theirs = (
        train(of_turns(cls), folder, config=CONFIGS[of], **settings) for cls in (having(ours, walk=walk), padded)
    )
    assert kinds == BOTH
    said = [record.getMessage() for record in caplog.records if record.name == common.__name__]
    assert len(said) == len({text.translate(common._NO_DIGITS) for text in said}), "once for each way"
    assert any("rows are walked in" in text for text in said) == (walk != 16)
    assert_equal_trainings(ours, theirs)


@pytest.mark.parametrize(
    ("model", "make", "walk"),
    [
        ("qwen3", padded_batch, 4),
        ("qwen3", batch_of_turns, 4),
        ("qwen3", batch_of_turns, COPIES),
        ("gpt_oss", batch_of_turns, 4),
        ("qwen3_5", batch_of_turns, 4),
    ],
)
def test_log_probs_and_gradients(folder: Path, model: str, make: Any, walk: Any, kinds: set[str]) -> None:
    settings: dict[str, Any] = {"model": model, "made": FEATURES[model](), "gradient_checkpointing": False}
    settings["router_aux_loss_coef"] = 0.0
    trainer = make_trainer(having(GRPOTrainer, walk=walk), folder, **settings)
    assert_equal_values(trainer, *make())
    assert kinds == ({"F", "G"} if walk is COPIES else BOTH)


BONUS = {"entropy_coef": 0.1, "_entropy_bonus_enabled": True}
LOSSES: list[dict[str, Any]] = [
    *({"loss_type": x} for x in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
    {"importance_sampling_level": "sequence", "beta": 0.1},
    {"off_policy_mask_threshold": 0.02, **BONUS},
    {"use_adaptive_entropy": True, "_last_world_entropy": 0.0, "_entropy_window_stats": None, **BONUS},
    {"top_entropy_quantile": 0.5},
]


def test_losses_that_are_sums_over_rollouts_take_one_walk(
    folder: Path, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rollouts end within others, and some are equal. Entropies above a quantile are those of other rollouts."""
    settings = {"entropy_target": 9.0, "entropy_coef_max": 0.2, "entropy_coef": 0.1, "gradient_checkpointing": False}
    trainer = make_trainer(having(GRPOTrainer, walk=4), folder, **settings)
    trainer.model.double()  # a loss of 2.2 is up to 1.4e-6 off in fp32, here no loss by more than 1.2e-7
    trainer.current_gradient_accumulation_steps = 2
    (packed, stock), model, metrics = both(trainer), trainer.model.train(), trainer._metrics["train"]
    ids, mask, room = batch_of_turns()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logps = stock(model, ids, mask, room)[0]
    inputs = {
        "prompt_ids": ids[:, :-room],
        "prompt_mask": mask[:, :-room],
        "completion_ids": ids[:, -room:],
        "completion_mask": mask[:, -room:],
        "advantages": torch.randn(len(ids), generator=draw),
        "num_items_in_batch": mask[:, -room:].sum(),
        "old_per_token_logps": logps + 0.3 * torch.randn(logps.shape, generator=draw),
        "ref_per_token_logps": logps + 0.1 * torch.randn(logps.shape, generator=draw),
    }
    walks, known = trainer._walks, trainer._walks.known
    for loss_settings in LOSSES:
        found = []
        kinds.clear()
        for compute, own in ((packed, walks), (stock, None)):
            with monkeypatch.context() as patch:
                state = {"_walks": own, "_get_per_token_logps_and_entropies": compute, **loss_settings}
                for name, value in state.items():
                    patch.setattr(trainer, name, value)
                metrics.clear()
                model.zero_grad()
                loss = trainer._compute_loss(model, inputs)
                loss.backward()
                gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
                found.append(
                    ([loss.item()], gradients, {name: x for name, x in metrics.items() if "dualkv" not in name})
                )
        (ours, gradients, our_metrics), (theirs, expected, their_metrics) = found
        assert ours == pytest.approx(theirs, abs=1e-6), loss_settings
        assert our_metrics == {name: pytest.approx(x, rel=1e-4, abs=1e-6) for name, x in their_metrics.items()}
        assert_close(str(loss_settings), gradients, expected, 1e-5)
        assert kinds == {"FT", "GT", "G"}
        assert known.factor == 1.0
        assert known.is_sum == ("top_entropy_quantile" not in loss_settings), loss_settings
    known.is_sum = True
    trainer._compute_loss(model, inputs)
    with pytest.raises(RuntimeError, match="backward of the values of the walk before did not run"):
        trainer._compute_loss(model, inputs)


IPO = {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [1.0, 0.5, 0.1], "ld_alpha": 0.5}
ANSWERS: dict[str, Any] = {
    "dpo": (DPOTrainer, trl.DPOTrainer, partial(dpo, **IPO)),
    "kto": (KTOTrainer, trl.KTOTrainer, partial(of_answers, dataset=LABELLED)),
    "sft": (SFTTrainer, trl.SFTTrainer, partial(of_answers, dataset=DATA, loss_type="dft")),
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls
@pytest.mark.parametrize(("of", "walk"), [*((of, 20) for of in ANSWERS), ("dpo", True)])
def test_walked_trainings_on_answers(
    tmp_path: Path, of: str, walk: Any, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(monkeypatch)
    ours, theirs, make = ANSWERS[of]
    assert_same(partial(make, folder=tmp_path), having(ours, walk=walk), theirs)
    assert kinds == ({"F", "G"} if walk is True else BOTH), "pairs so short are cut"


def test_what_a_walk_refuses(folder: Path) -> None:
    with pytest.raises(ValueError, match="walk is 0, expected"):
        make_trainer(having(GRPOTrainer, walk=0), folder)
    with pytest.raises(TypeError, match="walk"):
        make_trainer(having(GRPOTrainer, walk="all"), folder)
    trainer = make_trainer(having(GRPOTrainer, walk=True), folder)
    with pytest.raises(ValueError, match=r"walk is True on cpu, expected rows or a dualkv\.Memory"):
        trainer._walks._bytes()
    settings = {"model": "qwen3_moe", "router_aux_loss_coef": 0.5}
    with pytest.raises(ValueError, match=r"together with router_aux_loss_coef 0\.5, expected one process"):
        make_trainer(having(RLOOTrainer, walk=9), folder, config=CONFIGS["rloo"], **settings)

    with pytest.raises(ValueError, match="walk is given together with canary 2, expected"):
        make_trainer(having(GRPOTrainer, walk=9, canary=2), folder)
