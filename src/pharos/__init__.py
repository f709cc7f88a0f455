"""Pharos: language models from prefetch through evaluation and LoRA to two gates.

Importing this package imports nothing numerical, so that threads can be bound first
(see :mod:`pharos.runtime.threads`).
"""

__version__ = "0.1.0"
