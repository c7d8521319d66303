"""The structure of the package: its imports between layers, read from the syntax trees, and its public names."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicomm

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mpicomm"

# The layer of each module or package directly under mpicomm. It imports only from itself and from lower layers.
LAYERS = {
    "errors": 0,
    "settings": 0,
    "arguments": 0,
    "host_info": 0,
    "json_messages": 1,
    "metrics_file": 0,
    "rank_log": 0,
    "rank_binding": 3,
    "remedies": 1,
    "launch": 0,
    "mpi": 2,
    "terminal": 1,
    "torch_compatibility": 1,
    "agreement": 3,
    "topology": 3,
    "missing_ranks": 3,
    "devices": 1,
    "torch_internals": 4,
    "native": 1,
    "open_files": 4,
    "recorder": 4,
    "watchdog": 5,
    "backend": 6,
    "rank_variables": 6,
    "job": 7,
    "unconverted": 8,
    "collective_ops": 8,
    "training": 9,
    "bench": 9,
    "doctor": 9,
    "reports": 9,
    "horovod": 9,
    "job_info": 9,
    "testing": 9,
    "integrations": 9,
    "cli": 10,
    "__main__": 11,
}
BASE = 0  # its members may import each other, and otherwise only the standard library
MPI_MODULE = "mpicomm.mpi"
TEMPLATE_MODULE = "mpicomm.launch.jobscript.template"  # imported by `mpicomm job` when it writes a script
PRIVATE_TORCH_MODULE = "mpicomm.torch_internals"


@dataclasses.dataclass(frozen=True)
class Import:
    """One module imported by another."""

    target: str
    line: int
    is_run: bool
    """False under `if TYPE_CHECKING`: only the type checker reads the import."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """Return the key of a module in `LAYERS`, or "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


PATHS = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "examples")
TREES = {name_of(path): ast.parse(path.read_text(), str(path)) for path in PATHS}
each_module = pytest.mark.parametrize("module", list(TREES))


def imports_of(module: str) -> list[Import]:
    return list(_walk(TREES[module], is_run=True))


def _walk(node: ast.AST, is_run: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, is_run)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative imports hide where they point"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield Import(whole if whole in TREES else str(child.module), child.lineno, is_run)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), is_run=False)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), is_run)
        else:
            yield from _walk(child, is_run)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# -- imports ---------------------------------------------------------------------------------------------------------


def test_the_reader_of_imports_reads_them_all() -> None:
    assert {"mpicomm", "mpicomm.mpi", "mpicomm.job.bootstrap", "mpicomm.job.rendezvous"} <= set(TREES)
    targets = {each.target for each in imports_of("mpicomm.job.rendezvous")}
    assert {"mpicomm.errors", "mpicomm.topology", "mpi4py.MPI", "torch.distributed"} <= targets
    assert [each.is_run for each in imports_of("mpicomm.job.rendezvous") if each.target == "mpi4py.MPI"] == [False]


@each_module
def test_imports_point_down(module: str) -> None:
    """This includes imports for the type checker: a module refers only to lower layers."""
    if not layer_of(module):
        pytest.skip("the package's own module names the public ones, on first use")
    layer = layer_of(module)
    wrong = []
    for each in imports_of(module):
        if not within(each.target, "mpicomm"):
            continue
        target = layer_of(each.target)
        both_in_base = LAYERS[layer] == BASE == LAYERS.get(target)
        if not (target == layer or both_in_base or LAYERS.get(target, 99) < LAYERS[layer]):
            wrong.append(f"{module}:{each.line} imports {each.target}")
    assert not wrong


def test_imports_make_no_circles() -> None:
    graph = {
        module: {each.target for each in imports_of(module) if each.is_run and each.target in TREES} - {"mpicomm"}
        for module in TREES
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph) + ("mpicomm" not in graph)


@each_module
def test_the_package_imports_nothing_that_is_not_installed_with_it(module: str) -> None:
    assert not {each.target.split(".")[0] for each in imports_of(module)} & {"benchmarks", "tests"}


@pytest.mark.parametrize("module", [module for module in TREES if LAYERS.get(layer_of(module)) == BASE])
def test_the_ground_floor_needs_the_standard_library_alone(module: str) -> None:
    roots = {each.target.split(".")[0] for each in imports_of(module)}
    allowed = {"mpicomm", "jinja2"} if module == TEMPLATE_MODULE else {"mpicomm"}
    assert roots <= set(sys.stdlib_module_names) | allowed


@each_module
def test_mpi4py_is_imported_by_one_module(module: str) -> None:
    if module == MPI_MODULE:
        return
    assert [each for each in imports_of(module) if each.is_run and within(each.target, "mpi4py")] == []


@each_module
def test_private_names_of_torch_are_used_in_one_module(module: str) -> None:
    if module == PRIVATE_TORCH_MODULE:
        return
    imported = [each.target for each in imports_of(module) if within(each.target, "torch") and "._" in each.target]
    used = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node).split(".")[0] in {"torch", "dist"}
    ]
    assert imported + used == []


@each_module
def test_pickles_are_loaded_only_in_the_modules_that_security_md_names(module: str) -> None:
    """Operations exchange objects, and checkpoints contain them. The out-of-band channel and the store carry none."""
    pickles = {each.target for each in imports_of(module)} & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert not pickles or module in {
        "mpicomm.collective_ops.pytree",
        "mpicomm.training.checkpoint",
        "mpicomm.recorder.torch_format",  # writes them only
    }
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node), f"line {node.lineno}"


def test_importing_the_package_imports_little_of_ours() -> None:
    """The modules that the public names need are imported on first use."""
    at_top = {each.target for each in imports_of("mpicomm") if each.is_run}
    assert {target for target in at_top if within(target, "mpicomm")} == {"mpicomm.backend.registration"}


# -- names -----------------------------------------------------------------------------------------------------------


def test_no_top_level_module_bears_the_name_of_a_public_function() -> None:
    """`mpicomm.shutdown` would be the function or the module, depending on earlier imports."""
    assert not {layer_of(module) for module in TREES} & set(mpicomm.__all__)


def test_public_names_are_sorted_and_listed() -> None:
    assert list(mpicomm.__all__) == sorted(mpicomm.__all__)
    assert dir(mpicomm) == sorted(mpicomm.__all__)
    assert set(mpicomm._module_by_name()) == set(mpicomm.__all__) - {"__version__"}


@pytest.mark.parametrize("name", mpicomm.__all__)
def test_a_public_name_resolves_to_its_home(name: str) -> None:
    value = getattr(mpicomm, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__ == mpicomm._module_by_name()[name]


@pytest.mark.parametrize("name", [name for name in mpicomm.__all__ if not name.startswith("__")])
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(mpicomm, name)
    assert inspect.cleandoc(value.__doc__ or "").splitlines()[0].endswith((".", "command", "can"))
    if inspect.isclass(value):
        assert not value.__doc__.startswith(f"{name}("), "dataclasses write such a text where there is none"
        methods = [each for key, each in vars(value).items() if inspect.isfunction(each) and not key.startswith("_")]
        assert all(method.__doc__ for method in methods)
    else:
        for parameter in inspect.signature(value).parameters:
            assert f"    {parameter}: " in value.__doc__, f"{parameter} is not explained"


def test_type_checkers_find_the_public_names() -> None:
    """A name imported `as` itself is public to type checkers; `__all__` is computed from these imports."""
    imports = [node for node in ast.walk(TREES["mpicomm"]) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module not in ("__future__", "typing", "mpicomm.backend")]
    assert {(alias.name, alias.asname): node.module for node in ours for alias in node.names} == {
        (name, name): home for name, home in mpicomm._module_by_name().items()
    }


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mpicomm' has no attribute 'bootstarp'"):
        mpicomm.bootstarp  # noqa: B018


def test_examples_are_one_copy() -> None:
    assert (ROOT / "examples").samefile(PACKAGE / "examples")
    assert (PACKAGE / "examples").readlink() == Path("../examples")


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
