"""A pipeline's file -> the pipeline and its functions; every refusal names the file and the field."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import msgspec

from babelbus.spark.errors import PipelineError
from babelbus.spark.pipelines.model import Function, Pipeline, Scalar, Step, Wrong, check_scalars, fill, read

SUFFIXES = (".yaml", ".yml", ".py")
VARIABLE = "pipeline"
"""Name of the dictionary in a Python file."""


class Loaded(msgspec.Struct, frozen=True):
    """A pipeline that was read, with the functions of its Python steps by the steps' names."""

    file: str
    pipeline: Pipeline
    functions: dict[str, Function]


def load(file: str, settings: Mapping[str, str] | None = None) -> Loaded:
    """Read a pipeline; `settings` are given to its parameters.

    Python code of the file (and of modules that its steps name) runs, so it must be trusted.

    Raises:
        PipelineError: the file cannot be read, or a field of it is wrong.
    """
    if not os.path.isfile(file):
        is_folder = os.path.isdir(file)
        raise PipelineError(file, "", "it is a folder: name a file in it" if is_folder else "there is no such file")
    if not file.endswith(SUFFIXES):
        raise PipelineError(file, "", f"a pipeline's file ends in {', '.join(SUFFIXES)}")
    try:
        module = load_module(file) if file.endswith(".py") else None
        given: Any = _read_yaml(file) if module is None else _read_variable(module)
        given = _fill(given, settings or {})
        if module is not None and isinstance(given, dict):
            given.setdefault("description", (module.__doc__ or "").strip().partition("\n")[0])
            own = given.get("steps") or {}
            given["steps"] = _own_steps(module, file) | own if isinstance(own, dict) else own
        pipeline = read(given)
        functions = {
            name: _function(file, f"steps.{name}.python", step)
            for name, step in pipeline.steps.items()
            if step.python is not None
        }
        _check_inputs(pipeline, functions)
    except Wrong as wrong:
        raise PipelineError(file, wrong.field, wrong.problem) from None
    except OSError as error:
        raise PipelineError(file, "", f"it cannot be read: {error.strerror}") from error
    except RecursionError:
        raise PipelineError(file, "", "a part of it contains itself, or its parts are nested too deeply") from None
    return Loaded(file, pipeline, functions)


def find(path: str) -> Iterator[str]:
    """Yield the files of a folder that may be pipelines, sorted: YAML, and Python with a variable `pipeline`."""
    if os.path.isfile(path):
        yield path
        return
    for entry in sorted(os.listdir(path)):
        file = os.path.join(path, entry)
        if entry.startswith(("_", ".")) or not os.path.isfile(file) or not entry.endswith(SUFFIXES):
            continue
        if entry.endswith(".py"):
            # A file that cannot be read is refused when it is loaded.
            with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as source:
                if not any(line.startswith((f"{VARIABLE} ", f"{VARIABLE}:", f"{VARIABLE}=")) for line in source):
                    continue
        yield file


def load_module(file: str) -> ModuleType:
    """Run a Python file as a module; its functions travel to Spark's workers by value, for no worker can import it.

    Raises:
        Wrong: it has an error.
    """
    path = os.path.abspath(file)
    name = f"babelbus_pipeline_{os.path.splitext(os.path.basename(path))[0]}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise Wrong("", f"{type(error).__name__} when the file is run: {error}") from error
    from pyspark.cloudpickle import register_pickle_by_value

    register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def _read_yaml(file: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what YAML has and a pipeline cannot have, by its line."""

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, LookupError, AttributeError):
                kind, line = node.tag.rpartition(":")[2], node.start_mark.line + 1
                raise Wrong("", f"line {line}: {node.value!r} is no {kind}: write a text in quotes") from None

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            """Refuse a key that is there twice: the last one would replace the first one in silence."""
            seen: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                name = str(key.value)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise Wrong("", f"line {line}: the key {name!r} is there twice: write it once")
                seen.add(name)
            mapping = super().construct_mapping(node, deep)
            for key in mapping:
                if not isinstance(key, str):
                    raise Wrong("", f"line {node.start_mark.line + 1}: the key {key!r} is no text: write it in quotes")
            return mapping

    with open(file, encoding="utf-8") as source:
        try:
            return yaml.load(source, Loader)  # noqa: S506 - it is a safe one
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise Wrong("", f"it is no YAML: {' '.join(str(error).split())}") from None


def _read_variable(module: ModuleType) -> Any:
    given = getattr(module, VARIABLE, None)
    if given is None:
        raise Wrong("", f"the file has no variable '{VARIABLE}': a dictionary with name, sources and sinks")
    return given


def _fill(given: Any, settings: Mapping[str, str]) -> Any:
    if not isinstance(given, dict):
        return given
    parameters = given.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Wrong("parameters", "a mapping of names to values is needed")
    check_scalars("parameters", parameters)
    for name in settings:
        if name not in parameters:
            raise Wrong(
                "parameters", f"there is no parameter {name!r} to set; there are: {', '.join(parameters) or 'none'}"
            )
    known = {name: _like(name, parameters[name], settings[name]) for name in settings}
    filled: dict[str, Any] = fill({k: v for k, v in given.items() if k != "parameters"}, parameters | known)
    return filled | {"parameters": parameters | known}


def _like(name: str, default: Scalar, text: str) -> Scalar:
    """Return what the user wrote with the type of the default."""
    if isinstance(default, str):
        return text
    try:
        value = msgspec.convert(text, type(default), strict=False)
    except msgspec.ValidationError:
        raise Wrong(f"parameters.{name}", f"{text!r} is no {type(default).__name__}, as {default!r} is") from None
    assert isinstance(value, int | float | bool)
    return value


def _own_steps(module: ModuleType, file: str) -> dict[str, Any]:
    """Return the functions of a Python file whose first parameter is `spark`: each is a step of its name."""
    steps: dict[str, Any] = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            parameters = list(inspect.signature(value).parameters)
            if parameters[:1] == ["spark"]:
                steps[name] = {"python": f"{os.path.basename(file)}:{name}"}
    return steps


def _function(file: str, field: str, step: Step) -> Function:
    assert step.python is not None
    where, _, name = step.python.rpartition(":")
    if not where or not name.isidentifier():
        raise Wrong(field, f"{step.python!r} names no function: write file.py:function or package.module:function")
    if where.endswith(".py"):
        path = os.path.join(os.path.dirname(file), where)
        if not os.path.isfile(path):
            raise Wrong(field, f"there is no file {path}")
        try:
            module = load_module(path)
        except Wrong as wrong:
            raise Wrong(field, f"{where}: {wrong.problem}") from wrong
    else:
        try:
            module = importlib.import_module(where)
        except (Exception, SystemExit) as error:
            raise Wrong(field, f"module {where!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Wrong(field, f"{where} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _check_inputs(pipeline: Pipeline, functions: Mapping[str, Function]) -> None:
    """Check that the inputs of each step and sink are defined above it.

    Raises:
        Wrong: an input is not defined above.
    """
    known = {"spark", *pipeline.parameters, *pipeline.sources}
    for name, step in pipeline.steps.items():
        if step.python is not None:
            try:
                parameters = inspect.signature(functions[name]).parameters
            except ValueError:  # some of what is written in C
                raise Wrong(f"steps.{name}.python", f"{step.python!r} does not tell its parameters") from None
            if not parameters or next(iter(parameters)) != "spark":
                raise Wrong(f"steps.{name}.python", "the first parameter of its function must be 'spark', the session")
            for parameter in parameters.values():
                if parameter.name not in known and parameter.default is parameter.empty:
                    raise Wrong(
                        f"steps.{name}.python",
                        f"its parameter {parameter.name!r} is no source, parameter or step above it;"
                        f" there are: {', '.join(sorted(known - {'spark'}))}",
                    )
        known.add(name)
    frames = [*pipeline.sources, *pipeline.steps]
    for name, sink in pipeline.sinks.items():
        if sink.input not in frames:
            raise Wrong(
                f"sinks.{name}.from", f"there is no source or step {sink.input!r}; there are: {', '.join(frames)}"
            )
