# A few verbs. `just` lists them; each is a plain command you can also type.

setup:      # everything for development, into the active virtual environment
    pip install torch==2.13.0   # a CPU build here; any torch from 2.7 on will do
    pip install -e '.[dev,docs]' -e './tools[completion,plot]'

check:      # lint, types, import direction
    ruff check . && ruff format --check . && mypy && lint-imports

test *args: # the quick tests; `just test tools/tests/network` for the slow ones
    pytest -q -n 2 tests/unit tools/tests/unit tests/laws tests/papers tests/hostile tests/policy {{args}}

quick path=".": # in a minute: unit tests of a package (`just quick pipeline`), laws of two schemes, any order
    pytest -q -x tests/unit/{{path}}
    pytest -q -x tests/laws/test_laws.py -k "stripes or exdyna and not paper"
    ANY_ORDER_EXAMPLES=2 pytest -q -x tests/laws/test_any_order.py

soak:       # 2,000 sequences of 30 actions in any order, on virtual ranks: about ten minutes
    ANY_ORDER_EXAMPLES=2000 pytest -q tests/laws/test_any_order.py tests/laws/test_what_is_seen.py

mutants *words: # every fault in scripts/mutants.toml, put into a copy of the source, turns its test red
    python scripts/mutants.py {{words}}

kill-saves: # kill -9 before each system call of a save, on three kinds of training: about an hour
    python scripts/kill_saves.py

long-run:   # 20,000 steps on real ranks: memory, files and threads must not grow
    gradsieve lab soak --steps 20000

compat:     # which optimizers are served, in which ways of training: writes docs/compatibility.md
    python tests/compat.py --markdown docs/compatibility.md

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
