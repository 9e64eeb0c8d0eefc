"""From a list of prompts with quoted target words to training and test sets for the OCR reward.

    python examples/flowgrpo_trainer/data_process/ocr.py --model qwen_image --output_dir outputs/data/ocr

writes ``train.parquet`` and ``test.parquet`` in verl's schema. What an image has to show is the quoted part of its
prompt, as in: a shop sign that says "OPEN". Chat templates are no part of the data: the model's rollout adapter applies
them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_omni.reward_loop.text import quoted_text
from verl_omni.trainer.prompts import PromptRow, read_prompts
from verl_omni.workers.config import ConfigError

PROMPTS = Path(__file__).parents[1] / "data" / "ocr_prompts.txt"
NEGATIVE_PROMPTS = {"qwen_image": " ", "sd35": ""}
"""Model → the negative prompt that stands for none in classifier-free guidance, as its authors use it."""


def ocr_rows(prompts: Sequence[PromptRow], *, model: str, split: str) -> list[dict[str, Any]]:
    """A row of verl's schema for each. Raises :class:`ConfigError` naming the line of a prompt without quoted text."""
    rows = []
    for index, row in enumerate(prompts):
        target = quoted_text(row.prompt or "")
        if target is None:
            raise ConfigError(
                f'{row.source}: no text in quotes; write what the image has to show in double quotes, such as "OPEN"'
            )
        rows.append(
            {
                "data_source": "ocr",
                "prompt": [{"role": "user", "content": row.prompt}],
                "negative_prompt": [{"role": "user", "content": NEGATIVE_PROMPTS[model]}],
                "ability": "text_rendering",
                "reward_model": {"style": "rule", "ground_truth": target},
                "extra_info": {"split": split, "index": index, "source": row.source},
            }
        )
    return rows


def split_prompts(
    prompts: Sequence[PromptRow], *, test_size: int, seed: int
) -> tuple[list[PromptRow], list[PromptRow]]:
    """(training, test), each in the order of `prompts`; `test_size` of them are drawn for the test."""
    drawn = set(random.Random(seed).sample(range(len(prompts)), test_size))
    parts = [[row for index, row in enumerate(prompts) if (index in drawn) is test] for test in (False, True)]
    return parts[0], parts[1]


def write_parquet(rows: list[dict[str, Any]], file: Path) -> None:
    """Write `rows` to `file`, which is whole or not there."""
    import pyarrow
    import pyarrow.parquet

    partial = file.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
    partial.replace(file)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make training and test sets for the OCR reward.")
    parser.add_argument("--input", type=Path, default=PROMPTS, help="a prompt a line (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder; made if missing")
    parser.add_argument("--model", choices=sorted(NEGATIVE_PROMPTS), required=True)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--test_fraction", type=float, default=0.1, help="part of the prompts (default: %(default)s)")
    size.add_argument("--test_size", type=int, help="number of prompts, in place of a fraction")
    parser.add_argument("--seed", type=int, default=42, help="of the split (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        prompts = list({row.prompt: row for row in read_prompts([args.input], key="--input")}.values())
        test_size = round(len(prompts) * args.test_fraction) if args.test_size is None else args.test_size
        if not 0 < test_size < len(prompts):
            given = f"--test_fraction={args.test_fraction:g}" if args.test_size is None else f"--test_size={test_size}"
            most = len(prompts) - 1
            raise ConfigError(
                f"{given} takes {test_size} of {len(prompts)} prompts for the test set, but the test and the training "
                f"set need at least one each; write {f'--test_size from 1 to {most}' if most else 'more prompts'}"
            )
        train, test = split_prompts(prompts, test_size=test_size, seed=args.seed)
        sets = {
            "test": ocr_rows(test, model=args.model, split="test"),
            "train": ocr_rows(train, model=args.model, split="train"),
        }
    except ConfigError as error:
        parser.error(str(error))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():  # the scripts look for train.parquet, so it comes last
        write_parquet(rows, args.output_dir / f"{name}.parquet")
        print(f"{args.output_dir / name}.parquet: {len(rows)} prompts")


if __name__ == "__main__":
    main()
