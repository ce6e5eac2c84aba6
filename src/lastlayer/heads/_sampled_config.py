"""Samplers in the configuration of a head: their name and their arguments."""

from typing import Any

from lastlayer.samplers import Sampler


def sampler_to_config(sampler: Sampler) -> dict[str, Any]:
    """As JSON can hold it; the tables are part of the head's state."""
    return {"name": type(sampler).__name__, "arguments": sampler.config()}


def sampler_from_config(config: dict[str, Any]) -> Sampler:
    """A sampler whose state is still to be loaded."""
    found = [each for each in _below(Sampler) if each.__name__ == config["name"]]
    if len(found) != 1:
        trouble = "none is imported" if not found else f"{len(found)} have this name"
        raise ValueError(
            f"sampler: expected a class named {config['name']!r} below lastlayer.samplers.Sampler, "
            f"got no single one: {trouble}; import the module that defines it before loading"
        )
    return found[0].from_config(config["arguments"])


def _below(cls: Any) -> list[type[Sampler]]:
    return [each for child in cls.__subclasses__() for each in (child, *_below(child))]
