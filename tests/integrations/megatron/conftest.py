"""One process of one rank for the tests here."""

import os
from collections.abc import Iterator

import pytest

# megatron-core's own small functions run as they are, here and on the ranks that tests start: compiling them on a CPU
# takes longer than all tests.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch.distributed as dist


@pytest.fixture(scope="package", autouse=True)
def one_rank() -> Iterator[None]:
    from tests.integrations.megatron import cpu

    with cpu.rank(dist.HashStore()):
        yield
