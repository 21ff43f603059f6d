from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.build import SIZES, draw, stack
from tests.mixers.by_hand import attend, mix, mixer, turn
from tests.tolerances import FORWARD, assert_close

T = 7


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": 10}, {"rope": {}}, {"qk_rope_head_dim": 0}], ids=str)
@torch.no_grad()
def test_formula(options: dict[str, Any]) -> None:
    part, x = mixer("mla-required", **options), torch.randn(1, T, 24, dtype=torch.float64)
    heads, rank, nope, width = SIZES["n_heads"], SIZES["kv_lora_rank"], SIZES["qk_nope_head_dim"], SIZES["v_head_dim"]
    rope = options.get("qk_rope_head_dim", SIZES["qk_rope_head_dim"])
    queries = part.q_proj(x[0]) if "q_lora_rank" not in options else part.q_b_proj(part.q_a_norm(part.q_a_proj(x[0])))
    latent, k_rope = part.kv_a_proj(x[0]).split([rank, rope], dim=-1)
    up = part.kv_b_proj.weight.view(heads, nope + width, rank)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.kv_a_norm.weight
    outputs = []
    for h in range(heads):
        q_nope, q_rope = queries.view(T, heads, nope + rope)[:, h].split([nope, rope], dim=-1)
        key = k_rope
        if "rope" in options:
            q_rope, key = (torch.stack([turn(row, t) for t, row in enumerate(rows)]) for rows in (q_rope, k_rope))
        q, k = torch.cat([q_nope, q_rope], dim=-1), torch.cat([latent @ up[h, :nope].T, key], dim=-1)
        outputs.append(attend(q, k, latent @ up[h, nope:].T, (nope + rope) ** -0.5))
    want = torch.cat(outputs, dim=-1) @ part.o_proj.weight.T
    assert_close(mix(part, x)[0], want, 1e-6 if "rope" in options else FORWARD[torch.float64])


@torch.no_grad()
def test_only_the_latents_are_cached() -> None:
    lm = stack("mla-full")
    cache = lm.init_cache(1, max_length=20)
    lm(draw(1, 20), cache=cache)
    widths = {name: history.shape[2:].numel() for name, history in cache.layers[0].histories.items()}
    assert sum(widths.values()) == SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"]
