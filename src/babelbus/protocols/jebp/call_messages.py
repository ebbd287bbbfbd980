"""Parameters, messages and results of the methods of jebp/1.2; both sides use them."""

import msgspec


class ListMethods(msgspec.Struct, frozen=True, array_like=True):
    """`methods`: the names of the methods that the server knows, sorted."""
