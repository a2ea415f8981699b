"""The order of a dataset of answers: batches share only what they hold together."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np

from dualkv.arrays import positive


def group_by_prompt(dataset: Any, batch_size: int, seed: int = 0) -> Any:
    """Put the rows of each prompt next to each other, and shuffle prompts.

        dataset = group_by_prompt(dataset, args.per_device_train_batch_size)

    Read the dataset in its order (`train_sampling_strategy="sequential"`). Batches take prompts one after the other, so
    a prompt is cut where the number of its answers does not divide the batch size. Within a batch rows of a prompt are
    apart from each other where possible: KTO's trainer estimates its KL term from each prompt and the completion of the
    row before, which should answer another prompt. For a dataset with labels a warning tells that a prompt has more
    than half of a batch.

    Args:
        dataset: a `datasets.Dataset` with a column "prompt", of texts or messages. Of a paired one for KTO, take what
            `trl.data_utils.unpair_preference_dataset` returns.
        batch_size: rows of a batch, TRL's `per_device_train_batch_size`.
        seed: of the shuffle.

    Returns:
        The same rows in another order.

    Raises:
        ValueError: a dataset without rows or without a column "prompt", a batch size below 1.
        TypeError: another dataset, such as one that is read as a stream.
    """
    positive("batch_size", batch_size)
    if not hasattr(dataset, "select"):
        raise TypeError(f"dataset is a {type(dataset).__name__}, expected a datasets.Dataset")
    if "prompt" not in dataset.column_names:
        raise ValueError(f"dataset has columns {', '.join(dataset.column_names)}, expected one called prompt")
    if not len(dataset):
        raise ValueError("dataset has no rows, expected one or more")
    numbers: dict[str, int] = {}
    prompt = [numbers.setdefault(json.dumps(x), len(numbers)) for x in dataset["prompt"]]
    place = np.random.default_rng(seed).permutation(len(numbers))[prompt]
    batches, filled = [], 0
    for rows in np.split(order := np.argsort(place, kind="stable"), range(batch_size, len(order), batch_size)):
        of_row = place[rows]
        _, group, size = np.unique(of_row, return_inverse=True, return_counts=True)
        apart = np.argsort(-size[group], kind="stable")  # the largest prompts take every other place
        batch = np.empty_like(rows)
        batch[np.r_[0 : len(rows) : 2, 1 : len(rows) : 2]] = rows[apart]
        batches.append(batch)
        filled += 2 * int(size.max()) > len(rows)
    if filled and "label" in dataset.column_names:
        warnings.warn(
            f"dualkv: one prompt has more than half of the rows in {filled} of {len(batches)} batches, so KTO's KL term"
            f" pairs prompts with their own completions there: take a larger batch_size than {batch_size}",
            stacklevel=2,
        )
    return dataset.select(np.concatenate(batches))
