"""The example scripts, and how tests run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "flowgrpo_trainer"
QWEN = EXAMPLES / "qwen_image" / "run_qwen_image_ocr.sh"
QWEN_LORA = EXAMPLES / "qwen_image" / "run_qwen_image_ocr_lora.sh"
SD35_LORA = EXAMPLES / "sd35" / "run_sd35_medium_ocr_lora.sh"
TINY = EXAMPLES / "tiny" / "run_tiny_cpu.sh"
VARIABLES = ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES", "NUM_GPUS", "MAX_NUM_SEQS", "REQUEST_BATCH_MAX_WAIT_MS")


def run_script(script: Path, *overrides: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in the folder `cwd`, with no variables of its own but those in `env`."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        ["bash", str(script), *overrides],
        cwd=cwd,
        env={**inherited, "PYTHON": sys.executable, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
