"""``report.html``: a training run on one page, which needs neither the network nor any file beside it.

Written from what lies in the run's folder: ``run.json``, ``metrics.jsonl``, ``validation/``. The first and the latest
validation grid are in the page itself, those in between are links.

    python -m verl_omni.trainer.diffusion.report FOLDER     # writes it again
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl_omni.trainer.diffusion.charts import Points, Series, line_chart, stacked_chart
from verl_omni.trainer.diffusion.metrics import STAGES, STEP_STAGES
from verl_omni.trainer.diffusion.metrics_file import METRICS, Row, read_metrics
from verl_omni.trainer.diffusion.run_log import RUN
from verl_omni.trainer.diffusion.validation_grid import FOLDER, find_grids
from verl_omni.utils.text import flat

REPORT = "report.html"
MAX_POINTS = 400
"""Points of a curve at most: more can't be told apart, and make the page heavy."""
_GAP = "rollout/logp_gap_step_"
_LOG_NOTE = "Logarithmic; zeros lie on the lower edge."
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem } .sub { color: #666; margin-top: 0 }
.cards { display: flex; flex-wrap: wrap; gap: 1rem }
.cards div { border: 1px solid #ddd; border-radius: 6px; padding: .4rem 1rem }
.cards b { display: block; font-size: 1.3rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 1.5rem }
figure { margin: 0 } figure p { color: #666; font-size: .85rem; margin: 0 } svg { width: 100%; display: block }
svg text { font: 11px system-ui, sans-serif; fill: #666 } .grid { stroke: #e4e4e4 }
.legend { font-size: .85rem; display: flex; flex-wrap: wrap; gap: 0 1rem }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .35em; border-radius: 2px }
.grids img { max-width: 100%; border: 1px solid #ddd } .grids a { margin-right: .8rem }
table { border-collapse: collapse; font-size: .9rem } th, td { text-align: left; padding: .15rem 1rem .15rem 0;
border-bottom: 1px solid #eee; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
td { overflow-wrap: anywhere }
"""


def write_report(folder: str | Path) -> Path:
    """Write ``report.html`` into the run's `folder`, in place of an earlier one, and return its path.

    Raises OSError if that can't be done. Without metrics the page says so.
    """
    folder = Path(folder)
    path, part = folder / REPORT, folder / f"{REPORT}.part"
    part.write_text(_page(folder), encoding="utf-8")
    os.replace(part, path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of the run in the folder that `argv` names; the exit status."""
    parser = argparse.ArgumentParser(prog="report", description="Write the report of a training run.")
    parser.add_argument("folder", type=Path, help="trainer.default_local_dir of the run")
    folder = parser.parse_args(argv).folder
    if not (folder / METRICS).is_file():
        print(f"{folder} holds no training run: there is no {METRICS}", file=sys.stderr)
        return 2
    print(write_report(folder))
    return 0


def _page(folder: Path) -> str:
    about = _about(folder)
    rows = read_metrics(folder)
    name = str(about.get("experiment_name", folder.name))
    body = "\n".join([*_head(name, about, rows), *_curves(rows), *_grids(folder), *_tables(rows, about)])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_CSS}</style></head>\n<body>\n{body}\n'
        "</body></html>\n"
    )


def _about(folder: Path) -> dict[str, Any]:
    """What ``run.json`` tells; nothing if it is missing."""
    path = folder / RUN
    about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return about


def _head(name: str, about: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    yield f"<h1>{escape(name)}</h1>"
    yield f'<p class="sub">{escape(str(about.get("project_name", "")))}</p>'
    rewards, validated = _points(rows, "reward/mean"), _points(rows, "val/reward/mean")
    last = rows[-1]["step"] if rows else 0
    cards = {"status": str(about.get("status", "unknown")), "steps": f"{last} of {about.get('total_steps') or '?'}"}
    for title, points in (("reward", rewards), ("validation reward", validated)):
        if points:
            first, *_, latest = [*points.values()] * 2 if len(points) == 1 else points.values()
            cards[f"{title}, first → last"] = f"{first:.4g} → {latest:.4g}"
    speed = list(_points(rows, "perf/images_per_s_per_gpu").values())
    if speed:
        cards["images/s/GPU, mean"] = f"{sum(speed) / len(speed):.3g}"
    boxes = "".join(f"<div>{escape(title)}<b>{escape(value)}</b></div>" for title, value in cards.items())
    yield f'<div class="cards">{boxes}</div>'
    if not rows:
        yield "<p>No step is finished yet.</p>"


def _curves(rows: Sequence[Row]) -> Iterator[str]:
    size = math.ceil(len(rows) / MAX_POINTS)
    thin = thinned(rows, size)
    charts = [*_reward_charts(thin, _points(rows, "val/reward/mean")), *_policy_charts(thin), *_speed_charts(thin)]
    if any(charts):
        mean = f" <small>(each point is the mean of {size} steps)</small>" if size > 1 else ""
        yield f"<h2>Curves over training steps{mean}</h2>"
        yield f'<div class="charts">{"".join(charts)}</div>'


def _reward_charts(rows: Sequence[Row], validated: Points) -> Iterator[str]:
    mean = _series(rows, "reward/mean", "mean ± std of the samples", band=_points(rows, "reward/std"))
    yield line_chart("Reward", [mean, Series(name="validation", points=validated, dots=True)])
    scorers = sorted({name for row in rows for name in row if name.startswith("reward/") and name.count("/") == 2})
    if len(scorers) > 1:
        yield line_chart("Reward by scorer", [_series(rows, name, name.split("/")[1]) for name in scorers])
    within = _series(rows, "reward/group_std_mean", "within groups")
    between = _series(rows, "reward/group_mean_std", "between groups")
    yield line_chart("Standard deviation of the rewards", [within, between], note="Training needs that within groups.")
    yield line_chart("Groups without spread", [_series(rows, "reward/groups_without_spread", "share")], from_zero=True)


def _policy_charts(rows: Sequence[Row]) -> Iterator[str]:
    yield line_chart("Ratio of new to old probability", [_series(rows, "actor/ratio_mean", "mean")])
    first = _series(rows, "actor/first_ratio_max_dev", "before the first update of a step")
    largest = _series(rows, "actor/ratio_max_dev", "in the whole step")
    yield line_chart("Largest |ratio − 1|", [largest, first], log=True, note=_LOG_NOTE)
    yield line_chart("Clipped", [_series(rows, "actor/clip_fraction", "share of (sample, step) pairs")], from_zero=True)
    yield line_chart("KL to the reference", [_series(rows, "actor/kl_loss", "KL")])
    yield line_chart("Gradient norm", [_series(rows, "actor/grad_norm", "before clipping")], from_zero=True)
    gaps = {int(name.removeprefix(_GAP)): name for row in rows for name in row if name.startswith(_GAP)}
    yield line_chart(
        "|Δ log p| between rollout and trainer, by denoising step",
        [_series(rows, name, f"step {index}") for index, name in sorted(gaps.items())],
        log=True,
        note=_LOG_NOTE,
    )


def _speed_charts(rows: Sequence[Row]) -> Iterator[str]:
    times = {name: _points(rows, f"time/{name}_s") for name in STAGES}
    named = {step: sum(times[name].get(step, 0.0) for name in STEP_STAGES) for step in _points(rows, "time/step_s")}
    times["other"] = {step: max(0.0, s - named[step]) for step, s in _points(rows, "time/step_s").items()}
    yield stacked_chart("Time by stage, seconds", times)
    yield line_chart("Images/s/GPU", [_series(rows, "perf/images_per_s_per_gpu", "whole step")], from_zero=True)
    mean = _series(rows, "rollout/batch_size_mean", "mean")
    largest = _series(rows, "rollout/batch_size_max", "largest")
    yield line_chart("Rows in a forward of the rollout", [mean, largest], from_zero=True)


def _grids(folder: Path) -> Iterator[str]:
    grids = find_grids(folder)
    if not grids:
        return
    yield "<h2>Validation</h2>"
    shown = list(dict.fromkeys([min(grids), max(grids)]))
    yield '<div class="grids charts">'
    for step in shown:
        data = base64.b64encode(grids[step].read_bytes()).decode()
        title = "before training" if step == 0 else f"after step {step}"
        yield f'<figure><figcaption>{title}</figcaption><img alt="{title}" src="data:image/png;base64,{data}"></figure>'
    yield "</div>"
    links = [f'<a href="{FOLDER}/{path.name}">{step}</a>' for step, path in grids.items() if step not in shown]
    if links:
        yield f'<p class="grids">In between, after step {"".join(links)}</p>'


def _tables(rows: Sequence[Row], about: Mapping[str, Any]) -> Iterator[str]:
    names = sorted({name for row in rows for name in row if name != "step"})
    if names:
        yield '<h2>All metrics</h2><table><tr><th>name</th><th class="n">first</th><th class="n">last</th></tr>'
        for name in names:
            values = [row[name] for row in rows if name in row]
            cells = "".join(f'<td class="n">{_value(value)}</td>' for value in (values[0], values[-1]))
            yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
        yield "</table>"
    if about.get("config"):
        yield "<h2>Configuration</h2><table>"
        for key, value in flat(about["config"]):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"<tr><td>{escape(key)}</td><td>{escape(text)}</td></tr>"
        yield "</table>"


def thinned(rows: Sequence[Row], size: int) -> list[Row]:
    """Each `size` rows replaced by one: their last step, and the means of their metrics."""
    if size <= 1:
        return list(rows)
    thin: list[Row] = []
    for start in range(0, len(rows), size):
        bucket = rows[start : start + size]
        row: Row = {"step": bucket[-1]["step"]}
        for name in dict.fromkeys(name for item in bucket for name in item if name != "step"):
            values = [item[name] for item in bucket if item.get(name) is not None]
            row[name] = sum(values) / len(values) if values else None
        thin.append(row)
    return thin


def _series(rows: Sequence[Row], name: str, label: str, band: Points | None = None) -> Series:
    return Series(name=label, points=_points(rows, name), band=band or {})


def _points(rows: Sequence[Row], name: str) -> Points:
    """The steps at which `name` was a finite number."""
    return {row["step"]: row[name] for row in rows if row.get(name) is not None}


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


if __name__ == "__main__":
    sys.exit(main())
