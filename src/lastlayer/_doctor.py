"""What ``lastlayer doctor`` says: versions, devices, kernels, and the extras that are missing."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from lastlayer import kernels

PACKAGE = "lastlayer"
CORE = (PACKAGE, "torch", "triton", "numba", "numpy")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Device(NamedTuple):
    """A device that torch can compute on here."""

    device: str
    type: str
    name: str
    capability: str
    threads: int | None = None
    memory_bytes: int | None = None

    def describe(self) -> str:
        """One line for people."""
        parts = [self.name, self.capability]
        if self.threads is not None:
            parts.append(f"{self.threads} threads")
        if self.memory_bytes is not None:
            parts.append(f"{self.memory_bytes / 2**30:.0f} GiB")
        return ", ".join(part for part in parts if part)


class Kernel(NamedTuple):
    """The implementation that an operation takes for tensors of one device type and dtype."""

    op: str
    device_type: str
    dtype: str
    implementation: str


class Extra(NamedTuple):
    """An extra of this package, what it lacks here, and the command that adds it."""

    name: str
    missing: tuple[str, ...]
    command: str


class Report(NamedTuple):
    """Everything the doctor knows; versions and reasons are None where there is none."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    implementations: dict[str, str | None]
    kernels: tuple[Kernel, ...]
    extras: tuple[Extra, ...]

    def as_json(self) -> dict[str, object]:
        """The same as plain dictionaries and lists."""
        return {
            "versions": self.versions,
            "devices": [device._asdict() for device in self.devices],
            "implementations": {
                name: {"runs": reason is None, "reason": reason}
                for name, reason in self.implementations.items()
            },
            "kernels": [kernel._asdict() for kernel in self.kernels],
            "extras": [extra._asdict() for extra in self.extras],
        }


def examine() -> Report:
    """Looks at this machine and this installation."""
    devices = tuple(_devices())
    versions = {"python": platform.python_version()} | {name: _version(name) for name in CORE}
    return Report(
        versions=versions,
        devices=devices,
        implementations=dict(kernels.available()),
        kernels=tuple(_kernels(dict.fromkeys(device.type for device in devices))),
        extras=tuple(_extras()) if versions[PACKAGE] else (),
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Device]:
    capability = torch.backends.cpu.get_cpu_capability()
    yield Device("cpu", "cpu", platform.machine(), capability, threads=torch.get_num_threads())
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"capability {gpu.major}.{gpu.minor}"
        yield Device(f"cuda:{index}", "cuda", gpu.name, capability, memory_bytes=gpu.total_memory)
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type != "cuda":
        for index in range(torch.accelerator.device_count()):
            yield Device(f"{other.type}:{index}", other.type, "", "")


def _kernels(device_types: dict[str, None]) -> Iterator[Kernel]:
    for op in kernels.operations():
        for device_type in device_types:
            for dtype in DTYPES:
                chosen = kernels.selected(op, device_type, dtype)
                yield Kernel(op, device_type, str(dtype).removeprefix("torch."), chosen)


def _extras() -> Iterator[Extra]:
    requirements = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or ():
        wanted = [
            requirement
            for requirement in requirements
            if requirement.marker is not None
            and requirement.marker.evaluate({"extra": name})
            and not requirement.marker.evaluate({"extra": ""})
        ]
        missing = tuple(
            f"{requirement.name}{requirement.specifier}"
            for requirement in wanted
            if not _is_satisfied(requirement)
        )
        yield Extra(name, missing, f'pip install "{PACKAGE}[{name}]"')


def _is_satisfied(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def render(report: Report, out: Console) -> None:
    """Prints a report for people."""
    versions = Table("package", "version", title="Versions", title_justify="left")
    for name, version in report.versions.items():
        versions.add_row(name, version or "not installed")
    out.print(versions)

    devices = Table("device", "what it is", title="Devices", title_justify="left")
    for device in report.devices:
        devices.add_row(device.device, device.describe())
    out.print(devices)

    device_types = list(dict.fromkeys(device.type for device in report.devices))
    kernels = Table("operation", *device_types, title="Kernels", title_justify="left")
    for op in dict.fromkeys(kernel.op for kernel in report.kernels):
        kernels.add_row(op, *(_choices(report.kernels, op, kind) for kind in device_types))
    out.print(kernels)
    for name, reason in report.implementations.items():
        if reason is not None:
            _line(out, f"The {name} kernels cannot run here: {reason}.")

    if not report.extras:
        _line(out, f"{PACKAGE} is not installed, so its extras are unknown: pip install -e .")
    for extra in report.extras:
        if extra.missing:
            _line(out, f"Extra {extra.name} lacks {', '.join(extra.missing)}: {extra.command}")
        else:
            _line(out, f"Extra {extra.name} is complete.")


def _choices(kernels: tuple[Kernel, ...], op: str, device_type: str) -> str:
    """One name where all dtypes take the same implementation, else the dtypes of each."""
    dtypes_by_choice: dict[str, list[str]] = {}
    for kernel in kernels:
        if (kernel.op, kernel.device_type) == (op, device_type):
            dtypes_by_choice.setdefault(kernel.implementation, []).append(kernel.dtype)
    if len(dtypes_by_choice) == 1:
        return next(iter(dtypes_by_choice))
    return "; ".join(f"{name} ({', '.join(of)})" for name, of in dtypes_by_choice.items())


def _line(out: Console, text: str) -> None:
    # Commands are there to be copied: no wrapping, and [extra] is not markup.
    out.print(text, markup=False, highlight=False, soft_wrap=True)
