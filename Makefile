# Two targets for a newcomer: `make demo` and `make test`. Each does its own set-up and is quick when run again.

PYTHON ?= python3
MUTANTS ?= 0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WHEELS := deploy/wheels/.made

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo demo-blind encrypted test test-slow mutation test-containers test-encoders test-encrypted venv lint protos data format clean

demo: venv ## run FEDOT on real text and real images over the real services
	$(BIN)/veilfed demo --task vader
	@if command -v npm >/dev/null; then $(BIN)/veilfed demo --task emoji; \
	else echo "The image task was left out: its icons come as npm packages, and npm is not installed."; fi

test: venv data lint ## all quick tests (about 10 minutes on 2 cores)
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not containers and not encoders and not encrypted"

test-slow: venv data ## the tests marked slow
	$(BIN)/pytest -m slow

test-containers: venv $(WHEELS) ## the images, in an engine that is reached or, for root on Debian, installed and started
	$(BIN)/veilfed oracle fetch minilm
	$(BIN)/pytest -m containers tests/containers

# What the images install. The project itself is built from the source, in the image.
$(WHEELS): pyproject.toml constraints.txt | venv
	rm -f deploy/wheels/*.whl
	$(BIN)/python -m pip wheel --quiet -c constraints.txt -w deploy/wheels 'setuptools>=77' '.[oracle,aggregator,agent]'
	rm -f deploy/wheels/veilfed-*.whl
	touch $@

# timm and open_clip need a torchvision of their torch's own build, which constraints.txt does not have: about 6 GB.
test-encoders: data ## models and data of other libraries (open_clip, timm, transformers, datasets), in build/encoders
	test -x build/encoders/bin/python || $(PYTHON) -m venv build/encoders
	build/encoders/bin/python -m pip install --quiet -c constraints-encoders.txt -e '.[oracle,aggregator,agent,study,encoders]' datasets hypothesis pytest pytest-timeout
	build/encoders/bin/python -m pytest -m encoders tests/encoders

# SEAL's own build would fetch three helper libraries, which the toolchain file turns off.
encrypted: venv
	CMAKE_TOOLCHAIN_FILE=$(CURDIR)/deploy/seal.cmake $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[encrypted]'

test-encrypted: encrypted ## the encrypted engine against SEAL; builds Pyfhel, some minutes once
	$(BIN)/pytest -m encrypted tests/encrypted

demo-blind: encrypted ## neither side sees the other's: a job on encrypted blocks, about a quarter of an hour on 2 cores
	$(BIN)/veilfed demo --task blind

mutation: venv data ## small faults in fold, gates, rounds and ledger: which tests notice (hours; MUTANTS=16 for a sample)
	test -x build/mutation/bin/cosmic-ray || { $(PYTHON) -m venv build/mutation && build/mutation/bin/pip install --quiet cosmic-ray==8.7.0; }
	nice -n 15 $(BIN)/python -m benchmarks.mutation --cosmic-ray build/mutation/bin/cosmic-ray --sample $(MUTANTS) --json build/mutation.json

lint: venv ## formatting, lint, types, the trust boundary, drift and breaks of the protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/compile.py --check

data: venv ## the public models and data that the tests use
	$(BIN)/veilfed oracle fetch minilm
	$(BIN)/veilfed oracle fetch vit
	$(BIN)/veilfed data fetch vader
	$(BIN)/veilfed data fetch heart

protos: venv ## generate the Python code of the protos
	$(BIN)/python protos/compile.py

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[oracle,aggregator,agent,study,dev]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
