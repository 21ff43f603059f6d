"""zoo fit | validate | test | predict: reads and checks the recipe, then hands the run to LightningCLI."""

from __future__ import annotations

from zoo.cli._request import complete, parse_request, read_request, run_folder

_HELP = """usage: zoo {command} --config RECIPE [options]

  --config RECIPE           a shipped recipe's name (qwen3_next/tiny), a path, or a run folder;
                            a second one is laid over the first
  --model.set+ PATH=VALUE   change the stack: --model.set+ blocks.attn.mixer.gates.output=sigmoid
  --model.weights RUN       start from the weights of a run folder or checkpoint, with a fresh optimizer
  --model.weights_strict false  take what fits of them, and say what does not
  --imports FILE            a Python file that registers parts, or defines a data module or optimizer
  --ckpt_path last|PATH     {ckpt_path}
{force}  --trainer.max_steps=N     and every other argument of Lightning's Trainer; --trainer.callbacks+=NAME adds one;
                            --trainer.default_root_dir=DIR is the run folder (default: runs/ and the recipe's name)
  --data.seq_len=N          and the other arguments of the recipe's data module; --data=NAME takes another
  --optimizer=NAME --optimizer.lr=X --lr_scheduler=NAME --lr_scheduler.warmup_steps=N
  --seed_everything=N

  --print_config            the resolved configuration, and no run
  --data.help --optimizer.help=NAME --help-all
                            the arguments of one class; of everything"""
_RESUME = "go on from the run's last checkpoint, or from another"
_MEASURE = "the checkpoint to measure: the run's last, or another; alone, it brings its run's recipe"
_FORCE = "  --force                   start anew in a run folder that holds a run\n"


def main(command: str, args: list[str]) -> int:
    request = parse_request(command, args)
    if request.help in ("-h", "--help"):
        train = command == "fit"
        print(_HELP.format(command=command, ckpt_path=_RESUME if train else _MEASURE, force=_FORCE if train else ""))
        return 0
    if request.help or any(name.partition("=")[0].endswith(".help") for name in request.overrides):
        from zoo.cli._lightning import print_options

        return print_options(request)
    complete(request)
    recipe = read_request(request)

    from zoo.stack import load

    load(recipe, device="meta")  # every fault of the stack comes before Lightning's seconds of import
    folder = run_folder(request, recipe)

    from zoo.cli._lightning import run

    return run(request, recipe, folder)
