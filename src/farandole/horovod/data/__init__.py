"""Horovod's base classes for data loaders, under its names."""

from __future__ import annotations

from farandole.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
