"""Proofs of identity: passwords, tokens, keys, certificates, JWTs, and the back-off for guesses."""
