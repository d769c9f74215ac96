"""For all tests: one thread a process (the machine is shared), how many examples Hypothesis tries, which
tests run one after the other, and how long one may take in the gate."""

import contextlib
import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Triton decides whether its own functions are interpreted when it is imported, and torchft imports it, too:
# first of all here, for tests/unit/kernels/test_kernels_triton.py.
with contextlib.suppress(ImportError), pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    import triton.language  # noqa: F401

settings.register_profile("quick", max_examples=3, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=8, deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "nightly",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "slowest", "seconds above which a test says why in its docstring, after `Slow:`", default="20"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a module's tests together where they share processes, and all labs: they share the machine."""
    for item in items:
        folder = item.path.parent.name
        if folder in ("multiproc", "accelerator", "network"):
            item.add_marker(pytest.mark.xdist_group("lab" if folder == "network" else item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test of the gate that takes long and does not say why."""
    report = yield
    is_gate = item.config.getoption("markexpr") == "not nightly"
    says_why = "Slow:" in (getattr(getattr(item, "function", None), "__doc__", None) or "")
    if is_gate and report.when == "call" and report.passed and not says_why:
        most = float(item.config.getini("slowest"))
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # processes that share a core
        if report.duration > most * busy:
            report.outcome = "failed"
            report.longrepr = (
                f"it took {report.duration:.0f} s, more than {most:g}: mark it `nightly`, or say why in its "
                "docstring, after `Slow:`"
            )
    return report
