"""Where the user's program is, in words: torch's collective and the user's own line."""

from __future__ import annotations

import threading
from pathlib import Path

from gradsieve.comm import failures

HERE = Path(__file__).name


def seen_in(module: str, function: str, call: str = "flush()") -> tuple[str, bool]:
    """What another thread, as a watch is one, sees while the main one is in that function of that module."""
    found: list[tuple[str, bool]] = []
    thread = threading.Thread(
        target=lambda: found.append((failures.where_the_program_is(), failures.is_program_in(call)))
    )
    inside: dict[str, object] = {"__name__": module}
    exec(f"def {function}(thread):\n    thread.start()\n    thread.join()", inside)  # noqa: S102 - it stands for theirs
    inside[function](thread)  # type: ignore[operator]
    return found[0]


def test_the_line_is_the_users_and_not_a_librarys() -> None:
    for module in ("torch.nn.modules.module", "gradsieve.parallel.ddp", "json"):
        assert seen_in(module, "work")[0].startswith(f"at {HERE}:")
    assert seen_in("their.program", "work")[0].startswith("at <string>:"), "the innermost one"


def test_a_collective_is_named_without_what_torch_puts_around_it() -> None:
    assert seen_in("torch.distributed.distributed_c10d", "barrier")[0].startswith(f"in barrier() at {HERE}:")
    assert seen_in("torch.distributed.c10d_logger", "wrapper")[0].startswith(f"at {HERE}:")


def test_a_call_of_ours_is_known_by_its_name() -> None:
    assert seen_in("gradsieve.sync", "flush")[1]
    assert not seen_in("gradsieve.sync", "verify")[1]
    assert not seen_in("their.program", "flush")[1]
