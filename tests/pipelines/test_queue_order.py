"""The order in which waiting requests of several keys are served."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_omni.pipelines.queue_order import OVERTAKEN_BATCHES, QueueOrder


def served(arrivals, cap, *, steps):
    """Batches that a step-wise engine would run: ids that run in each step, until all are served.

    `arrivals`: key of each request, in order; request i arrives before step ``when``. `steps`: each takes as many.
    """
    order, waiting, running, batches = QueueOrder(), [], {}, []
    pending = list(enumerate(arrivals))
    while pending or waiting or running:
        while pending and pending[0][1][1] <= len(batches):
            i, (key, _) = pending.pop(0)
            waiting.append((str(i), key))
        running_key = next(iter(running.values()))[0] if running else None
        arranged = order.arrange(waiting, running_key, max_batch=cap)
        keys = dict(waiting)
        admitted = []
        for request in arranged:
            key = running_key if running_key is not None else keys[arranged[0]]
            if len(running) + len(admitted) == cap or keys[request] != key:
                break
            admitted.append(request)
        order.admitted(set(admitted), [request for request, _ in waiting])
        running |= {request: [keys[request], steps] for request in admitted}
        waiting = [(request, key) for request, key in waiting if request not in admitted]
        assert len({key for key, _ in running.values()}) <= 1
        batches.append(list(running))
        for state in running.values():
            state[1] -= 1
        running = {request: state for request, state in running.items() if state[1]}
    return batches


def test_a_queue_of_two_sizes_is_served_in_two_batches():
    batches = served([("small", 0), ("large", 0)] * 4, cap=8, steps=1)
    assert [sorted(batch, key=int) for batch in batches] == [["0", "2", "4", "6"], ["1", "3", "5", "7"]]


def test_one_size_is_served_in_the_order_of_arrival():
    assert served([("a", 0)] * 5, cap=2, steps=1) == [["0", "1"], ["2", "3"], ["4"]]


def test_a_request_joins_the_batch_that_it_fits_past_one_that_does_not():
    batches = served([("a", 0), ("b", 1), ("a", 1)], cap=2, steps=3)
    assert batches[1] == ["0", "2"]


def test_a_request_waits_for_no_more_than_two_full_batches_of_those_that_came_later():
    cap = 2
    arrivals = [("a", 0), ("b", 0), *(("a", step) for step in range(1, 40) for _ in range(cap))]
    batches = served(arrivals, cap=cap, steps=1)
    before = {
        request for batch in batches[: next(i for i, batch in enumerate(batches) if "1" in batch)] for request in batch
    }
    assert len(before - {"0"}) <= (OVERTAKEN_BATCHES + 1) * cap


@given(
    keys=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=30).map(
        lambda found: sorted(found, key=lambda pair: pair[1])
    ),
    cap=st.integers(1, 4),
    steps=st.integers(1, 3),
)
def test_every_request_is_served_once_for_all_its_steps(keys, cap, steps):
    batches = served(keys, cap, steps=steps)
    ran = [request for batch in batches for request in batch]
    assert sorted(ran, key=int) == [str(i) for i in range(len(keys)) for _ in range(steps)]


def test_what_is_forgotten_leaves_nothing_behind():
    order = QueueOrder()
    waiting = [("old", "b"), ("new", "a")]
    for _ in range(9):
        order.admitted({"new"}, ["old", "new"])
    assert order.arrange(waiting, "a", max_batch=2)[0] == "old"
    order.forget("old")
    assert order.arrange(waiting, "a", max_batch=2)[0] == "new"
