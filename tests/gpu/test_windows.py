"""Windows, chunks, sinks, softcapping and gradients of the log-sum-exp against float64, both directions, any depth."""

from __future__ import annotations

import itertools

import pytest
import torch

import dualkv
from codegen.spec import backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS
from dualkv import Layout
from tests import oracle
from tests.gpu import test_forward
from tests.gpu.test_trees import tree

BF16, FP16 = torch.bfloat16, torch.float16
LAYOUTS = {
    **{name: test_forward.LAYOUTS[name] for name in ("one group", "ragged groups")},
    "long": Layout.from_lengths([700, 256], [[300, 256, 513], [400, 130]]),
    "two tokens": Layout.from_lengths([1], [[1]]),
    "tree": tree([300, 90, 500, 40, 0, 300, 100, 1, 70], [-1, 0, 1, 1, 0, 4, 5, 5, 0]),
}
REACH = [{"window": 1}, {"window": 2}, {"window": 64}, {"window": 129}, {"window": 300}, {"chunk": 1}, {"chunk": 96}]
OTHERS = [
    {"sinks": True},
    {"softcap": 3.0},
    {"window": 100, "sinks": True},
    {"chunk": 100, "softcap": 20.0},
    {"window": 200, "sinks": True, "softcap": 5.0},
]
APART = (5, 6, 20)  # GQA ratios that long windows and chunks take apart
OF_HEAD_DIMS = dict.fromkeys(HEAD_DIMS, OTHERS) | {512: [OTHERS[0], OTHERS[1], OTHERS[-1]]}


def named(some):
    """Features of kernels."""
    names = {"window" if name == "chunk" else name for name in some}
    return tuple(name for name in ("window", "sinks", "softcap") if name in names)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [forward_spec("bf16", d, h, True, "window", short) for d in HEAD_DIMS for h in (1, 4) for short in (0, 1)]
    for d in HEAD_DIMS:
        for names in map(named, ({"window": 1}, *OF_HEAD_DIMS.get(d, ()))):
            # A window that hides nothing on a layout is dropped.
            for kept in {names, tuple(name for name in names if name != "window")} - {()}:
                for trees in (True,) if "window" in kept else (False, True):
                    specs += [forward_spec("bf16", d, 4, trees, "+".join(kept), short) for short in (False, True)]
                for fixed in (False, True):
                    specs += backward_specs("bf16", d, fixed, features=(*kept, *["dlse"] * fixed)).present
    for ratio, features in itertools.product(APART, ("window", "window+sinks", "window+softcap")):
        specs.append(forward_spec("bf16", 128, ratio, True, features))
    for features in (("window",), ("window", "sinks")):
        specs.append(forward_spec("bf16", 192, 4, True, "+".join(features), False, 128))
        specs += backward_specs("bf16", 192, features=features, head_dim_v=128).present
    compile_all(specs)


def draw(layout, features, head_dim, heads, kv_heads, dtype, deterministic, with_dlse, head_dim_v, seed):
    """(name, result, plain PyTorch's in the same dtype, float64's) of out and all gradients, of one draw of inputs."""
    made = torch.Generator("cuda").manual_seed(seed * 1000 + head_dim + heads + layout.num_tokens)
    total = layout.num_tokens
    of_v = head_dim_v or head_dim
    shapes = [(total, *n) for n in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, of_v), (heads, of_v))]
    q, k, v, dout = [torch.randn(shape, device="cuda", dtype=dtype, generator=made) for shape in shapes]
    dlse = torch.randn(heads, total, device="cuda", generator=made) if with_dlse else None
    features = dict(features)
    sinks = 2 * torch.randn(heads, device="cuda", generator=made) if features.pop("sinks", False) else None
    if features.get("softcap"):
        q = q * 4  # so that the cap is felt

    def gradients(out, lse, leaves):
        outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
        return out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, grads)

    def leaves():
        return [x.detach().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]

    def run():
        x = leaves()
        given = {"sinks": x[3]} if len(x) > 3 else {}
        layout_here = layout.to("cuda")
        found = dualkv.attention(
            *x[:3], layout_here, deterministic=deterministic, return_lse=True, **given, **features
        )  # fmt: skip
        return gradients(*found, x)

    got, again = run(), run()
    for i, (a, b) in enumerate(zip(got, again, strict=True)):
        assert (i == 2 and not deterministic) or torch.equal(a, b), i  # dq alone may differ
    arguments = layout.offsets, layout.parent, head_dim**-0.5
    want = oracle.attention_and_grads(q, k, v, *arguments, dout, dlse, sinks, **features)
    x = leaves()
    plain = gradients(
        *oracle.attention(*x[:3], *arguments, sinks=x[3].to(dtype) if len(x) > 3 else None, **features), x
    )
    assert (got[1] - want[1]).abs().max() <= 1e-4
    found = list(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, plain, want, strict=False))
    return [one for one in found if one[0] != "lse"]


def check(
    layout, features, head_dim=128, heads=8, kv_heads=2, dtype=BF16, deterministic=False, with_dlse=False,
    head_dim_v=None,
):  # fmt: skip
    """Errors are at most twice plain PyTorch's in the same dtype; and the bits are the same twice."""
    # The largest of few errors is luck; a draw has one gradient of a sink a head.
    draws = 16 if layout.num_tokens < 16 else 4 if "sinks" in features else 1
    call = layout, features, head_dim, heads, kv_heads, dtype, deterministic, with_dlse, head_dim_v
    for results in zip(*(draw(*call, seed) for seed in range(draws)), strict=True):
        name = results[0][0]
        x, p, w = (torch.cat([one[i].double().flatten() for one in results]) for i in (1, 2, 3))
        error, plain_error = x - w, p - w
        slack = 1e-5 * max(1.0, w.abs().max().item())
        assert error.abs().max() <= 2 * plain_error.abs().max() + slack, name
        assert error.norm() <= 2 * plain_error.norm() + 1e-5 * (w.norm() + w.numel() ** 0.5), name


@pytest.mark.parametrize("features", REACH, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_windows(name, head_dim, features):
    for kv_heads, deterministic in ((2, False), (8, True)):
        check(LAYOUTS[name], features, head_dim, 8, kv_heads, deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "features"), [(d, f) for d, some in OF_HEAD_DIMS.items() for f in some], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sinks_and_softcapping(name, head_dim, features):
    for deterministic in (False, True):
        check(LAYOUTS[name], features, head_dim, deterministic=deterministic, with_dlse=deterministic)


@pytest.mark.parametrize("ratio", [2, 5, 8, 16])
def test_gqa_ratios(ratio):
    check(LAYOUTS["one group"], {"window": 70, "sinks": True}, 64, ratio, 1)


@pytest.mark.parametrize("ratio", APART)
def test_heads_that_long_windows_and_chunks_take_apart(ratio):
    """Windows and chunks beyond 1,024 keys have tiles of one, two or four heads."""
    layout = Layout.from_lengths([1100, 700], [[600, 513], [1, 900]])
    for features in ({"window": 1300}, {"chunk": 1200, "sinks": True}, {"chunk": 1100, "softcap": 20.0}):
        for deterministic in (False, True):
            check(layout, features, 128, ratio, 1, deterministic=deterministic)


def test_fp16():
    check(LAYOUTS["long"], {"window": 128, "sinks": True}, 64, dtype=FP16)
    check(LAYOUTS["tree"], {"softcap": 30.0}, 128, dtype=FP16)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_gradient_of_lse_alone(head_dim):
    check(LAYOUTS["long"], {}, head_dim, with_dlse=True)


def test_long_paths():
    """Many tiles and key blocks, split items, windows that end within responses."""
    layout = Layout.from_lengths([3000], [[700] * 3])
    windows = (64, 128), (96, 1025), (128, 1024), (192, 1500), (256, 512), (256, 1024), (256, 1025), (512, 512)
    for head_dim, window in windows:
        check(layout, {"window": window}, head_dim, 4, 1)
    for features in ({"window": 1025}, {"chunk": 1500, "sinks": True}):
        check(layout, features, 192, 4, 1, head_dim_v=128)
    check(layout, {"window": 1500, "softcap": 20.0}, 256, 4, 1)  # windows above 1,024 have another tile at head dim 256
