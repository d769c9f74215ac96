"""The pools of ranks that gradsieve's own tests use."""

from multiproc.conftest import four, pool, two  # noqa: F401  # fixtures
