"""The graph of a pipeline: which source or step feeds which step or sink, as the console draws it."""

import inspect
import re
from typing import Any

from babelbus.spark.pipelines.load import Loaded
from babelbus.spark.pipelines.model import Sink, Source, Step

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|--[^\n]*|/\*.*?\*/", re.DOTALL)


def graph(loaded: Loaded) -> dict[str, list[dict[str, Any]]]:
    """Return for each sink the nodes that lead to it, sources first, the sink last.

    A step is fed by each source or step above it that its SQL names, or that is a parameter of its function.
    """
    pipeline = loaded.pipeline
    nodes: dict[str, dict[str, Any]] = {}
    for name, source in pipeline.sources.items():
        nodes[name] = _node(name, "source", _of_source(source), [])
    for name, step in pipeline.steps.items():
        words = _names(loaded, name, step)
        nodes[name] = _node(name, "step", _of_step(step), [one for one in nodes if one in words])
    found = {}
    for name, sink in pipeline.sinks.items():
        needed = {sink.input}
        for one in reversed(nodes):
            if one in needed:
                needed.update(nodes[one]["inputs"])
        above = [node for one, node in nodes.items() if one in needed]
        found[name] = [*above, _node(name, "sink", _of_sink(sink), [sink.input])]
    return found


def _node(name: str, kind: str, about: str, inputs: list[str]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "about": about, "inputs": inputs}


def _names(loaded: Loaded, name: str, step: Step) -> set[str]:
    """Return the names that a step may read; SQL knows no difference between a table and a column of its name."""
    if step.sql is not None:
        return set(_WORD.findall(_QUOTED.sub(" ", step.sql)))
    return set(inspect.signature(loaded.functions[name]).parameters)


def _of_source(source: Source) -> str:
    if source.topic is not None:
        return f"topic {source.topic if isinstance(source.topic, str) else ', '.join(source.topic)}"
    if source.pattern is not None:
        return f"topics {source.pattern}"
    if source.state:
        return "state"
    return f"parquet {source.parquet}" if source.parquet is not None else f"format {source.format}"


def _of_step(step: Step) -> str:
    return "SQL" if step.sql is not None else f"Python {step.python}"


def _of_sink(sink: Sink) -> str:
    if sink.topic is not None:
        return "the topic of each row" if sink.topic is True else f"topic {sink.topic}"
    for kind in ("state", "parquet", "delta", "format"):
        if (place := getattr(sink, kind)) is not None:
            return f"{kind} {place}"
    return "console"
