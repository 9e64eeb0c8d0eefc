"""Soak one real engine with a tiny random model.

Plays seeded random workloads to it, with faulty requests, aborts, changes of the policy, sleep and kills of its
process, and checks every result against the contracts of a rollout. Prints what happened and, for each violation, the
seed and the command that repeats it. Exit status: 0; 1 if a contract was broken; 2 for arguments that cannot be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_omni.testing.soak.faults import FAULTS
from verl_omni.testing.soak.report import as_table
from verl_omni.testing.soak.settings import SoakSettings
from verl_omni.testing.soak.workload import CFG_KEYS
from verl_omni.utils.console import own_stderr, own_stdout
from verl_omni.workers.rollout.plan import RolloutMode

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
}
"""Set unless it is: without the network; silent, as the errors are planted; one thread, as tiny models gain nothing by
more; no progress bars."""
AFTER_KILLS = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}
"""The same, with kills: a killed process leaves semaphores behind, which Python frees and warns of."""


def make_parser() -> argparse.ArgumentParser:
    """Of the command line."""
    default = SoakSettings()
    parser = argparse.ArgumentParser(prog="python -m verl_omni.testing.soak", description=__doc__)
    parser.add_argument("--family", choices=sorted(CFG_KEYS), default=default.family)
    modes = [mode.value for mode in RolloutMode]
    parser.add_argument("--mode", choices=modes, default=default.mode.value)
    parser.add_argument("--executor", choices=("uni", "mp"), help="mp if there are kills, else uni")
    parser.add_argument("--requests", type=int, default=default.requests, help="of all seeds together, as are counts")
    parser.add_argument("--seed", type=int, nargs="+", default=list(default.seeds))
    parser.add_argument("--faults", type=float, default=default.faults, help="share of requests that are wrong")
    parser.add_argument("--kinds", nargs="+", choices=sorted(FAULTS), default=list(default.kinds), help="how; all")
    parser.add_argument("--aborts", type=float, default=default.aborts, help="share of requests that are stopped")
    parser.add_argument("--swaps", type=int, default=default.swaps, help="changes of the policy")
    parser.add_argument("--sleeps", type=int, default=default.sleeps)
    parser.add_argument("--kills", type=int, default=default.kills, help="of the engine's process")
    parser.add_argument(
        "--check",
        type=lambda text: 1.0 if text == "all" else float(text),
        default=default.check,
        help='share of requests that are compared with their solo run, or "all"',
    )
    parser.add_argument("--cap", type=int, default=default.cap, help="max_num_seqs")
    parser.add_argument("--deadline", type=float, default=default.deadline_s, help="seconds a round may take")
    parser.add_argument("--out", type=Path, help="write the record here, as JSON")
    return parser


def parse(argv: Sequence[str]) -> tuple[SoakSettings, argparse.Namespace]:
    """The settings, and all arguments. Exits with status 2 for what cannot be."""
    parser = make_parser()
    args = parser.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name not in ("seed", "deadline", "out", "mode")}
    given["kinds"] = tuple(args.kinds)
    given["executor"] = args.executor or ("mp" if args.kills else "uni")
    try:
        settings = SoakSettings(mode=RolloutMode(args.mode), seeds=tuple(args.seed), deadline_s=args.deadline, **given)
    except ValueError as error:
        parser.error(str(error))
    return settings, args


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (None: those of the command line); returns the exit status."""
    settings, args = parse(sys.argv[1:] if argv is None else argv)
    for name, value in (ENVIRONMENT | (AFTER_KILLS if settings.kills else {})).items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.CRITICAL, format="%(levelname)s %(message)s", stream=own_stderr())
    out = own_stdout()
    with tempfile.TemporaryDirectory() as folder:
        record = soak(settings, Path(folder), lambda line: print(line, file=out, flush=True))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{as_table([record])}\n\nin {record['seconds']:.0f} s", file=out)
    for violation in record["violations"]:
        print(f"\nseed {violation['seed']}: {violation['what']}\n    {violation['command']}", file=out)
    if record["hangs"]:  # a thread that waits for ever would keep this process from ending
        out.flush()
        os._exit(1)
    return int(bool(record["violations"]))


def soak(settings: SoakSettings, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The record of one soak, of a tiny model that is made in `folder`."""
    import torch

    from verl_omni.testing.soak.soak import Soak  # brings in vLLM, which reads the environment
    from verl_omni.testing.tiny_models import build

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = build(settings.family, folder / settings.family)
    record = asyncio.run(Soak(model, settings, say).run())
    where = {"date": time.strftime("%Y-%m-%d"), "device": f"{platform.machine()} CPU, {os.cpu_count()} cores"}
    names = {"family": settings.family, "mode": settings.mode.value, "executor": settings.executor}
    return {**where, **names, "seeds": list(settings.seeds), **record}
