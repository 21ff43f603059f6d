"""torch's own flash attention among the backends of attention, without a GPU: its operators' arguments by the
dispatcher and shapes by their meta kernels, its numbers by the emulation of the package that it is a copy of."""

from contextlib import contextmanager

import pytest
import torch

import zoo.ops
from tests.ops import fake_flash
from tests.ops.test_flash import DENSE, PACKED, SINKS, compare, draw, every_sink, grads
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import BackendRefused, _flash, _flash_torch, attention, attention_to_first, watch_attention
from zoo.ops._dispatch import on_device

FORMS = {name: options for name, options in (DENSE | PACKED).items() if "softcap" not in options}
PLAIN = ("causal", "all", "scale")
SINK, CACHE = {"sink": True}, PACKED["a cache"]


class Operators:
    """`aten::_flash_attention_forward` and its backward on the CPU. `calls` are their arguments, by torch's names;
    `faults` are arguments that are replaced before anything is computed."""

    def __init__(self):
        self.calls, self.faults = [], {}

    @contextmanager
    def registered(self):
        library = torch.library.Library("aten", "IMPL")
        for name, work in (("_flash_attention_forward", self.forward), ("_flash_attention_backward", self.backward)):
            arguments = [x.name for x in getattr(torch.ops.aten, name).default._schema.arguments]
            library.impl(
                name, lambda *args, work=work, names=arguments, **more: self.call(work, names, args, more), "CPU"
            )
        try:
            yield self
        finally:
            library._destroy()

    def call(self, work, names, args, more):
        call = dict(zip(names, args, strict=False)) | more
        self.calls.append(call)
        call = call | self.faults
        assert all(call[name].stride(-1) == 1 for name in ("query", "key", "value"))
        assert call["query"].shape[-1] % 8 == 0
        assert call["query"].shape[-1] == call["value"].shape[-1] <= 256
        assert call["dropout_p"] == 0
        lengths = [call["cum_seq_q"], call["cum_seq_k"]]
        if lengths == [None, None]:
            assert (call["max_q"], call["max_k"]) == (call["query"].shape[1], call["key"].shape[1])
        else:
            assert all(x.dtype == torch.int32 and x.is_contiguous() and call["query"].ndim == 3 for x in lengths)
        renamed = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "causal": "is_causal"}
        renamed |= {"cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "max_seqlen_q": "max_q"}
        renamed |= {"max_seqlen_k": "max_k"}
        return work(call | {"softcap": 0.0} | {ours: call.get(theirs) for ours, theirs in renamed.items()})

    def forward(self, call):
        assert not call["return_debug_mask"]
        q = call["q"]
        o, lse = fake_flash.attend(call, call["window_size_left"], call["window_size_right"])
        state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return o, lse, *state, q.new_empty(0)

    def backward(self, call):
        assert call["logsumexp"].is_contiguous()
        assert call["rng_state"].dtype == torch.uint64
        found = {
            "dq": torch.empty_like(call["q"]),
            "dk": torch.empty_like(call["k"]),
            "dv": torch.empty_like(call["v"]),
        }
        given = {"dout": call["grad_out"].contiguous(), "softmax_lse": call["logsumexp"]}
        fake_flash.backward(call | found | given)
        return tuple(found.values())


@pytest.fixture
def operators(monkeypatch):
    """CPU tensors are judged as if they lay on a Hopper, in any dtype, in a torch that was built for it."""
    monkeypatch.setattr(_flash, "device_kind", lambda x: "cuda")
    monkeypatch.setattr(_flash, "capability", lambda x: (9, 0))
    monkeypatch.setattr(_flash, "DTYPES", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    monkeypatch.setattr(
        _flash, "_found", {"flash_attn.flash_attn_interface": "not here", "flash_attn.cute": "nor here"}
    )
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with Operators().registered() as operators:
        yield operators


@every_sink
@pytest.mark.parametrize("options", FORMS.values(), ids=list(FORMS))
def test_every_form_is_reference(options, sink, operators, monkeypatch):
    monkeypatch.setattr(_flash_torch, "_is_plain", lambda *args: False)
    compare("torch_flash", options | sink)
    assert len(operators.calls) == 2
    compare("torch_flash", options | sink, width=24, values=13)
    compare("torch_flash", options | sink, heads=3, kv_heads=1, dtype=torch.bfloat16)


@every_sink
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("window", [None, 5])
def test_a_chunk_sees_the_cache_before_it(queries, window, sink, operators, monkeypatch):
    monkeypatch.setattr(_flash_torch, "_is_plain", lambda *args: False)
    compare("torch_flash", {"window": window} | sink, queries=queries, keys=20)


@every_sink
@pytest.mark.parametrize("options", [{"window": 5}, PACKED["packed"]], ids=str)
def test_tensors_that_lie_crosswise(options, sink, operators):
    ins, options = draw(options | sink)
    ins = [x.detach().mT.contiguous().mT.requires_grad_() for x in ins[:3]] + ins[3:]
    weight = torch.randn(*ins[0].shape[:1], 16, 20, 4).movedim(1, -1)
    got, want = (
        torch.autograd.grad(attention(*ins[:3], backend=name, **options), ins, weight)
        for name in ("torch_flash", "reference")
    )
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, BACKWARD[torch.float32])


@pytest.mark.parametrize("sink", [{}, SINK], ids=str)
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ({"is_causal": False}, CACHE),
        ({"scale": None}, {"scale": 0.7, "window": 9}),
        ({"window_size_left": -1}, {"window": 5}),
        ({"window_size_right": 0}, {"cu_seqlens": [0, 9, 20], "causal": False}),
        ({"cum_seq_q": torch.tensor([0, 4, 6, 12], dtype=torch.int32)}, CACHE),
        ({"cum_seq_k": torch.tensor([0, 4, 14, 31], dtype=torch.int32)}, CACHE),
        ({"max_q": 7}, CACHE),
        ({"max_k": 16}, CACHE),
    ],
    ids=str,
)
def test_every_argument_has_its_effect(fault, options, sink, operators):
    ins, options = draw(options | sink)
    right, again = (attention(*ins[:3], backend="torch_flash", **options) for _ in range(2))
    operators.faults = fault
    wrong = attention(*ins[:3], backend="torch_flash", **options)
    assert not torch.allclose(wrong, right, atol=1e-2), "the output does not depend on it"
    wrong_grads = grads(again, ins)
    operators.faults = {}
    pairs = list(zip(wrong_grads, grads(right, ins), strict=True))[:3]
    assert not all(torch.allclose(a, b, atol=1e-2) for a, b in pairs), "the gradients do not depend on it"


@every_sink
@pytest.mark.parametrize("options", FORMS.values(), ids=list(FORMS))
def test_shapes_are_those_of_the_meta_kernels(options, sink, operators, monkeypatch):
    monkeypatch.setattr(_flash_torch, "_is_plain", lambda *args: False)
    ins, options = draw(options | sink, width=24, values=16, dtype=torch.bfloat16)
    ins = [x.detach().to("meta").requires_grad_() for x in ins]
    o = attention(*ins[:3], backend="torch_flash", **options | ({"sink": ins[3]} if "sink" in options else {}))
    assert (o.shape, o.dtype) == ((*ins[0].shape[:3], 16), torch.bfloat16)
    assert [g.shape for g in torch.autograd.grad(o.sum(), ins)] == [x.shape for x in ins]
    assert operators.calls == []
    # what the emulation returns is as the meta kernels have it
    call, like = _flash_torch._Call(True, -1, -1, 0.0, 1.0, False, None), {}
    for device in ("meta", "cpu"):
        q = torch.zeros(2, 5, 4, 16, device=device)
        like[device] = [(x.shape, x.dtype) for x in call.forward(q, q[:, :, :2], q[:, :, :2])]
    assert like["meta"] == like["cpu"]


@every_sink
@pytest.mark.parametrize("options", FORMS.values(), ids=list(FORMS))
def test_the_first_token_by_the_log_of_the_sum(options, sink, operators, monkeypatch):
    """Against blocks; all documents in one launch."""
    seen = []
    with watch_attention(lambda *call: seen.append(call)):
        for width, dtype in ((16, torch.float32), (13, torch.float32), (16, torch.bfloat16)):
            ins, given = draw(options | sink, width=width, dtype=dtype)
            attention(*ins[:3], backend="reference", **given)
    found = [attention_to_first(*call) for call in seen]
    assert len(operators.calls) == len(seen)
    monkeypatch.setattr(_flash_torch, "cannot", lambda *args: "not now")
    for call, numbers in zip(seen, found, strict=True):
        for got, want in zip(numbers, attention_to_first(*call), strict=True):
            assert got.dtype == torch.float32
            assert_close(got, want, FORWARD[torch.float32])


def test_what_scaled_dot_product_attention_takes_is_its(operators):
    def chosen(options, **sizes):
        ins, options = draw(options, **sizes)
        with zoo.ops.trace() as choices:
            attention(*ins[:3], **options)
        return choices[0].backend

    assert [chosen(DENSE[name]) for name in PLAIN] == 3 * ["sdpa"]
    assert chosen({"window": 20}) == "sdpa"
    assert chosen({}, queries=1, keys=20) == "sdpa"
    for options in [{"window": 5}, {"sink": True}, SINKS["off by one"], *PACKED.values()]:
        assert chosen(options) == ("torch_flash" if "softcap" not in options else "blocked")
    assert chosen({}, queries=7, keys=20) == "torch_flash"


def test_what_it_cannot_do(operators, monkeypatch):
    def why(options, **sizes):
        ins, options = draw(options, **sizes)
        with pytest.raises(BackendRefused) as caught:
            attention(*ins[:3], backend="torch_flash", **options)
        return str(caught.value).removeprefix("attention: backend 'torch_flash' was forced but refuses: ")

    assert why({"softcap": 2.0}) == "torch's flash attention has no softcap"
    assert why({"window": 5}, width=264) == "torch's flash attention takes heads of at most 256, not of 264"
    assert "scaled_dot_product_attention takes it" in why({})
    for gpu, width, reason in [
        ((7, 5), 64, "needs compute capability 8.0 or more, not 7.5"),
        (None, 64, "needs compute capability 8.0 or more, and there is none here"),
        ((8, 9), 200, "takes heads of at most 192 on this GPU, not of 200"),
    ]:
        monkeypatch.setattr(_flash, "capability", lambda x, gpu=gpu: gpu)
        assert why({"window": 5}, width=width) == f"torch's flash attention {reason}"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert why({"window": 5}) == "this torch is built without flash attention"
    monkeypatch.setattr(_flash, "device_kind", lambda x: x.device.type)
    assert why({}) == "flash-attn needs a CUDA device"
    with on_device("cuda"), pytest.raises(BackendRefused):
        attention(*(torch.empty(1, 4, 2, 16, device="meta") for _ in range(3)), window=2, backend="torch_flash")
