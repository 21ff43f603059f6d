"""zoo generate CHECKPOINT --prompt TEXT: what a trained model writes, as it writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from zoo.cli._parser import Parser, seed
from zoo.recipe import run_of
from zoo.registry import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from zoo.data import Tokenizer
    from zoo.stack import Stack


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, "Writes the prompt and what the model makes of it.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one of its checkpoints")
    parser.add_argument("--prompt", required=True, help="the text to go on from; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token; default 0.8")
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose among the fewest whose probabilities reach P")
    parser.add_argument("--seed", type=seed, default=0, help="the same seed, the same text; default 0")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one")
    options = parser.read(args)
    _check(options.max_new_tokens >= 1, "--max-new-tokens", "at least 1", options.max_new_tokens)
    _check(options.temperature >= 0, "--temperature", "at least 0", options.temperature)
    _check(options.top_k is None or options.top_k >= 1, "--top-k", "at least 1", options.top_k)
    _check(options.top_p is None or 0 < options.top_p <= 1, "--top-p", "above 0 and at most 1", options.top_p)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    _check(bool(prompt), "--prompt", "some text to go on from", repr(prompt))

    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = options.device or found
    _check(device != "cuda" or found == "cuda", "--device", "cpu, as torch finds no GPU", device)
    model, tokenizer = _load(options.checkpoint)
    model.to(device)
    ids = tokenizer.encode(prompt)
    vocab_size = model.config.vocab_size
    _check(max(ids) < vocab_size, "--prompt", f"ids below the model's vocab_size {vocab_size}", max(ids))
    torch.manual_seed(options.seed)
    print(prompt, end="", flush=True)
    with torch.inference_mode():
        new = sampled(
            model,
            torch.tensor([ids], device=device),
            min(tokenizer.vocab_size, vocab_size),
            options.max_new_tokens,
            options.temperature,
            options.top_k,
            options.top_p,
        )
        for text in decode_stream(tokenizer, new):
            print(text, end="", flush=True)
    print()
    return 0


def _check(holds: bool, option: str, expected: str, found: object) -> None:
    if not holds:
        raise RecipeError(f"zoo generate: {option}: expected {expected}, found {found}")


def _load(path: str) -> tuple[Stack, Tokenizer]:
    """The model and the tokenizer of a run."""
    from zoo.data import load_tokenizer
    from zoo.train import LanguageModule, find_checkpoint, quiet, read_checkpoint, read_weights

    quiet()
    checkpoint = find_checkpoint(path, "zoo generate")
    folder = run_of(checkpoint)
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise RecipeError(f"zoo generate: no tokenizer.json in the run folder of '{checkpoint}'")
    stored = read_checkpoint(checkpoint, "zoo generate")["hyper_parameters"]
    module = LanguageModule(stored["stack"], stored["imports"])
    module.configure_model()
    read_weights(checkpoint, module, "zoo generate")
    return module.stack.eval(), load_tokenizer(folder / "tokenizer.json")


def sampled(
    model: Stack,
    tokens: Tensor,
    n_ids: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Iterator[int]:
    """The ids that follow tokens [1,T], one by one, all below `n_ids`."""
    from zoo.stack import sample

    cache = model.init_cache(1, tokens.shape[1] + max_new_tokens)
    for _ in range(max_new_tokens):
        last = model(tokens, cache=cache)[:, -1, :n_ids]
        tokens = sample(last, temperature, top_k, top_p)[:, None]
        yield int(tokens)


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of the ids, piece by piece. A character that spans several tokens is held back until it is whole."""
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        whole = text.rstrip("\ufffd")
        if len(whole) > len(shown):
            yield whole[len(shown) :]
            shown = whole
    yield tokenizer.decode(seen)[len(shown) :]
