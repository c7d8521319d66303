"""The tables of figures in the documents: `python -m tests.docs.figures` writes them from docs/results.

Each table is between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from typing import Any

from mpicomm.doctor.fabric_rules import RULES, Source
from mpicomm.launch import environment
from tests.compat import results
from tests.launching import ROOT

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "fault-tolerance.md",
    ROOT / "docs" / "compatibility.md",
    ROOT / "docs" / "horovod.md",
    ROOT / "docs" / "tools.md",
    ROOT / "docs" / "reference.md",
    ROOT / "benchmarks" / "README.md",
)
_RESULTS = ROOT / "docs" / "results"
_PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_SIZES = {4: "4 B", 2**10: "1 KiB", 2**16: "64 KiB", 2**20: "1 MiB", 2**24: "16 MiB", 2**26: "64 MiB"}
_LIBRARIES = {"openmpi": "Open MPI", "mpich": "MPICH"}


def written(text: str) -> str:
    """Return a document with its tables generated from the results."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text())
    return found


def _table(*rows: tuple[str, ...], align: str = "---:") -> str:
    rule = ("---", *[align] * (len(rows[0]) - 1))
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _all_reduce() -> str:
    result = _result("all-reduce-2-openmpi")
    us = {(row["nbytes"], row["backend"]): row["us"] for row in result["rows"] if row["in_place"]}
    rows = [
        (size, *(_us(us[nbytes, backend]) for backend in ("mpi", "gloo", "mpi4py")),
            f"{us[nbytes, 'gloo'] / us[nbytes, 'mpi']:.1f}")
        for nbytes, size in _SIZES.items()
    ]  # fmt: skip
    return _table(("all_reduce, microseconds", "mpicomm", "Gloo", "mpi4py", "Gloo / mpicomm"), *rows)


def _ratios() -> str:
    found = {called: _result(f"ratios-{name}")["ratios"] for name, called in _LIBRARIES.items()}
    rows = [
        (ours["what"], *(f"{each['value']:.3g}" for each in (ours, theirs)),
            f"{'≥' if ours['is_least'] else '≤'} {ours['target']:g}")
        for ours, theirs in zip(*found.values(), strict=True)
    ]  # fmt: skip
    return _table(("what", *found, "target"), *rows)


def _steps() -> str:
    ms = {(row["model"], row["strategy"], row["backend"]): row for row in _result("ddp-2-openmpi")["rows"]}
    kinds = dict.fromkeys((model, strategy) for model, strategy, _ in ms)
    rows = [
        (f"{strategy.upper()}, {ms[model, strategy, 'mpi']['parameters']:,} parameters",
            *(f"{ms[model, strategy, backend]['ms']:.2f}" for backend in ("mpi", "gloo", "none")))
        for model, strategy in kinds
    ]  # fmt: skip
    return _table(("milliseconds per step", "mpicomm", "Gloo", "no communication"), *rows)


def _microseconds() -> str:
    found = {called: _result(f"microseconds-2-{name}")["us"] for name, called in _LIBRARIES.items()}
    parts = next(iter(found.values()))
    return _table(
        ("4 B, microseconds", *found), *((part, *(f"{us[part]:.2f}" for us in found.values())) for part in parts)
    )


def _small_operations() -> str:
    found = [_result(f"microseconds-2-{name}")["operations"] for name in _LIBRARIES]
    columns = ("mpi4py", "none", "mpi", "added", "mpi-async")
    heads = ("mpi4py", "torch", "mpicomm", "added", "asynchronous")
    rows = [
        (f"{of_each[0]['operation']}, {of_each[0]['bytes']} B",
            *(f"{each[column]:.1f}" for each in of_each for column in columns))
        for of_each in zip(*found, strict=True)
    ]  # fmt: skip
    return _table(("microseconds", *(f"{called}: {head}" for called in _LIBRARIES.values() for head in heads)), *rows)


def _steadiness() -> str:
    found = {called: _result(f"steadiness-2-{name}") for name, called in _LIBRARIES.items()}
    trips = [each["microseconds"]["round trip of 1 B"] for each in found.values()]
    rows = [("round trip of 1 B, us", *(f"{trip[each]:.3g}" for trip in trips for each in ("50", "0")))]
    for name in found["Open MPI"]["ratios"]:
        ratios = [each["ratios"][name] for each in found.values()]
        rows.append((name, *(f"{each[which]:.3g}" for each in ratios for which in ("50", "100"))))
    return _table(("mpi4py / mpicomm", *(f"{name}, {which}" for name in found for which in ("median", "best"))), *rows)


def _multi_node() -> str:
    found = _result("multi-node-2x2-mpich")["rows"]
    us = {(row["operation"], row["backend"]): row["us"] for row in found if row["in_place"]}
    rows = [
        (operation, *(f"{us[operation, way] / 1000:.0f}" for way in ("hierarchical", "MPI alone")))
        for operation in ("all_reduce", "all_reduce_avg")
    ]
    return _table(("64 MiB, milliseconds", "hierarchical", "MPI alone"), *rows)


def _recovery() -> str:
    result = _result("recovery-4-openmpi")
    kinds = {"all kills": "gap_s", "without spares": "gap_s_without_spares", "with spares": "gap_s_with_spares"}
    rows = [
        (kind, str(result[name]["number"]), *(f"{result[name][each]:.2f}" for each in ("p50", "p95", "max")))
        for kind, name in kinds.items()
    ]
    return _table(("seconds from a kill to the next step", "number", "median", "95th percentile", "maximum"), *rows)


def _fault_tolerance() -> str:
    rows = [
        (case, *(_us(figures[state]) for state in ("without", "with")), f"{figures['ratio']:.2f}")
        for case, figures in _result("fault-tolerance-2-openmpi")["figures"].items()
    ]
    return _table(("microseconds", "without", "with `--fault-tolerant`", "ratio"), *rows)


def _recovery_peers() -> str:
    systems = _result("recovery-peers-openmpi")["systems"]
    rows = [
        (name, f"{row['continued']} of {row['kills']}",
            *(f"{row['gap_s'][each]:.2f}" for each in ("p50", "p95", "max")), str(row["discarded_steps"]))
        for name, row in systems.items()
    ]  # fmt: skip
    columns = ("jobs that continued", "median", "95th percentile", "maximum", "discarded steps, at most")
    return _table(("seconds from a kill to the next step", *columns), *rows)


def _recovery_on_hosts() -> str:
    result = _result("recovery-hosts-openmpi")
    of_what: dict[str, dict[int, dict[str, Any]]] = {}
    for each in result["faults"]:
        of_what.setdefault(each["what"], {})[each["hosts"]] = each
    continuations = {
        "in place": "the other ranks continue in place",
        "restarted": "the job ends; `--max-restarts` starts it again on the other hosts",
    }
    rows = [
        (what, continuations[by_hosts[2]["way"]], *(f"{by_hosts[size]['gap_s']:.1f}" for size in (2, 4)))
        for what, by_hosts in of_what.items()
    ]
    return _table(("fault", "continuation", "2 hosts, s", "4 hosts, s"), *rows)


def _status() -> str:
    """Return an item of a list: the versions with which the compatibility suite ran without a failure."""
    found = sorted(results.read_all(), key=results.order)
    passed = [each["versions"] for each in found if all(not part["failures"] for part in each["parts"].values())]
    mpis = ", ".join(" ".join(each) for each in sorted({results.mpi_of(versions) for versions in passed}))
    others = (
        f"{name} {', '.join(dict.fromkeys(versions[name].partition('+')[0] for versions in passed))}"
        for name in ("torch", "Python", "mpi4py")
    )
    text = f"The compatibility suite passes with {mpis}; {'; '.join(others)}."
    return "".join(f"{line}\n" for line in textwrap.wrap(text, 118, initial_indent="- ", subsequent_indent="  "))


def _compatibility() -> str:
    found = sorted(results.read_all(), key=results.order)
    rows = [
        (v["torch"], v["Python"], " ".join(results.mpi_of(v)), v["mpi4py"], v["NumPy"],
            results.outcome(result["parts"]), result["date"])
        for result in found
        for v in [result["versions"]]
    ]  # fmt: skip
    return _table(("torch", "Python", "MPI", "mpi4py", "NumPy", "result", "date"), *rows, align="---")


def _gpus() -> str:
    rows = []
    for path in sorted(_RESULTS.glob("gpu-tests-*.json")):
        result = json.loads(path.read_text())
        devices, versions, parts = result["devices"], result["versions"], result["parts"]
        name, version = next((name, version) for name, version in versions.items() if "MPI" in name)
        good = sum(set(part["statuses"]) == {0} for part in parts.values())  # None: it timed out
        names = ", ".join(sorted(set(devices["names"])))
        is_aware = "yes" if devices.get("GPU-aware MPI") else "no"
        rows.append(
            (
                f"{len(devices['names'])} {names}",
                versions["torch"],
                f"{name} {version}",
                is_aware,
                f"{good} of {len(parts)} parts",
                result["date"],
            )
        )
    return _table(("GPU", "torch", "MPI", "GPU-aware", "result", "date"), *rows, align="---")


def _gpu_throughput() -> str:
    found = {path.stem: json.loads(path.read_text()) for path in sorted(_RESULTS.glob("gpu-*-2-*.json"))}
    names = {name: f"{_LIBRARIES[name.split('-')[-1]]}, {name.split('-')[1]}" for name in found}
    rows = [
        (
            f"{operation}, {size}",
            *(f"{result['gibibytes_per_second'][size][operation]:.1f}" for result in found.values()),
        )
        for operation in (
            "all_reduce, GPU",
            "all_reduce, host",
            "broadcast, GPU",
            "broadcast, host",
            "plain copy to the GPU",
        )
        for size in ("1 MiB", "64 MiB")
    ]
    return _table(("GiB/s", *names.values()), *rows)


def _horovod_steps() -> str:
    found = {called: _result(f"horovod-steps-2-{name}")["steps"] for name, called in _LIBRARIES.items()}
    rows = [
        (f"{called}, {each['parameters']:,} parameters",
            *(f"{each[f'{kind}, least']:.2f}" for kind in ("hvd.DistributedOptimizer", "DistributedDataParallel")),
            f"{each['ratio, median of the rounds']:.2f}")
        for called, steps in found.items()
        for each in steps.values()
    ]  # fmt: skip
    return _table(("milliseconds per step", "hvd.DistributedOptimizer", "DistributedDataParallel", "ratio"), *rows)


def _top() -> str:
    result = _result("top-48-openmpi")
    phases = {"busy": "all ranks are in operations", "sleeping": "all ranks sleep 1 s between operations"}
    rows = [
        (
            phases[phase],
            *(f"{result[phase][what][each]:.3f}" for what in ("answer", "command") for each in ("median", "max")),
        )
        for phase in phases
    ]
    columns = tuple(f"{what}, {each}" for what in ("status of all ranks", "command") for each in ("median", "maximum"))
    return _table(("seconds", *columns), *rows)


def _doctor() -> str:
    return f"```text\n{(_RESULTS / 'doctor.txt').read_text()}```\n"


def _forwarded() -> str:
    rows = [(subject, ", ".join(f"`{name}`" for name in names)) for subject, names in environment.FORWARDED.items()]
    return _table(("variables of", "names and patterns"), *rows, align="---")


def _fabric() -> str:
    settings: dict[tuple[Source, str], list[str]] = {}
    for rule in RULES:
        name = f"`{rule.setting}`" if rule.setting.isupper() else rule.setting
        settings.setdefault((rule.source, rule.network), []).append(name)
    rows = [
        (network, ", ".join(dict.fromkeys(names)), f"[{source.title}]({source.url})", source.date)
        for (source, network), names in settings.items()
    ]
    return _table(("network", "settings", "source", "date"), *rows, align="---")


TABLES: dict[str, Callable[[], str]] = {
    "all-reduce": _all_reduce,
    "ratios": _ratios,
    "steps": _steps,
    "microseconds": _microseconds,
    "small-operations": _small_operations,
    "steadiness": _steadiness,
    "multi-node": _multi_node,
    "recovery": _recovery,
    "recovery-hosts": _recovery_on_hosts,
    "fault-tolerance": _fault_tolerance,
    "recovery-peers": _recovery_peers,
    "horovod-steps": _horovod_steps,
    "top": _top,
    "status": _status,
    "compatibility": _compatibility,
    "doctor": _doctor,
    "gpus": _gpus,
    "gpu-throughput": _gpu_throughput,
    "forwarded": _forwarded,
    "fabric": _fabric,
}


def write() -> None:
    for document in DOCUMENTS:
        document.write_text(written(document.read_text()))


if __name__ == "__main__":
    write()
