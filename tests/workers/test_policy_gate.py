"""The gate between trajectories and policy changes."""

import asyncio

import pytest

from verl_omni.workers.rollout.policy_gate import PolicyGate


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Actors:
    """Trajectories and changes that stay inside until told to leave, and a log of what happened."""

    def __init__(self) -> None:
        self.gate = PolicyGate()
        self.log: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def trajectory(self, name: str) -> None:
        async with self.gate.trajectory() as version:
            self.log.append(f"{name}@{version}")
            await self.leave[name].wait()

    async def change(self, name: str, fail: bool = False) -> None:
        async with self.gate.change():
            self.log.append(name)
            await self.leave[name].wait()
            if fail:
                raise RuntimeError(name)

    async def start(self, kind, name: str, *args) -> None:
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(kind(name, *args))
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
        await settle()


def test_trajectories_run_together_and_a_change_waits_for_all_of_them():
    async def scenario() -> None:
        actors = Actors()
        await actors.start(actors.trajectory, "a")
        await actors.start(actors.trajectory, "b")
        await actors.start(actors.change, "lora")
        assert actors.log == ["a@0", "b@0"] and actors.gate.running == 2
        await actors.end("a")
        assert "lora" not in actors.log
        await actors.end("b")
        assert actors.log[-1] == "lora" and actors.gate.version == 0
        await actors.end("lora")
        assert actors.gate.version == 1

    asyncio.run(scenario())


def test_a_waiting_change_holds_new_trajectories_back():
    async def scenario() -> None:
        actors = Actors()
        await actors.start(actors.trajectory, "a")
        await actors.start(actors.change, "lora")
        await actors.start(actors.trajectory, "late")
        assert actors.log == ["a@0"]
        await actors.end("a")
        assert actors.log == ["a@0", "lora"]
        await actors.end("lora")
        assert actors.log == ["a@0", "lora", "late@1"]

    asyncio.run(scenario())


def test_changes_run_one_at_a_time_in_the_order_they_came():
    async def scenario() -> None:
        actors = Actors()
        for name in ("first", "second"):
            await actors.start(actors.change, name)
        await actors.start(actors.trajectory, "t")
        assert actors.log == ["first"]
        await actors.end("first")
        assert actors.log == ["first", "second"]
        await actors.end("second")
        assert actors.log == ["first", "second", "t@2"]

    asyncio.run(scenario())


def test_a_failed_change_leaves_the_version_and_opens_the_gate():
    async def scenario() -> None:
        actors = Actors()
        await actors.start(actors.change, "bad", True)
        await actors.start(actors.trajectory, "t")
        await actors.end("bad")
        assert actors.log == ["bad", "t@0"]
        with pytest.raises(RuntimeError, match="bad"):
            await actors.tasks["bad"]

    asyncio.run(scenario())


def test_a_change_that_does_not_count_leaves_the_version():
    async def scenario() -> None:
        gate = PolicyGate()
        async with gate.change(counts=False):
            pass
        assert gate.version == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cancelled", "entered"), [("lora", {"a@0", "late@0"}), ("a", {"lora", "late@1"}), ("late", {"a@0", "lora"})]
)
def test_cancelled_ones_let_the_others_go_on(cancelled: str, entered: set[str]):
    async def scenario() -> None:
        actors = Actors()
        await actors.start(actors.trajectory, "a")
        await actors.start(actors.change, "lora")
        await actors.start(actors.trajectory, "late")
        actors.tasks[cancelled].cancel()
        await settle()
        await actors.end("a", "lora", "late")
        assert actors.gate.running == 0
        assert set(actors.log) >= entered

    asyncio.run(scenario())


def test_a_change_may_bring_its_number_and_a_failed_one_leaves_the_old():
    async def scenario() -> PolicyGate:
        gate = PolicyGate()
        async with gate.change(version=12):
            pass
        with pytest.raises(RuntimeError):
            async with gate.change(version=13):
                raise RuntimeError
        assert gate.version == 12
        async with gate.change():
            pass
        return gate

    assert asyncio.run(scenario()).version == 13


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancels", [1, 2])
def test_a_change_that_has_begun_ends_before_its_cancelled_caller(cancels: int, fails: bool):
    async def scenario() -> None:
        gate, begun, leave = PolicyGate(), asyncio.Event(), asyncio.Event()

        async def change() -> None:
            begun.set()
            await leave.wait()
            if fails:
                raise RuntimeError("refused")

        caller = asyncio.create_task(gate.carry_out(change, version=7))
        await begun.wait()
        for _ in range(cancels):
            caller.cancel()
            await settle()
        assert not caller.done() and gate.version == 0
        leave.set()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await caller
        assert gate.version == (0 if fails else 7)
        assert (repr(cancelled.value.__cause__) == "RuntimeError('refused')") is fails
        async with gate.trajectory() as version:
            assert version == gate.version

    asyncio.run(scenario())


def test_a_change_that_is_cancelled_while_it_waits_never_begins():
    async def scenario() -> None:
        actors = Actors()
        await actors.start(actors.trajectory, "a")
        caller = asyncio.create_task(actors.gate.carry_out(lambda: pytest.fail("it began")))
        await settle()
        caller.cancel()
        await actors.end("a")
        assert caller.cancelled() and actors.gate.version == 0

    asyncio.run(scenario())


def test_a_change_that_is_carried_out_gives_its_result_or_its_error():
    async def scenario() -> None:
        gate = PolicyGate()

        async def fail() -> None:
            raise RuntimeError("refused")

        assert await gate.carry_out(lambda: asyncio.sleep(0, "done")) == "done"
        assert gate.version == 1
        with pytest.raises(RuntimeError, match="refused"):
            await gate.carry_out(fail)
        assert gate.version == 1

    asyncio.run(scenario())
