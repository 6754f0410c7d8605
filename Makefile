VENV := .venv
BIN := $(VENV)/bin
VERSION = $(shell sed -n "s/^ *select '\([0-9][^']*\)'.*/\1/p" sql/base/version.sql)
unexport PYTHONDONTWRITEBYTECODE  # else each process that a test starts compiles all again
# Many tests wait for a while, so there is one process more than there are cores.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PYTEST = cd tests && ../$(BIN)/python -m pytest

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo ## See jobs run, fail, retry and survive a crash (DATABASE_URL, else a throw-away server)
	@cd python_client/examples && ../../$(BIN)/python -m demo $(ARGS)

install: ## Install into DATABASE_URL or the PG* defaults (ARGS="--with-roles"; see ./install.sh --help)
	@./install.sh $(ARGS)

test: $(VENV)/.dev ## Run all tests, or some: ARGS="sql -k claim"; sets up what a fresh machine lacks
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || ../$(BIN)/python again.py

test-fast: $(VENV)/.dev ## Run what takes little: sql, client and contract without what is marked slow
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not long" $(or $(ARGS),sql client contract)

test-matrix: $(VENV)/.dev ## Run the SQL and race tests on PostgreSQL 14 to 18
	$(BIN)/python tests/matrix.py $(ARGS)

test-pythons: $(VENV)/.dev ## Run the tests of the client on each Python from 3.11 to 3.14 that is found: ARGS="3.13 -- client"
	$(BIN)/python tests/pythons.py $(ARGS)

test-settings: $(VENV)/.dev ## Run the tests under settings that a database may have: ARGS="'time zone'"
	$(BIN)/python tests/settings.py $(ARGS)

test-numbers: $(VENV)/.dev ## Run all tests, or some, in databases with the numbers 0, 1 and 1023: ARGS="sql"
	for n in 0 1 1023; do (export ROTA_TEST_DATABASE_NUMBER=$$n; $(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)) || exit 1; done

lint: $(VENV)/.dev ## Check style, types and the safety of the SQL
	tests/lint.sh

format: $(VENV)/.dev ## Put the Python code into its one shape
	$(BIN)/ruff check --config python_client/pyproject.toml --fix tests
	$(BIN)/ruff format --config python_client/pyproject.toml tests
	cd python_client && ../$(BIN)/ruff check --fix && ../$(BIN)/ruff format

check: lint test ## Lint and test: what must be green before a change goes in

audit: $(VENV)/.dev ## Look for known holes in what the client depends on (asks the index of PyPI)
	@$(BIN)/python tests/security/audit.py

chaos: $(VENV)/.dev ## Kill and freeze workers at random for a minute, and look for lost jobs
	$(BIN)/python tests/faults/chaos.py $(ARGS)

faults: $(VENV)/.dev ## Let servers, lines, disks and clocks fail under load: ARGS="--only kill --scale 0.1"
	$(BIN)/python tests/faults/play_faults.py $(ARGS)

incidents: $(VENV)/.dev ## Stage fifteen incidents, and see that the first line of an answer finds and mends each
	export ROTA_INCIDENTS=1; $(PYTEST) -sv faults/test_incidents.py $(ARGS)

move: $(VENV)/.dev ## Kill those who move a queue to another database, and look for each job at its end
	cd tests && ../$(BIN)/python -m faults.move_kill $(ARGS)

forward: $(VENV)/.dev ## Kill those who carry jobs to another database, and see that each arrives once and in order
	cd tests && ../$(BIN)/python -m faults.forward_kill $(ARGS)

scale-demo: $(VENV)/.dev ## See two servers with four databases and a front survive what fails, in two minutes
	@cd tests && ../$(BIN)/python -m faults.scale_demo $(ARGS)

scale-history: $(VENV)/.dev ## Let servers, a front and workers of four databases fail, and judge a million jobs: ARGS="--jobs 20000 --faults 20"
	@cd tests && ../$(BIN)/python -m faults.scale_history $(ARGS)

effects: $(VENV)/.dev ## Kill workers a thousand times between a mail and the finish of its job
	$(BIN)/python tests/faults/effects_kill.py $(ARGS)

races: $(VENV)/.dev ## Play operations against each other, by the ten thousand: ARGS="--feature keys"
	$(BIN)/python tests/races/play_races.py $(ARGS)

fuzz: $(VENV)/.dev ## Throw a million calls with hostile arguments at every function: ARGS="--only enqueue"
	$(BIN)/python tests/fuzz/arguments.py $(ARGS)

mutants: $(VENV)/.dev ## Take the guards out one by one, and see that the tests notice: ARGS="--only NAME"
	$(BIN)/python tests/mutants/run.py $(ARGS)

fuzz-schedules: $(VENV)/.dev ## Compare schedules with cronsim a million times, and throw a million strings at the reader
	$(BIN)/python tests/fuzz/cron_oracle.py $(ARGS)
	$(BIN)/python tests/fuzz/schedule_texts.py

prove: $(VENV)/.dev ## Hold 100000 random histories against a model, and explore two million states of a lease: ARGS="--seed 1"
	$(BIN)/python tests/model/prove.py $(ARGS)
	$(PYTEST) -n $(WORKERS) -m long model mutants faults sql races contract fuzz

tickers: $(VENV)/.dev ## Let eight processes tick through stops of days, and check each planned time
	$(BIN)/python tests/model/tickers.py $(ARGS)

web-demo: $(VENV)/.dev ## See a shop with a failing mail provider live in a browser, on a throw-away server
	@cd tests && ../$(BIN)/python -m web.demo $(ARGS)

web-pictures: $(VENV)/.dev ## Take the pictures of the page that the docs show
	@cd tests && ../$(BIN)/python -m web.demo --port 8026 --pictures ../python_client/docs/pictures

web-report: $(VENV)/.dev ## Tell what axe says of each screen, at both widths, dark and light
	@cd tests && ../$(BIN)/python -m web.axe_report

screens: $(VENV)/.dev ## Write what the commands show into the docs
	@cd tests && ../$(BIN)/python -m contract.screens

bench-web: $(VENV)/.dev ## Time each screen among a million live and ten million finished jobs: ARGS="--live 100000 --finished 1000000"
	@cd tests && ../$(BIN)/python -m web.timings $(ARGS)

bench: $(VENV)/.bench ## Measure everything against yardsticks, in 75 minutes: ARGS="--only claims"
	$(BIN)/python tests/bench/measure_all.py $(ARGS)

bench-quick: $(VENV)/.bench ## See in less than four minutes that every benchmark works
	$(BIN)/python tests/bench/measure_all.py --quick $(ARGS)

bench-schedules: $(VENV)/.dev ## Enqueue the jobs of 100000 schedules of one minute, and claim meanwhile
	$(BIN)/python tests/bench/due_schedules.py $(ARGS)

bench-behind: $(VENV)/.dev ## Claim with a million jobs behind limits, keys and tenants, and without
	$(BIN)/python tests/bench/behind.py $(ARGS)

bench-upgrade: $(VENV)/.dev ## Upgrade a million rows of 0.1.0 with old clients at work, and tell how long they wait
	$(PYTEST) releases/test_from_0_1_0.py -m long -s $(ARGS)

bench-waiting: $(VENV)/.dev ## Measure limits, turns, order and dependencies, before and after: ARGS="--against PATH" HELD="--against PATH"
	$(BIN)/python tests/bench/waiting_costs.py $(ARGS)
	$(BIN)/python tests/bench/limit_costs.py
	$(BIN)/python tests/bench/waiting_held.py $(HELD)

bench-databases: $(VENV)/.dev ## Work for four databases on two servers, of which one is killed and stopped, in ten minutes
	cd tests && ../$(BIN)/python -m bench.many_databases --kill --stop $(ARGS)

bench-growth: $(VENV)/.dev ## Compare the CPU of a job on 1, 4, 8 and 16 databases of one server: ARGS="--worker"
	cd tests && ../$(BIN)/python -m bench.growth $(ARGS)

bench-failover: $(VENV)/.dev ## Time how long producers wait when a primary dies and its standby is promoted
	cd tests && ../$(BIN)/python -m bench.failover $(ARGS)

bench-acts: $(VENV)/.dev ## Act on 100000 jobs at once, and see what claims feel of it, in four minutes
	$(BIN)/python tests/bench/acts_at_once.py $(ARGS)

bench-settings: $(VENV)/.dev ## See what one setting of another queue costs: ARGS="--against PATH", a tree to compare with
	$(BIN)/python tests/bench/settings_cost.py $(ARGS)

bench-single: $(VENV)/.dev ## Measure the plain calls beside another commit: ARGS=PATH, a tree to compare with
	$(BIN)/python tests/bench/single.py $(ARGS)

bench-fan-out: $(VENV)/.dev ## Fan out to a million jobs and in again, and time it
	$(BIN)/python tests/bench/fan_out.py $(ARGS)

bench-outage: $(VENV)/.dev ## Count the attempts while a mail server is down, with a breaker and without
	$(BIN)/python tests/bench/outage.py $(ARGS)

bench-maintenance: $(VENV)/.dev ## Remove what has expired, by the ten thousand rows a second: ARGS="--against ../main"
	$(BIN)/python tests/bench/removal.py $(ARGS)

bench-views: $(VENV)/.dev ## Ask every view and question at a million live, ten million ended jobs and a million errors
	$(BIN)/python tests/bench/views.py $(ARGS)

bench-worker: $(VENV)/.dev ## Drain jobs that do nothing, and tell where the CPU time goes: ARGS="--plain --processes 4 --phases"
	$(BIN)/python tests/bench/worker_profile.py $(ARGS)

dist: ## Build dist/rota-X.Y.Z.sql, one plain file for a fresh install by any driver
	@mkdir -p dist
	@echo "-- rota $(VERSION) for a database without it, in one piece for any driver; with psql add -v ON_ERROR_STOP=1" > dist/rota-$(VERSION).sql
	@awk -v vars=fresh -f sql/flatten.awk sql/install.sql >> dist/rota-$(VERSION).sql
	@echo dist/rota-$(VERSION).sql

clean: ## Remove what was built or downloaded
	rm -rf $(VENV) .matrix .mutants dist

setup: # bring the Debian packages that are missing; does nothing when all is there
	@tests/setup.sh

$(VENV)/.demo: python_client/pyproject.toml
	@tests/venv.sh $(VENV) demo
	@touch $@

$(VENV)/.bench: python_client/pyproject.toml | setup
	@tests/venv.sh $(VENV) demo,bench
	@touch $@

$(VENV)/.dev: python_client/pyproject.toml | setup
	@tests/venv.sh $(VENV) demo,test,lint
	@touch $@ $(VENV)/.demo
