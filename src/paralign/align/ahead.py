"""Work on the next items in threads while the results so far are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_THREADS = 2
"""torch and file reads let go of the interpreter; a third thread would wait for it."""
_MOST_AHEAD = 4


def results_ahead(jobs: Iterable[tuple[K, Callable[[], V]]]) -> Iterator[tuple[K, V]]:
    """Yield what every job returns, beside what it is called by, in the order of the jobs.

    A few jobs run ahead of the one whose result is yielded. ``jobs`` itself is iterated in the
    caller's thread. What a job raises is raised where its result would be yielded.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        coming: deque[tuple[K, Future[V]]] = deque()
        for key, job in jobs:
            coming.append((key, pool.submit(job)))
            if len(coming) > _MOST_AHEAD:
                key, future = coming.popleft()
                yield key, future.result()
        for key, future in coming:
            yield key, future.result()
