"""Measure serial, request-level and step-wise rollouts of one model.

    python -m verl_omni.bench MODEL                 a checkpoint folder in diffusers layout
    python -m verl_omni.bench --random qwen_image   full size with random weights, for a GPU
    python -m verl_omni.bench --tiny qwen_image     tiny and random, for any machine

Prints images a second by mode and cap, and where the time goes. Compare rows of one run with each other; another run is
another machine, if only by what else it does. Exit status: 0; 1 if something could not be measured, or a ratio fell
below the baseline; 2 for arguments that cannot be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_omni.bench.arguments import parse
from verl_omni.bench.compare import changes, told
from verl_omni.bench.measure import Bench
from verl_omni.bench.model import BenchModel
from verl_omni.bench.plot import save_plot
from verl_omni.bench.record import profile_points
from verl_omni.bench.report import say, tables
from verl_omni.bench.session import Session, make_bench
from verl_omni.utils.console import own_stderr
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.profile import ProfileKey, RolloutProfile
from verl_omni.workers.rollout.profile_key import ATTENTION_VARIABLE


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (None: those of the command line); returns the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # an engine start warns a lot, and there are many
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=own_stderr())
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv, __doc__ or "")
    if args.attention is not None:
        os.environ[ATTENTION_VARIABLE] = args.attention
    try:
        baseline = None if args.baseline is None else read_record(args.baseline)
        for path in (args.out, args.plot, args.profile):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            bench = make_bench(args, open_model(args, Path(folder)))
            record = Session(args, bench, shlex.join(["python", "-m", "verl_omni.bench", *argv])).run()
            return finish(args, bench, record, baseline)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2


def open_model(args: argparse.Namespace, folder: Path) -> BenchModel:
    """The model that the arguments name; random ones are built in `folder`."""
    if args.model is not None:
        return BenchModel.open(args.model, name=Path(args.model).name)
    kind, family = ("tiny", args.tiny) if args.tiny else ("random", args.random)
    say(f"building a {kind} {family}")
    return BenchModel.build(kind, family, folder)


def read_record(path: Path) -> dict[str, Any]:
    """An earlier record. Raises :class:`ConfigError` naming the file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(record, dict) and {"workload", "rows", "device"} <= record.keys()):
            raise ValueError('it holds no "workload", "rows" and "device"')
    except (OSError, ValueError) as error:
        raise ConfigError(f"--baseline {path} is no record of this bench: {error}") from error
    return record


def finish(args: argparse.Namespace, bench: Bench, record: dict[str, Any], baseline: dict[str, Any] | None) -> int:
    """Print the tables, write what was asked for, compare; returns the exit status."""
    measured = [row for row in record["rows"] if "error" not in row]
    failed = len(record["rows"]) > len(measured)
    peak = f"matrix products reach {record['matrix_peak_tflops']:.3g} TFLOP/s"
    say(f"\n{bench.model.name} on {record['device']}; {peak}\n\n{tables(record)}")
    if measured and args.plot is not None:
        save_plot(record, args.plot)
    if args.profile is not None and (points := profile_points(measured)):
        RolloutProfile(key=profile_key(bench, args.lora_rank[0]), points=points).save(args.profile)
    written = [str(path) for path in (args.out, args.plot, args.profile) if path is not None and path.exists()]
    if written:
        say(f"\nwritten: {', '.join(written)}")
    if baseline is None:
        return int(failed)
    found = changes(baseline, record)
    say(f"\nagainst {args.baseline}, measured on {baseline['device']}\n\n{told(found)}")
    fallen = [change.name for change in found if change.fallen]
    if fallen:
        say(f"\nfallen by more than the rounds of the baseline lie apart: {', '.join(fallen)}")
    return int(failed or bool(fallen))


def profile_key(bench: Bench, lora_rank: int) -> ProfileKey:
    """What the measurement holds for."""
    from verl_omni.trainer.rollout_setup import device_name

    guided = bench.load.cfg > 1
    return ProfileKey.of(bench.rollout, model=bench.model.path, device=device_name(), cfg=guided, lora_rank=lora_rank)
