# Two commands on a fresh machine with Python 3.10+ and make: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A file is one process': what its tests share is set up once.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder
TESTS := $(BIN)/python -m pytest $(SPREAD)
QUICK := not slow and not extras and not conformance
# Of all tests: each part ends in under an hour on two cores.
PARTS := 1 2 3 4
SEED := $(or $(SEED),$(shell date +%s))

TORCH ?= 2.13.0
.PHONY: venv build dist release-check sbom docs site-version demo test test-extras test-part test-all test-with test-older test-opacus other conformance lint bench clients products clean

venv: $(STAMP)

# torch first: whatever comes after must be satisfied with the pinned build.
$(STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# csrc/ into fastclip._C, in place. Without nvcc it says so and goes on; an error is an error.
build: $(STAMP)
	FASTCLIP_BUILD=strict $(BIN)/python setup.py build_ext --inplace

# The sdist and the wheel, into build/dist.
dist: $(STAMP)
	$(BIN)/python -c "import setuptools.build_meta as b; [f('build/dist') for f in (b.build_sdist, b.build_wheel)]"

# Whether this commit can be released: versions, changelog, tag, sdist and wheel, and a step in an environment of its own.
release-check: $(STAMP)
	$(BIN)/python -m bench.release_check

# What an installed wheel consists of (CycloneDX), into build/dist: everything that `pip install` brings,
# with versions, licences and hashes where they are known.
sbom: dist
	$(PYTHON) -m venv --clear build/sbom
	build/sbom/bin/python -m pip install --quiet torch==$(TORCH)
	build/sbom/bin/python -m pip install --quiet build/dist/*.whl
	$(PYTHON) -m venv --clear build/sbom-tool
	build/sbom-tool/bin/python -m pip install --quiet "cyclonedx-bom>=5"
	build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
		--output-reproducible -o build/dist/fastclip.cdx.json build/sbom/bin/python

# The site, into build/site: build/site/index.html can be opened as it is; its search wants a server.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The site of this version, as a commit on the local branch gh-pages; "latest" and the start page lead to it.
site-version: $(STAMP)
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike --quiet deploy --update-aliases \
		$$($(BIN)/python -c "from fastclip import __version__ as v; print(v.rpartition('.')[0])") latest
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike set-default latest

demo: $(STAMP)
	$(BIN)/python -m bench.demo

test: $(STAMP)
	$(TESTS) -m "$(QUICK)"

# What `make test` leaves out and is not long: whole commands, examples, pages, the site, audits.
test-extras: $(STAMP)
	$(TESTS) -m "extras and not slow and not conformance"

# Everything but conformance, in an order of its own: `make test-all SEED=7` is the same one again.
test-all: $(STAMP)
	failed=0; for part in $(PARTS); do $(MAKE) test-part PART=$$part SEED=$(SEED) || failed=1; done; exit $$failed

test-part: $(STAMP)
	@echo "part $(PART) of $(words $(PARTS)), order of SEED=$(SEED)"
	$(TESTS) -p randomly --randomly-seed=$(SEED) --part $(PART)/$(words $(PARTS)) -m "not conformance"

# The same tests in an environment of their own: make test-with PYTHON=python3.10, or, with libraries of its
# time, make test-with TORCH=2.6.0 WITH=transformers==5.0.0; or a PART of them, with what is built already.
# The interpreter of Triton 3.6, which torch 2.11 brings, asks for WITH="transformers==5.17.0 numpy<2.4".
OTHER = build/torch-$(TORCH)-$(notdir $(PYTHON))
test-with: other
	$(if $(PART),,FASTCLIP_BUILD=strict $(OTHER)/bin/python setup.py build_ext --inplace)
	$(OTHER)/bin/python -m pytest $(SPREAD) -m "$(QUICK)" $(PART)

other:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH)
	FASTCLIP_BUILD=0 $(OTHER)/bin/python -m pip install --quiet --editable ".[test]" torch==$(TORCH) $(foreach package,$(WITH),"$(package)")

# The ways of a step with an older torch, which no run with the newest shows.
OLDER := TORCH=2.11.0 "WITH=transformers==5.17.0 numpy<2.4"
test-older: $(STAMP)
	$(MAKE) other $(OLDER)
	$(MAKE) test-with $(OLDER) PART="tests/engine/test_engine.py tests/ops/noise tests/data tests/engine/optimizer tests/engine/capture"

# What rests on Opacus, with another version of it.
OPACUS ?= 1.5.4
test-opacus: $(STAMP)
	$(MAKE) test-with OTHER=build/opacus-$(OPACUS) WITH=opacus==$(OPACUS) PART="tests/engine/test_engine.py tests/opacus tests/engine/optimizer \
		tests/accounting tests/engine/model tests/data tests/engine/test_overrides.py tests/rules/layers/test_sampled.py tests/backward/test_not_kept.py \
		tests/test_opacus_versions.py tests/test_torch_names.py tests/test_imports.py"

# Opacus' own test suite on this engine, and as it is after fastclip.opacus.install(): about 10 minutes.
conformance: $(STAMP)
	$(BIN)/python -m tests.conformance
	$(BIN)/python -m tests.conformance.installed

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench.train --parts

# Models and trainers of other libraries against one sample at a time, in two environments of their own: timm needs torchvision,
# which needs another torch. About half an hour, and 6 GB.
products: $(STAMP)
	$(MAKE) other OTHER=build/products WITH="monai diffusers trl==1.16.0 bitsandbytes"
	build/products/bin/python -m pytest $(SPREAD) -m "" tests/products
	$(MAKE) other OTHER=build/products-timm TORCH=2.14.1 WITH="torchvision==0.29.1 timm"
	build/products-timm/bin/python -m pytest $(SPREAD) -m "" tests/products

# Programs that use Opacus, each with Opacus and with this, in an environment of their own: about an hour.
# Their pins are passed over (torchvision and torchaudio for CUDA, vllm, an older huggingface-hub): what
# docs/clients.md says of each runs without.
CLIENTS := build/clients
CLIENT_NEEDS := cryptography transformers peft accelerate datasets scikit-learn xgrammar json-repair "psutil<6" \
	flwr==1.42.0 trl==1.16.0 colorama structlog pydantic-settings "pydantic[email]" rich opt_einsum prv-accountant
clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m bench.clients --rounds 2 --out bench/results/clients-cpu.json
	$(CLIENTS)/bin/python -m bench.clients.table bench/results/clients-cpu.json --page docs/clients.md

$(CLIENTS)/.installed: Makefile
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet torch==2.13.0
	FASTCLIP_BUILD=strict $(CLIENTS)/bin/python -m pip install --quiet --editable . torch==2.13.0
	$(CLIENTS)/bin/python -m pip install --quiet $(CLIENT_NEEDS) torch==2.13.0
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps \
		mostlyai-engine==2.7.3 nemo-safe-synthesizer==0.1.16 dp-transformers==1.0.0
	touch $@

clean:
	rm -rf $(VENV) build fastclip/_*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
