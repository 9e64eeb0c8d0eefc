"""The page about a run: well-formed, complete, and safe with whatever stands in prompts, names and settings."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from verl_omni.trainer.diffusion.charts import BOTTOM, LEFT, RIGHT, TOP, Series, line_chart, stacked_chart
from verl_omni.trainer.diffusion.metrics_file import MetricsFile
from verl_omni.trainer.diffusion.report import MAX_POINTS, main, thinned, write_report
from verl_omni.trainer.diffusion.validation_grid import write_grid
from verl_omni.trainer.generation.grid import Tile

NASTY = "<script>alert('1')</script> & \"quoted\""
VOID = {"meta", "img", "br", "link"}

numbers = st.floats(-1e9, 1e9)
curves = st.dictionaries(st.integers(0, 10**6), numbers, min_size=1, max_size=20)


class Page(HTMLParser):
    """Elements and text of a page; an element that is not closed, or closed twice, fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def step(k: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 * k,
        "reward/std": 0.05,
        "reward/ocr/mean": 0.1 * k,
        "reward/jpeg/mean": 0.2,
        "reward/group_std_mean": 0.04,
        "reward/group_mean_std": 0.03,
        "reward/groups_without_spread": 0.25,
        "actor/ratio_mean": 1 + 1e-6 * k,
        "actor/ratio_max_dev": 1e-4,
        "actor/first_ratio_max_dev": 0.0,
        "actor/clip_fraction": 0.1,
        "actor/kl_loss": 1e-5 * k,
        "actor/grad_norm": math.nan if k == 2 else 0.3,
        "rollout/logp_gap_step_0": 0.0,
        "rollout/logp_gap_step_10": 1e-6,
        "rollout/batch_size_mean": 12.0,
        "rollout/batch_size_max": 16.0,
        "time/generation_s": 5.0,
        "time/update_s": 3.0,
        "time/step_s": 9.0,
        "perf/images_per_s_per_gpu": 2.0,
    }


def run(folder: Path, steps: int, *, grids: tuple[int, ...] = (), **about) -> Path:
    file = MetricsFile(folder, keep=None)
    for k in range(1, steps + 1):
        file.write(k, step(k))
        if k in grids:
            file.write(k, {"val/reward/mean": k / 5})
    file.close()
    for k in grids:
        write_grid(folder, k, [Tile(image=Image.new("RGB", (8, 8), "red"), label=f"{k}", prompt=NASTY)])
    (folder / "run.json").write_text(json.dumps({"experiment_name": "name", "status": "finished", **about}))
    return write_report(folder)


def figures(text: str) -> list[str]:
    return re.findall(r"<figcaption><b>(.*?)</b>", text)


def test_a_run_on_one_page(tmp_path):
    config = {"data": {"train_batch_size": 8}, "trainer": {"logger": ["console"]}, "reward": {}}
    path = run(tmp_path, 3, grids=(1, 2, 3), total_steps=5, project_name="project", config=config)
    text = path.read_text()
    page = Page(text)
    assert figures(text) == [
        "Reward",
        "Reward by scorer",
        "Standard deviation of the rewards",
        "Groups without spread",
        "Ratio of new to old probability",
        "Largest |ratio − 1|",
        "Clipped",
        "KL to the reference",
        "Gradient norm",
        "|Δ log p| between rollout and trainer, by denoising step",
        "Time by stage, seconds",
        "Images/s/GPU",
        "Rows in a forward of the rollout",
    ]
    for word in (
        "finished",
        "3 of 5",
        "0.1 → 0.3",
        "0.2 → 0.6",
        "project",
        "step 10",
        "other",
        "data.train_batch_size",
    ):
        assert word in page.text
    rows = dict(re.findall(r"<tr><td>([^<]*)</td><td[^>]*>[^<]*</td><td[^>]*>([^<]*)</td></tr>", text))
    assert rows.keys() == {*step(1), "val/reward/mean"}
    assert rows["reward/mean"] == "0.3" and rows["actor/ratio_mean"] == "1"


def test_the_page_needs_no_network_and_no_script(tmp_path):
    page = Page(run(tmp_path, 2, grids=(1, 2)).read_text())
    assert not page.all("script") and not page.all("link")
    sources = [image["src"] or "" for image in page.all("img")]
    assert [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources] == [
        (tmp_path / "validation" / f"step_{k}.png").read_bytes() for k in (1, 2)
    ]
    assert not page.all("a")


def test_grids_in_between_are_links(tmp_path):
    page = Page(run(tmp_path, 12, grids=(0, 2, 10, 12)).read_text())
    assert [link["href"] for link in page.all("a")] == ["validation/step_2.png", "validation/step_10.png"]
    assert [image["alt"] for image in page.all("img")] == ["before training", "after step 12"]
    assert all((tmp_path / (link["href"] or "")).is_file() for link in page.all("a"))


def test_one_grid_is_shown_once(tmp_path):
    assert len(Page(run(tmp_path, 1, grids=(1,)).read_text()).all("img")) == 1


def test_what_people_write_is_text(tmp_path):
    config = {NASTY: {"prompt": NASTY}, "list": [NASTY]}
    path = run(tmp_path, 1, experiment_name=NASTY, project_name=NASTY, status=NASTY, total_steps=1, config=config)
    file = MetricsFile(tmp_path, keep=1)
    file.write(1, {f"reward/{NASTY}/mean": 1.0, f"actor/{NASTY}": 1.0})
    file.close()
    page = Page(write_report(tmp_path).read_text())
    assert not page.all("script")
    shown = ["title", "heading", "project", "status", "metric", "metric", "key", "value", "list"]
    assert page.text.count("<script>") == len(shown)
    assert path == tmp_path / "report.html"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_just_begun(tmp_path, steps):
    page = Page(run(tmp_path, steps).read_text())
    assert ("No step is finished yet." in page.text) == (steps == 0)


def test_a_folder_without_anything(tmp_path):
    assert tmp_path.name in Page(write_report(tmp_path).read_text()).text


def test_a_long_run_is_thinned(tmp_path):
    steps = 2 * MAX_POINTS + 1
    page = Page(run(tmp_path, steps).read_text())
    assert "each point is the mean of 3 steps" in page.text
    assert f"{steps} of ?" in page.text


def test_thinning_takes_means_of_what_there_is():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None, "b": 2.0}, {"step": 3, "a": 4.0}, {"step": 5, "b": None}]
    assert thinned(rows, 3) == [{"step": 3, "a": 2.5, "b": 2.0}, {"step": 5, "b": None}]
    assert thinned(rows, 1) == rows


def test_the_command(tmp_path, capsys):
    run(tmp_path, 1).unlink()
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    assert main([str(tmp_path / "none")]) == 2
    assert "holds no training run" in capsys.readouterr().err


def coordinates(svg: str) -> list[tuple[float, float]]:
    pairs = re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', svg)))
    return [(float(x), float(y)) for x, y in pairs]


def within(svg: str) -> bool:
    return all(LEFT <= x <= RIGHT and TOP - 0.1 <= y <= BOTTOM + 0.1 for x, y in coordinates(svg))


@given(curves, curves, st.booleans())
def test_curves_stay_inside_their_axes(first, second, log):
    bands = {step: abs(value) / 2 for step, value in first.items()}
    svg = line_chart(
        "t", [Series(name="a", points=first, band={} if log else bands), Series(name="b", points=second)], log=log
    )
    Page(svg)
    assert coordinates(svg) and within(svg)
    assert "nan" not in svg and "inf" not in svg


@given(st.dictionaries(st.integers(0, 1000), st.floats(0, 1e9), max_size=20), st.booleans())
def test_columns_stand_on_each_other(points, twice):
    svg = stacked_chart("t", {"a": points, "b": points if twice else {}})
    Page(svg)
    columns = [
        (float(y), float(height))
        for y, height in re.findall(r'y="([\d.-]+)" width="[\d.]+" height="([\d.-]+)" fill="#', svg)
    ]
    assert len(columns) == len(points) * (2 if twice else 1)
    assert all(height >= 0 and y >= TOP - 0.1 and y + height <= BOTTOM + 0.2 for y, height in columns)


def test_heights_are_those_of_the_values():
    svg = line_chart("t", [Series(name="a", points={1: 0.0, 2: 5.0, 3: 10.0})], from_zero=True)
    low, middle, high = (y for _, y in coordinates(svg))
    assert low == BOTTOM and middle == pytest.approx((low + high) / 2, abs=0.1)
    svg = line_chart("t", [Series(name="a", points={1: 1e-6, 2: 1e-5, 3: 1e-4, 4: 0.0})], log=True)
    first, second, third, zero = (y for _, y in coordinates(svg))
    assert (first, third, zero) == (BOTTOM, TOP, BOTTOM) and second == pytest.approx((TOP + BOTTOM) / 2)


def test_labels_tell_close_values_apart():
    svg = line_chart("t", [Series(name="a", points={1: 1.000001, 2: 1.000004})])
    labels = re.findall(r'text-anchor="end">([^<]*)<', svg)
    assert len(labels) == len(set(labels)) >= 3


def test_the_pointer_shows_values_and_nothing_is_drawn_of_nothing():
    svg = line_chart("t", [Series(name="a < b", points={7: 0.125})])
    assert "<title>step 7\na &lt; b: 0.125</title>" in svg
    assert line_chart("t", [Series(name="a", points={})]) == stacked_chart("t", {"a": {}}) == ""
