"""Tiny models and ragged rollouts for veRL workers, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB + 1,  # even, for two tensor-parallel ranks
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large: attention must matter
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Shorter than some prompts, some responses and both.
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip
# Hybrid models: a recurrent layer below one of attention.
LINEAR = ["linear_attention", "full_attention"]
GATED = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
IMAGE, START, END = 93, 94, 95  # the highest ids: texts with images stay below
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
          "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 48, "num_position_embeddings": 16,
          "deepstack_visual_indexes": [0, 1]}  # fmt: skip
OF_IMAGES = {"image_token_id": IMAGE, "video_token_id": 96, "vision_start_token_id": START, "vision_end_token_id": END}
# The images of prompts, by the prompt's length: (height, width) in patches.
IMAGES = {23: [(4, 6)], 30: [(4, 4), (2, 6)], 14: [(6, 4)], 300: [(10, 12), (4, 4)], 33: [(4, 4)], 49: [(4, 8)]}


def _qwen3_vl(vocabulary: int) -> Qwen3VLConfig:
    text = SIZES | {"vocab_size": vocabulary, "rope_parameters": ROPE}
    return Qwen3VLConfig(text_config=text, vision_config=VISION, **OF_IMAGES)


MODELS = {
    "dense": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "of_sixteens": (Qwen3ForCausalLM, Qwen3Config(**SIZES | {"vocab_size": 112})),
    "critic": (Qwen3ForTokenClassification, Qwen3Config(**SIZES, num_labels=1)),
    "one_kv_head": (Qwen3ForCausalLM, Qwen3Config(**SIZES | {"num_key_value_heads": 1})),
    "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "two_heads": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1}, **EXPERTS),
    ),
    "images": (Qwen3VLForConditionalGeneration, _qwen3_vl(VOCAB)),
    "images_of_sixteens": (Qwen3VLForConditionalGeneration, _qwen3_vl(112)),
    "images_2_5": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(
            text_config=SIZES | {"vocab_size": VOCAB, "hidden_size": 64, "rope_parameters": ROPE},
            vision_config=VISION | {"out_hidden_size": 64, "window_size": 8, "fullatt_block_indexes": [1]},
            **OF_IMAGES,
        ),
    ),
    "qwen3_5_text": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SIZES, **GATED, layer_types=LINEAR)),
    "images_3_5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(
            text_config=SIZES | GATED | {"vocab_size": VOCAB, "layer_types": LINEAR},
            vision_config={name: value for name, value in VISION.items() if not name.startswith("deepstack")},
            **OF_IMAGES,
        ),
    ),
    "olmo_hybrid": (OlmoHybridForCausalLM, OlmoHybridConfig(**SIZES, layer_types=LINEAR, pad_token_id=0)),
    "windows_and_sinks": (GptOssForCausalLM, GptOssConfig(**SIZES, **WINDOWS)),
}

# Prompt length, response lengths: a prompt of one token, an empty response, a group of one. Two updates take the first
# and the last eight rollouts, so the third group is cut.
GROUPS = [(1, [4, 9, 1]), (23, [7, 0, 12]), (30, [3, 5, 8, 2, 6]), (5, [4, 2]), (9, [11]), (14, [6, 3])]
UPDATE = 8


def save_models(folder: Path) -> None:
    """Random weights, the same every time; in fp64 too, because float32 files cannot be read in `double_throughout`."""
    for name, (model, config) in MODELS.items():
        torch.manual_seed(0)
        made = model(config)
        for of, parameter in made.named_parameters():
            if of.endswith("A_log"):  # slow decays, so that a response depends on the state that its prompt leaves
                nn.init.uniform_(parameter, -7, -4)
        made.save_pretrained(folder / name)
        made.double().save_pretrained(folder / f"{name}-fp64")


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_rollouts(s: dict[str, Any], ranks: int, rank: int) -> TensorDict:
    """The rollouts of `rank`, without padding, as veRL's trainer sends them: of each update's eight an equal share.

    Read from the scenario `s`: `groups`; `interleaved`; `differs`, the rollout and token of a prompt to change;
    `temperature`, one number or "ragged" for one a rollout; `padded` for the way over veRL's padded form; `turns` for
    rollouts of several turns, which share more than their prompts, "of_sixteens" for turns of 16 tokens; `screens` for
    responses that begin with an image.
    """
    generator = torch.Generator().manual_seed(7)

    def draw(n: int) -> torch.Tensor:
        return torch.randint(1, VOCAB, (n,), generator=generator)

    prompts, responses, uids = [], [], []
    for g, (prompt_len, response_lens) in enumerate(s.get("groups", GROUPS)):
        prompt = draw(prompt_len)
        for n in response_lens:
            prompts.append(prompt)
            responses.append(draw(n))
            uids.append(f"uid-{g}")
    masks = [torch.ones_like(r) for r in responses]
    seen: list[dict[str, Any]] = []
    of_images: list[torch.Tensor] = []
    if s.get("model", "").startswith("images"):
        shown: list[list[tuple[int, int]]] = [[] for _ in responses]
        if s.get("screens"):
            responses, masks, shown = _screens(responses, uids)
        prompts, responses, of_images, seen = _with_images(prompts, responses, shown)
    if s.get("turns"):
        sizes = (16, 16, 16) if s["turns"] == "of_sixteens" else (6, 3, 7)
        prompts, responses, masks = _turns(prompts, responses, uids, draw, *sizes)
    noise = [torch.randn(3, len(r), generator=generator) for r in responses]
    if "differs" in s:  # one token of one prompt
        i, at = s["differs"]
        prompts[i] = prompts[i].clone()
        prompts[i][at] += 1

    mine = [i for i in range(len(prompts)) if (i % UPDATE) * ranks // UPDATE == rank]
    if s.get("interleaved"):  # the rollouts of a prompt apart from each other
        mine.sort(key=lambda i: (i // UPDATE, 3 * i % UPDATE))
    prompts, responses, noise, masks = ([x[i] for i in mine] for x in (prompts, responses, noise, masks))
    of_responses = {
        "response_mask": masks,
        "advantages": [n[0] for n in noise],
        # Off the policy, so that ratios are clipped and the KL term is not 0.
        "old_log_probs": [n[1] - 4 for n in noise],
        "ref_log_prob": [n[2] - 4 for n in noise],
    }
    if s.get("model") == "critic":
        of_responses |= {"values": [n[1] for n in noise], "returns": [n[2] for n in noise]}
    make = _padded if s.get("padded") else _nested
    data = make(prompts, responses, of_responses)
    if of_images:
        data["position_ids"] = nested_positions([of_images[i] for i in mine])
        tu.assign_non_tensor_stack(data, "multi_modal_inputs", [seen[i] for i in mine])
    tu.assign_non_tensor_stack(data, "uid", [uids[i] for i in mine])
    tu.assign_non_tensor(
        data,
        global_token_num=NonTensorData([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]),
        calculate_entropy=True,
        **s.get("settings", {}),
    )
    temperature = s.get("temperature", 0.8)
    if temperature == "ragged":
        # With these, no ratio lies within 0.5 % of an edge of the clipped loss. (With sixteenths one was 1.200002, and
        # rounding decided whether its token had a gradient.)
        data["temperature"] = 0.5 + torch.tensor(mine) / 15
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    return data


def nested_positions(rows: list[torch.Tensor]) -> torch.Tensor:
    """[4, L] of each rollout, as veRL nests them."""
    lens = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, 1), lens, jagged_dim=2)


def _screens(
    responses: list[torch.Tensor], uids: list[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[tuple[int, int]]]]:
    """Responses behind a turn with an image, which two of a group share, and a third one has in another form; their
    loss masks; sizes of these images."""
    changed, masks, shown = [], [], []
    for i, (response, uid) in enumerate(zip(responses, uids, strict=True)):
        size = [(4, 4), (4, 4), (2, 8), None][(i - uids.index(uid)) % 4]
        turn = torch.tensor([7, 8, 9, START, *[IMAGE] * 4, END, 5, 6] if size else [], dtype=torch.int64)
        shown.append([size] if size else [])
        masks.append(torch.cat([torch.zeros_like(turn), torch.ones_like(response)]))
        changed.append(torch.cat([turn, response % (IMAGE - 1) + 1]))
    return changed, masks, shown


def _with_images(
    prompts: list[torch.Tensor], responses: list[torch.Tensor], shown: list[list[tuple[int, int]]]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[dict[str, Any]]]:
    """Prompts with placeholders; positions [4, L] of each rollout; the images of each rollout.

    Images follow each other from the prompt's second token on; responses have those of the sizes `shown` already. As in
    Qwen-VL, an image of h x w tokens takes max(h, w) positions.
    """
    prompts = [x % (IMAGE - 1) + 1 for x in prompts]
    responses = [x if own else x % (IMAGE - 1) + 1 for x, own in zip(responses, shown, strict=True)]
    positions, seen = [], []
    for prompt, response, own in zip(prompts, responses, shown, strict=True):
        at, sizes = 1, IMAGES.get(len(prompt), [])
        for height, width in sizes:
            rows = height * width // 4
            prompt[at], prompt[at + 1 : at + 1 + rows], prompt[at + 1 + rows] = START, IMAGE, END
            at += rows + 2
        whole, found, at = torch.cat([prompt, response]), [torch.full((3, 1), -1)], 0
        for height, width in sizes + own:
            h, w = height // 2, width // 2
            begin = at + int((whole[at:] == IMAGE).int().argmax())
            found.append(torch.arange(1, begin - at + 1).expand(3, -1) + found[-1].max())
            grid = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(h), torch.arange(w), indexing="ij"))
            found.append(grid.reshape(3, h * w) + found[-1].max() + 1)
            at = begin + h * w
        found.append(torch.arange(1, len(whole) - at + 1).expand(3, -1) + found[-1].max())
        positions.append(torch.cat([torch.arange(len(whole))[None], torch.cat(found[1:], 1)]))
        draw = torch.Generator().manual_seed(len(prompt))
        grids = torch.tensor([(1, *size) for size in sizes + own]).view(-1, 3)
        pixels = {"pixel_values": torch.randn(int(grids.prod(1).sum()), 24, generator=draw), "image_grid_thw": grids}
        pixels["images_seqlens"] = grids.prod(1)  # veRL's agent loop adds it
        seen.append(pixels if len(grids) else {})
    return prompts, responses, positions, seen


def _turns(
    prompts: list[torch.Tensor],
    responses: list[torch.Tensor],
    uids: list[str],
    draw: Callable[[int], torch.Tensor],
    of_turn: int,
    of_answer: int,
    summarized: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Prompts, responses, masks: pairs of a group begin with the same turn and the environment's answer to it, of which
    empty responses are only a part. What a rollout trains on, its neighbours may not. Two groups begin their prompts
    alike, and one's prompt is another's prompt and the first `summarized` tokens behind it, as agents that summarize
    make them. Some first tokens do not count either, unless turns have 16 tokens.
    """
    turn, answer = draw(of_turn), draw(of_answer)
    changed, masks = [], []
    for i, (prompt, response, uid) in enumerate(zip(prompts, responses, uids, strict=True)):
        at = uids.index(uid)
        if (i - at) % 2 == 0:
            turn, answer = draw(of_turn), draw(of_answer)
        counts = torch.ones(of_turn + of_answer + len(response), dtype=torch.int64)
        counts[of_turn : of_turn + of_answer] = 0
        if of_turn < 16:
            counts[i % 4] = 0
        whole = torch.cat([turn, answer, response])
        cut = 4 if len(response) == 0 else len(whole)
        changed.append(whole[:cut])
        masks.append(counts[:cut])
        prompts[i] = torch.cat([prompts[0].new_tensor(range(1, 13)), prompt[12:]]) if len(prompt) > 20 else prompt
    last = len(uids) - 1
    longer = torch.cat([prompts[8], changed[8][:summarized]])
    for i in range(uids.index(uids[last]), len(uids)):
        prompts[i] = longer
    return prompts, changed, masks


def _nested(prompts: list[torch.Tensor], responses: list[torch.Tensor], of_responses: dict[str, Any]) -> TensorDict:
    sequences = [torch.cat(x) for x in zip(prompts, responses, strict=True)]
    rows = {
        "input_ids": sequences,
        "position_ids": [torch.arange(len(s)) for s in sequences],
        "prompts": prompts,
        "responses": responses,
        **of_responses,
        "loss_mask": [m.clone() for m in of_responses["response_mask"]],
    }
    return TensorDict({name: nested(x) for name, x in rows.items()}, batch_size=[len(prompts)])


def _padded(prompts: list[torch.Tensor], responses: list[torch.Tensor], of_responses: dict[str, Any]) -> TensorDict:
    """Prompts padded on the left, responses on the right; then what veRL's trainers make of that."""

    def left(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")

    def right(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    of = {"prompts": left(prompts), "responses": right(responses)}
    of["input_ids"] = torch.cat(list(of.values()), 1)
    of["attention_mask"] = torch.cat(
        [left([torch.ones_like(p) for p in prompts]), right([torch.ones_like(r) for r in responses])], 1
    )
    of["position_ids"] = (of["attention_mask"].cumsum(1) - 1).clamp(min=0)
    of |= {name: right(rows) for name, rows in of_responses.items()}
    return left_right_2_no_padding(TensorDict(of, batch_size=[len(prompts)]))
