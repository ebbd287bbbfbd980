"""Pipelines as files (docs/pipeline.md): sources, steps in SQL or Python, sinks; checked, started, watched, stopped."""
