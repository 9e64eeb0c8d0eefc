"""Measure serial, request-level and step-wise rollouts of one model.

    python -m verl_omni.bench MODEL                 a checkpoint folder in diffusers layout
    python -m verl_omni.bench --random qwen_image   full size with random weights, for a GPU
    python -m verl_omni.bench --tiny qwen_image     tiny and random, for any machine

Prints images a second by mode and cap, and where the time goes. Compare rows of one run with each other; another run is
another machine, if only by what else it does. Exit status: 0; 1 if something could not be measured, or a ratio fell
below the baseline; 2 for arguments that cannot be, or if the first engine fails its first requests; 130 after Ctrl-C,
which prints and records what was measured so far, and writes no plot and no profile.
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

import torch

from verl_omni.bench.arguments import parse
from verl_omni.bench.compare import as_table, changes, check_record
from verl_omni.bench.measure import Bench
from verl_omni.bench.model import BenchModel, build_random
from verl_omni.bench.outputs import Outputs, check_outputs
from verl_omni.bench.plot import save_plot
from verl_omni.bench.record import make_profile
from verl_omni.bench.report import say, tables
from verl_omni.bench.room import check_room
from verl_omni.bench.session import Session, checked_key, make_bench
from verl_omni.utils.console import log_to_stderr, own_stderr
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.profile_key import ATTENTION_VARIABLE

INTERRUPTED = 130
"""As a shell has it after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (None: those of the command line); returns the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # an engine start warns a lot, and there are many
    log_to_stderr(logging.NOTSET)
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv, __doc__ or "")
    if args.attention is not None:
        os.environ[ATTENTION_VARIABLE] = args.attention
    if args.replicas > 1:
        from verl_omni.bench.servers import prepare_for_ray

        prepare_for_ray()
    try:
        baseline = None if args.baseline is None else read_record(args.baseline)
        check_outputs(args)
        with tempfile.TemporaryDirectory() as folder:
            bench = make_bench(args, open_model(args, args.keep or Path(folder)))
            return measure_all(args, bench, shlex.join(["python", "-m", "verl_omni.bench", *argv]), baseline)
    except ConfigError as error:
        print(f"config error: {error}", file=own_stderr())
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=own_stderr())
        return INTERRUPTED


def measure_all(args: argparse.Namespace, bench: Bench, command: str, baseline: dict[str, Any] | None) -> int:
    """Check what can be checked, measure, and :func:`finish`; returns the exit status."""
    outputs = Outputs()
    session = Session(args, bench, command, outputs)
    checked_key(bench, args.lora_rank[0])
    if baseline is not None:
        changes(baseline, session.planned())
    try:
        record = session.run()
    except KeyboardInterrupt:
        show(bench, session.keep(), outputs)
        raise
    return finish(args, bench, record, baseline, outputs)


def open_model(args: argparse.Namespace, folder: Path) -> BenchModel:
    """The model that the arguments name; a random one is built in `folder` unless it is there."""
    if args.model is not None:
        return BenchModel.open(args.model, name=Path(args.model).name)
    kind, family = ("tiny", args.tiny) if args.tiny else ("random", args.random)
    path = folder / f"{kind}_{family}"
    if kind == "random":
        cuda = torch.cuda.is_available()
        spread = cuda and args.engine  # options may spread the weights over GPUs, or keep them on the host
        engines = 0 if spread else 1 if cuda else args.replicas
        device = torch.device("cuda" if cuda else "cpu")
        check_room(family, path, dtype=args.dtype, device=device, engines=engines)
    if not path.is_dir():
        say(f"building a {kind} {family}")
        build_random(kind, family, path)
    return BenchModel.open_random(kind, family, path)


def read_record(path: Path) -> dict[str, Any]:
    """An earlier record. Raises :class:`ConfigError` naming the file."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check_record(record)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--baseline {path} is no record of this bench: {error}") from error
    return record


def show(bench: Bench, record: dict[str, Any], outputs: Outputs) -> None:
    """Print the tables, and what was written."""
    peak = f"matrix products reach {record['matrix_peak_tflops']:.3g} TFLOP/s"
    if record["rows"]:
        say(f"\n{bench.model.name} on {record['device']}; {peak}\n\n{tables(record)}")
    if outputs.written:
        say(f"\nwritten: {', '.join(map(str, outputs.written))}")


def finish(
    args: argparse.Namespace, bench: Bench, record: dict[str, Any], baseline: dict[str, Any] | None, outputs: Outputs
) -> int:
    """Write what was asked for beside the record, print the tables, compare; returns the exit status."""
    if args.plot is not None and any("error" not in row for row in record["rows"]):
        outputs.write(args.plot, lambda path: save_plot(record, path))
    if args.profile is not None and (profile := make_profile(checked_key(bench, args.lora_rank[0]), record["rows"])):
        outputs.write(args.profile, profile.save)
    show(bench, record, outputs)
    failed = bool(outputs.failed) or any({"error", "failed_rounds"} & row.keys() for row in record["rows"])
    if baseline is None:
        return int(failed)
    try:
        found = changes(baseline, record)
    except ConfigError as error:  # what both could have was not measured
        say(f"\nnot compared: {error}")
        return 1
    say(f"\nagainst {args.baseline}, measured on {baseline['device']}\n\n{as_table(found)}")
    fallen = [change.name for change in found if change.fallen]
    if fallen:
        say(f"\nfallen below what the rounds of the baseline allow: {', '.join(fallen)}")
    return int(failed or bool(fallen))
