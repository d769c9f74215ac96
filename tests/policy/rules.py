"""The house rules as functions over a source tree: each returns what breaks it, in words, or nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_quantized", "empty_strided", "eye"),
    *("full", "linspace", "logspace", "nested_tensor", "ones", "rand", "randint", "randn", "randperm"),
    *("range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "fftfreq", "rfftfreq"),
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
    *("sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor"),
    *("sparse_bsc_tensor", "sparse_compressed_tensor"),
}
"""What torch makes in a type or on a device that the program's user can set, unless it is told which."""


def long_files(package: Path, limit: int) -> list[str]:
    found = [(path, len(path.read_text().splitlines())) for path in sorted(package.rglob("*.py"))]
    return [f"{path.relative_to(package)} has {lines} lines" for path, lines in found if lines > limit]


def long_functions(package: Path, limit: int) -> list[str]:
    return [
        f"{where}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for where, tree in _trees(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > limit
    ]


def users_of(package: Path, library: str, excepted: tuple[str, ...] = ()) -> list[str]:
    """Where `library` is imported or reached as an attribute, but for files whose path starts as excepted."""
    return [
        f"{where}:{line} uses {library}"
        for where, tree in _trees(package)
        if not where.startswith(excepted or ("\0",))
        for name, line in _names(tree)
        if name == library or name.startswith(f"{library}.")
    ]


_OWN_OR_OTHERS = {
    *("_content", "_gradsieve_sum", "_moves", "_end_connections"),  # ours
    *("_exit", "_getframe", "_current_frames", "_fields", "_forkserver", "_forkserver_pid"),  # Python's
    *("_optimizers", "_custom_objects"),  # Accelerate's
    *("_use_async_quorum", "_quorum_retries", "_quorum_timeout"),  # torchft's
}
"""Names of objects that begin with an underscore, are used from outside, and are not torch's."""
_REACHING = {"getattr", "hasattr", "setattr", "delattr"}


def private_to_torch(package: Path, excepted: tuple[str, ...]) -> list[str]:
    """Where a name of torch is used that begins with an underscore, or may be one: of an object, any such
    name counts that is not known to be somebody else's."""
    return [
        f"{where}:{line} uses {name}"
        for where, tree in _trees(package)
        if where not in excepted
        for name, line in sorted({*_private_paths(tree), *_private_attributes(tree)})
    ]


def _private_paths(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Written as a path from torch: imported, reached, or named in a string of its own."""
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    named = (
        (each.value, each.lineno)
        for each in constants
        if isinstance(each.value, str) and re.fullmatch(r"torch(\.\w+)+", each.value)
    )
    imported = _imported(tree)
    for name, line in (*_names(tree), *named):
        first, _, rest = name.partition(".")
        path = f"{imported.get(first, first)}.{rest}".split(".")
        if path[0] == "torch" and any(map(_is_private, path)):
            yield name, line


def _private_attributes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Of anything but oneself, also by `getattr` and its like."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
        elif isinstance(node, ast.Call) and _dotted(node.func) in _REACHING:
            owner, word = node.args[0], node.args[1]
            name = str(word.value) if isinstance(word, ast.Constant) else ""
        else:
            continue
        if isinstance(owner, ast.Call):
            owner = owner.func  # super()._name
        its_own = name in methods or _dotted(owner) in {"self", "cls", "super", *classes}
        if _is_private(name) and not its_own and name not in _OWN_OR_OTHERS:
            yield name, node.lineno


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dangerous(package: Path) -> list[str]:
    """Ways to run what a file, a peer or an argument says."""
    return [
        f"{where}:{node.lineno} {what}"
        for where, tree in _trees(package)
        for node in ast.walk(tree)
        if (what := _danger(node)) is not None
    ]


def _danger(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name, _ in _names(node):
            if name.split(".")[0] in _PICKLES or name in {"os.system", "os.popen", "torch.load"}:
                return f"imports {name}"
    if not isinstance(node, ast.Call):
        return None
    called = _dotted(node.func)
    if called in {"eval", "exec", "compile", "__import__"}:
        return f"calls {called}"
    if called == "torch.load" or tuple(called.split(".")) in _SHELLS:
        return f"calls {called}"
    for keyword in node.keywords:
        constant = isinstance(keyword.value, ast.Constant) and keyword.value.value
        if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not constant):
            return "passes shell="
        if keyword.arg == "allow_pickle" and constant:
            return "passes allow_pickle="
    return None


def left_to_default(package: Path) -> list[str]:
    """Tensors whose type or device is left to torch's defaults, which whoever imports the package may set.

    Any mention of a factory counts but a call that names both: handed on, it would be called without them.
    """
    return [
        f"{where}:{line} {what}"
        for where, tree in _trees(package)
        for line, what in sorted(_left_to_default(tree, _imported(tree)))
    ]


def _left_to_default(tree: ast.Module, imported: dict[str, str]) -> Iterator[tuple[int, str]]:
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        first, *rest = _dotted(node).split(".")
        name = ".".join([imported.get(first, first), *rest])
        if not name.startswith("torch."):
            continue
        call, made = calls.get(id(node)), name.split(".")[-1]
        if call is not None and made.endswith("Tensor"):
            yield call.lineno, f"calls {name}, which follows torch's defaults"
        elif made in _FACTORIES and (missing := {"dtype", "device"} - _named(call)):
            yield node.lineno, f"{name} without {' and '.join(sorted(missing, reverse=True))}"


def _named(call: ast.Call | None) -> set[str]:
    """Keywords that are given a value other than None, which would be the default."""
    given = call.keywords if call is not None else []
    return {word.arg for word in given if word.arg and not _is_none(word.value)}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _imported(tree: ast.AST) -> dict[str, str]:
    """What names in a file stand for that it imports under another one, or from within a module."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def undocumented(names: list[str], folder: Path) -> list[str]:
    """Schemes without a page or a section of their own: a heading with the name as its anchor."""
    headings = [
        heading
        for page in sorted(folder.glob("*.md"))
        for heading in re.findall(r"^#+ .*\{#([\w-]+)\}$", page.read_text(), re.MULTILINE)
    ]
    faults = [f"{name} has {headings.count(name)} sections" for name in names if headings.count(name) > 1]
    pages = {page.stem for page in folder.glob("*.md")}
    return faults + [
        f"{name} has no {name}.md and no section" for name in names if name not in {*headings, *pages}
    ]


def decision_faults(cited: set[int], folder: Path) -> list[str]:
    """A decision has one section with its number and a status below it, and a line in the index; all that
    are cited are there."""
    pages = [page.read_text() for page in sorted(folder.glob("*.md"))]
    headings = [
        int(number) for page in pages for number in re.findall(r"^#+ ADR (\d+): ", page, re.MULTILINE)
    ]
    whole = r"^#+ ADR (\d+): .* \{#adr-\1\}\n\nStatus: (?:accepted|replaced by \[ADR \d+\])"
    with_status = {int(number) for page in pages for number in re.findall(whole, page, re.MULTILINE)}
    index = (folder / "index.md").read_text()
    listed = {int(number) for number in re.findall(r"^\| (\d+) \| \[.*#adr-\1\)", index, re.MULTILINE)}
    return [
        *(f"ADR {number} is not there" for number in sorted(cited - {*headings})),
        *(f"ADR {number} is there twice" for number in sorted({*headings}) if headings.count(number) > 1),
        *(f"ADR {number} has no anchor or status" for number in sorted({*headings} - with_status)),
        *(f"ADR {number} is not in the index" for number in sorted({*headings} ^ listed)),
    ]


def recipe_faults(scheme_file: Path) -> list[str]:
    """The numbered recipe of the docstring and the numbered comments of the code name the same steps."""
    text = scheme_file.read_text()
    recipe = set(re.findall(r"^(\d+)\. ", ast.get_docstring(ast.parse(text)) or "", re.MULTILINE))
    comments = [line.split("#", 1)[1] for line in text.splitlines() if re.match(r"\s*# \d", line)]
    done = {number for comment in comments for number in re.findall(r"\b(\d+)\.(?!\d)", comment)}
    return [
        f"{scheme_file.name}: step {step} is only in one of recipe and code" for step in sorted(recipe ^ done)
    ]


def _trees(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text())


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module or attribute that is imported or reached by a dotted name, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and _dotted(node):
            yield _dotted(node), node.lineno


def _dotted(node: ast.AST) -> str:
    """`a.b.c` as written; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""
