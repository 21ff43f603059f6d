"""attention: the reference against sums written out query by query, the fused path against the reference."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zoo.ops
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import BackendRefused, _attention_blocked, _attention_sdpa, attention, attention_to_first, watch_attention
from zoo.ops._dispatch import on_device
from zoo.registry import RecipeError

LENGTHS = [1, 7, 63, 64, 65]
WINDOWS = [None, 1, 5, 64, 100]
BACKENDS = ["sdpa", "blocked", "reference"]
SINK, OFF_BY_ONE, SIGMOID = {"sink": True}, {"normalizer": "softmax_off_by_one"}, {"normalizer": "sigmoid"}
# every fast path of every form; a sink that is True is drawn
FAST = [("sdpa", OFF_BY_ONE), ("sdpa", SINK)]
FAST += [("blocked", form) for form in ({}, OFF_BY_ONE, SINK, SIGMOID, {"softcap": 1.5})]
FAST += [("blocked", {**form, "softcap": 1.5}) for form in (SINK, SIGMOID)]
every_fast_path = pytest.mark.parametrize(("backend", "form"), FAST, ids=str)


def inputs(queries, keys=None, *, batch=2, heads=4, kv_heads=2, width=16, values=None, dtype=torch.float32):
    keys = queries if keys is None else keys
    values = width if values is None else values
    shapes = (batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, values)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def by_hand(q, k, v, *, causal=True, window=None, sink=None, softcap=None, normalizer="softmax", scale=None):
    """The definition, one query and one head at a time, over the keys that the query sees and no others."""
    (batch, queries, heads, width), keys, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    o = torch.zeros(batch, queries, heads, v.shape[3], dtype=v.dtype)
    for b in range(batch):
        for i in range(queries):
            end = i + keys - queries + 1 if causal else keys
            start = 0 if window is None else max(0, end - window)
            for h in range(heads):
                s = k[b, start:end, h // group] @ q[b, i, h] * scale
                s = s if softcap is None else softcap * torch.tanh(s / softcap)
                if normalizer == "sigmoid":
                    p = torch.sigmoid(s - math.log(end - start))
                else:
                    rest = (
                        1.0 if normalizer == "softmax_off_by_one" else 0.0 if sink is None else sink[h].double().exp()
                    )
                    p = s.exp() / (s.exp().sum() + rest)
                o[b, i, h] = p @ v[b, start:end, h // group]
    return o


def compare(ins, want_ins=None, *, forward=None, backward=None, got_with="sdpa", want_with="reference", **options):
    """Outputs and gradients of two backends on the same inputs, the sink among them where there is one."""
    dtype = ins[0].dtype
    want_ins = want_ins or ins
    if options.get("sink") is True:
        sink = torch.randn(ins[0].shape[2], dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
        options["sink"], ins, want_ins = sink, [*ins, sink], [*want_ins, sink]
    got = attention(*ins[:3], backend=got_with, **options)
    want = attention(*want_ins[:3], backend=want_with, **options)
    assert got.dtype == ins[2].dtype
    assert_close(got.to(want.dtype), want, forward or FORWARD[dtype], "o")
    weights = torch.randn_like(want)
    got_grads = torch.autograd.grad(got, ins, weights.to(got.dtype))
    want_grads = torch.autograd.grad(want, want_ins, weights)
    for name, a, b in zip(("q", "k", "v", "sink")[: len(ins)], got_grads, want_grads, strict=True):
        assert_close(a.to(b.dtype), b, backward or BACKWARD[dtype], f"d{name}")


# ---- the reference


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 3},
        {"scale": 0.7},
        {"softcap": 0.5},
        {"sink": torch.tensor([0.0, 1.0, -3.0, 5.0])},
        {"sink": torch.tensor([0.0, 1.0, -3.0, 5.0]), "window": 2, "softcap": 1.5},
        {"normalizer": "softmax_off_by_one"},
        {"normalizer": "softmax_off_by_one", "window": 3},
        {"normalizer": "sigmoid"},
        {"normalizer": "sigmoid", "window": 3, "softcap": 2.0},
        {"normalizer": "sigmoid", "causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (1, 5), (3, 9)])
def test_reference_is_the_definition(options, queries, keys):
    ins = inputs(queries, keys, values=5, dtype=torch.float64)
    assert_close(attention(*ins, backend="reference", **options), by_hand(*ins, **options), 1e-12)


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_above_zero(backend, scale):
    ins = inputs(7, dtype=torch.float64)
    assert_close(attention(*ins, backend=backend, scale=scale), by_hand(*ins, scale=scale), 1e-12)
    for each in ins:
        each.requires_grad_()
    attention(*ins, backend=backend, scale=scale).sum().backward()
    assert all(each.grad.isfinite().all() for each in ins)
    q, k, v = (each.detach().bfloat16() for each in ins)
    assert torch.equal(attention(q, k, v, backend=backend, scale=-1.7), attention(-q, k, v, backend=backend, scale=1.7))


def test_options_change_the_result():
    ins = inputs(9)
    plain = attention(*ins)
    sink = torch.ones(4)
    for options in [
        {"causal": False},
        {"window": 3},
        {"scale": 0.5},
        {"softcap": 1.0},
        {"sink": sink},
        {"normalizer": "sigmoid"},
        {"normalizer": "softmax_off_by_one"},
        {"cu_seqlens": torch.tensor([0, 4, 9])},
    ]:
        one = [x[:1] for x in ins] if "cu_seqlens" in options else ins
        assert (attention(*one, **options) - plain[: len(one[0])]).abs().max() > 1e-2, options


def test_a_sink_of_zero_is_off_by_one_and_a_far_one_is_none():
    ins = inputs(7, dtype=torch.float64)
    zero = attention(*ins, sink=torch.zeros(4))
    assert_close(zero, attention(*ins, normalizer="softmax_off_by_one"), 1e-14)
    assert_close(attention(*ins, sink=torch.full((4,), -1e4)), attention(*ins), 1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sink_learns(backend):
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    ins = inputs(5, dtype=torch.float64, width=4)
    assert torch.autograd.gradcheck(lambda *ins: attention(*ins[:3], sink=ins[3], backend=backend), (*ins, sink))


@pytest.mark.parametrize("normalizer", ["softmax", "softmax_off_by_one", "sigmoid"])
@pytest.mark.parametrize("backend", ["reference", "blocked", None])
def test_scores_of_any_size_stay_finite(normalizer, backend):
    q, k, v = inputs(6)
    o = attention(1e3 * q, 1e3 * k, v, normalizer=normalizer, backend=backend)
    assert all(torch.isfinite(x).all() for x in (o, *torch.autograd.grad(o.sum(), [q, k, v])))


# ---- the fused path


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_fused_is_reference(length, window, heads):
    compare(inputs(length, heads=heads[0], kv_heads=heads[1]), window=window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (1, 200), (3, 70), (65, 66), (64, 200), (150, 200)])
def test_a_chunk_sees_the_cache_before_it(queries, keys, window):
    compare(inputs(queries, keys), window=window)


@pytest.mark.parametrize("length", [300, 333])
@pytest.mark.parametrize("window", [1, 2, 63, 65, 128])
def test_many_blocks_of_a_window(length, window):
    compare(inputs(length, batch=1, width=8), window=window)


@pytest.mark.parametrize("values", [4, 12, 32])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"causal": False}], ids=str)
def test_value_width_of_its_own(values, options):
    compare(inputs(70, values=values), **options)
    compare(inputs(1, 9, values=values), **options)


@pytest.mark.parametrize("options", [{"causal": False}, {"scale": 0.3}, {"scale": 0.3, "window": 4}], ids=str)
def test_other_options(options):
    compare(inputs(7, 9), **options)
    compare(inputs(33), **options)


@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(65, 65), (1, 33), (7, 33)])
def test_float64_is_not_demoted(queries, keys, options):
    compare(inputs(queries, keys, dtype=torch.float64, values=8), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(65, 65), (1, 33), (7, 33)])
def test_bfloat16(queries, keys, options, backend):
    ins = inputs(queries, keys, dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in ins]
    compare(ins, wide, got_with=backend, **options)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("values", [192, 128])
def test_a_decoded_token_in_bfloat16_has_a_softmax_in_float32(values, backend):
    q, k, v = inputs(1, 300, width=192, values=values, dtype=torch.bfloat16)
    want = attention(4 * q.float(), k.float(), v.float(), backend="reference")
    got = attention(4 * q, k, v, backend=backend).float()
    assert (got - want).square().mean().sqrt() < 4e-3 * want.square().mean().sqrt()
    assert attention(q[:0], k[:0], v[:0], backend=backend).shape == (0, *got.shape[1:])


def test_the_reference_is_rounded_once():
    ins = inputs(33, dtype=torch.bfloat16)
    want = attention(*(x.float() for x in ins), backend="reference")
    assert torch.equal(attention(*ins, backend="reference"), want.bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"cu_seqlens": torch.tensor([0, 1, 5])}], ids=str)
def test_gradients_are_derivatives(backend, options):
    ins = inputs(5, batch=1, width=3, values=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *ins: attention(*ins, backend=backend, **options), ins)


def test_autocast_leaves_the_arithmetic_alone():
    ins = inputs(33)
    for backend in BACKENDS:
        want = attention(*ins, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attention(*ins, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_has_the_dtype_of_v(backend):
    q, k, v = inputs(9)
    o = attention(q, k, v.bfloat16(), backend=backend)
    assert o.dtype == torch.bfloat16
    assert_close(o.float(), attention(q, k, v), FORWARD[torch.bfloat16])


# ---- sinks, sigmoids, caps


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 queries, so that short inputs have many."""
    monkeypatch.setattr(_attention_blocked, "SCORES", 1)


@every_fast_path
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (65, 65), (200, 200), (1, 200), (7, 33), (64, 200)])
def test_every_form_is_reference(queries, keys, window, backend, form, small_blocks):
    compare(inputs(queries, keys, width=8), window=window, got_with=backend, **form)


@every_fast_path
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_every_form_with_heads_and_values_of_other_sizes(heads, backend, form, small_blocks):
    for values in (4, 32):
        ins = inputs(33, heads=heads[0], kv_heads=heads[1], values=values)
        compare(ins, got_with=backend, scale=0.4, **form)
        compare(ins, got_with=backend, causal=False, **form)


@every_fast_path
@pytest.mark.parametrize("window", [None, 5])
def test_every_form_is_packed(window, backend, form, small_blocks):
    for cu, cu_k in PACKINGS:
        ins = inputs(cu[-1], (cu_k or cu)[-1], batch=1, values=8)
        bounds = {"cu_seqlens": torch.tensor(cu), "cu_seqlens_k": None if cu_k is None else torch.tensor(cu_k)}
        compare(ins, window=window, got_with=backend, **bounds, **form)


@every_fast_path
@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=str)
def test_every_form_in_other_dtypes(options, backend, form, small_blocks):
    for queries, keys in ((65, 65), (1, 33), (7, 33)):
        ins = inputs(queries, keys, dtype=torch.bfloat16)
        wide = [x.detach().float().requires_grad_() for x in ins]
        compare(ins, wide, got_with=backend, **options, **form)
        compare(inputs(queries, keys, dtype=torch.float64, values=8), got_with=backend, **options, **form)


@every_fast_path
def test_every_form_with_tensors_that_lie_crosswise(backend, form):
    """Strides of any order, in the inputs and in the gradient that comes back."""
    ins = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs(33)]
    form = form | {"sink": torch.randn(4)} if "sink" in form else form
    for weight in (torch.ones(1).expand(2, 33, 4, 16), torch.randn(2, 16, 33, 4).movedim(1, -1)):
        got, want = (
            torch.autograd.grad(attention(*ins, backend=name, **form), ins, weight) for name in (backend, "reference")
        )
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, BACKWARD[torch.float32])


def test_the_chosen_size_of_blocks():
    for shape in ({"batch": 1, "heads": 2, "kv_heads": 1}, {"batch": 9, "heads": 8, "kv_heads": 2}):
        compare(inputs(400, width=4, **shape), got_with="blocked", **SIGMOID)
        compare(inputs(400, width=4, **shape), got_with="blocked", window=70, **SINK)


@pytest.mark.parametrize("form", [{}, SINK, {"window": 300}], ids=str)
def test_training_at_the_length_of_one_block_of_keys_of_the_kernel(form, monkeypatch):
    """There torch's kernel computes the whole square, so it is not asked; at other lengths and without gradients it
    is."""
    asked = []
    run = _attention_blocked.run
    monkeypatch.setattr(_attention_blocked, "run", lambda *args: asked.append(1) or run(*args))
    form = form | {"sink": torch.randn(4)} if "sink" in form else form
    compare(inputs(300, batch=1, width=8), got_with="sdpa", **form)
    assert asked
    asked.clear()
    ins = inputs(300, batch=1, width=8)
    with torch.no_grad():
        attention(*ins, backend="sdpa", **form)
    attention(*(x[:, :256] for x in ins), backend="sdpa", **form)
    attention(ins[0][:, :200], *ins[1:], backend="sdpa", **form)
    assert not asked


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@every_fast_path
def test_all_pairs_are_never_held(backend, form, monkeypatch):
    monkeypatch.setattr(_attention_blocked, "SCORES", 1 << 14)
    ins = inputs(1024, batch=1, heads=2, kv_heads=1, width=4)
    form = form | {"sink": torch.randn(2)} if "sink" in form else form
    with Largest() as largest:
        attention(*ins, backend=backend, **form).sum().backward()
    assert largest.numel <= 2 * 16 * 1024 + 1024


class Calls(Largest):
    """And how many operations there were: what a GPU waits for."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def on_meta(length, batch=1, heads=8, kv_heads=8, width=64, dtype=torch.bfloat16):
    shapes = (batch, length, heads, width), *2 * [(batch, length, kv_heads, width)]
    return [torch.empty(shape, device="meta", dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 128])
def test_blocks_for_a_gpu_are_large_and_few(window):
    """gpt_oss: in blocks for a CPU a layer of it took 300,000 launches."""
    with on_device("cuda"), Calls() as calls:
        ins = on_meta(4096, batch=2, heads=64)
        attention(*ins, window=window, sink=torch.empty(64, device="meta"), backend="blocked").sum().backward()
    assert calls.number < 3000
    assert calls.numel <= _attention_blocked.SCORES_ELSEWHERE


@pytest.mark.parametrize(
    "bounds", [list(range(0, 32769, 2048)), [0, *range(100, 32000, 640), 32768]], ids=["one", "many"]
)
def test_what_the_first_token_gets_is_few_launches_on_a_gpu(bounds):
    with on_device("cuda"), Calls() as calls:
        seen = []
        with watch_attention(lambda *call: seen.append(call)), torch.no_grad():
            attention(*on_meta(32768), cu_seqlens=torch.tensor(bounds), backend="blocked")
        calls.number = 0
        attention_to_first(*seen[0])
    assert calls.number < 60 * (len(set(bounds)) - 1)


@pytest.mark.parametrize("form", [form for backend, form in FAST if backend == "blocked"], ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_blocks_for_a_gpu_are_reference(form, window, monkeypatch):
    monkeypatch.setattr(_attention_blocked, "device_kind", lambda x: "cuda")
    monkeypatch.setattr(_attention_blocked, "SCORES_ELSEWHERE", 1 << 20)
    compare(inputs(1300, batch=1, heads=2, kv_heads=1, width=8), window=window, got_with="blocked", **form)


@pytest.mark.parametrize("form", [form for backend, form in FAST if backend == "blocked"], ids=str)
def test_work_of_blocks_in_a_window_is_linear_in_time(form):
    work = []
    form = form | {"sink": torch.randn(2)} if "sink" in form else form
    for length in (1024, 4096):
        ins = inputs(length, batch=1, heads=2, kv_heads=1, width=4)
        with FlopCounterMode(display=False) as flops:
            attention(*ins, window=64, backend="blocked", **form).sum().backward()
        work.append(flops.get_total_flops())
    assert 0 < work[1] <= 4.5 * work[0]


# ---- whoever looks on


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("form", [{}, OFF_BY_ONE, SINK, SIGMOID, {"softcap": 1.5}, SINK | {"softcap": 1.5}], ids=str)
def test_what_the_first_token_gets(form, window, small_blocks):
    """Against p itself, which attention to one-hot values shows."""
    form = form | {"sink": torch.randn(4)} if "sink" in form else form
    seen = []
    for cu, cu_k in [(None, None), *PACKINGS]:
        queries, keys = (33, 40) if cu is None else (cu[-1], (cu_k or cu)[-1])
        q, k, _ = inputs(queries, keys, batch=2 if cu is None else 1)
        bounds = {} if cu is None else {"cu_seqlens": torch.tensor(cu), "cu_seqlens_k": torch.tensor(cu_k or cu)}
        one_hot = torch.eye(keys)[None, :, None].expand(len(q), -1, 2, -1)
        with watch_attention(lambda *call: seen.append(call)):
            p = attention(q, k, one_hot, window=window, backend="reference", **bounds, **form)
        first, total = attention_to_first(*seen[-1])
        starts = [0] * queries
        if cu is not None:
            starts = [start for (a, b), start in zip(pairwise(cu), (cu_k or cu)[:-1], strict=True) for _ in range(a, b)]
        want = torch.stack([p[:, i, :, start] for i, start in enumerate(starts)], dim=1)
        assert_close(first, want, FORWARD[torch.float32])
        assert_close(total, p.sum(-1), FORWARD[torch.float32])
    attention(q, k, one_hot, **bounds)
    assert len(seen) == 1 + len(PACKINGS)


# ---- the fast path of torch's kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (1, 70), (7, 70)])
@pytest.mark.parametrize("values", [8, 16, 32])
def test_stays_on_the_flash_kernel(queries, keys, window, values, dtype):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention(*inputs(queries, keys, values=values, dtype=dtype), window=window, backend="sdpa").sum().backward()


class FlashCalls(TorchDispatchMode):
    """The number of scores that torch's fused CPU kernel computes, call by call, and the masks and queries it gets."""

    def __init__(self):
        super().__init__()
        self.scores, self.masks, self.queries = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            q, k = args[:2]
            self.scores.append(q.shape[:-1].numel() * k.shape[-2])
            self.masks.append(kwargs.get("attn_mask"))
            self.queries.append(q.data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [{}, OFF_BY_ONE], ids=str)
@pytest.mark.parametrize(("window", "most"), [(8, 80), (64, 160), (256, 400)])
def test_work_of_a_window_is_linear_in_time(window, most, form):
    with FlashCalls() as calls:
        attention(*inputs(2048, batch=1, heads=2, kv_heads=1, width=4), window=window, **form)
    assert 0 < sum(calls.scores) <= 2 * 2048 * most


def test_documents_of_one_length_are_one_call():
    ins = inputs(60, batch=1)
    with FlashCalls() as calls:
        attention(*ins, cu_seqlens=torch.arange(0, 61, 10))
    assert len(calls.scores) == 1
    with FlashCalls() as calls:
        attention(*ins, cu_seqlens=torch.tensor([0, 20, 60]))
    assert len(calls.scores) == 2


@pytest.mark.parametrize(("queries", "keys", "window"), [(70, 70, None), (1, 70, None), (1, 70, 5), (9, 9, 20)])
def test_no_mask_where_none_is_needed(queries, keys, window):
    with FlashCalls() as calls:
        attention(*inputs(queries, keys), window=window)
    assert calls.masks == [None]


def test_what_needs_no_padding_is_not_copied():
    q, k, v = inputs(70, values=8)
    with FlashCalls() as calls:
        attention(q, k, v)
    assert calls.queries == [q.data_ptr()]


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("dtype", "values", "shared"),
    [(torch.bfloat16, 16, True), (torch.float32, 16, False), (torch.bfloat16, 8, False)],
    ids=str,
)
def test_heads_share_keys_on_a_gpu_only_where_flash_attention_takes_them(dtype, values, shared, window, monkeypatch):
    """torch's other kernel that does holds [T,T]."""
    monkeypatch.setattr(_attention_sdpa, "device_kind", lambda x: "cuda")
    kernel, causal = _attention_sdpa.F.scaled_dot_product_attention, []

    def spy(q, k, v, **how):
        assert how["enable_gqa"] == (q.shape[1] != k.shape[1])
        causal.extend([k.shape[1], v.shape[1]] if how["is_causal"] else [])
        return kernel(q, k, v, **how)

    monkeypatch.setattr(_attention_sdpa.F, "scaled_dot_product_attention", spy)
    compare(inputs(70, values=values, dtype=dtype), window=window)
    assert causal == (2 * [2 if shared else 4])


@pytest.mark.parametrize(
    ("queries", "keys", "trains", "fused"),
    [
        (1, 64, False, False),
        (3, 64, False, False),
        (5, 64, False, True),
        (64, 64, False, True),
        (1, 64, True, False),
        (64, 64, True, False),
        (65, 65, True, True),
    ],
)
def test_wide_heads_are_padded_where_that_is_better(queries, keys, trains, fused, monkeypatch):
    monkeypatch.setattr(_attention_sdpa, "SHORT", 2 * 2 * 64 * 64)
    ins = inputs(queries, keys, heads=2, width=24, values=160)
    with FlashCalls() as calls, torch.set_grad_enabled(trains):
        attention(*ins)
        attention(*ins, sink=torch.zeros(2))
    assert len(calls.scores) == 1 + fused
    compare(ins)
    with torch.no_grad():
        assert_close(attention(*ins), attention(*ins, backend="reference"), FORWARD[torch.float32])


# ---- packing

PACKINGS = [
    ([0, 1, 8, 71], None),
    ([0, 10, 20, 30], None),
    ([0, 5], None),
    ([0, 1, 2, 3], [0, 9, 10, 80]),
    ([0, 3, 4, 69], [0, 3, 70, 140]),
    ([0, 4, 8], [0, 70, 140]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("cu", "cu_k"), PACKINGS)
def test_packed_is_separate(cu, cu_k, window, backend):
    ins = inputs(cu[-1], (cu_k or cu)[-1], batch=1, values=8)
    lengths_k = None if cu_k is None else torch.tensor(cu_k, dtype=torch.int32)
    got = attention(*ins, window=window, cu_seqlens=torch.tensor(cu), cu_seqlens_k=lengths_k, backend=backend)
    separate = [
        attention(ins[0][:, a:b], *(x[:, c:d] for x in ins[1:]), window=window, backend=backend)
        for (a, b), (c, d) in zip(pairwise(cu), pairwise(cu_k or cu), strict=True)
    ]
    want = torch.cat(separate, dim=1)
    assert_close(got, want, FORWARD[torch.float32])
    weights = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, ins, weights), torch.autograd.grad(want, ins, weights), strict=True):
        assert_close(a, b, BACKWARD[torch.float32])


@pytest.mark.parametrize(
    ("backend", "options"),
    [(None, {}), (None, {"window": 3})]
    + [(name, {"normalizer": n}) for name in (None, "reference") for n in ("softmax_off_by_one", "sigmoid")]
    + [(name, {"sink": torch.ones(4), "softcap": 2.0}) for name in (None, "reference")]
    + [(None, {"sink": torch.ones(4)}), ("reference", {})],
    ids=str,
)
@pytest.mark.parametrize("cu", [[0, 7, 30, 32], [0, 8, 16, 24]])
def test_no_gradient_between_documents(cu, backend, options):
    ins = inputs(cu[-1], batch=1)
    o = attention(*ins, cu_seqlens=torch.tensor(cu), backend=backend, **options)
    grads = torch.autograd.grad(o[:, cu[1] : cu[2]].square().sum(), ins)
    for grad in grads:
        assert (grad[:, : cu[1]] == 0).all()
        assert (grad[:, cu[2] :] == 0).all()
        assert (grad[:, cu[1] : cu[2]] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 5])
def test_causal(backend, window):
    q, k, v = inputs(70)
    with torch.no_grad():
        before = attention(q, k, v, window=window, backend=backend)
        for x in (q, k, v):
            x[:, 40:] += 1
        after = attention(q, k, v, window=window, backend=backend)
    assert torch.equal(before[:, :40], after[:, :40])
    assert (before[:, 40:] - after[:, 40:]).abs().max() > 0.1


# ---- choice, shapes, errors


def test_the_fused_path_says_what_it_cannot_do():
    ins = inputs(5)
    for options, reason in [
        ({"normalizer": "sigmoid"}, "no normalizer 'sigmoid'"),
        ({"softcap": 30.0}, "no softcap"),
    ]:
        with pytest.raises(BackendRefused, match=f"'sdpa' was forced but refuses: .*{reason}"):
            attention(*ins, backend="sdpa", **options)
        with zoo.ops.trace() as choices:
            attention(*ins, **options)
        assert choices[0].backend == "blocked"
        assert reason in choices[0].refused["sdpa"]
    q, k, v = (x.to("meta") for x in ins)
    with on_device("cuda"), pytest.raises(BackendRefused, match="kernels on cuda have no sink"):
        attention(q, k, v, sink=torch.zeros(4, device="meta"), backend="sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("queries", "keys", "window"), [(7, 7, None), (3, 9, None), (1, 9, None), (200, 200, 5)])
@pytest.mark.parametrize("sinks", [False, True])
def test_meta_tensors(queries, keys, window, backend, sinks):
    ins = [x.detach().to("meta").requires_grad_() for x in inputs(queries, keys, values=8)]
    sink = torch.zeros(4, device="meta", requires_grad=True) if sinks else None
    o = attention(*ins, window=window, sink=sink, backend=backend)
    assert (o.device.type, o.shape) == ("meta", (2, queries, 4, 8))
    assert [g.shape for g in torch.autograd.grad(o.sum(), ins)] == [x.shape for x in ins]


def shaped(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    "ins",
    [
        shaped((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8)),
        shaped((2, 5, 4, 8), (2, 5, 2, 7), (2, 5, 2, 8)),
        shaped((2, 5, 4, 8), (2, 5, 2, 8), (2, 6, 2, 8)),
        shaped((2, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)),
        shaped((2, 5, 8), (2, 5, 8), (2, 5, 8)),
    ],
)
def test_shapes_that_do_not_fit(ins):
    with pytest.raises(ValueError, match=r"^attention: expected q \[B,Tq,H,K\].* got q \[") as caught:
        attention(*ins)
    assert "\n" not in str(caught.value)
    for x in ins:
        assert str(list(x.shape)) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"window": 3, "causal": False}, "needs causal=True"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"normalizer": "sofmax"}, "unknown normalizer 'sofmax'. Did you mean 'softmax'"),
        ({"sink": torch.zeros(3)}, r"expected sink \[H\] = \[4\], got \[3\]"),
        ({"sink": torch.zeros(4), "normalizer": "sigmoid"}, "does not fit normalizer 'sigmoid'"),
        ({"cu_seqlens_k": torch.tensor([0, 5])}, "needs cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens: must run from 0 to the number of tokens, 5"),
        ({"cu_seqlens": torch.tensor([0, 2, 5]), "cu_seqlens_k": torch.tensor([0, 5])}, "2 documents and .* has 1"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 2, 5])},
            "document 0 has 3 queries, some of which see none of its 2 keys",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        attention(*inputs(5, batch=1), **options)


def test_queries_that_see_no_key():
    with pytest.raises(ValueError, match="some of 5 queries see none of 3 keys"):
        attention(*inputs(5, 3))
    assert attention(*inputs(5, 3), causal=False).shape == (2, 5, 4, 16)
    with pytest.raises(ValueError, match="5 packed queries and 9 keys: say cu_seqlens_k"):
        attention(*inputs(5, 9, batch=1), cu_seqlens=torch.tensor([0, 5]))


def test_a_wrong_normalizer_is_a_recipe_error():
    with pytest.raises(RecipeError):
        attention(*inputs(1), normalizer="linear")
