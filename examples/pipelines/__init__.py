"""Pipelines that are ready to run, and to be copied and changed (docs/pipeline.md)."""
