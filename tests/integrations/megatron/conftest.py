"""One process of one rank for the tests here."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="package", autouse=True)
def one_rank() -> Iterator[None]:
    from tests.integrations.megatron import cpu

    with cpu.rank(dist.HashStore()):
        yield
