"""Guess a hidden digit: after each guess the policy is told whether the digit is higher or lower. Fewer turns earn more."""

from __future__ import annotations

from headrace.rollouts.environments import Result

TURNS = 4


async def play(task, say) -> Result:
    """One rollout of up to four turns: "?" asks for a digit, "+" and "-" answer higher and lower, "=" ends it."""
    hidden = int(task.rng.integers(0, 10))
    told, near = "?", 0.0
    for turn in range(TURNS):
        answer = await say(told, max_tokens=1)
        if not answer.isdecimal():
            return Result(0.1 * near, {"turns": turn + 1.0})
        guess = int(answer)
        if guess == hidden:
            return Result(1.0, {"turns": turn + 1.0})
        near = 1.0 - abs(guess - hidden) / 10
        told = "+" if hidden > guess else "-"
    return Result(0.5 * near, {"turns": float(TURNS)})
