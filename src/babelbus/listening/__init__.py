"""Connections before their protocol: TLS, caps for each address, quotas for each principal"""
