# Everything runs in .venv, on the CPU. The first target that needs it installs it; later ones reinstall only after
# requirements/ or pyproject.toml changed. PYTHON=... picks the interpreter that makes .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --no-compile
PYTEST := $(BIN)/pytest -n auto --maxprocesses 4
STAMP := .venv/.installed
TINY := .cache/tiny/qwen_image
ROLLOUT := outputs/rollout
BENCH := --tiny qwen_image --caps 16 --requests 16 --text 7 --negative-text 1 --warmup 2 --repeats 9 --rounds 3

# Nothing here needs the network once installed, and no figures of a run are sent anywhere.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_LOGGING_LEVEL ?= WARNING

.PHONY: help install demo rollout test test-fast lint format docs bench soak clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(STAMP)  ## make .venv with the engine for CPU, the project and its tools

demo: $(TINY)/model_index.json  ## train a tiny random model on the CPU, from prompts to a report
	PYTHON=$(abspath $(BIN)/python) MODEL_PATH=$(TINY) examples/flowgrpo_trainer/tiny/run_tiny_cpu.sh

rollout: $(TINY)/model_index.json  ## roll out the prompts in examples/prompts/demo.txt on a tiny random model
	$(BIN)/python -m verl_omni.trainer.main_generation \
		actor_rollout_ref.model.path=$(TINY) \
		actor_rollout_ref.rollout.dtype=float32 \
		actor_rollout_ref.rollout.n=4 \
		actor_rollout_ref.rollout.step_execution=true \
		actor_rollout_ref.rollout.max_num_seqs=16 \
		actor_rollout_ref.rollout.pipeline.height=128 \
		actor_rollout_ref.rollout.pipeline.width=128 \
		actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0 \
		actor_rollout_ref.rollout.algo.sde_window_size=2 \
		'actor_rollout_ref.rollout.algo.sde_window_range=[0,5]' \
		data.val_files=examples/prompts/demo.txt \
		data.negative_prompt=blurry \
		generation.output_dir=$(ROLLOUT)
	@echo "Look at $(ROLLOUT): grid.png shows the images, rollout.json tells what ran, trajectories.safetensors holds the recorded steps."

test: $(STAMP)  ## run all tests
	$(PYTEST)

test-fast: $(STAMP)  ## run the tests that start no engine and take no seconds each
	$(PYTEST) -m "not engine and not slow"

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## bring the code into style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)  ## build the docs into site/; a broken link fails
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## measure the three modes on this machine; fails if batching gains less than it did
	$(BIN)/python -m verl_omni.bench $(BENCH) --baseline benchmarks/cpu_modes.json --out outputs/bench/cpu_modes.json

soak: $(STAMP)  ## play random workloads with faults, aborts, swaps and kills to an engine, and check every result
	$(BIN)/python -m verl_omni.testing.soak --requests 400 --seed 0 1 --swaps 8 --kills 1 --out outputs/soak.json

clean:  ## remove what running, testing and building left
	rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist outputs site verl_omni.egg-info
	find verl_omni tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove .venv too
	rm -rf .venv

$(STAMP): pyproject.toml requirements/cpu.txt requirements/cpu-pinned.txt requirements/cpu-nodeps.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1 || true); Python 3.11 or 3.12 is needed: make PYTHON=python3.11" >&2; exit 1; }
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64") ;; *) \
		echo "vLLM for CPU comes for Linux on x86_64 and aarch64 only, not for $$(uname -sm)" >&2; exit 1;; esac
	@echo 'installing into .venv; this takes a minute or two'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	@torch=$$(grep '^torch==' requirements/cpu.txt); $(PIP) "$$torch" || { \
		echo "pip finds no $$torch for this machine; CONTRIBUTING.md, 'PyTorch', tells how to point pip to its wheels" >&2; exit 1; }
	$(PIP) -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP) --no-deps --require-hashes -r requirements/cpu-pinned.txt
	$(PIP) --no-deps -r requirements/cpu-nodeps.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@# once, on all cores: a process that may not write bytecode would compile vLLM and verl anew at each start
	$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	touch $@

$(TINY)/model_index.json: verl_omni/testing/tiny_models.py verl_omni/testing/tiny_tokenizers.py | $(STAMP)
	$(BIN)/python -m verl_omni.testing.tiny_models qwen_image $(TINY)
