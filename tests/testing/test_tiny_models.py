"""The tiny models: reproducible files, tokenizers that tell prompts apart, transformers that react to what they get."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, SD3Transformer2DModel
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from verl_omni.testing.tiny_models import FAMILIES, MARKER, build, main

# The first part of what Qwen-Image puts around a prompt; its pipeline drops the hidden states of these 34 tokens.
QWEN_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
QWEN_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = ["a", "a red circle", "a blue circle", "an armadillo, 3 rings & a 'Ω' — 猫 — at night"]


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def tiny(tiny_qwen: Path, tiny_sd3: Path) -> dict[str, Path]:
    return {"qwen_image": tiny_qwen, "sd3": tiny_sd3}


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes_in_another_process(tiny: dict[str, Path], tmp_path: Path) -> None:
    code = "import sys; from verl_omni.testing.tiny_models import main; main(sys.argv[1:3]); main(sys.argv[3:5])"
    folders = {family: str(tmp_path / family) for family in FAMILIES}
    command = [sys.executable, "-c", code, *(word for pair in folders.items() for word in pair)]
    ran = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "12345"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == list(folders.values())
    for family in FAMILIES:
        assert digests(tmp_path / family) == digests(tiny[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_changes_the_weights_and_nothing_else(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    a, b = digests(tiny[family]), digests(build(family, tmp_path / "m", seed=1))
    assert a.keys() == b.keys()
    changed = {name for name in a if a[name] != b[name]}
    assert changed == {name for name in a if name.endswith(".safetensors")} | {MARKER}


def test_building_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build("sd3", tmp_path / "m")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tiny_model_is_replaced_and_its_stray_files_go(tmp_path: Path) -> None:
    build("sd3", tmp_path)
    (tmp_path / "stray").write_text("x")
    build("sd3", tmp_path, seed=3)
    assert json.loads((tmp_path / MARKER).read_text()) == {"family": "sd3", "seed": 3}
    assert not (tmp_path / "stray").exists()


def test_other_folders_and_files_are_left_alone(tiny_qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"something other than a tiny model.*name a new or empty folder"):
        build("sd3", tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        build("sd3", tmp_path / "notes.txt")
    with pytest.raises(FileExistsError, match="holds a tiny qwen_image model"):
        build("sd3", tiny_qwen)
    assert digests(tmp_path).keys() == {"notes.txt"}
    assert (tiny_qwen / "model_index.json").is_file()


def test_bad_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no tiny model family 'flux'; write one of qwen_image, sd3"):
        build("flux", tmp_path)
    with pytest.raises(ValueError, match="seed -1 is out of range"):
        build("sd3", tmp_path, seed=-1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main(["sd3", str(tmp_path)])
    assert "name a new or empty folder" in capsys.readouterr().err


def test_qwen_tokenizer_encodes_the_template_as_the_real_one_does(tiny_qwen: Path) -> None:
    tokenizer = Qwen2Tokenizer.from_pretrained(tiny_qwen, subfolder="tokenizer")
    assert len(tokenizer(QWEN_PREFIX).input_ids) == 34
    ids = [tokenizer(QWEN_PREFIX + prompt + QWEN_SUFFIX).input_ids for prompt in PROMPTS]
    assert [len(i) for i in ids[:3]] == [40, 42, 42]
    assert len(ids[3]) > 42
    assert len({tuple(i) for i in ids}) == len(PROMPTS)
    assert all(i[:34] == ids[0][:34] for i in ids)
    assert tokenizer.decode(ids[3]) == QWEN_PREFIX + PROMPTS[3] + QWEN_SUFFIX
    chat = [{"role": "user", "content": "a"}]
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        == f"<|im_start|>user\na{QWEN_SUFFIX}"
    )


@pytest.mark.parametrize(
    ("cls", "name"), [(CLIPTokenizer, "tokenizer"), (CLIPTokenizer, "tokenizer_2"), (T5Tokenizer, "tokenizer_3")]
)
def test_sd3_tokenizers_tell_prompts_apart(cls: type, name: str, tiny_sd3: Path) -> None:
    tokenizer = cls.from_pretrained(tiny_sd3, subfolder=name)
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert len({tuple(i) for i in ids}) == len(PROMPTS)
    assert len(ids[0]) < len(ids[1]) == len(ids[2]) < len(ids[3])
    # Only what T5's alphabet lacks (Ω, —, 猫, —) may be unknown.
    assert ids[3].count(tokenizer.unk_token_id) == (4 if cls is T5Tokenizer else 1)


def relative_change(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / a.norm()).item()


@torch.no_grad()
def test_qwen_velocity_depends_on_latents_prompt_and_timestep(tiny_qwen: Path) -> None:
    model = QwenImageTransformer2DModel.from_pretrained(tiny_qwen, subfolder="transformer")
    generator = torch.Generator().manual_seed(0)
    x, other_x = torch.randn(2, 1, 16, 64, generator=generator)
    prompt, other_prompt = torch.randn(2, 1, 6, 64, generator=generator)

    def velocity(x: torch.Tensor, prompt: torch.Tensor, t: float) -> torch.Tensor:
        return model(
            hidden_states=x,
            timestep=torch.tensor([t]),
            encoder_hidden_states=prompt,
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, 4, 4)]],
        ).sample

    v = velocity(x, prompt, 0.9)
    assert v.isfinite().all()
    assert 0.1 < v.std() < 10
    for other in (velocity(other_x, prompt, 0.9), velocity(x, other_prompt, 0.9), velocity(x, prompt, 0.8)):
        assert relative_change(v, other) > 1e-2


@torch.no_grad()
def test_sd3_velocity_depends_on_latents_prompt_pooled_and_timestep(tiny_sd3: Path) -> None:
    model = SD3Transformer2DModel.from_pretrained(tiny_sd3, subfolder="transformer")
    generator = torch.Generator().manual_seed(0)
    x, other_x = torch.randn(2, 1, 16, 8, 8, generator=generator)
    prompt, other_prompt = torch.randn(2, 1, 6, 64, generator=generator)
    pooled, other_pooled = torch.randn(2, 1, 64, generator=generator)

    def velocity(x: torch.Tensor, prompt: torch.Tensor, pooled: torch.Tensor, t: float) -> torch.Tensor:
        return model(x, encoder_hidden_states=prompt, pooled_projections=pooled, timestep=torch.tensor([t])).sample

    v = velocity(x, prompt, pooled, 900.0)
    assert v.isfinite().all()
    assert 0.1 < v.std() < 10
    for args in (
        (other_x, prompt, pooled, 900.0),
        (x, other_prompt, pooled, 900.0),
        (x, prompt, other_pooled, 900.0),
        (x, prompt, pooled, 800.0),
    ):
        assert relative_change(v, velocity(*args)) > 1e-2
