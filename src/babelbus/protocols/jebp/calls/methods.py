"""The methods that a server of jebp/1.2 knows: name -> parameters and function, from one module for each family."""

from typing import Final

from babelbus.protocols.jebp.call_messages import ListMethods
from babelbus.protocols.jebp.calls import groups, live, requests
from babelbus.protocols.jebp.calls.call import Method

METHODS: Final[dict[str, Method]] = {
    "methods": Method(ListMethods, lambda call, _: call.methods),
    **groups.METHODS,
    **live.METHODS,
    **requests.METHODS,
}
"""All of them. A server may add methods to its copy (`JebpService.methods`) before it starts."""
