"""Batches on a cluster: replicas of a model in the actors of a Ray Data pipeline.

    import nanoinfer.ray
    ds = ray.data.read_parquet("s3://bucket/prompts")
    ds.map_batches(nanoinfer.ray.Generator, fn_constructor_kwargs={"model": "shakespeare"}, concurrency=4)

Importing this package does not import ray.
"""

from __future__ import annotations

from nanoinfer.ray.generator import Generator

__all__ = ["Generator"]
