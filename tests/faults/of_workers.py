"""Faults of workers: they die in the middle, or stand still until their jobs are given away."""

from __future__ import annotations

from faults.fault_run import Scene, fault
from faults.processes import LEASE


@fault("kill", "workers killed with -9", 1000, minutes=3)
def kill(scene: Scene) -> None:
    """Kill a worker every tenth of a second, and a producer now and then."""
    with scene.load(workers=6) as load:
        for number in scene.rounds():
            load.pause(0.12)
            load.crew.kill(scene.dice.randrange(len(load.crew)))
            if number % 20 == 10:
                load.producers.kill(scene.dice.randrange(len(load.producers)))


@fault("freeze", "workers frozen past their leases", 1000, minutes=4)
def freeze(scene: Scene) -> None:
    """Stop workers until others have their jobs; then they go on, and must not be believed."""
    with scene.load(workers=12) as load:
        crew = load.crew
        for _ in scene.rounds():
            load.pause(0.1)
            while crew.frozen > len(crew) * 2 // 3:
                load.pause(0.05)
            while not crew.freeze(
                scene.dice.randrange(len(crew)), LEASE * scene.dice.uniform(1.1, 2.0)
            ):
                pass
