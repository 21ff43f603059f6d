"""Planted faults: each is caught by the contract that it breaks, and the message names what was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes_by_hand import undone, write
from zoo.check import cases
from zoo.check.contract import Broken, NotApplicable
from zoo.check.plan import plan
from zoo.check.run import find

GATE = '''
import torch
import torch.nn.functional as F
from torch import nn
from zoo.gates.{kind} import *
from zoo.gates.{kind} import {base}, float32, register
from zoo.nn import LowRank
from zoo.shapes import Slot


@register("planted")
class Planted({base}):
    """{doc}"""

    {attributes}

    def __init__(self, slot: Slot, *, {options}):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim)
        self.z_proj = nn.Linear(slot.d_in, slot.n_heads, bias=False)
        {init}

    def forward(self, x):
        z = float32(self.z_proj(x))
        {forward}
'''
MIXER = '''
import torch
from torch import nn
from zoo import ops
from zoo.mixers._linear import LinearMixer, linear, written
from zoo.mixers._mixer import register


@register("planted")
class Planted(LinearMixer):
    """S_t = exp(log_decay_t) S_{{t-1}} + k_t v_t^T; y = W_o S_t^T q_t. The author, 2026."""

    {attributes}

    def __init__(self, context, gates, *, n_heads: int, head_dim: int):
        super().__init__(
            context, n_heads=n_heads, head_dim=head_dim, n_v_heads=n_heads, head_v_dim=head_dim, norm=None
        )
        self.q_proj, self.k_proj, self.v_proj = (linear(context.d_model, self.d_k) for _ in range(3))
        self.o_proj = linear(self.d_v, context.d_model)
        self.fill_slots(gates)

    def forward(self, x, layout, cache=None):
        q, k, v = (
            proj(x).unflatten(-1, (self.n_heads, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = self.gated("query", q, x), self.gated("key", k, x), self.gated("value", v, x)
        log_decay, beta = self.decay_and_beta(x, x)
        {forward}
        o = self.gated("output", o, x)
        return self.post(self.o_proj(o.flatten(-2)), x)

    def op_flops(self, length):
        return 5 * self.d_k * self.head_dim
    {methods}
'''
SOUND = "o = self.recur(ops.linear_attention, *written(q, k, v, beta), log_decay, layout=layout, cache=cache)"


@pytest.fixture(autouse=True)
def _undo(tmp_path: Path) -> Iterator[None]:
    with undone(tmp_path):
        yield
    cases.forget()


def gate(kind: str, forward: str, *, doc: str = "y = f(W x). The author, 2026.", **parts: str) -> str:
    base = {"decay": "DecayGate", "write": "WriteGate", "output": "OutputGate", "branch": "BranchGate"}[kind]
    parts = {"attributes": "", "options": "slope: float = 1.0", "init": "self.slope = slope"} | parts
    return GATE.format(kind=kind, base=base, doc=doc, forward=forward, **parts)


def mixer(forward: str = SOUND, attributes: str = "", methods: str = "") -> str:
    return MIXER.format(forward=forward, attributes=attributes, methods=methods)


def first_fault(folder: Path, code: str) -> Broken | None:
    """The first contract that the class in the file breaks, each tried on its first case."""
    cases.forget()
    ((kind, key),) = find(str(write(folder, "planted_part.py", code)))
    for step in plan(kind, key):
        for case in step.cases[:1]:
            try:
                step.contract(case)
            except NotApplicable:
                continue
            except Broken as fault:
                return fault
    return None


def decay(log_decay: str, **parts: str) -> str:
    return gate("decay", f"return Decay({log_decay})", **{"attributes": 'granularity = "head"'} | parts)


GATES = {
    "positive log-decay": (
        decay("self.slope * z"),
        ("in_range", "a log_decay of ", "at most 0"),
    ),
    "wrong sign: writes what it should erase": (
        gate("write", "return self.slope * z.tanh()"),
        ("in_range", "a beta of -", "at least 0"),
    ),
    "more than it says": (
        gate("write", "return 3 * (self.slope * z).sigmoid()"),
        ("in_range", "a beta of 2.", "at_most 2"),
    ),
    "wrong sign: of a hand-written gradient": (
        gate(
            "output",
            "return Wrong.apply(self.slope * z).unsqueeze(-1)",
        )
        + """

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.tanh()

    @staticmethod
    def backward(ctx, grad):
        return -grad * (1 - ctx.saved_tensors[0].tanh() ** 2)
""",
        ("the_gradient_is_the_slope", "a gradient of ", "the slope, "),
    ),
    "looks ahead": (
        gate("output", "return (self.slope * z.roll(-1, 1)).sigmoid().unsqueeze(-1)"),
        ("a_gate_does_not_look_ahead", "for the tokens before it differs by ", "bit for bit"),
    ),
    "looks at the mean of the sequence": (
        gate("output", "return (self.slope * (z - z.mean(1, keepdim=True))).sigmoid().unsqueeze(-1)"),
        ("a_gate_does_not_look_ahead", "for the tokens before it differs by ", "bit for bit"),
    ),
    "looks at the last token": (
        gate("output", "return (self.slope * (z + z[:, -1:])).sigmoid().unsqueeze(-1)"),
        ("a_gate_does_not_look_ahead", "1 added to token 4", "bit for bit"),
    ),
    "a branch gate for three branches, however many there are": (
        gate("branch", "return (self.slope * z).sigmoid().unsqueeze(-1).expand(-1, -1, -1, 3)"),
        ("shape_and_dtype", "shape [2, 5, 3, 3]", "[2, 5, 3, 8]"),
    ),
    "remembers": (
        gate("output", "return (self.slope * z.cumsum(1)).sigmoid().unsqueeze(-1)"),
        ("a_token_is_gated_by_itself", "the other tokens differs by ", "bit for bit"),
    ),
    "a parameter that never learns": (
        gate(
            "output",
            "return (self.slope * z + 0 * self.bias).sigmoid().unsqueeze(-1)",
            attributes='no_decay = ("bias",)',
            init="self.slope = slope; self.bias = nn.Parameter(torch.zeros(slot.n_heads))",
        ),
        ("every_parameter_learns", "bias of shape [3] has no gradient in [0, 1, 2]", "every row"),
    ),
    "a parameter that is not used": (
        gate(
            "output",
            "return (self.slope * z).sigmoid().unsqueeze(-1)",
            init="self.slope = slope; self.w = nn.Linear(2, 2)",
        ),
        ("every_parameter_learns", "w.weight has no gradient", "every row"),
    ),
    "wrong shape": (
        gate("output", "return (self.slope * z).sigmoid()"),
        ("shape_and_dtype", "shape [2, 5, 3]", "[2, 5, 3, 8] or [2, 5, 3, 1]"),
    ),
    "wrong shape under batch=1": (
        gate("output", "return (self.slope * z).sigmoid().squeeze(0).unsqueeze(-1)"),
        ("a_batch_of_one", "of shape [5, 3, 1]", "the shape [1, 5, 3, 1]"),
    ),
    "a decay that is no Decay": (
        gate("decay", "return -F.softplus(z)", attributes='granularity = "head"'),
        ("shape_and_dtype", "Tensor", "Decay(log_decay)"),
    ),
    "breaks under bfloat16": (
        gate("output", "return (self.slope * self.z_proj(float32(x))).sigmoid().unsqueeze(-1)"),
        ("bfloat16", "RuntimeError: ", "no error"),
    ),
    "scores in bfloat16": (
        gate("output", "return (self.slope * self.z_proj(x)).sigmoid().unsqueeze(-1)"),
        ("bfloat16", "torch.bfloat16", "float32"),
    ),
    "a decay rate in bfloat16": (
        decay(
            "-self.slope * self.A_log.exp() * F.softplus(z)",
            init="self.slope = slope; self.A_log = nn.Parameter(torch.zeros(slot.n_heads))",
            attributes='granularity = "head"; no_decay = ("A_log",)',
        )
        + """
    @torch.no_grad()
    def reset_parameters(self):
        self.A_log.zero_()
""",
        ("default_dtype_bfloat16", "A_log in torch.bfloat16", "float32_parameter"),
    ),
    "missing docstring": (
        gate("output", "return (self.slope * z).sigmoid().unsqueeze(-1)", doc=""),
        ("docstring", "none", "formula"),
    ),
    "a docstring without a source": (
        gate("output", "return (self.slope * z).sigmoid().unsqueeze(-1)", doc="score = σ(W x)."),
        ("docstring", "'score = σ(W x).'", "a source"),
    ),
    "a docstring without a formula": (
        gate("output", "return (self.slope * z).sigmoid().unsqueeze(-1)", doc="A gate, 2026."),
        ("docstring", "'A gate, 2026.'", "a formula"),
    ),
    "an option that says nothing": (
        gate("output", "return z.sigmoid().unsqueeze(-1)"),
        ("every_option_changes_the_model", "the same model", "other"),
    ),
    "an option without a default": (
        gate("output", "return (self.slope * z).sigmoid().unsqueeze(-1)", options="slope: float"),
        ("options", "slope has no default", "a default"),
    ),
    "an option whose other values nobody knows": (
        gate(
            "output", "return (self.slope * z).sigmoid().unsqueeze(-1)", options="slope: float = 1.0, mode: str = 'a'"
        ),
        ("options", "the option mode = 'a' of Planted", "examples = {'mode': [...]}"),
    ),
    "a start that is left to chance": (
        gate(
            "output",
            "return (self.slope * z + self.bias).sigmoid().unsqueeze(-1)",
            attributes='no_decay = ("bias",)',
            init="self.slope = slope; self.bias = nn.Parameter(torch.zeros(slot.n_heads))",
        ),
        ("starts_finite", "bias: nan at [0]", "finite"),
    ),
    "a granularity that no mixer takes": (
        decay("-F.softplus(z)", attributes='granularity = "token"'),
        ("shape_and_dtype", "granularity 'token'", "head, channel, full"),
    ),
    "a parameter that weight decay reaches": (
        gate(
            "output",
            "return (self.slope * z + self.bias).sigmoid().unsqueeze(-1)",
            init="self.slope = slope; self.bias = nn.Parameter(torch.zeros(slot.n_heads))",
        )
        + """
    @torch.no_grad()
    def reset_parameters(self):
        self.bias.zero_()
""",
        ("only_projections_decay", "['bias'] would decay", "no_decay = ('bias',)"),
    ),
}
MIXERS = {
    "looks ahead": (
        mixer(SOUND + "\n        o = o + 0.1 * o.mean(1, keepdim=True)"),
        ("the_future_is_not_seen", "logits before token 30:", "the same within"),
    ),
    "leaks across documents": (
        mixer(
            "state = cache.read('state', layout) if cache is not None else None\n"
            "        if cache is None: o, _ = ops.linear_attention(*written(q, k, v, beta), log_decay)\n"
            "        else: o = self.recur(ops.linear_attention, *written(q, k, v, beta), log_decay,"
            " layout=layout, cache=cache)"
        ),
        ("packed_equals_separate", "logits differs by ", "the same within"),
    ),
    "ignores the cache": (
        mixer("o, _ = ops.linear_attention(*written(q, k, v, beta), log_decay, cu_seqlens=layout.cu_seqlens)"),
        ("cached_equals_full", "logits differs by ", "the same within"),
    ),
    "takes padding for tokens: a state for every row, also for those without a token": (
        mixer(
            "state = cache.states.get('state') if cache is not None else None\n"
            "        o, state = ops.linear_attention(*written(q, k, v, beta), log_decay, initial_state=state,"
            " cu_seqlens=layout.cu_seqlens)\n"
            "        if cache is not None: cache.states['state'] = state"
        ),
        ("padding_holds_with_a_cache", "ValueError: ", "no error"),
    ),
    "counts the batch": (
        mixer(SOUND + "\n        o = o / len(x)"),
        ("a_batch_of_one_is_a_row_of_the_batch", "logits differs by ", "the same within"),
    ),
    "forgets all": (
        mixer("o, _ = ops.linear_attention(*written(q, k, v, beta), torch.full_like(q[..., 0], -60.0).float())"),
        ("the_first_token_moves_the_last_logit", "the logits of token 66 move by 0", "at least"),
    ),
    "a state that grows": (
        mixer(SOUND + "\n        if cache is not None: cache.extend('seen', x, layout)"),
        ("the_state_does_not_grow", "numbers after 4 tokens, 2176 after 40", "as many"),
    ),
    "keeps more than it says": (
        mixer(
            SOUND
            + "\n        documents = len(layout.bounds or [0, *x]) - 1"
            + "\n        if cache is not None: cache.write('more', x.new_zeros(documents, 3), layout)"
        ),
        ("the_cache_holds_what_state_size_says", "numbers in the cache", "of state_size"),
    ),
    "a state size that is wrong": (
        mixer(methods="\n    def state_size(self, length):\n        return 7\n"),
        ("the_cache_holds_what_state_size_says", "numbers in the cache", "of state_size"),
    ),
    "a float32 state that is not said": (
        mixer(methods="\n    def float32_state_size(self, length):\n        return 7\n"),
        ("the_cache_holds_what_state_size_says", "numbers of float32 in the cache", "of float32_state_size"),
    ),
    "applies no output gate": (
        mixer(SOUND).replace('o = self.gated("output", o, x)', "pass"),
        ("nothing_passes_a_gate_at_zero", "a mixer gives up to ", "exactly 0"),
    ),
}


@pytest.mark.parametrize("fault", GATES)
def test_gates(tmp_path: Path, fault: str) -> None:
    code, (contract, found, expected) = GATES[fault]
    caught = first_fault(tmp_path, code)
    assert caught is not None
    assert caught.contract == contract, str(caught)
    assert found in f"{caught.input} {caught.found}", str(caught)
    assert expected in caught.expected, str(caught)
    assert caught.input


@pytest.mark.parametrize("fault", MIXERS)
def test_mixers(tmp_path: Path, fault: str) -> None:
    code, (contract, found, expected) = MIXERS[fault]
    caught = first_fault(tmp_path, code)
    assert caught is not None
    assert caught.contract == contract, str(caught)
    assert found in caught.found, str(caught)
    assert expected in caught.expected, str(caught)
    assert caught.input


def test_a_sound_mixer_breaks_nothing(tmp_path: Path) -> None:
    assert first_fault(tmp_path, mixer()) is None


@pytest.mark.parametrize(
    "code",
    [
        decay("-self.slope * F.softplus(z)"),
        gate("write", "return (self.slope * z).sigmoid()"),
        gate("output", "return (self.slope * z).sigmoid().unsqueeze(-1)"),
    ],
    ids=["decay", "write", "output"],
)
def test_a_sound_gate_breaks_nothing(tmp_path: Path, code: str) -> None:
    assert first_fault(tmp_path, code) is None
