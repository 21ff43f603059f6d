"""A mixture of experts beside transformers' own: `python -m tests.ops.time_experts`.

Forward and backward of the whole block, router included, in milliseconds: medians of runs that take turns, so that a
busy machine is busy for all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config import FFNPart, Part, build
from zoo.registry import FFNS
from zoo.sequence import dense
from zoo.shapes import LayerContext

D, WIDTH, N_EXPERTS, TOP_K = 256, 128, 64, 4
RUNS = 9


Run = tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]


def ours() -> Run:
    options = {"n_experts": N_EXPERTS, "top_k": TOP_K, "expert": FFNPart(name="swiglu", options={"width": WIDTH})}
    ffn = build(FFNS, Part(name="moe", options=options), "ffn", LayerContext(D))
    start(ffn)
    return lambda x: ffn(x, dense(*x.shape[:2], x.device)), list(ffn.parameters())


def theirs(implementation: str) -> Run:
    """Qwen3-Next's router and experts; its shared expert is left out."""
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=D, moe_intermediate_size=WIDTH, num_experts=N_EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    router, experts = qwen.Qwen3NextTopKRouter(config), qwen.Qwen3NextExperts(config)
    for module in (router, experts):
        start(module)

    def run(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        _, weights, chosen = router(flat)
        return experts(flat, chosen, weights).view_as(x)

    return run, [*router.parameters(), *experts.parameters()]


@torch.no_grad()
def start(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_(std=0.02)


def take_turns(runs: Mapping[str, Run], n_tokens: int, clock: Callable[[], float]) -> dict[str, float]:
    x = torch.randn(1, n_tokens, D, requires_grad=True)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(RUNS + 2):
        for name, (run, parameters) in runs.items():
            for tensor in (x, *parameters):
                tensor.grad = None
            before = clock()
            run(x).square().sum().backward()
            if turn > 1:
                taken[name].append(1e3 * (clock() - before))
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    runs: dict[str, Any] = {name: theirs(name) for name in ("eager", "grouped_mm")} | {"ours": ours()}
    # one thread: of CPU, whatever else the machine does
    for threads, clock in ((1, time.process_time), (2, time.perf_counter)):
        torch.set_num_threads(threads)
        for n_tokens in (128, 2048):
            times = take_turns(runs, n_tokens, clock)
            own = times.pop("ours")
            beside = ", ".join(f"{name} {taken:.1f} ({taken / own:.2f}x)" for name, taken in times.items())
            print(f"{threads} thread(s), {n_tokens} tokens: ours {own:.1f}, {beside}")  # noqa: T201


if __name__ == "__main__":
    main()
