"""What people see of a training run: console, ``metrics.jsonl``, validation grids, ``report.html``, backends."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.trainer.diffusion.metrics import STAGES
from verl_omni.trainer.diffusion.metrics_file import MetricsFile
from verl_omni.utils.console import own_stderr
from verl_omni.utils.secrets import masked

if TYPE_CHECKING:
    from verl_omni.trainer.generation.grid import Tile

logger = logging.getLogger(__name__)

CONSOLE = "console"
RUN = "run.json"


class RunLog:
    """Takes the metrics of a run, step after step, and closes with its outcome.

    Everything is written into `folder`, which is made if missing. `logger` names the backends: ``console`` is a line a
    step and a progress bar, others are verl's (tensorboard, wandb …); one that fails is warned of, and the run goes on.
    `config` is plain data, shown in the report; secrets in it are masked. `resume_step` is the step of the checkpoint
    from which the run goes on: what an earlier run logged up to it is kept. None: a new run, nothing is kept.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project_name: str,
        experiment_name: str,
        logger: Sequence[str] = (CONSOLE,),
        config: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        resume_step: int | None = None,
    ) -> None:
        from tqdm import tqdm

        from verl_omni.trainer.diffusion.trackers import Tracker
        from verl_omni.trainer.diffusion.validation_grid import drop_grids

        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        config = masked(config or {})
        self._about = {
            "project_name": project_name,
            "experiment_name": experiment_name,
            "total_steps": total_steps,
            "config": config,
        }
        self._describe("running")
        drop_grids(self.folder, keep=resume_step)
        self._file = MetricsFile(self.folder, keep=resume_step)
        self._trackers = [
            Tracker(
                backend,
                self.folder,
                project_name=project_name,
                experiment_name=experiment_name,
                config=config,
                resume_step=resume_step,
            )
            for backend in dict.fromkeys(logger)
            if backend != CONSOLE
        ]
        self._step = resume_step or 0
        self._total_steps = total_steps
        self._console = CONSOLE in logger
        # nothing but lines where the output is no terminal
        self._progress = tqdm(
            total=total_steps,
            initial=self._step,
            desc="training",
            unit="step",
            file=own_stderr(),
            disable=None if self._console else True,
        )
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`, counted from 1; what belongs to the same step may come in several calls.

        Raises ValueError for a step before the last one, TypeError for a value that is no number.
        """
        self._record(step, metrics)
        if step > self._step:
            self._say(step_line(step, self._total_steps, metrics))
            self._progress.update(step - self._step)
            self._step = step

    def log_validation(self, step: int, tiles: Sequence[Tile], metrics: Mapping[str, float]) -> None:
        """Record a validation after `step` (0: before training) and its images, if any; renews the report."""
        from verl_omni.trainer.diffusion.validation_grid import write_grid

        self._record(step, metrics)
        line = f"validation after step {step}: reward {_spread(metrics, 'val/reward')}"
        if tiles:
            path = write_grid(self.folder, step, tiles)
            line += f", images in {path}"
            self._log_image(step, path)
        self._say(line)
        self._report()

    def close(self, status: str = "finished") -> None:
        """End the log; `status` is finished, or says how the run ended instead (failed, interrupted). Only once."""
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        self._file.close()
        self._describe(status)
        for tracker in self._trackers:
            tracker.close(exit_code=0 if status == "finished" else 1)
        path = self._report()
        if path is not None and self._console:
            print(f"{status} after {self._step} steps; report: {path}", file=own_stderr())

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def _log_image(self, step: int, path: Path) -> None:
        from PIL import Image

        with Image.open(path) as image:
            for tracker in self._trackers:
                tracker.log_image(step, "validation/grid", image)

    def _say(self, line: str) -> None:
        if self._console:
            self._progress.write(line, file=own_stderr())

    def _describe(self, status: str) -> None:
        content = json.dumps({"status": status, **self._about}, indent=1, ensure_ascii=False, default=str)
        (self.folder / RUN).write_text(content + "\n", encoding="utf-8")

    def _report(self) -> Path | None:
        from verl_omni.trainer.diffusion.report import write_report

        try:
            return write_report(self.folder)
        except Exception as error:  # it can be written again from what lies in the folder
            logger.warning("the report could not be written: %s: %s", type(error).__name__, error)
            return None


def step_line(step: int, total_steps: int | None, metrics: Mapping[str, float]) -> str:
    """A step in one line, of whatever there is in `metrics`."""
    total = f"/{total_steps}" if total_steps else ""
    words = [f"step {step:>{len(total) - 1 if total else 0}}{total}"]
    if "reward/mean" in metrics:
        words.append(f"reward {_spread(metrics, 'reward')}")
    formats = {
        "actor/ratio_mean": "ratio {:.6f}",
        "actor/clip_fraction": "clipped {:.0%}",
        "actor/kl_loss": "KL {:.2g}",
        "rollout/logp_gap_mean": "|Δ log p| {:.1e}",
        "rollout/batch_size_mean": "batch {:.1f}",
    }
    words += [text.format(metrics[name]) for name, text in formats.items() if name in metrics]
    if "perf/images_per_s_per_gpu" in metrics:
        words.append(f"{metrics['perf/images_per_s_per_gpu']:.2f} img/s/GPU")
    if "time/step_s" in metrics:
        times = [f"{name} {metrics[key]:.1f}" for name in STAGES if (key := f"time/{name}_s") in metrics]
        words.append(f"{metrics['time/step_s']:.1f} s" + (f" ({', '.join(times)})" if times else ""))
    return "  ".join(words)


def _spread(metrics: Mapping[str, float], prefix: str) -> str:
    mean, std = metrics.get(f"{prefix}/mean"), metrics.get(f"{prefix}/std")
    if mean is None:
        return "unknown"
    return f"{mean:.4f}" if std is None else f"{mean:.4f} ± {std:.4f}"
