"""Sort four digits: the reward is the share of digits in the right place."""

from __future__ import annotations


async def play(task, say, digits: int = 4) -> float:
    """One rollout: the policy is shown the digits and answers with as many."""
    numbers = task.rng.integers(0, 10, digits).tolist()
    answer = await say("".join(map(str, numbers)) + ">", max_tokens=digits)
    wanted = "".join(map(str, sorted(numbers)))
    right = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return right / digits
