"""The report of ``lastlayer doctor``: versions, devices, kernels and missing extras."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from lastlayer import kernels

PACKAGE = "lastlayer"
CORE = (PACKAGE, "torch", "triton", "numba", "numpy")
# The device type of each implementation.
KERNELS_OF = {"triton": "cuda", "cpu": "cpu"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def examine() -> dict[str, Any]:
    """Inspects this machine and this installation; versions and reasons may be None."""
    devices = list(_devices())
    versions = {"python": platform.python_version()} | {name: _version(name) for name in CORE}
    return {
        "versions": versions,
        "devices": devices,
        "implementations": {
            name: {"runs": reason is None, "reason": reason}
            for name, reason in kernels.available().items()
        },
        "kernels": [
            {
                "op": op,
                "device_type": kind,
                "dtype": str(dtype).removeprefix("torch."),
                "implementation": kernels.selected(op, kind, dtype),
            }
            for op in kernels.operations()
            for kind in dict.fromkeys(device["type"] for device in devices)
            for dtype in DTYPES
        ],
        "extras": list(_extras()) if versions[PACKAGE] else [],
    }


def conclusion(report: dict[str, Any]) -> str:
    """One sentence: whether the fast kernels run here, and what to install."""
    kinds = list(dict.fromkeys(device["type"] for device in report["devices"]))
    gpu = "CUDA GPUs" if torch.version.hip is None else "ROCm GPUs"
    names = {"cpu": "the CPU", "cuda": gpu}
    where = " and ".join(names[kind] for kind in kinds if kind in names)
    if not report["versions"].get(PACKAGE):
        return f"{PACKAGE} runs from its source tree on {where}: install it with pip install -e ."
    broken = [
        f"the {name} kernels cannot run ({each['reason']})"
        for name, each in report["implementations"].items()
        if not each["runs"] and KERNELS_OF.get(name) in kinds
    ]
    if broken:
        said = f"{PACKAGE} works on {where}, but slower than it could: {'; '.join(broken)}"
    else:
        said = f"{PACKAGE} works on {where} with its fast kernels"
    if untried := [kind for kind in kinds if kind not in KERNELS_OF.values()]:
        said += f"; {', '.join(untried)}: plain torch code, untested there"
    lab = [extra for extra in report["extras"] if extra["name"] == "lab" and extra["missing"]]
    return f"{said}; lastlayer compare needs {lab[0]['command']}" if lab else f"{said}."


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[dict[str, Any]]:
    yield {
        "device": "cpu",
        "type": "cpu",
        "name": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield {
            "device": f"cuda:{index}",
            "type": "cuda",
            "name": gpu.name,
            "capability": f"capability {gpu.major}.{gpu.minor}",
            "memory_bytes": gpu.total_memory,
        }
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type != "cuda":
        for index in range(torch.accelerator.device_count()):
            yield {"device": f"{other.type}:{index}", "type": other.type}


def _extras() -> Iterator[dict[str, Any]]:
    """Yields each extra of this package, its missing requirements and the command to install it."""
    requirements = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or ():
        missing = [
            f"{each.name}{each.specifier}"
            for each in requirements
            if each.marker is not None
            and each.marker.evaluate({"extra": name})
            and not each.marker.evaluate({"extra": ""})
            and not _is_satisfied(each)
        ]
        yield {"name": name, "missing": missing, "command": f'pip install "{PACKAGE}[{name}]"'}


def _is_satisfied(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def render(report: dict[str, Any], out: Console) -> None:
    """Prints the report as tables."""
    versions = Table("package", "version", title="Versions", title_justify="left")
    for name, version in report["versions"].items():
        versions.add_row(name, version or "not installed")
    out.print(versions)

    devices = Table("device", "what it is", title="Devices", title_justify="left")
    for device in report["devices"]:
        parts = [device.get("name"), device.get("capability")]
        if "threads" in device:
            parts.append(f"{device['threads']} thread{'s' * (device['threads'] != 1)}")
        if "memory_bytes" in device:
            parts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
        devices.add_row(device["device"], ", ".join(part for part in parts if part))
    out.print(devices)

    kinds = list(dict.fromkeys(device["type"] for device in report["devices"]))
    table = Table("operation", *kinds, title="Kernels", title_justify="left")
    for op in dict.fromkeys(row["op"] for row in report["kernels"]):
        table.add_row(op, *(_choices(report["kernels"], op, kind) for kind in kinds))
    out.print(table)
    for name, each in report["implementations"].items():
        if not each["runs"]:
            _line(out, f"The {name} kernels cannot run here: {each['reason']}.")

    if not report["extras"]:
        _line(out, f"{PACKAGE} is not installed, so its extras are unknown: pip install -e .")
    for extra in report["extras"]:
        if extra["missing"]:
            missing = ", ".join(extra["missing"])
            _line(out, f"Extra {extra['name']} lacks {missing}: {extra['command']}")
        else:
            _line(out, f"Extra {extra['name']} is complete.")
    _line(out, conclusion(report))


def _choices(rows: list[dict[str, str]], op: str, device_type: str) -> str:
    """One name if all dtypes use the same implementation, else each name with its dtypes."""
    dtypes_by_choice: dict[str, list[str]] = {}
    for row in rows:
        if (row["op"], row["device_type"]) == (op, device_type):
            dtypes_by_choice.setdefault(row["implementation"], []).append(row["dtype"])
    if len(dtypes_by_choice) == 1:
        return next(iter(dtypes_by_choice))
    return "; ".join(f"{name} ({', '.join(of)})" for name, of in dtypes_by_choice.items())


def _line(out: Console, text: str) -> None:
    # Commands are copied by users: no wrapping, and [extra] is not markup.
    out.print(text, markup=False, highlight=False, soft_wrap=True)
