"""numpy, loaded by its first use: a server without records, and a client, work without its 12 MiB."""

import importlib
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["I8", "I32", "I64", "U8", "U32", "Flags", "Rows", "is_loaded", "load", "load_soon", "np"]


class _Late(ModuleType):
    """Becomes the module of its name by the first use, and costs nothing more from then on."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)  # its lock lets threads that come together wait
        vars(self).update(vars(module))
        self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(module, name)


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    I8 = npt.NDArray[np.int8]
    I32 = npt.NDArray[np.int32]
    I64 = npt.NDArray[np.int64]
    U8 = npt.NDArray[np.uint8]
    U32 = npt.NDArray[np.uint32]
    Flags = npt.NDArray[np.bool_]
    Rows = npt.NDArray[np.void]
else:
    np = _Late("numpy")
    I8 = I32 = I64 = U8 = U32 = Flags = Rows = Any


def is_loaded() -> bool:
    """Return whether the next use of numpy costs nothing."""
    return type(np) is ModuleType


def load() -> None:
    """Load numpy now: before clients come, or in a thread, for it takes about 80 ms."""
    np.ndarray  # noqa: B018 - the use is the purpose


def load_soon() -> None:
    """Load numpy in a thread: something came that soon may need it, and the event loop shall not wait for it."""
    if not is_loaded():
        threading.Thread(target=load, name="load-numpy", daemon=True).start()
