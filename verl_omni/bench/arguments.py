"""The command line of the bench, checked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from verl_omni.bench.workload import ARRIVALS, SERIAL_REQUESTS
from verl_omni.workers.config.rollout import DTYPES, PLAN_KEYS, RolloutMode
from verl_omni.workers.rollout.profile import LARGEST_CAP
from verl_omni.workers.rollout.profile_key import ATTENTION_VARIABLE

FAMILIES = ("qwen_image", "sd3")
GPU_CAPS, CPU_CAPS = [4, 8, 16, 32], [4, 8, 16]
_FROM_ONE = (
    *("size", "caps", "n", "requests", "repeats", "rounds", "warmup", "replicas"),
    *("negative_text", "max_sequence_length", "log_prob_gap"),
)
"""Options whose numbers are at least 1."""


def parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    """What the command line says. Exits with status 2 where it contradicts itself."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_omni.bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_what_is_measured(parser)
    _add_how_and_where(parser)
    args = parser.parse_args(argv)
    args.caps = args.caps or (GPU_CAPS if torch.cuda.is_available() else CPU_CAPS)
    args.dtype = DTYPES.get(args.dtype, args.dtype) or ("bfloat16" if torch.cuda.is_available() else "float32")
    if problem := next(_problems(args), None):
        parser.error(problem)
    return args


def text_range(value: str) -> tuple[int, int]:
    """``64`` or ``20-250`` as the shortest and the longest length."""
    low, _, high = value.partition("-")
    lengths = int(low), int(high or low)
    if not 1 <= lengths[0] <= lengths[1]:
        raise ValueError
    return lengths


def _add_what_is_measured(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", help="checkpoint folder in diffusers layout")
    model.add_argument("--random", choices=FAMILIES, help="full size with random weights")
    model.add_argument("--tiny", choices=FAMILIES, help="tiny with random weights")
    add = parser.add_argument_group("what is generated").add_argument
    add("--size", type=int, nargs="+", metavar="PIXELS", help="height, and width if it differs (the recipe's)")
    add("--steps", type=int, default=10, help="denoising steps (10)")
    add("--cfg", type=float, help="guidance scale, 1 for none (the recipe's: Qwen-Image 4, SD3 none)")
    add("--n", type=int, help="images of a prompt (the recipe's: Qwen-Image 16, SD3 8)")
    add("--text", type=text_range, default=(64, 64), metavar="N|N-N", help="tokens of a prompt, or a range (64)")
    add("--negative-text", type=int, default=6, help="tokens of the negative prompt (6)")
    add("--max-sequence-length", type=int, metavar="N", help="limit on text tokens (the adapter's, or --text if above)")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("what is measured").add_argument
    add("--modes", nargs="+", type=RolloutMode, choices=list(RolloutMode), help="(all that the adapter supports)")
    add("--caps", nargs="+", type=int, help=f"requests in a batch (GPU {GPU_CAPS}, CPU {CPU_CAPS})")
    add("--arrivals", nargs="+", choices=ARRIVALS, default=["burst"], help="all requests at once, or over time")
    add("--lora-rank", nargs="+", type=int, default=[0], metavar="RANK", help="ranks of a random LoRA; 0: none (0)")
    add("--merge-lora", action="store_true", help="merge it into the weights")
    add("--replicas", type=int, default=1, help="engines, compared with one; each gets the same load (1)")
    add(
        "--requests",
        type=int,
        help="images in a repeat of a replica (2 full batches, or 4 with staggered arrivals, in whole groups of --n); "
        f"in serial mode at most {SERIAL_REQUESTS} of them, unless --modes names no other",
    )
    add("--warmup", type=int, default=1, help="repeats before the counted ones (1)")
    add("--repeats", type=int, default=3, help="counted repeats of a round (3)")
    add("--rounds", type=int, default=1, help="engines started of each mode and cap, in turn (1)")


def _add_how_and_where(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how the engine runs").add_argument
    add("--dtype", choices=[*DTYPES, *DTYPES.values()], help="(GPU bfloat16, CPU float32)")
    add("--eager", action="store_true", help="do not compile")
    add("--attention", metavar="NAME", help=f"attention backend, as {ATTENTION_VARIABLE}")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="further engine arguments, or rows_per_forward")
    add = parser.add_argument_group("what is written").add_argument
    add("--out", type=Path, metavar="FILE.json", help="the record")
    add("--plot", type=Path, metavar="FILE.svg", help="images/s over the cap")
    add("--profile", type=Path, metavar="FILE.json", help="the profile that rollout.profile reads")
    add("--keep", type=Path, metavar="FOLDER", help="build the random model as FOLDER/tiny_sd3, say, or use that one")
    add(
        "--log-prob-gap",
        type=int,
        nargs="+",
        default=[],
        metavar="ROWS",
        help="how far log-probs of forwards with ROWS rows, and the recorded ones, lie from those of a row alone",
    )
    add("--torch-profile", metavar="PREFIX", help="PREFIX.….txt, on a GPU: time of one more burst by kernel")
    add("--baseline", type=Path, metavar="FILE.json", help="an earlier record: fail if a ratio fell")


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if args.size and len(args.size) > 2:
        yield "--size takes a height, and a width if it differs"
    if args.steps < 2:
        yield "--steps must be at least 2, so that one of them is stochastic"
    for name in _FROM_ONE:
        value = getattr(args, name)
        if value not in (None, []) and min(value if isinstance(value, list) else [value]) < 1:
            yield f"--{name.replace('_', '-')} must be at least 1"
    if max(args.caps) > LARGEST_CAP:
        yield f"--caps must be at most {LARGEST_CAP}"
    if args.max_sequence_length is not None and args.max_sequence_length < max(args.text):
        yield f"--max-sequence-length {args.max_sequence_length} is below the {max(args.text)} tokens of --text"
    if min(args.lora_rank) < 0 or sorted(args.lora_rank) != args.lora_rank:
        yield "--lora-rank takes ranks in rising order, as an engine cannot go back to the weights without LoRA layers"
    ours = {key for key in PLAN_KEYS if key != "rows_per_forward"}
    if not isinstance(args.engine, dict) or ours & args.engine.keys():
        yield f"--engine takes a JSON object without {', '.join(sorted(ours))}, which --modes and --caps decide"
    if args.merge_lora and max(args.lora_rank) == 0:
        yield "--merge-lora needs --lora-rank"
    if args.keep is not None and args.model is not None:
        yield "--keep needs --random or --tiny: a checkpoint is kept anyhow"
    if args.plot is not None and args.plot.suffix != ".svg":
        yield f"--plot {args.plot}: write a name that ends in .svg"
    yield from _profile_problems(args)
    yield from _looking_closer_problems(args)


def _profile_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.profile is None:
        return
    if len(args.lora_rank) > 1:
        yield "--profile needs one --lora-rank: a profile holds for one"
    if "burst" not in args.arrivals:
        yield "--profile needs --arrivals burst: it keeps the speed with full batches"
    batches = args.modes != [RolloutMode.SERIAL]
    if batches and args.requests is not None and args.requests < max(args.caps):
        yield f"--profile needs --requests {max(args.caps)} or more for the caps: it keeps the speed with full batches"


def _looking_closer_problems(args: argparse.Namespace) -> Iterator[str]:
    for option, wanted in (("--log-prob-gap", args.log_prob_gap), ("--torch-profile", args.torch_profile)):
        if wanted and args.replicas > 1:
            yield f"{option} needs one engine"
        if wanted and "burst" not in args.arrivals:
            yield f"{option} needs --arrivals burst"
    if args.torch_profile and not torch.cuda.is_available():
        yield "--torch-profile needs a GPU"
    if not args.log_prob_gap:
        return
    most = max(args.log_prob_gap)
    if min(args.lora_rank) > 0 and not args.merge_lora:
        yield "--log-prob-gap needs 0 in --lora-rank, or --merge-lora: it leaves a LoRA beside the weights out"
    if any(most % rows for rows in args.log_prob_gap):
        yield f"--log-prob-gap takes numbers that divide the largest, {most}: every forward is to be full"
    rows = args.engine.get("rows_per_forward")
    if isinstance(rows, int) and rows < most:
        yield f"--log-prob-gap {most} is above the rows_per_forward={rows} of --engine"
