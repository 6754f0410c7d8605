VENV := .venv
BIN := $(VENV)/bin
VERSION = $(shell sed -n "s/^ *select '\([0-9][^']*\)'.*/\1/p" sql/base/version.sql)
unexport PYTHONDONTWRITEBYTECODE  # else each process that a test starts compiles all again
# Many tests wait for a while, so there are two processes more than there are cores.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))
PYTEST = cd tests && ../$(BIN)/python -m pytest

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo ## See jobs run, fail, retry and survive a crash (DATABASE_URL, else a throwaway server)
	@cd python_client/examples && ../../$(BIN)/python -m demo $(ARGS)

install: ## Install into DATABASE_URL or the PG* defaults (ARGS="--with-roles"; see ./install.sh --help)
	@./install.sh $(ARGS)

test: $(VENV)/.dev ## Run the tests, but not the long ones, or some: ARGS="sql -k claim"; as root installs what a fresh machine lacks
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || ../$(BIN)/python again.py

test-fast: $(VENV)/.dev ## Run the fast tests: sql, client and contract without those marked slow
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not long" $(or $(ARGS),sql client contract)

test-matrix: $(VENV)/.dev ## Run the SQL and race tests on PostgreSQL 14 to 18
	$(BIN)/python tests/matrix.py $(ARGS)

test-pythons: $(VENV)/.dev ## Run the client tests on each installed Python from 3.11 to 3.14: ARGS="3.13 -- client"
	$(BIN)/python tests/pythons.py $(ARGS)

test-settings: $(VENV)/.dev ## Run the tests under various database settings and locales: ARGS="'icu tr'"
	$(BIN)/python tests/settings.py $(ARGS)

test-numbers: $(VENV)/.dev ## Run all tests, or some, in databases with the numbers 0, 1 and 1023: ARGS="sql"
	for n in 0 1 1023; do (export ROTA_TEST_DATABASE_NUMBER=$$n; $(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)) || exit 1; done

lint: $(VENV)/.dev ## Check style, types and the safety of the SQL
	tests/lint.sh

format: $(VENV)/.dev ## Format the Python code
	$(BIN)/ruff check --config python_client/pyproject.toml --fix tests
	$(BIN)/ruff format --config python_client/pyproject.toml tests
	cd python_client && ../$(BIN)/ruff check --fix && ../$(BIN)/ruff format

check: lint test ## Lint and test: must pass before a merge

audit: $(VENV)/.dev ## Check the client's dependencies for known vulnerabilities (queries PyPI)
	@$(BIN)/python tests/security/audit.py

chaos: $(VENV)/.dev ## Kill and freeze workers at random for a minute, and look for lost jobs
	$(BIN)/python tests/faults/chaos.py $(ARGS)

faults: $(VENV)/.dev ## Make servers, networks, disks and clocks fail under load: ARGS="--only kill --scale 0.1"
	$(BIN)/python tests/faults/play_faults.py $(ARGS)

incidents: $(VENV)/.dev ## Stage fifteen incidents, and check that the first line of an answer finds and repairs each
	export ROTA_INCIDENTS=1; $(PYTEST) -sv faults/test_incidents.py $(ARGS)

move: $(VENV)/.dev ## Kill the processes that move a queue to another database, and look for each job at its end
	cd tests && ../$(BIN)/python -m faults.move_kill $(ARGS)

forward: $(VENV)/.dev ## Kill the processes that carry jobs to another database, and check that each arrives once and in order
	cd tests && ../$(BIN)/python -m faults.forward_kill $(ARGS)

scale-demo: $(VENV)/.dev ## See two servers with four databases and a front survive failures, in two minutes
	@cd tests && ../$(BIN)/python -m faults.scale_demo $(ARGS)

scale-history: $(VENV)/.dev ## Make servers, a front and workers of four databases fail, and check a million jobs: ARGS="--jobs 20000 --faults 20"
	@cd tests && ../$(BIN)/python -m faults.scale_history $(ARGS)

effects: $(VENV)/.dev ## Kill workers a thousand times between a mail and the finish of its job
	$(BIN)/python tests/faults/effects_kill.py $(ARGS)

races: $(VENV)/.dev ## Race operations against each other, tens of thousands of times: ARGS="--feature keys"
	$(BIN)/python tests/races/play_races.py $(ARGS)

fuzz: $(VENV)/.dev ## Throw a million calls with hostile arguments at every function: ARGS="--only enqueue"
	$(BIN)/python tests/fuzz/arguments.py $(ARGS)

mutants: $(VENV)/.dev ## Remove the guards one by one, and check that the tests notice: ARGS="--only NAME"
	$(BIN)/python tests/mutants/run.py $(ARGS)

fuzz-schedules: $(VENV)/.dev ## Compare schedules with cronsim a million times, and throw a million strings at the parser
	$(BIN)/python tests/fuzz/cron_oracle.py $(ARGS)
	$(BIN)/python tests/fuzz/schedule_texts.py

prove: $(VENV)/.dev ## Compare 100000 random histories with a model, and explore two million states of a lease: ARGS="--seed 1"
	$(BIN)/python tests/model/prove.py $(ARGS)
	$(PYTEST) -n $(WORKERS) -m long model mutants faults sql races contract fuzz client web releases

tickers: $(VENV)/.dev ## Tick in eight processes through gaps of days, and check each planned time
	$(BIN)/python tests/model/tickers.py $(ARGS)

web-demo: $(VENV)/.dev ## See a shop with a failing mail provider live in a browser, on a throwaway server
	@cd tests && ../$(BIN)/python -m web.demo $(ARGS)

web-pictures: $(VENV)/.dev ## Take the pictures of the page that the docs show
	@cd tests && ../$(BIN)/python -m web.demo --port 8026 --pictures ../python_client/docs/pictures

web-report: $(VENV)/.dev ## Print what axe reports for each screen, at both widths, dark and light
	@cd tests && ../$(BIN)/python -m web.axe_report

screens: $(VENV)/.dev ## Write what the commands show into the docs
	@cd tests && ../$(BIN)/python -m contract.screens

bench-web: $(VENV)/.dev ## Time each screen with a million live and ten million finished jobs: ARGS="--live 100000 --finished 1000000"
	@cd tests && ../$(BIN)/python -m web.timings $(ARGS)

bench: $(VENV)/.bench ## Measure everything against yardsticks, in 80 minutes: ARGS="--only claims"
	$(BIN)/python tests/bench/measure_all.py $(ARGS)

bench-quick: $(VENV)/.bench ## Check in less than four minutes that every benchmark works
	$(BIN)/python tests/bench/measure_all.py --quick $(ARGS)

bench-schedules: $(VENV)/.dev ## Enqueue the jobs of 100000 schedules of one minute, and claim meanwhile
	$(BIN)/python tests/bench/due_schedules.py $(ARGS)

bench-behind: $(VENV)/.dev ## Claim with a million jobs behind limits, keys and tenants, and without
	$(BIN)/python tests/bench/behind.py $(ARGS)

bench-upgrade: $(VENV)/.dev ## Upgrade a million rows of 0.1.0 while old clients work, and time how long they wait
	$(PYTEST) releases/test_from_0_1_0.py -m long -s $(ARGS)

bench-waiting: $(VENV)/.dev ## Measure limits, turns, order and dependencies, before and after: ARGS="--against PATH" HELD="--against PATH"
	$(BIN)/python tests/bench/waiting_costs.py $(ARGS)
	$(BIN)/python tests/bench/limit_costs.py
	$(BIN)/python tests/bench/waiting_held.py $(HELD)

bench-databases: $(VENV)/.dev ## Run jobs of four databases on two servers, one of which is killed and stopped, in ten minutes
	cd tests && ../$(BIN)/python -m bench.many_databases --kill --stop $(ARGS)

bench-growth: $(VENV)/.dev ## Compare the CPU of a job on 1, 4, 8 and 16 databases of one server: ARGS="--worker"
	cd tests && ../$(BIN)/python -m bench.growth $(ARGS)

bench-failover: $(VENV)/.dev ## Time how long producers wait when a primary dies and its standby is promoted
	cd tests && ../$(BIN)/python -m bench.failover $(ARGS)

bench-acts: $(VENV)/.dev ## Act on 100000 jobs at once, and measure the effect on claims, in four minutes
	$(BIN)/python tests/bench/acts_at_once.py $(ARGS)

bench-settings: $(VENV)/.dev ## Measure what one setting of another queue costs: ARGS="--against PATH", a tree to compare with
	$(BIN)/python tests/bench/settings_cost.py $(ARGS)

bench-single: $(VENV)/.dev ## Compare the plain calls with another commit: ARGS=PATH, a tree to compare with
	$(BIN)/python tests/bench/single.py $(ARGS)

bench-full-scans: $(VENV)/.dev ## Measure workers that walk past jobs of other types, or ended ones: ARGS="--against PATH"
	$(BIN)/python tests/bench/full_scans.py $(ARGS)

bench-fan-out: $(VENV)/.dev ## Time the fan-out to a million jobs, and the fan-in
	$(BIN)/python tests/bench/fan_out.py $(ARGS)

bench-outage: $(VENV)/.dev ## Count the attempts while a mail server is down, with a breaker and without
	$(BIN)/python tests/bench/outage.py $(ARGS)

bench-maintenance: $(VENV)/.dev ## Remove expired rows, tens of thousands a second: ARGS="--against ../main"
	$(BIN)/python tests/bench/removal.py $(ARGS)

bench-views: $(VENV)/.dev ## Time every view and query with a million live, ten million ended jobs and a million errors
	$(BIN)/python tests/bench/views.py $(ARGS)

bench-worker: $(VENV)/.dev ## Drain empty jobs, and show where the CPU time goes: ARGS="--plain --processes 4 --phases"
	$(BIN)/python tests/bench/worker_profile.py $(ARGS)

dist: ## Build dist/rota-X.Y.Z.sql, one plain file for a fresh install by any driver
	@mkdir -p dist
	@echo "-- rota $(VERSION) for a database without it, in one piece for any driver; with psql add -v ON_ERROR_STOP=1" > dist/rota-$(VERSION).sql
	@awk -v vars=fresh -f sql/flatten.awk sql/install.sql >> dist/rota-$(VERSION).sql
	@echo dist/rota-$(VERSION).sql

clean: ## Remove build output and downloads
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
