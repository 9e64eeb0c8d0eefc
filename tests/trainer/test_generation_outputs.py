"""What a run writes, from samples that no engine had to make."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.generation.grid import Tile, draw_grid, fit
from verl_omni.trainer.generation.outputs import RunReport, check_output_dir, write_outputs
from verl_omni.trainer.generation.settings import GenerationConfig
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.rollout.plan import AdapterCapabilities, resolve_plan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample


def sample(request_id: str, outputs: int = 1, steps: int = 2, latent: bool = False) -> RolloutSample:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (outputs, 3, 16, 24), dtype=torch.uint8, generator=generator)
    recorded = steps > 0
    return RolloutSample(
        request_id=request_id,
        images=None if latent else pixels,
        latents=torch.randn(outputs, 6, 4) if latent else None,
        trajectory_latents=torch.randn(outputs, steps + 1, 6, 4) if recorded else None,
        trajectory_log_probs=torch.randn(outputs, steps) if recorded else None,
        trajectory_timesteps=torch.rand(outputs, steps) * 1000 if recorded else None,
        prompt_embeddings={"prompt_embeds": torch.randn(5, 8), "pooled_prompt_embeds": torch.randn(8)},
        sde_windows=[(0, steps)] * outputs,
        seed=1,
        policy_version=0,
        peak_memory_mb=0.0,
        queue_wait_s=0.0,
    )


RESULTS = [
    (RolloutRequest(request_id="0000-00", prompt="a cat"), sample("0000-00")),
    (RolloutRequest(request_id="0000-01", prompt="a cat"), RolloutError("0000-01", "too long")),
    (RolloutRequest(request_id="0001-00", prompt_token_ids=[1]), sample("0001-00", outputs=2)),
    (RolloutRequest(request_id="0001-01", prompt="ode"), sample("0001-01", steps=0)),
    (RolloutRequest(request_id="0002-00", prompt="latent"), sample("0002-00", latent=True)),
]
PLAN = resolve_plan(
    DiffusionRolloutConfig(max_num_seqs=4), AdapterCapabilities(name="A", request_batch=True, missing_step_methods=())
)
STATS = RolloutStats(batch_sizes={4: 2, 1: 3}, waves=2, encodes_requested=5, encodes_computed=3)
REPORT = RunReport(plan=PLAN, stats=STATS, seconds=2.0, peak_memory_mb=12.34)


def write(folder, results=RESULTS, **keys) -> GenerationConfig:
    config = GenerationConfig(output_dir=str(folder), **keys)
    write_outputs(config, results, REPORT, columns=2)
    return config


def files(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_files_and_tensors(tmp_path):
    write(tmp_path / "deep" / "out")
    out = tmp_path / "deep" / "out"
    images = {f"images/{name}.png" for name in ("0000-00", "0001-00.0", "0001-00.1", "0001-01")}
    assert files(out) == {"grid.png", "rollout.json", "trajectories.safetensors"} | images
    pixels = torch.tensor(list(Image.open(out / "images" / "0001-00.1.png").tobytes()), dtype=torch.uint8).view(
        16, 24, 3
    )
    assert torch.equal(pixels.permute(2, 0, 1), RESULTS[2][1].images[1])
    tensors = load_file(out / "trajectories.safetensors")
    embeds = {"prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds"}
    recorded = embeds | {"latents", "log_probs", "timesteps"}
    expected = {f"{name}/{key}" for name in ("0000-00", "0001-00.0", "0001-00.1") for key in recorded}
    expected |= {f"0001-01/{key}" for key in embeds} | {f"0002-00/{key}" for key in recorded | {"output_latents"}}
    assert tensors.keys() == expected
    assert torch.equal(tensors["0001-00.1/latents"], RESULTS[2][1].trajectory_latents[1])
    shapes = {key: tuple(tensors[f"0000-00/{key}"].shape) for key in recorded}
    assert shapes["latents"] == (3, 6, 4)
    assert shapes["log_probs"] == shapes["timesteps"] == (2,)
    assert shapes["prompt_embeds"] == (5, 8)
    assert tensors["0000-00/prompt_embeds_mask"].all()


def test_report(tmp_path):
    write(tmp_path)
    report = json.loads((tmp_path / "rollout.json").read_text())
    assert {key: report[key] for key in ("mode", "max_num_seqs", "rows_per_forward", "num_requests")} == {
        "mode": "request_level",
        "max_num_seqs": 4,
        "rows_per_forward": None,
        "num_requests": 5,
    }
    assert (report["num_images"], report["gen_s"], report["images_per_s"], report["peak_memory_mb"]) == (
        5,
        2.0,
        2.5,
        12.3,
    )
    assert report["batch_sizes"] == {"1": 3, "4": 2}
    assert report["encodes"] == {"requested": 5, "computed": 3}
    assert report["failed"] == [{"id": "0000-01", "error": "too long"}]
    assert "max_num_seqs=4" in report["reason"]


def test_the_report_tells_how_long_each_size_waited(tmp_path):
    waits = {"a": (64, 0.5), "b": (32, 2.0), "c": (64, 1.5)}
    results = [
        (RolloutRequest(request_id=name, width=width, height=32), replace(sample(name), queue_wait_s=wait))
        for name, (width, wait) in waits.items()
    ]
    failed = (RolloutRequest(request_id="d", width=16, height=32), RolloutError("d", "too long"))
    unknown = [
        (RolloutRequest(request_id=name, width=width, height=32), replace(sample(name), queue_wait_s=None))
        for name, width in {"e": 64, "f": 8}.items()
    ]
    report = REPORT.as_dict([*results, failed, *unknown])
    assert report["queue_wait_s"] == {
        "64x32": {"requests": 2, "mean": (0.5 + 1.5) / 2, "max": 1.5},
        "32x32": {"requests": 1, "mean": 2.0, "max": 2.0},
    }
    told = {name: wait for name, (_, wait) in waits.items()}
    assert {row["id"]: row["queue_wait_s"] for row in report["samples"]} == told | {"e": None, "f": None}


def test_an_older_run_is_replaced_and_other_files_are_left_alone(tmp_path):
    write(tmp_path)
    (tmp_path / "images" / "holiday.png").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, RESULTS[:1], grid=False, save_trajectories=False)
    assert files(tmp_path) == {"rollout.json", "images/0000-00.png", "images/holiday.png", "notes.txt"}
    write(tmp_path, RESULTS[1:2], save_images=False)
    assert files(tmp_path) == {
        "grid.png",
        "rollout.json",
        "trajectories.safetensors",
        "images/holiday.png",
        "notes.txt",
    }


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As if the disk were full: a write past `size` bytes of a file is an error of the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_is_too_large_is_named_and_the_others_are_written(tmp_path):
    write(tmp_path, RESULTS[:1])
    old = {file: (tmp_path / file).read_bytes() for file in files(tmp_path)}
    long = replace(sample("0007-00"), trajectory_latents=torch.zeros(1, 3, 50_000, 4))
    results = [(RolloutRequest(request_id="0007-00", prompt="a dog"), long)]
    with (
        files_of_at_most(100_000),
        pytest.raises(ConfigError, match=r"^generation\.output_dir='.*': could not write traj.*large") as raised,
    ):
        write(tmp_path, results)
    assert "\n" not in str(raised.value) and "rollout.json" not in str(raised.value)
    assert files(tmp_path) == {"grid.png", "images/0007-00.png", "rollout.json", "trajectories.safetensors"}
    kept = {file for file in old if (tmp_path / file).exists() and (tmp_path / file).read_bytes() == old[file]}
    assert kept == {"trajectories.safetensors"}


def test_what_an_earlier_run_wrote_is_left_where_nothing_can_be_written(tmp_path):
    write(tmp_path, RESULTS[:1])
    old = {file: (tmp_path / file).read_bytes() for file in files(tmp_path)}
    with files_of_at_most(0), pytest.raises(ConfigError) as raised:
        write(tmp_path, RESULTS[2:])
    for name in ("rollout.json", "images", "trajectories.safetensors", "grid.png"):
        assert f"{name} (" in str(raised.value)
    assert {file: (tmp_path / file).read_bytes() for file in files(tmp_path)} == old
    assert {path.name for path in tmp_path.iterdir()} == {file.split("/")[0] for file in old}


def test_a_folder_that_is_gone_read_only_by_the_end_is_a_configuration_error(tmp_path, monkeypatch):
    def refused(*args, **keys):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(tempfile, "mkdtemp", refused)  # a folder's mode does not stop root
    with pytest.raises(ConfigError, match=r"output_dir=.*could not write rollout\.json \(Permission denied\)"):
        write(tmp_path)


def test_same_results_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name)
    for file in files(tmp_path / "a"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_what_is_in_the_way_of_the_outputs_is_named(tmp_path):
    check_output_dir(GenerationConfig(output_dir=str(tmp_path / "a" / "b")))
    (tmp_path / "file").write_text("")
    (tmp_path / "out" / "grid.png").mkdir(parents=True)
    (tmp_path / "out2").mkdir()
    (tmp_path / "out2" / "images").write_text("")
    for folder, obstacle in (("file", "file"), ("file/out", "file"), ("out", r"grid\.png"), ("out2", "images")):
        with pytest.raises(ConfigError, match=f"{obstacle} is in the way"):
            check_output_dir(GenerationConfig(output_dir=str(tmp_path / folder)))


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", "a\0b", "é" * 130])
def test_a_request_id_writes_nothing_outside_the_folder(tmp_path, name):
    folder = tmp_path / "out"
    (folder / "images").mkdir(parents=True)
    results = [(RolloutRequest(request_id=name, prompt="a"), sample(name))]
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="names no file"):
        write(folder, results)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["images", "grid.png", "rollout.json"])
def test_a_link_out_of_the_folder_is_refused_and_one_within_it_is_not(tmp_path, name):
    folder, outside = tmp_path / "out", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "0000-00.png").write_text("mine")
    (folder / name).symlink_to(outside if name == "images" else outside / "file")
    with pytest.raises(
        ConfigError, match=rf"output_dir=.*{name} is a link to {outside}.*, outside the folder; remove it"
    ):
        check_output_dir(GenerationConfig(output_dir=str(folder)))
    (folder / name).unlink()
    (folder / "real").mkdir()
    (folder / name).symlink_to(folder / "real" if name == "images" else folder / "real" / "file")
    check_output_dir(GenerationConfig(output_dir=str(folder)))


@pytest.mark.parametrize("name", ["a\0b", "a" * 256, "/".join(["abc"] * 1100), "\ud800"])
def test_what_can_name_no_folder_is_a_bad_configuration(name):
    with pytest.raises(ConfigError, match=r"generation\.output_dir=.*(no file name can have|too long)") as raised:
        GenerationConfig(output_dir=name)
    assert len(str(raised.value)) < 200


def test_a_folder_that_cannot_be_made_is_found_before_the_run_and_a_fine_one_is_left_unmade(tmp_path):
    with pytest.raises(ConfigError, match="'/proc/no/such' cannot be written"):
        check_output_dir(GenerationConfig(output_dir="/proc/no/such"))
    check_output_dir(GenerationConfig(output_dir=str(tmp_path / "a" / "b")))
    assert not (tmp_path / "a").exists()


def test_a_request_whose_prompt_is_no_text_spoils_no_file(tmp_path):
    odd = (RolloutRequest(request_id="0003-00", prompt=5), RolloutError("0003-00", "prompt must be a string"))
    write(tmp_path, [*RESULTS, odd])
    assert {"grid.png", "rollout.json", "trajectories.safetensors"} <= files(tmp_path)
    assert (tmp_path / "trajectories.safetensors").stat().st_mode == (tmp_path / "rollout.json").stat().st_mode


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((8, 8), (128, 128)),
        ((40, 20), (160, 80)),
        ((128, 64), (128, 64)),
        ((256, 256), (256, 256)),
        ((1024, 512), (256, 128)),
        ((4000, 1), (256, 1)),
    ],
)
def test_tiles_are_readable_and_not_huge(size, fitted):
    assert fit(Image.new("RGB", size)).size == fitted


def test_grid_shows_every_tile_where_it_belongs():
    tiles = [
        Tile(image=Image.new("RGB", (8, 8), color), label=color, prompt="long " * 50)
        for color in ("red", "lime", "blue")
    ]
    sheet = draw_grid([*tiles, Tile(image=None, label="x", prompt="\u6c34 \U0001f98a")], columns=2)
    (width, height), cell = sheet.size, (sheet.width - 8) // 2
    assert width == 8 + 2 * (128 + 8)
    colors = [sheet.getpixel((x, y)) for y in (10, (height - 8) // 2 + 10) for x in (10, cell + 10)]
    assert colors[:3] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
