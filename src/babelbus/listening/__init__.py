"""Admission of clients: TLS, caps for each address, quotas; known to the protocols and to the administration alike"""
