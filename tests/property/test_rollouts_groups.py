"""For all orders of answers, failures and deadlines: every request ends once, and a step holds what its number says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.rollouts import EnvPolicy, GroupBook, Rollout

POLICIES = [
    ("individual", "keep"),
    ("individual", "refill"),
    ("individual", "drop"),
    ("group", "drop"),
    ("group", "refill"),
]


def rollout(request):
    return Rollout(
        example_id=request.task, env_name=request.env_name, reward=float(request.member), trajectory=(), draw=request.attempt,
        policy_version=request.policy_version,
    )  # fmt: skip


def adds_up(book):
    c = book.counts
    assert c.requested == c.arrived + c.failed.total() + book.outstanding
    assert c.arrived == c.delivered + c.dropped + c.discarded + book.held


@given(
    policy=st.sampled_from(POLICIES),
    size=st.integers(1, 4),
    per_step=st.integers(1, 3),
    membership=st.sampled_from(["index", "completion"]),
    actions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**6)), max_size=60),
)
def test_counts_add_up_at_every_moment_and_nothing_late_enters_a_step(policy, size, per_step, membership, actions):
    journal = []
    env = EnvPolicy(env_name="game", group_size=size, scoring=policy[0], on_failure=policy[1], max_refills=1)
    book = GroupBook([env], groups_per_step=per_step, lag=1, membership=membership, journal=journal.append)
    out, ended, taken = [], [], []
    for kind, which in actions:
        if kind <= 1 or not out:
            out += book.open("game")
        elif kind <= 5:
            request = out.pop(which % len(out))
            book.arrive(request, rollout(request))
            ended.append(request)
        elif kind <= 7:
            request = out.pop(which % len(out))
            out += book.fail(request, "crash")
            ended.append(request)
        elif kind == 8 and ended:
            before = (book.held, book.counts.late)
            request = ended[which % len(ended)]
            book.arrive(request, rollout(request))
            assert (book.held, book.counts.late) == (before[0], before[1] + 1)
        else:
            book.expire(len(taken))
        adds_up(book)
        while book.ready():
            taken.append(book.take())
            adds_up(book)
    seen = [(r.example_id, r.reward) for s in taken for r in s.rollouts]
    assert len(set(seen)) == len(seen)
    for step in taken:
        assert [(r.example_id, r.reward) for r in step.rollouts] == sorted(
            (r.example_id, r.reward) for r in step.rollouts
        )
        sizes = {task: sum(r.example_id == task for r in step.rollouts) for task in step.tasks}
        assert all(0 < n <= size for n in sizes.values())
        if policy != ("individual", "keep") and policy != ("individual", "refill"):
            assert all(n == size for n in sizes.values())
        if policy[0] == "group":
            assert all(len({r.draw for r in step.rollouts if r.example_id == t}) == 1 for t in step.tasks)
        if membership == "index":
            assert sorted(step.tasks + step.dropped) == list(range(step.step * per_step, (step.step + 1) * per_step))
            assert all(r.policy_version == max(0, step.step - 1) for r in step.rollouts)
        else:
            assert len(step.tasks) == per_step
    assert book.counts.failed.total() == sum(f["fact"] == "failed" for f in journal)


@settings(max_examples=60)
@given(order=st.permutations(range(12)))
def test_a_step_by_index_is_the_same_for_every_order_of_arrival(order):
    book = GroupBook([EnvPolicy(env_name="game", group_size=3)], groups_per_step=2)
    requests = [r for _ in range(4) for r in book.open("game")]
    for at in order:
        if at == 7:
            book.fail(requests[at], "crash")
        else:
            book.arrive(requests[at], rollout(requests[at]))
    steps = [book.take(), book.take()]
    told = [[(r.example_id, int(r.reward)) for r in s.rollouts] for s in steps]
    assert told == [[(t, m) for t in (0, 1) for m in range(3)], [(2, 0), (2, 2), (3, 0), (3, 1), (3, 2)]]
    assert book.counts.groups == {"full": 3, "partial": 1}


def test_a_stale_group_is_cancelled_and_a_finished_one_never():
    book = GroupBook([EnvPolicy(env_name="game", group_size=2)], groups_per_step=1)
    done, half, fresh = book.open("game"), book.open("game"), book.open("game", policy_version=5)
    for request in (*done, half[0]):
        book.arrive(request, rollout(request))
    assert book.cancel_older(5) == 1
    assert [len(book.take().rollouts) for _ in range(2)] == [2, 1]
    assert not book.ready()
    assert book.outstanding == len(fresh)
    assert book.counts.failed == {"stale": 1}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"env_name": "all"}, "stands for"),
        ({"env_name": "a/b"}, "without '/'"),
        ({"scoring": "group", "on_failure": "keep"}, "computed against missing rollouts"),
        ({"group_size": 0}, "at least 1"),
        ({"on_failure": "retry"}, "keep, refill or drop"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(more, told):
    with pytest.raises(ConfigError, match=told):
        EnvPolicy(**{"env_name": "game", "group_size": 2, **more})


def test_a_group_that_is_asked_for_again_gives_back_what_had_arrived():
    policy = EnvPolicy(env_name="game", group_size=3, scoring="group", on_failure="refill", max_refills=1)
    book = GroupBook([policy], groups_per_step=1)
    first = book.open("game")
    book.arrive(first[0], rollout(first[0]))
    again = book.fail(first[1], "crash")
    assert [(r.member, r.attempt) for r in again] == [(0, 1), (1, 1), (2, 1)]
    assert (book.counts.discarded, book.counts.failed) == (1, {"crash": 1, "superseded": 1})
    book.arrive(again[0], rollout(again[0]))
    assert book.fail(again[2], "crash") == []
    assert book.take().dropped == (0,)
    assert (book.counts.dropped, book.counts.delivered) == (1, 0)
    adds_up(book)
