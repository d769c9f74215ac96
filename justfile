# A few verbs. `just` lists them; each is a plain command you can also type.

setup:      # everything for development, into the active virtual environment
    pip install torch==2.13.0   # a CPU build here; any torch from 2.7 on will do
    pip install -e '.[dev,docs]' -e './tools[completion,plot]'

check:      # lint, types, import direction
    ruff check . && ruff format --check . && mypy && lint-imports

test *args: # the tests of the gate in one process; `just test tools/tests/network` for those in the lab, too
    pytest -q -n 2 -m "not nightly" tests/unit tools/tests/unit tests/laws tests/papers tests/hostile tests/policy {{args}}

# In a minute: unit tests of a package (`just quick comm`), laws of two schemes, actions in any order.
quick path="pipeline":
    #!/usr/bin/env bash
    set -euo pipefail
    export HYPOTHESIS_PROFILE=quick ANY_ORDER_EXAMPLES=4 OMP_NUM_THREADS=1
    pytest -q -x -m "not nightly" tests/laws/test_any_order.py tests/laws/test_laws.py \
        -k "any_order or (stripes or exdyna) and not paper" &
    laws=$!
    pytest -q -x -m "not nightly" tests/unit/{{path}}
    wait "$laws"

soak:       # 2,000 sequences of 30 actions in any order, on virtual ranks: about ten minutes
    ANY_ORDER_EXAMPLES=2000 pytest -q tests/laws/test_any_order.py tests/laws/test_what_is_seen.py

nightly:    # every test, also those that the gate leaves out; a thousand examples of each property; soak; mutants
    pytest -q -n 2 --dist loadgroup
    HYPOTHESIS_PROFILE=nightly pytest -q -n 2 -o timeout=3600 tests/laws tests/papers tests/hostile tests/unit tools/tests/unit
    just soak
    just mutants

mutants *words: # every fault in scripts/mutants.toml, put into a copy of the source, turns its test red
    python scripts/mutants.py {{words}}

kill-saves: # kill -9 before each system call of a save, on three kinds of training: about an hour
    python scripts/kill_saves.py

long-run:   # 20,000 steps on real ranks: memory, files and threads must not grow
    gradsieve lab soak --steps 20000

compat:     # which optimizers are served, in which ways of training: writes docs/compatibility.md
    python scripts/compat.py --markdown docs/compatibility.md

fuzz:       # altered messages wherever a peer's bytes are read, and altered checkpoints
    gradsieve lab fuzz --target frames --count 1e6 --seed 1
    gradsieve lab fuzz --target checkpoints --count 1e5 --seed 1

bench:      # the headline measurement (needs root for the lab)
    gradsieve bench step --hosts 4 --rate 1gbit --workload mlp --params 25e6 --density 0.001

docs:       # read the documentation at localhost:8000
    mkdocs serve

release tag: # wheel and sdist of both distributions, checked: `just release v0.1.0`
    python scripts/release.py {{tag}}

ci:         # the gate, as CI runs it
    bash .ci/run
