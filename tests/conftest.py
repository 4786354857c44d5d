"""What holds for every test: one thread for numerics, and the same examples on every run."""

from __future__ import annotations

import os

# Before any library reads them. More threads than cores make small kernels wait for each other,
# and a thread count that differs from machine to machine changes the order of sums.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reads the network

from hypothesis import settings  # noqa: E402

settings.register_profile("hal", deadline=None, derandomize=True, database=None)
settings.load_profile("hal")
