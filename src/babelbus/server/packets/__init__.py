"""Sockets of whole packets (SOCK_SEQPACKET) for the processes of one machine, as sbus needs them."""
