"""Sockets of whole packets (SOCK_SEQPACKET) for the processes of one machine, as sbus needs them."""

from babelbus.protocols.sbus.packets.listeners import ABSTRACT, Door, OpenDoor, open_door, read_door
from babelbus.protocols.sbus.packets.sockets import PacketServer

__all__ = ["ABSTRACT", "Door", "OpenDoor", "PacketServer", "open_door", "read_door"]
