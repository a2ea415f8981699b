"""The backends' host side: which one a call gets, FlexAttention's operators on the CPU, and what cuDNN is given, by a
stand-in for its package that computes densely."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import dualkv
from codegen import packages, surface
from dualkv import Layout
from dualkv.cli import doctor
from dualkv.ops import backends, compiling, cudnn, flex, hopper
from dualkv.ops.features import Features
from tests import oracle

TREE = Layout.from_segments([0, 30, 55, 55, 90, 101, 140], [-1, 0, 1, 2, 0, -1])
GROUP = Layout.from_lengths([200], [[70, 0, 50]])


# ---------------------------------------------------------------- FlexAttention's operators
@pytest.fixture
def compiler(monkeypatch):
    """Sets what compiles the operators: nothing, or what only traces them; either way they run densely on the CPU."""

    def use(name):
        monkeypatch.setattr(flex, "COMPILER", name)
        flex._compiled.cache_clear()
        compiling.failures.clear()

    yield use
    flex._compiled.cache_clear()
    compiling.failures.clear()
    torch._dynamo.reset()


FEATURES = [
    {},
    {"window": 37},
    {"chunk": 50},
    {"softcap": 2.0},
    {"sinks": True, "dlse": True},
    {"window": 3, "dlse": True},
]


def drawn(layout, features, head_dim_v=16):
    torch.manual_seed(0)
    rows, sinks, dlse = layout.num_tokens, None, None
    q, k, v, dout = (torch.randn(rows, h, d) for h, d in ((4, 16), (2, 16), (2, head_dim_v), (4, head_dim_v)))
    if "sinks" in features:
        sinks = torch.randn(4)
    if "dlse" in features:
        dlse = torch.randn(4, rows)
    return q, k, v, dout, sinks, dlse


def against_the_oracle(module, layout, features, head_dim_v=16, deterministic=False):
    q, k, v, dout, sinks, dlse = drawn(layout, features, head_dim_v)
    asked = {name: x for name, x in features.items() if name not in ("sinks", "dlse")}
    call = layout._segments, 0.3, Features(sinks=sinks, **asked)
    with torch._C._AutoDispatchBelowAutograd():  # as within the ops
        out, lse = module.forward(q, k, v, *call)
        grads = module.backward(dout, q, k, v, out, lse, *call, dlse, deterministic)
    want = oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, 0.3, dout, dlse, sinks, **asked)
    assert grads[3].shape == ((0,) if sinks is None else (4,))
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")[: 5 + (sinks is not None)]
    for name, a, b in zip(names, (out, lse, *grads)[: len(names)], want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("layout", [GROUP, TREE], ids=["group", "tree"])
def test_flex_is_exact(compiler, layout, features):
    compiler("eager")
    against_the_oracle(flex, layout, features, head_dim_v=24 if layout is TREE else 16)


def test_flex_is_traced_once_for_all_lengths(compiler):
    """A graph without breaks, and another length is no other graph."""
    from torch._dynamo.utils import counters

    compiler("aot_eager")
    for features in ({"softcap": 2.0}, {"window": 3, "dlse": True}):
        against_the_oracle(flex, GROUP, features)
    graphs = counters["stats"]["unique_graphs"]
    for features in ({"softcap": 2.0}, {"window": 3, "dlse": True}):
        against_the_oracle(flex, Layout.from_lengths([150, 300], [[3, 9, 5], [70]]), features)
    assert counters["stats"]["unique_graphs"] == graphs
    whole = Layout.from_lengths([128], [[100, 28]])  # blocks
    q, k, v, *_ = drawn(whole, {})
    wide = [torch.cat([x, x, x], 1) for x in (q, k, v)]
    shifted = [torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape) for x in (q, k, v)]
    flex.forward(q, k, v, whole._segments, 0.3)
    graphs = counters["stats"]["unique_graphs"]
    for laid_out in (
        [x[:, : x.shape[1] // 3] for x in wide],
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)],
        shifted,
    ):
        flex.forward(*laid_out, whole._segments, 0.3)
    padded = Layout.from_lengths([300], [[7]])
    flex.forward(*drawn(padded, {})[:3], padded._segments, 0.3)
    assert counters["stats"]["unique_graphs"] == graphs


def test_graphs_of_flex_have_no_annotations(compiler):
    """Annotations keep PyTorch 2.11 from caching a compiled graph: every process would compile it again, with a
    warning."""
    graphs, typed = [], []

    def look(graph, inputs):
        modules = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        graphs.extend(modules)
        typed.extend(n for m in modules for n in m.graph.nodes if n.type is not None)
        return graph.forward

    compiler(aot_autograd(fw_compiler=look))
    for features in ({}, {"window": 37, "softcap": 2.0}):
        against_the_oracle(flex, GROUP, features)
    assert len(graphs) > 4  # each has others of scores and masks in it
    assert not typed


def test_flex_is_compiled_for_its_heads_and_head_dims(compiler):
    """FlexAttention's compiler takes powers of two of them: it fails where they are symbols."""
    shapes = []

    def note(graph, inputs):
        given = [x.meta["example_value"] for x in graph.graph.find_nodes(op="placeholder")]
        shapes.extend(x.shape for x in given if isinstance(x, torch.Tensor) and x.is_floating_point())
        return graph

    compiler(note)
    against_the_oracle(flex, GROUP, {"window": 3, "dlse": True}, head_dim_v=24)
    assert len(shapes) == 3 + 7
    for shape in shapes:
        assert isinstance(shape[2], torch.SymInt), shape
        assert {type(n) for n in (*shape[:2], *shape[3:])} == {int}, shape


# ---------------------------------------------------------------- cuDNN, by a stand-in
class Plan:
    def __init__(self, ends, q, k, v, **spans):
        self.ends, self.spans = ends, spans

    def hidden(self):
        """[T, T] of packed rows."""
        ends = self.ends[0].T.tolist()
        begins = self.spans["cu_seqlens_q"].tolist() if "cu_seqlens_q" in self.spans else [0, len(ends)]
        hidden = torch.ones(len(ends), len(ends), dtype=torch.bool)
        for row, of_row in enumerate(ends):
            first = max(b for b in begins[:-1] if b <= row)
            for a, b in zip([0, *of_row[1::2]], of_row[::2], strict=True):
                hidden[row, first + a : first + b] = False
        return hidden


def stand_in(made_plans):
    """`cudnn.flex_attention` with the arguments of its classes (1.29 to 1.32), computed densely in their order."""
    module = types.ModuleType("cudnn.flex_attention")

    def scores(plan, q, k, scale):
        ratio = q.shape[-2] // k.shape[-2]
        s = torch.einsum("...qhd,...khd->...hqk", q, k.repeat_interleave(ratio, -2)) * scale
        return s.masked_fill(plan.hidden(), float("-inf"))

    def create_mask_plan(mask_func, q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                         max_seqlen_k=None, pack_gqa=None, build_backward=None):  # fmt: skip
        assert mask_func.dtype == torch.int32
        assert mask_func.is_contiguous()
        assert mask_func.shape[1] % 2 == 1
        assert build_backward
        assert (q.dim() == 4) == (cu_seqlens_q is None)
        if cu_seqlens_q is not None:
            assert cu_seqlens_q.dtype == torch.int32
            assert torch.equal(cu_seqlens_q, cu_seqlens_k)
            assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
            assert int(cu_seqlens_q.diff().min()) > 0
        spans = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}
        made_plans.append(Plan(mask_func, q, k, v, **spans))
        return made_plans[-1]

    class Api:
        workspace_size = 128

        def __init__(self, *sample, deterministic=None):
            self.sample, self.compiled, self.options = (
                [x for x in sample if isinstance(x, torch.Tensor)],
                False,
                deterministic,
            )

        def check_support(self):
            self.supported = True

        def compile(self):
            print("Compiled a kernel")
            assert self.supported
            assert len(sys.argv) == 1
            self.compiled = True

        def checked(self, *tensors):
            assert self.compiled
            now = [x for x in tensors if x is not None]
            assert [(x.shape, x.stride(), x.dtype) for x in now] == [
                (x.shape, x.stride(), x.dtype) for x in self.sample
            ]

    class FlexAttentionFwd(Api):
        def execute(self, q_tensor, k_tensor, v_tensor, o_tensor, mask_plan, lse_tensor=None, *, workspace=None,
                    softmax_scale=None, current_stream=None, max_logit_tensor=None):  # fmt: skip
            self.checked(q_tensor, k_tensor, v_tensor, o_tensor, lse_tensor)
            assert self.options is None
            assert workspace.numel() >= 128
            s = scores(mask_plan, q_tensor, k_tensor, softmax_scale)
            ratio = q_tensor.shape[-2] // k_tensor.shape[-2]
            lse_tensor.copy_(s.logsumexp(-1))
            o_tensor.copy_(torch.einsum("...hqk,...khd->...qhd", s.softmax(-1), v_tensor.repeat_interleave(ratio, -2)))

    class FlexAttentionBwd(Api):
        def execute(self, q_tensor, k_tensor, v_tensor, o_tensor, do_tensor, lse_tensor, dq_tensor, dk_tensor,
                    dv_tensor, mask_plan, dlse_tensor=None, *, workspace, softmax_scale=None,
                    current_stream=None):  # fmt: skip
            self.checked(
                q_tensor,
                k_tensor,
                v_tensor,
                o_tensor,
                do_tensor,
                lse_tensor,
                dq_tensor,
                dk_tensor,
                dv_tensor,
                dlse_tensor,
            )
            assert type(self.options) is bool
            kv, ratio = k_tensor.shape[-2], q_tensor.shape[-2] // k_tensor.shape[-2]
            p = (scores(mask_plan, q_tensor, k_tensor, softmax_scale) - lse_tensor[..., None]).exp()
            dp = torch.einsum("...qhd,...khd->...hqk", do_tensor, v_tensor.repeat_interleave(ratio, -2))
            delta = (do_tensor * o_tensor).sum(-1).transpose(-1, -2)
            delta = delta if dlse_tensor is None else delta - dlse_tensor
            ds = p * (dp - delta[..., None]) * softmax_scale
            dq_tensor.copy_(torch.einsum("...hqk,...khd->...qhd", ds, k_tensor.repeat_interleave(ratio, -2)))
            for to, of, x in ((dk_tensor, ds, q_tensor), (dv_tensor, p, do_tensor)):
                to.copy_(torch.einsum("...hqk,...qhd->...khd", of, x).unflatten(-2, (kv, ratio)).sum(-2))

    for thing in (create_mask_plan, FlexAttentionFwd, FlexAttentionBwd):
        setattr(module, thing.__name__, thing)
    return module


IMPORTS_CUDNN = cudnn._module


@pytest.fixture
def plans(monkeypatch):
    found = []
    module = stand_in(found)
    monkeypatch.setattr(cudnn, "_module", lambda: module)
    monkeypatch.setattr(compiling, "failures", {})
    monkeypatch.setattr(torch.cuda, "device_of", lambda q: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    return found


CUDNN_LAYOUTS = {
    "one group": Layout.from_lengths([40], [[7, 0, 11]]),
    "groups, some without rows": Layout.from_lengths([20, 0, 0, 3], [[5, 1], [], [4, 2], [9]]),
    "tree": TREE,
}


@pytest.mark.parametrize("features", [f for f in FEATURES if "softcap" not in f], ids=str)
@pytest.mark.parametrize("name", CUDNN_LAYOUTS)
def test_what_cudnn_is_given(plans, monkeypatch, capsys, name, features):
    """Intervals of the layout, arguments in the order of its classes, lse without sinks: results are the oracle's. The
    program's arguments are kept from its compiler, and what it prints from standard output."""
    monkeypatch.setattr(sys, "argv", ["program", "-d", "bwd"])
    source = CUDNN_LAYOUTS[name]
    layout = Layout.from_segments(source.offsets, source.parent)
    for deterministic in (False, True):
        against_the_oracle(cudnn, layout, features, head_dim_v=24, deterministic=deterministic)
    assert len(plans) == 1
    assert sys.argv == ["program", "-d", "bwd"]
    assert capsys.readouterr().out == ""


def test_the_surface_of_the_installed_package():
    """The calls of `dualkv.ops.cudnn`, and that of the benchmark, in the package itself."""
    if cudnn.not_installed():
        pytest.skip(cudnn.not_installed())
    theirs = IMPORTS_CUDNN()
    assert surface.uncallable(theirs, "flex_attn_func", "q k v", "mask_plan softmax_scale") is None


def test_the_surface_is_probed(monkeypatch):
    """A version whose calls are those of 1.29 runs, whatever its number; another one is refused by what it has."""
    for name in (module := stand_in([])).__dict__:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", module)
    monkeypatch.setattr(packages, "found", lambda name: "1.33.0")
    monkeypatch.setattr(compiling, "failures", {})
    imports = IMPORTS_CUDNN.__wrapped__
    assert imports() is module
    for changed in (
        lambda mask_func, k, q, v, **others: None,  # another order
        lambda mask_func, q, k, v, *, cu_seqlens=None: None,
        lambda mask_func, q, k: None,
    ):
        monkeypatch.setattr(compiling, "failures", {})
        monkeypatch.setattr(module, "create_mask_plan", changed)
        with pytest.raises(
            compiling.NotCompiled, match=r"nvidia-cudnn-frontend 1\.33\.0 does not fit .*create_mask_plan"
        ):
            imports()


def test_versions(monkeypatch):
    def installed(version):
        monkeypatch.setattr(packages, "found", lambda name: version)
        return cudnn.not_installed()

    assert installed("1.29.0") is installed("1.32.5") is installed("2.0") is None
    without = "an environment without nvidia-cudnn-frontend 1.29 or newer ({}: pip install 'dualkv[cudnn]')"
    assert installed("1.28.9") == without.format("found 1.28.9")
    assert installed(None) == without.format("not installed")
    assert [cudnn.head_dims(*pair) for pair in ((64, 128), (136, 128), (192, 136), (8, 256))] == [
        (64, 128), (192, 128), (256, 256), (256, 256),
    ]  # fmt: skip


# ---------------------------------------------------------------- which one
@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device of a given capability, with or without cuDNN and Triton: q, and what serves it first."""

    of_device = hopper.device_unsupported, cudnn.device_unsupported, flex.device_unsupported, backends.order

    def of(capability, with_cudnn=True, with_triton=True, dtype=torch.bfloat16):
        for cached in of_device:
            cached.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(cudnn, "not_installed", lambda: None if with_cudnn else "an environment without cuDNN")
        monkeypatch.setattr(packages, "lacking", lambda name: None if with_triton else f"{name} (not installed)")
        return types.SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0), shape=(5, 4, 256), is_cuda=True)

    yield of
    for cached in of_device:
        cached.cache_clear()


def test_the_first_that_serves(gpu, monkeypatch):
    def first(*given, softcap=None, dlse=None, head_dim=256, rows=5, **settings):
        q = gpu(*given, **settings)
        q.shape = (rows, 4, head_dim)
        return backends.first(q, q, Features(softcap=softcap), dlse)[0]

    assert first((9, 0)) == first((9, 0), head_dim=512) == "hopper"
    assert first((10, 0)) == first((10, 3)) == "cudnn"
    assert first((10, 0), dlse=True) == first((10, 0), False) == "flex"  # dlse at head dim 256
    assert first((10, 0), False, False) == first((8, 6)) == first((12, 0)) == "flash"
    assert first((8, 0), softcap=5.0) == first((10, 0), softcap=5.0) == "flex"
    assert first((8, 0), head_dim=264) == first((8, 0), softcap=5.0, head_dim=264) == "reference"
    assert first((8, 0), True, False, softcap=5.0) == first((7, 5)) == "reference"
    assert first((9, 0), dtype=torch.float32) == "reference"
    assert first((8, 0), rows=2**21) == "flash"
    assert first((8, 0), softcap=5.0, rows=2**21 - 128) == "flex"
    assert first((8, 0), softcap=5.0, rows=2**21 - 127) == "reference"  # whole blocks have 2^31 elements
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert first((9, 0)) == "flash"


def fails_to_compile(graph, inputs):
    raise RuntimeError("out of resources")


def test_what_is_not_compiled_falls_to_the_next(compiler, monkeypatch):
    """FlexAttention by default, whose compiler fails or is switched off; by hand it is an error."""
    q, k, v, dout, _, _ = drawn(GROUP, {})
    want = dualkv.attention(q.requires_grad_(), k, v, GROUP, backend="reference")
    (dq,) = torch.autograd.grad(want, q, dout)
    flexible = replace(backends.BACKENDS["flex"], refuses=lambda *call: None)
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS | {"flex": flexible})
    monkeypatch.setattr(backends, "warn_once", lambda text: warned.append(text))

    def by_default():
        out = dualkv.attention(q, k, v, GROUP)
        assert torch.equal(out, want)
        assert torch.equal(torch.autograd.grad(out, q, dout)[0], dq)
        with pytest.raises(compiling.NotCompiled, match=reason):
            dualkv.attention(q, k, v, GROUP, backend="flex")
        assert all("'flex' was not compiled" in text and reason in text for text in warned)
        assert len(warned) == 2

    warned, reason = [], "out of resources"
    compiler(fails_to_compile)
    by_default()
    assert len(compiling.failures) == 2
    warned.clear()
    compiled = flex._compiled.cache_info().misses
    by_default()
    assert flex._compiled.cache_info().misses == compiled, "not tried again"
    warned, reason = [], "switched off"
    compiler("aot_eager")
    with torch.compiler.set_stance("force_eager"):
        by_default()
        monkeypatch.setenv("DUALKV_BACKEND", "flex")
        with pytest.raises(compiling.NotCompiled):
            dualkv.attention(q, k, v, GROUP)


@pytest.mark.parametrize("of", ["import", "plan", "FlexAttentionFwd", "FlexAttentionBwd"])
def test_a_cudnn_that_fails_gives_way_to_the_next(plans, monkeypatch, of):
    """The default takes the next backend, with one warning for each thing that fails, which is not tried again; a
    backend chosen by hand raises an error."""
    q, k, v, dout, _, _ = drawn(GROUP, {})
    want = dualkv.attention(q.requires_grad_(), k, v, GROUP, backend="reference")
    (dq,) = torch.autograd.grad(want, q, dout)
    monkeypatch.setattr(cudnn, "unsupported", lambda *call: None)
    monkeypatch.setattr(backends, "order", lambda device: ("cudnn", "reference"))
    monkeypatch.setattr(backends, "warn_once", lambda text: warned.append(text))
    warned, tried = [], []

    def fails(*given, **more):
        tried.append(of)
        raise ImportError("no kernels here")

    if of == "import":
        monkeypatch.setattr(cudnn, "importlib", types.SimpleNamespace(import_module=fails))
        monkeypatch.setattr(cudnn, "_module", IMPORTS_CUDNN)
    elif of == "plan":
        monkeypatch.setattr(cudnn._module(), "create_mask_plan", fails)
    else:
        monkeypatch.setattr(getattr(cudnn._module(), of), "check_support", fails)
    for _ in range(2):
        layout = Layout.from_segments(GROUP.offsets, GROUP.parent)
        out = dualkv.attention(q, k, v, layout)
        torch.testing.assert_close((out, torch.autograd.grad(out, q, dout)[0]), (want, dq), atol=1e-6, rtol=1e-5)
        with pytest.raises(compiling.NotCompiled, match="no kernels here"):
            torch.autograd.grad(dualkv.attention(q, k, v, layout, backend="cudnn"), q, dout)
    assert tried == [of]
    assert set(warned) == {
        "dualkv: the backend 'cudnn' was not compiled (ImportError: no kernels here); running the chunked reference"
    }


def test_memory_that_ends_while_cudnn_compiles_is_no_refusal(monkeypatch):
    for error in (MemoryError(), torch.OutOfMemoryError("full")):
        with pytest.raises(type(error)), cudnn._compiling("test"):
            raise error
    assert not compiling.failures


@pytest.mark.parametrize(
    ("error", "raised", "kept"),
    [
        (torch.OutOfMemoryError("of the device"), torch.OutOfMemoryError, 0),
        (OSError("no space left"), compiling.NotCompiled, 0),
        (ValueError("No valid triton configs"), compiling.NotCompiled, 1),
    ],
    ids=["memory", "disk", "blocks"],
)
def test_what_may_pass_is_tried_again(compiler, error, raised, kept):
    def fails(graph, inputs):
        tried.append(error)
        raise error

    compiler(fails)
    tried, (q, k, v, *_) = [], drawn(GROUP, {})
    for _ in range(2):
        with pytest.raises(raised, match=str(error)):
            flex.forward(q, k, v, GROUP._segments, 0.3)
    assert (len(compiling.failures), len(tried)) == (kept, 2 - kept)


def test_too_many_graphs_of_one_form_leave_the_others(compiler, monkeypatch):
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def fails(*given):
        raise FailOnRecompileLimitHit("8 graphs")

    compiler("eager")
    q, k, v, *_ = drawn(GROUP, {})
    with monkeypatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda *key: fails)
        with pytest.raises(compiling.NotCompiled, match="8 graphs"):
            flex.forward(q, k, v, GROUP._segments, 0.3)
    flex.forward(q, k, v, GROUP._segments, 0.3)


def test_a_feature_that_a_backend_does_not_name_is_refused():
    """Each argument of features counts, and each backend says which it computes."""
    q = torch.empty(5, 4, 16)
    for name in Features._fields:
        (counted,) = Features(**{name: 1}).names
        for found in backends.BACKENDS.values():
            assert replace(found, serves=()).unsupported(q, q, Features(**{name: 1})) == counted


def test_by_hand(gpu, monkeypatch):
    q = gpu((9, 0))

    def chosen(backend=None, softcap=None):
        return backends.choose(q, q, Features(softcap=softcap), None, backend)

    for name, found in backends.BACKENDS.items():
        assert chosen(name) is found
        monkeypatch.setenv("DUALKV_BACKEND", name)
        assert chosen() is found
        assert chosen("flash") is backends.BACKENDS["flash"]
    monkeypatch.setenv("DUALKV_BACKEND", "cudnn")
    with pytest.raises(ValueError, match="DUALKV_BACKEND is 'cudnn', which does not serve softcap"):
        chosen(softcap=3.0)
    with pytest.raises(ValueError, match="backend is 'flash', which does not serve softcap"):
        chosen("flash", 3.0)
    narrow = types.SimpleNamespace(**vars(q) | {"shape": (5, 4, 128)})
    assert backends.choose(q, narrow, Features(), None, "cudnn") is backends.BACKENDS["cudnn"]  # padded to 256/256
    for shapes, words in {
        ((4, 192), (2, 128)): "grouped queries with values of another head dim",
        ((4, 40), (2, 24)): "grouped queries with values of another head dim",
        ((4, 64), (4, 104)): "head dim 64 with values of 104",
        ((4, 192), (4, 128)): None,
        ((4, 64), (4, 96)): None,
        ((4, 160), (2, 160)): None,
    }.items():
        of = [types.SimpleNamespace(**vars(q) | {"shape": (5, *shape)}) for shape in shapes]
        assert cudnn.unsupported(*of) == (words and f"{words} on compute capability 9.0")
    assert backends.choose(gpu((10, 0)), narrow, Features(), None, "cudnn") is backends.BACKENDS["cudnn"]
    q = gpu((9, 0))
    monkeypatch.setenv("DUALKV_BACKEND", "fa2")
    with pytest.raises(
        ValueError, match="DUALKV_BACKEND is 'fa2', expected one of hopper, cudnn, flash, flex, reference"
    ):
        chosen()


def test_the_argument_on_a_cpu(monkeypatch):
    q, k, v, dout, _, _ = drawn(TREE, {})
    q.requires_grad_()
    out = dualkv.attention(q, k, v, TREE, backend="reference")
    assert torch.equal(out, dualkv.attention(q, k, v, TREE))
    out.backward(dout)
    for name in ("hopper", "cudnn", "flash", "flex"):
        with pytest.raises(ValueError, match=f"backend is '{name}', which does not serve torch.float32 inputs"):
            dualkv.attention(q, k, v, TREE, backend=name)
        with pytest.raises(ValueError, match="cpu devices"):
            dualkv.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), TREE, backend=name)
    with pytest.raises(ValueError, match="'fa3', expected one of"):
        dualkv.attention(q.to("meta"), k.to("meta"), v.to("meta"), TREE, backend="fa3")
    with pytest.raises(TypeError, match="backend is a int"):
        dualkv.attention(q, k, v, TREE, backend=3)
    monkeypatch.setenv("DUALKV_BACKEND", "cudnn")
    with pytest.raises(ValueError, match="DUALKV_BACKEND is 'cudnn'"):
        dualkv.attention(q, k, v, TREE)
    assert doctor._served("CPU", torch.device("cpu"), torch.float32).what == "nothing"


def test_the_doctor_says_why(gpu, monkeypatch):
    def says(*given, dtype=torch.bfloat16):
        q = gpu(*given, dtype=dtype)
        monkeypatch.setattr(torch, "empty", lambda *size, **settings: q)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "the GPU")
        return doctor._served("cuda:0", q.device, dtype)

    assert says((9, 0)).why == "the GPU is a Hopper GPU"
    found = says((10, 0))
    assert found.what == "cuDNN's interval-mask attention"
    assert found.why == "hopper does not serve compute capability 10.0"
    found = says((10, 0), False)
    assert found.what == "PyTorch's FlexAttention, compiled"
    assert "without cuDNN" in found.why
    assert says((8, 0)).what == "a composition of PyTorch's FlashAttention calls"
    monkeypatch.setenv("DUALKV_BACKEND", "flex")
    assert says((10, 0)) == doctor.Runs("cuda:0", "PyTorch's FlexAttention, compiled", "DUALKV_BACKEND is 'flex'")
