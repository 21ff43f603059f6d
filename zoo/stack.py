"""Stack: embed -> blocks -> norm -> head. Plain torch; usable without Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.block import Block, build_streams
from zoo.cache import Cache
from zoo.config import StackConfig
from zoo.multi_token import MultiToken
from zoo.nn import Linear, make_norm
from zoo.nn.changes import note_change
from zoo.nn.cross_entropy import cross_entropy, rows_at_once, token_nats
from zoo.nn.sampling import sample
from zoo.nn.unfilled import Unfilled
from zoo.ops._dispatch import chooses_freely
from zoo.recipe import Recipe, load_stack_config, read_recipe
from zoo.registry import RecipeError
from zoo.sequence import Entry, Layout, Ledger, lay_out
from zoo.shapes import LayerContext


class Stack(nn.Module):
    """A language model from its configuration: tokens [B,T] -> logits [B,T,V].

    Built on whatever device is current; on the meta device nothing is allocated, and `materialize` later gives it
    memory and the same initialisation as if it had been built there.
    """

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config = config
        # from_pretrained leaves out nn.Embedding's own start, which on the meta device costs seconds of imports
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.d_model), freeze=False)
        self.embed_norm = make_norm(config.d_model, config.norm) if config.embed_norm else None
        first = config.layers[0]
        self.streams = build_streams(
            config.blocks[first], LayerContext(config.d_model, norm=config.norm), _place(first)
        )
        self.layers = nn.ModuleList(
            Block(config.blocks[name], _context(config, layer, name), _place(name))
            for layer, name in enumerate(config.layers)
        )
        self.norm = make_norm(config.d_model, config.norm)
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.multi_token: MultiToken | None = None
        if config.multi_token is not None:
            name = config.multi_token.block
            context = _context(config, config.n_layers, name)
            self.multi_token = MultiToken(config.blocks[name], context, _place(name))
        if not self.embed.weight.is_meta:
            self.reset_parameters()

    def _apply(self, *args: Any, **kwargs: Any) -> Stack:
        """Every way to another dtype or device."""
        note_change()
        return super()._apply(*args, **kwargs)

    def materialize(self, device: str | torch.device) -> Stack:
        """Allocates the parameters on `device` and initialises them. RecipeError for more than a machine has."""
        if torch.device(device).type == "cpu":
            _check_memory(self)
        self.to_empty(device=device)
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.reset_parameters()
        return self

    @torch.no_grad()
    def reset_parameters(self, only: Sequence[nn.Module] | None = None) -> None:
        """N(0, init_std) for every matrix of a projection or embedding, also where a module names stacked ones in its
        `projections`, 0 for a projection's bias; then each part's own `reset_parameters`, inner parts first, so that a
        part has the last word over what it contains. `only`: of these modules, in the order of `modules()`."""
        modules = list(self.modules() if only is None else only)
        for module in modules:
            matrices = ("weight",) if isinstance(module, (nn.Linear, nn.Embedding)) else _projections(module)
            for name in matrices:
                nn.init.normal_(getattr(module, name), std=self.config.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in reversed(modules):
            own = getattr(module, "reset_parameters", None)
            if own is not None and module is not self and not isinstance(module, (nn.Linear, nn.Embedding)):
                own()

    def forward(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits [B,T,V] of the next token.

        cu_seqlens [N+1]: tokens are [1,T], N documents back to back that do not see each other. attention_mask [B,T]
        of 0/1: padding left or right, whose logits are 0. cache: the tokens go on from those it carries, and are
        added to it, unless the call fails; such a call builds no graph. ValueError in one line for tokens outside
        the vocabulary and unfit arguments.
        """
        if cache is not None:
            with torch.no_grad():
                held = cache.held()
                try:
                    entry, tokens = self._enter(tokens, cu_seqlens, attention_mask, cache)
                    with _without_graph(self):
                        logits = cache.step(self._with_cache, self)(tokens, entry.layout, cache)
                except BaseException:
                    cache.restore(held)
                    raise
                return entry.leave(logits)
        entry, hidden = self._hidden(tokens, cu_seqlens, attention_mask)
        return entry.leave(self.head(self.norm(hidden)))

    def _hidden(
        self, tokens: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, ledger: Ledger | None = None
    ) -> tuple[Entry, Tensor]:
        """The entry, and the hidden states before the last norm in its layout."""
        entry, tokens = self._enter(tokens, cu_seqlens, mask)
        entry.layout.ledger = ledger
        return entry, self._through(tokens, entry.layout)

    def _enter(
        self, tokens: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, cache: Cache | None = None
    ) -> tuple[Entry, Tensor]:
        """The entry, and the tokens in its layout, which the cache has counted."""
        entry = lay_out(tokens, cu_seqlens, mask, cache.lengths if cache is not None else None)
        tokens = entry.enter(tokens)
        self._check_tokens("tokens", tokens)
        entry.layout.tokens = tokens
        if cache is not None:
            entry.layout.repeats = _repeats(entry.layout, tokens)
            cache.advance(entry.layout, tokens.shape[1])
        return entry, tokens

    def _through(self, tokens: Tensor, layout: Layout, cache: Cache | None = None) -> Tensor:
        """tokens [B,T] -> the hidden states before the last norm, [B,T,D]."""
        x = self.embedded(tokens)
        if not tokens.numel():
            return x
        stream = x if self.streams is None else self.streams.open(x)
        for index, layer in enumerate(self.layers):
            stream = layer(stream, layout, cache.layers[index] if cache is not None else None)
        hidden: Tensor = stream if self.streams is None else self.streams.close(stream)
        return hidden

    def _with_cache(self, tokens: Tensor, layout: Layout, cache: Cache) -> Tensor:
        hidden = self._through(tokens, layout, cache)
        logits: Tensor = cache.head.step(self._say, self.head, self.norm)(hidden, layout, cache.head)
        return logits

    def _say(self, head: Any, hidden: Tensor, *others: Any) -> Tensor:
        logits: Tensor = head(self.norm(hidden))
        return logits

    def embedded(self, tokens: Tensor) -> Tensor:
        """tokens [B,T] -> what enters the layers, [B,T,D]."""
        x: Tensor = self.embed(tokens)
        return x if self.embed_norm is None else self.embed_norm(x)

    def _check_tokens(self, name: str, tokens: Tensor, none: int | None = None) -> None:
        """`none` stands for no token."""
        # on a GPU the look would stall the stream, and the embedding's own assertion stops the run
        if tokens.device.type != "cpu":
            return
        if none is not None:
            tokens = tokens[tokens != none]
        if not tokens.numel():
            return
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            found = low if low < 0 else high
            raise ValueError(f"{name}: found {found}, and the vocabulary is 0 to {self.config.vocab_size - 1}")

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What to descend, float32: the mean cross-entropy in nats over the targets, and what routers and multi-token
        prediction add to it.

        labels [B,T]: the target of each position, -100 for none; by default the next token of the same document.
        **labels[t] is the target of position t: unlike in transformers, nothing is shifted here.** Padding and the last
        token of a document have no target.

        parts: `cross_entropy` (the mean) and `n_targets`; each addition by its name, weighted; `router/LAYER`, the
        statistics that the router of a layer updates itself by.
        """
        ledger = Ledger()
        entry, hidden = self._hidden(tokens, cu_seqlens, attention_mask, ledger=ledger)
        targets = self._targets(entry, tokens, labels)
        total, n_targets = self._cross_entropy(self.norm(hidden), targets)
        mean = total / n_targets.clamp_min(1)
        if self.multi_token is not None and self.config.multi_token is not None:
            predicted = hidden
            if hidden.numel():
                following = _from_the_next(entry.enter(tokens), entry.layout)
                # the last token of a document has none to follow it: any will do, for nobody sees that position
                predicted = self.multi_token(hidden, self.embedded(following.clamp_min(0)), entry.layout)
            second, _ = self._cross_entropy(predicted, _from_the_next(targets, entry.layout))
            # over as many as the first, as DeepSeek-V3 has it: so batches add up by one number of targets
            ledger.add("multi_token", self.config.multi_token.weight * second / n_targets.clamp_min(1))
        loss = mean + sum(ledger.losses.values())
        added = {name: term.detach() for name, term in ledger.losses.items()}
        statistics = {f"router/{layer}": seen for layer, seen in ledger.statistics.items()}
        return loss, {"cross_entropy": mean.detach(), "n_targets": n_targets, **added, **statistics}

    def _targets(self, entry: Entry, tokens: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None:
            return _from_the_next(entry.enter(tokens), entry.layout)
        if labels.shape != tokens.shape:
            raise ValueError(f"labels: expected {tuple(tokens.shape)} like tokens, found {tuple(labels.shape)}")
        targets = entry.enter(labels)
        self._check_tokens("labels", targets, none=-100)
        return targets

    def _cross_entropy(self, normed: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the targets that are none of -100, and their number."""
        return cross_entropy(normed.flatten(0, 1), self.head.weight, targets.flatten().long())

    @torch.no_grad()
    def nats(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-log p(label) of every position [B,T], float32 or better, 0 where there is no label; and the labels [B,T],
        -100 for none. Arguments as for `loss`. Logits are held some at a time."""
        entry, hidden = self._hidden(tokens, cu_seqlens, attention_mask)
        targets = self._targets(entry, tokens, labels)
        rows = rows_at_once(self.head.weight)
        pairs = zip(self.norm(hidden).flatten(0, 1).split(rows), targets.flatten().long().split(rows), strict=True)
        found = torch.cat([token_nats(self.head(some), wanted) for some, wanted in pairs])
        # what leaves is zero where there is padding
        return entry.leave(found.view(targets.shape)), entry.leave(targets + 100) - 100

    @torch.no_grad()
    def answers(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """[B,T] int64: the likeliest token wherever labels are not -100, and anything elsewhere. Only the logits of
        those positions are computed, some at a time."""
        entry, hidden = self._hidden(tokens, cu_seqlens, attention_mask)
        asked = entry.enter(labels) != -100
        some = self.norm(hidden[asked]).split(rows_at_once(self.head.weight))
        found = torch.zeros(asked.shape, dtype=torch.int64, device=asked.device)
        found[asked] = torch.cat([self.head(each).argmax(dim=-1) for each in some])
        return entry.leave(found)

    def init_cache(self, batch_size: int, max_length: int | None = None) -> Cache:
        """An empty cache for `batch_size` documents: preallocated for `max_length` tokens each, or growing.

        While it decodes it keeps copies of some weights and a recording of their use, and sees whatever an operation,
        an optimizer, another dtype or device, a hook or another module changes in the model. What is written behind
        torch's back, through `.data` or NumPy, wants a new cache.
        """
        if batch_size < 0 or (max_length is not None and max_length < 0):
            raise ValueError(f"init_cache: expected sizes of 0 or more, found {batch_size} and {max_length}")
        return Cache(len(self.layers), batch_size, max_length)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Tensor:
        """tokens [B,T] followed by `max_new_tokens` sampled ones, [B,T+n]. temperature 0 takes the likeliest; top_k and
        top_p keep the k likeliest tokens, or the fewest whose probabilities reach p. Prompts may be padded left or
        right."""
        if tokens.ndim != 2:
            raise ValueError(f"generate: expected tokens [B,T], got shape {list(tokens.shape)}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: expected 0 or more, found {max_new_tokens}")
        cache = self.init_cache(tokens.shape[0], tokens.shape[1] + max_new_tokens)
        logits = self(tokens, attention_mask=attention_mask, cache=cache)
        if not all(cache.lengths):
            raise ValueError(f"generate: prompt {cache.lengths.index(0)} has no token to go on from")
        if attention_mask is None:
            last = logits[:, -1]
        else:
            at = attention_mask.shape[1] - 1 - attention_mask.flip(1).int().argmax(dim=1)
            last = logits[torch.arange(len(logits)), at]
        out = [tokens]
        for step in range(max_new_tokens):
            out.append(sample(last, temperature, top_k, top_p)[:, None])
            if step + 1 < max_new_tokens:
                last = self(out[-1], cache=cache)[:, -1]
        return torch.cat(out, dim=1)


def _without_graph(model: nn.Module) -> AbstractContextManager[Any]:
    """inference_mode, which takes a tenth off a token's time; but FSDP, whose gathered weights would then be unfit for
    training, gets no_grad."""
    return torch.no_grad() if hasattr(model, "unshard") else torch.inference_mode()


def _repeats(layout: Layout, tokens: Tensor) -> bool:
    """Whether a decoded token's step may be that of the one before (`Layout.repeats`): on a CPU, where calls of torch
    are all that is done, and with nothing set around it that chooses other calls."""
    return (
        tokens.shape[1] == 1
        and type(tokens) is Tensor  # and no stand-in
        and layout.bounds is None
        and layout.carries
        and tokens.is_cpu
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and chooses_freely()
        and not torch.nn.modules.module._has_any_global_hook()
    )


def _check_memory(model: Stack) -> None:
    """The system would end a process that takes more than there is, in the midst of it and without a word."""
    if not hasattr(os, "sysconf"):
        return
    own = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    needed, there = sum(p.nbytes for p in own), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise RecipeError(
            f"model: its weights take {needed / 2**30:,.1f} GiB, and this machine has {there / 2**30:,.1f} GiB of "
            "memory; `zoo show` plans it, and device 'meta' builds it without numbers"
        )


def _projections(module: nn.Module) -> Sequence[str]:
    names: Sequence[str] = getattr(type(module), "projections", ())
    return names


def _place(block: str) -> str:
    return f"model.stack.blocks.{block}"


def _context(config: StackConfig, layer: int, block: str) -> LayerContext:
    mixers = [config.blocks[name].mixer.name for name in config.layers[:layer]]
    same_below = mixers.count(config.blocks[block].mixer.name)
    # the layer of multi-token prediction is one more, behind the last and with a stream of its own
    n_layers = max(config.n_layers, layer + 1)
    opens = layer in (0, config.n_layers)
    return LayerContext(config.d_model, layer, n_layers, config.norm, same_below, opens=opens)


def _from_the_next(values: Tensor, layout: Layout) -> Tensor:
    """[B,T]: of each token what its next one has (itself, or its target); -100 behind the last of a document."""
    targets = values.roll(-1, dims=1)
    targets[:, -1:] = -100
    if layout.bounds is not None:
        targets[0, [end - 1 for end in layout.bounds[1:]]] = -100
    return targets


def load(
    source: str | Path | Mapping[str, Any] | Recipe,
    *,
    device: str | torch.device = "cpu",
    set: Sequence[str] = (),
    imports: Sequence[str] = (),
) -> Stack:
    """A model from a shipped recipe's name, a path, or the mapping that stands under `model.stack`, freshly
    initialised.

    `set` are overrides (`blocks.attn.mixer.gates.output=sigmoid`), `imports` the user's files to import first. On
    device "meta" nothing is allocated. RecipeError, one line, for anything that the recipe says wrongly.
    """
    recipe = read_recipe(source, set, imports)
    config = load_stack_config(recipe)
    with torch.device("meta"), Unfilled(), recipe.placing_errors():
        model = Stack(config)
    return model if torch.device(device).type == "meta" else model.materialize(device)
